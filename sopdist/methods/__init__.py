"""Methods: what is trained and how. One file per method, with its settings, behind one interface (`method.py`).

To add one: write a file with `Settings` and a subclass of `Method` or `LossMethod`, and add the class to `METHODS`.
"""

from __future__ import annotations

from .ce import CrossEntropy
from .cores2 import CORES2
from .cores2_star import CORES2Star
from .coteaching import Coteaching
from .coteaching_plus import CoteachingPlus
from .dividemix import DivideMix
from .elr import ELRMethod
from .elr_plus import ELRPlus
from .forward import ForwardCorrection
from .gce import GCE
from .method import (
    BatchLayout,
    Cost,
    Method,
    MethodSettings,
    Outlook,
    PerSample,
    Predict,
    Readout,
    Setup,
    StepOutput,
    TableCost,
    Trainer,
)
from .mixup import MixUp
from .sl import SL
from .sop import SOPMethod

__all__ = [
    "DEFAULT", "METHODS", "BatchLayout", "Cost", "Method", "MethodSettings", "Outlook", "PerSample", "Predict",
    "Readout", "Setup", "StepOutput", "TableCost", "Trainer", "make_method", "settings_of_methods",
]  # fmt: skip

METHODS: dict[str, type[Method]] = {
    "ce": CrossEntropy,
    "sop": SOPMethod,
    "forward": ForwardCorrection,
    "gce": GCE,
    "sl": SL,
    "mixup": MixUp,
    "coteaching": Coteaching,
    "coteaching_plus": CoteachingPlus,
    "elr": ELRMethod,
    "elr_plus": ELRPlus,
    "dividemix": DivideMix,
    "cores2": CORES2,
    "cores2_star": CORES2Star,
}
DEFAULT = "sop"


def settings_of_methods() -> dict[str, type[MethodSettings]]:
    """The settings class of each method, by `method.name`."""
    return {name: method.Settings for name, method in METHODS.items()}


def make_method(settings: MethodSettings) -> Method:
    """The method that a config names. It has no tables until `start` is called."""
    return METHODS[settings.name](settings)

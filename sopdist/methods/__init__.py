"""Methods: what is trained and how, one file each with its settings, behind one interface (`method.py`).

To add one: write a file with `Settings` and a subclass of `Method` or `LossMethod`, and add the class to `METHODS`.
"""

from __future__ import annotations

from .ce import CrossEntropy
from .gce import GCE
from .method import Cost, Method, MethodSettings, Outlook, PerSample, Predictions, Readout, Setup, StepOutput, TableCost
from .sl import SL
from .sop import SOPMethod

__all__ = [
    "DEFAULT", "METHODS", "Cost", "Method", "MethodSettings", "Outlook", "PerSample", "Predictions", "Readout", "Setup",
    "StepOutput", "TableCost", "make_method", "settings_of_methods",
]  # fmt: skip

METHODS: dict[str, type[Method]] = {
    "ce": CrossEntropy,
    "sop": SOPMethod,
    "gce": GCE,
    "sl": SL,
}
DEFAULT = "sop"


def settings_of_methods() -> dict[str, type[MethodSettings]]:
    """The settings class of each method, by `method.name`."""
    return {name: method.Settings for name, method in METHODS.items()}


def make_method(settings: MethodSettings) -> Method:
    """The method that a config names. It has no tables until `start` is called."""
    return METHODS[settings.name](settings)

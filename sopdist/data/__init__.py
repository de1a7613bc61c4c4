"""Data: from images on disk to shards, label sets, the plan of an epoch, and batches.

A training loop needs `from sopdist.data import Stream, DataSettings, Policy, Recipe`. Names are imported lazily, so
that commands that only handle files do not have to import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..errors import DataError
    from .augment.policy import Policy
    from .augment.recipes import Recipe
    from .batch import Batch
    from .settings import DataSettings
    from .split import Split, open_split
    from .stream import Stream

__all__ = ["Batch", "DataError", "DataSettings", "Policy", "Recipe", "Split", "Stream", "open_split"]

_MODULES = {
    "Batch": ".batch",
    "DataError": "..errors",
    "DataSettings": ".settings",
    "Policy": ".augment.policy",
    "Recipe": ".augment.recipes",
    "Split": ".split",
    "Stream": ".stream",
    "open_split": ".split",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)

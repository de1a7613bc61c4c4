"""Imports torchvision even if its compiled extension cannot be loaded.

timm imports torchvision. The Linux wheel is compiled against a torch with CUDA. With a CPU build of torch its extension
does not load, and `import torchvision` fails because it registers fake kernels for two operators, nms and qnms, that
are then undefined. No network needs them. If the import fails for this reason, and only then, this module defines the
operators and imports torchvision again. Calling them raises an error about the missing kernel.
"""

from __future__ import annotations

import importlib
import logging
import sys

import torch

_logger = logging.getLogger("sopdist.models")
_MISSING = "torchvision::nms does not exist"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_defined: list[torch.library.Library] = []  # definitions are removed with their library, so keep a reference


def import_torchvision() -> None:
    """Import torchvision. Raises the errors of its import, including when it is not installed."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING not in str(error) or _defined:
            raise
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # partially imported by the first attempt
    library = torch.library.Library("torchvision", "DEF")
    library.define(f"nms{_SCHEMA}")
    library.define(f"qnms{_SCHEMA}")
    _defined.append(library)
    importlib.import_module("torchvision")
    _logger.debug("torchvision's compiled extension does not match this torch; networks do not need it")

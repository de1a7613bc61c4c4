"""Importing torchvision where its compiled part cannot be loaded.

timm imports torchvision. The wheel that is published for Linux is compiled against a torch with CUDA; beside a CPU
build of torch its library does not load, and then `import torchvision` fails, because it describes two operators, nms
and qnms, that nobody has declared. No network needs them. So where the import fails for that reason, and only there,
they are declared and the import is tried again: whoever calls them is told that there is no kernel.
"""

from __future__ import annotations

import importlib
import logging
import sys

import torch

_logger = logging.getLogger("sopdist.models")
_MISSING = "torchvision::nms does not exist"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # what is declared is forgotten with its library, so it is kept


def import_torchvision() -> None:
    """Import torchvision, if there is any; raises what its import raises."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING not in str(error) or _declared:
            raise
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # what the first try has left half done
    library = torch.library.Library("torchvision", "DEF")
    library.define(f"nms{_SCHEMA}")
    library.define(f"qnms{_SCHEMA}")
    _declared.append(library)
    importlib.import_module("torchvision")
    _logger.debug("torchvision's compiled part does not fit this torch; networks do not need it")

"""Initial weights from a local file. Everything must match except the classifier, which may have other classes.

This module handles state dicts and files, and is independent of any particular network.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

_logger = logging.getLogger("sopdist.models")
_PICKLED = (".pth", ".pt")
_INSIDE = ("state_dict", "model")  # keys under which training scripts save the weights
_WRAPPER = "module."  # prefix that DataParallel adds to each name
_COUNTER = ".num_batches_tracked"  # missing in older files, and not needed
_MAX_NAMED = 4


def load_weights(network: nn.Module, path: Path, classifiers: Sequence[str]) -> None:
    """Load the weights into the network. If a module in `classifiers` does not match, log it and leave it unchanged."""
    where = f"model.weights = {str(path)!r}"
    found, wanted = read_weights(path), network.state_dict()
    for classifier in classifiers:
        _keep_initial_if_mismatched(found, wanted, classifier, where)
    problems = [
        *_named("missing in the file", (n for n in wanted if n not in found and not n.endswith(_COUNTER))),
        *_named("unknown to the network", (name for name in found if name not in wanted)),
        *_named(
            "with another shape",
            (
                f"{name} {tuple(found[name].shape)} in the file, {tuple(wanted[name].shape)} in the network"
                for name in wanted
                if name in found and found[name].shape != wanted[name].shape
            ),
        ),
    ]
    if problems:
        raise ConfigError(f"{where}: not the weights of this network, see model.name: {'; '.join(problems)}")
    network.load_state_dict(found, strict=False)  # missing keys were checked above


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by name. No code in the file is executed."""
    where = f"model.weights = {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{where}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix in _PICKLED:
            return _plain(torch.load(path, map_location="cpu", weights_only=True), where)
    except ImportError:
        raise ConfigError(f"{where}: needs safetensors to be read: pip install safetensors") from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{where}: damaged, or contains more than tensors and plain values, which is not loaded because it could "
            "run code; save only network.state_dict()"
        ) from None
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: cannot be read, is it complete? ({' '.join(str(error).split())[:200]})") from None
    except Exception as error:  # SafetensorError derives directly from Exception
        if type(error).__module__.partition(".")[0] not in ("safetensors", "safetensors_rust"):
            raise
        raise ConfigError(f"{where}: cannot be read, is it complete? ({error})") from None
    raise ConfigError(f"{where}: weights are read from .safetensors and {', '.join(_PICKLED)} files")


def _plain(content: Any, where: str) -> dict[str, Tensor]:
    for key in _INSIDE:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where}: contains no named weights; save network.state_dict()")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"{where}: {name!r} is not a tensor; save only network.state_dict()")
    if all(name.startswith(_WRAPPER) for name in content):
        content = {name.removeprefix(_WRAPPER): value for name, value in content.items()}
    return dict(content)


def _keep_initial_if_mismatched(
    found: dict[str, Tensor], wanted: dict[str, Tensor], classifier: str, where: str
) -> None:
    names = [name for name in wanted if name.startswith(f"{classifier}.")]
    if all(name in found and found[name].shape == wanted[name].shape for name in names):
        return
    shapes = [tuple(found[name].shape) for name in names if name in found]
    what = f"the last layer, {classifier}, has shape {shapes[0]}" if shapes else f"has no {classifier}, the last layer"
    _logger.info("%s: %s: not loaded, the last layer starts from random weights", where, what)
    for name in names:
        found[name] = wanted[name]


def _named(what: str, names: Iterable[str]) -> list[str]:
    """A list of at most one string: the number of names, and the first few."""
    listed = list(names)
    more = ", ..." if len(listed) > _MAX_NAMED else ""
    return [f"{len(listed)} {what}: {', '.join(listed[:_MAX_NAMED])}{more}"] if listed else []

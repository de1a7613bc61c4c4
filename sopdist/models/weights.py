"""Initial weights from a local file. Everything must fit but the classifier, whose classes may be others.

Knows state dicts and files, and no particular network.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ConfigError

_logger = logging.getLogger("sopdist.models")
_PICKLED = (".pth", ".pt")
_INSIDE = ("state_dict", "model")  # keys under which training scripts put the weights
_WRAPPER = "module."  # what DataParallel puts before each name
_COUNTER = ".num_batches_tracked"  # older files have none, and nothing depends on it
_MOST_NAMED = 4


def load_weights(network: nn.Module, path: Path, classifiers: Sequence[str]) -> None:
    """Fill the network. A module named in `classifiers` is left as it is, and that is logged, if it does not fit."""
    where = f"model.weights = {str(path)!r}"
    found, wanted = read_weights(path), network.state_dict()
    for classifier in classifiers:
        _leave_out_if_it_does_not_fit(found, wanted, classifier, where)
    problems = [
        *_named("missing in the file", (n for n in wanted if n not in found and not n.endswith(_COUNTER))),
        *_named("unknown to the network", (name for name in found if name not in wanted)),
        *_named(
            "of another shape",
            (
                f"{name} {tuple(found[name].shape)} in the file, {tuple(wanted[name].shape)} in the network"
                for name in wanted
                if name in found and found[name].shape != wanted[name].shape
            ),
        ),
    ]
    if problems:
        raise ConfigError(f"{where}: not the weights of this network, see model.name: {'; '.join(problems)}")
    network.load_state_dict(found, strict=False)  # what may be missing was decided above


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Nothing in the file is executed."""
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
            f"{where}: damaged, or holds more than tensors and plain values, which is not loaded because it could run "
            "code; save network.state_dict() alone"
        ) from None
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: cannot be read, is it complete? ({' '.join(str(error).split())[:200]})") from None
    except Exception as error:  # SafetensorError is an Exception and nothing more particular
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
        raise ConfigError(f"{where}: holds no weights by name; save network.state_dict()")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"{where}: {name!r} is not a tensor; save network.state_dict() alone")
    if all(name.startswith(_WRAPPER) for name in content):
        content = {name.removeprefix(_WRAPPER): value for name, value in content.items()}
    return dict(content)


def _leave_out_if_it_does_not_fit(
    found: dict[str, Tensor], wanted: dict[str, Tensor], classifier: str, where: str
) -> None:
    names = [name for name in wanted if name.startswith(f"{classifier}.")]
    if all(name in found and found[name].shape == wanted[name].shape for name in names):
        return
    there = [tuple(found[name].shape) for name in names if name in found]
    what = (
        f"{classifier}, the last layer, is of shape {there[0]}" if there else f"it has no {classifier}, the last layer"
    )
    _logger.info("%s: %s: left out, ours starts from random weights", where, what)
    for name in names:
        found[name] = wanted[name]


def _named(what: str, names: Iterable[str]) -> list[str]:
    """At most one text: how many there are, and the first few."""
    every = list(names)
    more = ", ..." if len(every) > _MOST_NAMED else ""
    return [f"{len(every)} {what}: {', '.join(every[:_MOST_NAMED])}{more}"] if every else []

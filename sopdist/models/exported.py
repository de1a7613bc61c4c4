"""A network as a folder, for use without the run that trained it: `model.safetensors` and `config.json`.

    network = load_exported("exported/cifar10")      # logits = network((pixels / 255 - mean) / std)
    read_exported("exported/cifar10").label_names    # what the logits belong to

Knows what a network takes and gives, nothing of checkpoints and data sets. Nothing in the folder is executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import ConfigError, build
from ..data.errors import DataError
from .factory import FROM_TIMM, OURS, make_model
from .settings import ModelSettings

FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # timm looks for this name, too
SECTION = "sopdist"  # of config.json; the rest of it is for timm
_MOST_BYTES = 64 << 20  # of a config; a million long names of classes fit


@dataclass(frozen=True)
class Exported:
    """What must be known of a network beside its weights."""

    name: str  # as model.name; a network of timm is timm:ARCHITECTURE
    channels: int  # of an image
    size: int  # side of the square image that it takes
    classes: int
    mean: list[float]  # of each channel, for pixels from 0 to 1
    std: list[float]
    resize: int = 0  # the short side of an image from whose centre `size` is cut out; 0: all of it is squeezed to size
    drop_rate: float = 0.0
    label_names: list[str] | None = None  # of the classes, in the order of the logits
    step: int = 0  # after which it was saved
    epoch: float = 0.0
    version: str = ""  # of the sopdist that wrote it
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"format = {self.format}: this sopdist reads {FORMAT}; take sopdist {self.version}")
        if self.name not in OURS and (not self.name.startswith(FROM_TIMM) or ":" in self.name[len(FROM_TIMM) :]):
            raise ConfigError(f"name = {self.name!r}: must be one of {', '.join(OURS)}, or {FROM_TIMM}ARCHITECTURE")
        if min(self.channels, self.size, self.classes) < 1:
            raise ConfigError(f"channels = {self.channels}, size = {self.size}, classes = {self.classes}: too small")
        if not len(self.mean) == len(self.std) == self.channels:
            raise ConfigError(f"mean, std: must have {self.channels} entries, one for each channel")
        if self.label_names is not None and len(self.label_names) != self.classes:
            raise ConfigError(f"label_names: must be {self.classes}, found {len(self.label_names)}")

    @property
    def of_timm(self) -> bool:
        """Whether timm makes the network."""
        return self.name.startswith(FROM_TIMM)


def load_exported(folder: Path | str) -> nn.Module:
    """The network of a folder that `sopdist checkpoint export` wrote, on the CPU and ready to predict."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    exported = read_exported(folder)
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    try:
        return filled(exported, state)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None


def read_exported(folder: Path | str) -> Exported:
    """What `config.json` of such a folder says."""
    path = Path(folder) / CONFIG
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: is larger than any config of a network")
        tree: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    section = tree.get(SECTION) if isinstance(tree, dict) else None
    if not isinstance(section, dict):
        raise DataError(f"{path}: was not written by `sopdist checkpoint export`: it has no section {SECTION!r}")
    try:
        return build(Exported, section, f"{SECTION}.")
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None


def filled(exported: Exported, state: dict[str, Tensor]) -> nn.Module:
    """The network with these weights, in evaluation mode; ConfigError if they are of another one."""
    settings = ModelSettings(exported.name, drop_rate=exported.drop_rate)
    network = make_model(settings, channels=exported.channels, size=exported.size, classes=exported.classes)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"not the weights of {exported.name} with {exported.classes} classes: {error}") from None
    return network.eval()

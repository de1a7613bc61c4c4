"""Evaluation: top-1 and top-5 of the network on named splits, each sample exactly once, exact over ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ConfigError
from ..data.remote.transfer import PIPE
from ..data.settings import DataSettings
from ..data.stream import Stream
from .settings import EvaluateSettings
from .world import World

TOP = 5

_logger = logging.getLogger("sopdist.train")


def data_of_split(data: DataSettings, split: str) -> DataSettings:
    """Where an evaluation split lies: a name is a folder of `data.root`, a path, URL or `pipe:` stands for itself."""
    if split.startswith(PIPE) or "/" in split:
        return replace(data, root=split, split="")
    return replace(data, split=split)


def open_evaluations(
    settings: EvaluateSettings, data: DataSettings, classes: tuple[str, ...], batch: int, world: World
) -> dict[str, Stream]:
    """A stream for each named split."""
    streams: dict[str, Stream] = {}
    try:
        for name, split in settings.splits.items():
            wanted = replace(data_of_split(data, split), labels=settings.labels, balanced_per_epoch=0)
            streams[name] = Stream(wanted, batch, rank=world.rank, world_size=world.size, train=False)
            found = streams[name].split.manifest.classes
            if len(found) != len(classes):
                raise ConfigError(
                    f"evaluate.splits.{name}: has {len(found)} classes, the training split {len(classes)}"
                )
            _warn_of_other_names(name, found, classes, world)
    except BaseException:
        close_all(streams)
        raise
    return streams


def _warn_of_other_names(split: str, found: tuple[str, ...], classes: tuple[str, ...], world: World) -> None:
    """Class 7 here must mean class 7 there. Names may be spelled in two ways, so it is only a warning."""
    other = [(number, *names) for number, names in enumerate(zip(found, classes, strict=True)) if names[0] != names[1]]
    if other and world.rank == 0:
        number, theirs, ours = other[0]
        _logger.warning(
            "evaluate.splits.%s: %s of %s classes have other names than in the training split, e.g. class %s is %r "
            "there and %r here: are they in the same order?",
            split, len(other), len(classes), number, theirs, ours,
        )  # fmt: skip


def close_all(streams: Mapping[str, Stream]) -> None:
    """Stop the streams' threads."""
    for stream in streams.values():
        stream.close()


def evaluate(forward: Callable[[Tensor], Tensor], stream: Stream, world: World) -> dict[str, float]:
    """Top-1, top-5 (where there are more classes than that) and mean cross-entropy over all samples of the split.

    `forward` makes logits of images. Every rank sees its part; sums are taken over ranks.
    """
    return rates(world.sum(count(forward, stream, world.device)), len(stream.split.manifest.classes))


@torch.no_grad()
def count(forward: Callable[[Tensor], Tensor], stream: Stream, device: torch.device) -> list[float]:
    """Sums over this rank's part of the split: top-1 hits, top-5 hits, loss, weight. Gaps have weight 0."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    classes = len(stream.split.manifest.classes)
    for batch in stream.epoch():
        on_device = batch.to(device)
        logits = forward(on_device.images).float()
        weight = on_device.weight.double()
        best = logits.topk(min(TOP, classes), dim=1).indices == on_device.labels[:, None]  # (B, up to 5)
        loss = F.cross_entropy(logits, on_device.labels, reduction="none")
        hits = torch.stack([best[:, 0], best.any(1)]).double()  # (2, B)
        sums += torch.stack(
            [*(hits * weight).sum(1), (loss.double() * weight).where(weight > 0, 0).sum(), weight.sum()]
        )
    found: list[float] = sums.tolist()
    return found


def rates(sums: Sequence[float], classes: int) -> dict[str, float]:
    """What the sums over all ranks come to, a sample."""
    top1, top5, lost, total = sums
    found = {"top1": top1 / max(total, 1.0), "loss": lost / max(total, 1.0), "samples": total}
    return found | ({"top5": top5 / max(total, 1.0)} if classes > TOP else {})

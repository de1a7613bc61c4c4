"""Evaluation: top-1 and top-5 of the network on named splits, each sample exactly once, exact over ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ConfigError
from ..data.settings import DataSettings
from ..data.stream import Stream
from .settings import EvaluateSettings
from .world import World

TOP = 5

_logger = logging.getLogger("sopdist.train")


def open_evaluations(
    settings: EvaluateSettings, data: DataSettings, classes: tuple[str, ...], batch: int, world: World
) -> dict[str, Stream]:
    """A stream for each named split. A split of `data.root` by its name, any other by its path or URL."""
    streams: dict[str, Stream] = {}
    try:
        for name, split in settings.splits.items():
            there = replace(data, root=split, split="") if "/" in split else replace(data, split=split)
            wanted = replace(there, labels=settings.labels, balanced_per_epoch=0)
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


@torch.no_grad()
def evaluate(forward: Callable[[Tensor], Tensor], stream: Stream, world: World) -> dict[str, float]:
    """Top-1, top-5 (where there are more classes than that) and mean cross-entropy over all samples of the split.

    `forward` makes logits of images. Every rank sees its part; sums are taken over ranks, and gaps have weight 0.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # top-1, top-5, loss, weight
    classes = len(stream.split.manifest.classes)
    for batch in stream.epoch():
        on_device = batch.to(world.device)
        logits = forward(on_device.images).float()
        weight = on_device.weight.double()
        best = logits.topk(min(TOP, classes), dim=1).indices == on_device.labels[:, None]  # (B, up to 5)
        loss = F.cross_entropy(logits, on_device.labels, reduction="none")
        hits = torch.stack([best[:, 0], best.any(1)]).double()  # (2, B)
        sums += torch.stack(
            [*(hits * weight).sum(1), (loss.double() * weight).where(weight > 0, 0).sum(), weight.sum()]
        )
    top1, top5, lost, total = world.sum(sums.tolist())
    found = {"top1": top1 / max(total, 1.0), "loss": lost / max(total, 1.0), "samples": total}
    return found | ({"top5": top5 / max(total, 1.0)} if classes > TOP else {})

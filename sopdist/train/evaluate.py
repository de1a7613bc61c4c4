"""Evaluation: top-1 and top-5 on named splits. Every sample counts exactly once, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.remote.transfer import PIPE
from ..data.settings import DataSettings
from ..data.stream import Stream
from ..errors import ConfigError
from .distributed.world import World
from .settings import EvaluateSettings

TOP = 5

_logger = logging.getLogger("sopdist.train")


def data_of_split(data: DataSettings, split: str) -> DataSettings:
    """Data settings of an evaluation split: the name of a folder in `data.root`, or a path, URL or `pipe:`."""
    if split.startswith(PIPE) or "/" in split:
        return replace(data, root=split, split="")
    return replace(data, split=split)


def open_evaluations(
    settings: EvaluateSettings, data: DataSettings, classes: tuple[str, ...], batch: int, world: World
) -> dict[str, Stream]:
    """Open a stream for each named split."""
    streams: dict[str, Stream] = {}
    try:
        for name, split in settings.splits.items():
            wanted = replace(data_of_split(data, split), labels=settings.labels_of(name), balanced_per_epoch=0)
            streams[name] = Stream(wanted, batch, rank=world.rank, world_size=world.size, train=False)
            found = streams[name].split.manifest.classes
            if len(found) != len(classes):
                raise ConfigError(
                    f"evaluate.splits.{name}: has {len(found)} classes, but the training split has {len(classes)}"
                )
            _warn_about_class_names(name, found, classes, world)
    except BaseException:
        close_all(streams)
        raise
    return streams


def _warn_about_class_names(split: str, found: tuple[str, ...], classes: tuple[str, ...], world: World) -> None:
    """Warn if class names differ: class 7 must mean the same in both splits. A spelling may differ, so no error."""
    different = [
        (index, *names) for index, names in enumerate(zip(found, classes, strict=True)) if names[0] != names[1]
    ]
    if different and world.rank == 0:
        index, theirs, ours = different[0]
        _logger.warning(
            "evaluate.splits.%s: %s of %s classes are named differently in the training split, e.g. class %s is %r "
            "here and %r there: are they in the same order?",
            split, len(different), len(classes), index, theirs, ours,
        )  # fmt: skip


def close_all(streams: Mapping[str, Stream]) -> None:
    """Stop the threads of the streams."""
    for stream in streams.values():
        stream.close()


def evaluate(forward: Callable[[Tensor], Tensor], stream: Stream, world: World) -> dict[str, float]:
    """Return top-1, top-5 (with more than 5 classes) and mean cross-entropy over all samples of the split.

    `forward` computes logits from images. Each rank evaluates its part; the sums are reduced over ranks.
    """
    return rates(world.sum(count(forward, stream, world.device)), len(stream.split.manifest.classes))


@torch.no_grad()
def count(forward: Callable[[Tensor], Tensor], stream: Stream, device: torch.device) -> list[float]:
    """Sums over this rank's part of the split: top-1 hits, top-5 hits, loss, weight. Padding has weight 0."""
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
    """Turn the sums over all ranks into metrics per sample."""
    top1, top5, lost, total = sums
    found = {"top1": top1 / max(total, 1.0), "loss": lost / max(total, 1.0), "samples": total}
    return found | ({"top5": top5 / max(total, 1.0)} if classes > TOP else {})

"""Input checks of the loss. Errors are raised before any state changes, and say what to fix."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import NoiseTable

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_batch(
    logits: Tensor,
    labels: Tensor,
    index: Tensor,
    logits2: Tensor | None,
    weight: Tensor | None,
    table: NoiseTable,
    *,
    wants_view: bool,
) -> None:
    """Raise on wrong shapes, dtypes or devices. Never reads values, so it never synchronizes with a device."""
    given = {"logits": logits, "labels": labels, "index": index, "logits2": logits2, "weight": weight}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("logits", "labels", "index")):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if logits.dim() != 2 or logits.dtype not in _FLOATS:
        raise ValueError(f"logits must be floats of shape (batch, classes), got {_describe(logits)}")
    batch, classes = logits.shape
    if classes != table.num_classes:
        raise ValueError(f"logits have {classes} classes, but this SOP has num_classes={table.num_classes}")
    for name, tensor in (("labels", labels), ("index", index)):
        if tensor.dtype not in _INTEGERS:
            raise TypeError(f"{name} must be integers, got {_describe(tensor)}")
        if tensor.shape != (batch,):
            raise ValueError(f"{name} must have shape ({batch},), got {_describe(tensor)}")
    if weight is not None and (weight.shape != (batch,) or weight.dtype not in (*_FLOATS, torch.bool)):
        raise ValueError(f"weight must be floats or a bool mask of shape ({batch},), got {_describe(weight)}")
    if logits2 is not None and (logits2.shape != logits.shape or logits2.dtype not in _FLOATS):
        raise ValueError(f"logits2 must be floats of shape {tuple(logits.shape)}, as logits, got {_describe(logits2)}")
    if wants_view and logits2 is None:
        raise ValueError("consistency > 0 compares two views: pass the logits of the second view as logits2")
    if logits2 is not None and not wants_view:
        raise ValueError("logits2 has no effect with consistency=0: create this SOP with consistency > 0")
    device = table.u.device
    if logits.device != device:
        raise ValueError(
            f"logits are on {logits.device}, the noise table is on {device}: call sop.to('{logits.device}')"
        )
    for name, other in (("labels", labels), ("index", index), ("weight", weight), ("logits2", logits2)):
        if other is not None and other.device != device:
            raise ValueError(f"{name} is on {other.device}, logits and the noise table are on {device}")


def check_values(labels: Tensor, index: Tensor, table: NoiseTable) -> None:
    """Raise if a label or an index is out of range. On a GPU this synchronizes with the device."""
    if not len(index):
        return
    for name, tensor, size, of in (
        ("labels", labels, table.num_classes, "num_classes"),
        ("index", index, table.num_samples, "num_samples"),
    ):
        low, high = torch.aminmax(tensor)
        if int(low) < 0 or int(high) >= size:
            at = int(((tensor < 0) | (tensor >= size)).nonzero()[0, 0])
            hint = "; to ignore a sample, set its weight to 0" if name == "labels" else ""
            raise IndexError(f"{name}[{at}] = {int(tensor[at])} is outside [0, {of} = {size}){hint}")


def check_labels(labels: Tensor, table: NoiseTable) -> None:
    """Raise unless `labels` holds a valid label for every sample."""
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS or labels.shape != (table.num_samples,):
        got = _describe(labels) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels must be a tensor with the labels of all {table.num_samples} samples, in index order, got {got}"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= table.num_classes:
        raise IndexError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, outside [0, {table.num_classes})"
        )


def check_weight(weight: Tensor) -> Tensor:
    """Raise if a weight is negative or not finite. Return a mask of the samples with a positive weight."""
    weight = weight.to(torch.float32)
    good = torch.isfinite(weight) & (weight >= 0)
    if not bool(good.all()):
        at = int((~good).nonzero()[0, 0])
        raise ValueError(f"weight[{at}] = {float(weight[at])} is not a finite number >= 0")
    return weight > 0


def check_prior(
    prior: Tensor | None, balance: float, num_classes: int, device: torch.device | str | None
) -> Tensor | None:
    """Return the prior of the balance term as a distribution over classes, or None if the term is off."""
    if not balance:
        if prior is not None:
            raise ValueError("prior has no effect with balance=0: pass balance > 0 too")
        return None
    if prior is None:
        return torch.full((num_classes,), 1 / num_classes, dtype=torch.float32, device=device)
    prior = torch.as_tensor(prior, dtype=torch.float32, device=device)
    if (
        prior.shape != (num_classes,)
        or not bool((torch.isfinite(prior) & (prior >= 0)).all())
        or float(prior.sum()) <= 0
    ):
        raise ValueError(f"prior must be num_classes = {num_classes} numbers >= 0 with a positive sum")
    return prior / prior.sum()


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"

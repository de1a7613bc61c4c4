"""The kernels of `native.c`, called through ctypes. `reference` documents them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ..counter import INITIAL_STD
from ..rates import RULES, Step
from ..rows import NoiseTable, RowBlock
from .facts import Facts, LossResult

_P, _I64, _F32, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ELEMENTS_PER_THREAD = 1 << 15  # with fewer, another thread costs more time than it saves


class _Table(ctypes.Structure):
    """`Table` in native.c."""

    _fields_ = (
        *((name, _P) for name in ("u", "v", "classes", "mean_loss", "mean_margin", "mean_fit")),
        *((name, _P) for name in ("visits", "evictions", "evicted")),
        *((name, _I64) for name in ("num_classes", "slots", "class_bytes")),
        ("seed", ctypes.c_uint64),
        ("first", _I64),
        ("stride", _I64),
        ("initial_std", _F32),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("sopdist.noise.kernels._native")
    if spec is None or spec.origin is None:
        raise RuntimeError("the CPU kernels are not built: install a C compiler, then reinstall sopdist")
    library = ctypes.CDLL(spec.origin)
    library.sopdist_loss.argtypes = [*(_P,) * 7, *(_I64,) * 4, _F32, _INT, _F32, _INT, *(_P,) * 9]
    library.sopdist_loss.restype = None
    library.sopdist_rows.argtypes = [*(_P,) * 8, _I64, _INT, _F32, _F32, _INT]
    library.sopdist_rows.restype = None
    return library


def is_built() -> bool:
    """Whether `native.c` was compiled when the package was installed, and can be loaded."""
    try:
        _library()
    except (RuntimeError, OSError):
        return False
    return True


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // _ELEMENTS_PER_THREAD))


def _floats(*columns: Tensor) -> tuple[Tensor, ...]:
    """Check the columns, because C does not check the memory behind a pointer."""
    for column in columns:
        if column.dtype != torch.float32 or column.device.type != "cpu" or not column.is_contiguous():
            found = f"{column.dtype} on {column.device}"
            raise TypeError(f"the noise table must be contiguous float32 on the CPU, found {found}. Was it cast?")
    return columns


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def fused_loss(
    logits: Tensor,
    labels: Tensor,
    index: Tensor,
    block: RowBlock,
    keep: Tensor | None,
    *,
    eps: float,
    reclip: bool,
    target: float,
) -> LossResult:
    """See `reference_loss.fused_loss`."""
    z = logits.detach().to(torch.float32).contiguous()
    labels, index = labels.contiguous(), index.contiguous()
    keep = None if keep is None else keep.contiguous()
    batch, classes = z.shape
    threads = _threads(z.numel())
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    scratch, gradient = torch.zeros(threads, classes, **floats), torch.empty(batch, classes, **floats)
    losses, scale, cross_entropy, margin, pull, fit = (torch.empty(batch, **floats) for _ in range(6))
    predicted = torch.empty(batch, dtype=torch.int64, device="cpu")
    slots, class_bytes = (0, 0) if block.classes is None else (block.classes.shape[1], block.classes.itemsize)
    tensors = (z, labels, index, keep, *_floats(block.u, block.v), block.classes)
    results = (scratch, losses, gradient, scale, predicted, cross_entropy, margin, pull, fit)
    _library().sopdist_loss(
        *map(_pointer, tensors), slots, class_bytes, batch, classes, eps, reclip, target, threads,
        *map(_pointer, results),
    )  # fmt: skip
    return LossResult(losses, gradient, scale, Facts(predicted, cross_entropy, margin, pull, fit))


def update_rows(table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """See `reference_rows.update_rows`."""
    u, v, *means = _floats(table.u, table.v, table.mean_loss, table.mean_margin, table.mean_fit)
    columns = (u, v, table.classes, *means, table.visits)
    struct = _Table(
        *map(_pointer, (*columns, table.evictions, table.evicted)),
        table.num_classes, table.slots, 0 if table.classes is None else table.classes.itemsize,
        table.seed, table.first, table.stride, INITIAL_STD,
    )  # fmt: skip
    visits = [tensor.contiguous() for tensor in (index, labels, *facts)]
    _library().sopdist_rows(
        ctypes.byref(struct),
        *map(_pointer, visits),
        len(index),
        RULES.index(step.rule),
        step.v,
        step.u,
        _threads(len(index) * table.v.shape[1]),
    )

"""Initial values of the noise table, as a pure function of (seed, sample, class).

A value must not depend on rank, layout, device or order of computation, so nothing here has state. The integers come
from Philox-4x32-10, the generator behind `tl.randn`. The counter is (class // 4, sample, stream), and one call yields
four neighbouring classes, as `tl.randn4x` does:

    words(seed, i, k)   = philox(key = seed, counter = (k // 4, i mod 2^32, i div 2^32, stream))    four 32-bit words
    normal(seed, i, k)  = word pair (0, 1) or (2, 3) -> Box-Muller -> cosine or sine, chosen by k mod 4

The conversion from integers to normals differs from `tl.randn` on purpose:

* `tl.randn` calls log and cos, whose last bits differ between CPU and GPU. Here they are polynomials that use only
  additions, multiplications, one division and one square root. IEEE 754 defines the rounding of all of these.
* No value is ever zero. The updates of u and v are multiplicative, so a row that starts at zero could never learn.

This file is the reference, in plain PyTorch; `kernels/triton_counter.py` does the same arithmetic on CUDA. It does not
know about tables or losses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..philox import WORD_MASK, philox
from .rounding import sqrt_rounded

INITIAL_STD = 1e-8
V_STREAM = 0
U_STREAM = 1

# Upper bound of |initial value|: Box-Muller's radius at the smallest uniform, 2^-24, is sqrt(48 ln 2) = 5.77.
INITIAL_MAX = INITIAL_STD * math.sqrt(48 * math.log(2)) * (1 + 1e-6)

_CHUNK = 1 << 15  # quads per chunk: the int64 temporaries stay in the cache, which makes initialization 5x faster


def _box_muller(radius_word: Tensor, angle_word: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent standard normals (cosine, sine) from two words, in correctly rounded float32 steps."""
    # 1. Odd integers in (0, 2^24): the uniforms are these over 2^24, never 0 or 1. Exact in float32.
    radius_odd = (radius_word >> 9) * 2 + 1
    angle_odd = (angle_word >> 9) * 2 + 1

    # 2. ln(odd / 2^24) = ln m + (e - 24) ln 2 with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh f as a series.
    bits = radius_odd.to(torch.float32).view(torch.int32)
    exponent = (bits >> 23) - (127 + 24)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    high = mantissa > 1.41421354
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = (exponent + high).to(torch.float32)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    s = f * f
    series = ((((s * 0.11111111) + 0.14285715) * s + 0.2) * s + 0.33333334) * s + 1.0
    log = exponent * 0.6931472 + (f * 2.0) * series
    radius = sqrt_rounded(log * -2.0)

    # 3. cos and sin of odd / 2^24 turns: the nearest quarter turn, and a Taylor series for the rest in (-pi/4, pi/4).
    quarter = (angle_odd + (1 << 21)) >> 22
    y = (angle_odd - (quarter << 22)).to(torch.float32) * 3.7450704e-07  # 2 pi / 2^24
    y2 = y * y
    sine = ((((y2 * 2.7557319e-06) - 1.9841270e-04) * y2 + 8.3333338e-03) * y2 - 1.6666667e-01) * y2
    sine = sine * y + y
    cosine = ((((y2 * 2.4801588e-05) - 1.3888889e-03) * y2 + 4.1666668e-02) * y2 - 0.5) * y2 + 1.0
    odd, quarter = (quarter & 1) == 1, quarter & 3
    cos = torch.where(odd, sine, cosine)
    sin = torch.where(odd, cosine, sine)
    cos = torch.where((quarter == 1) | (quarter == 2), -cos, cos)
    sin = torch.where(quarter >= 2, -sin, sin)
    return radius * cos, radius * sin


def _four_initials(seed: int, sample: Tensor, quad: Tensor, stream: int) -> Tensor:
    """Initial values of classes 4*quad .. 4*quad + 3: the shape of `sample` with a last axis of 4 added."""
    constant = torch.full_like(sample, stream)
    w0, w1, w2, w3 = philox(seed, quad, sample & WORD_MASK, (sample >> 32) & WORD_MASK, constant)
    normals = torch.stack((*_box_muller(w0, w1), *_box_muller(w2, w3)), dim=-1)
    return normals * INITIAL_STD


def initial_u(seed: int, sample: Tensor) -> Tensor:
    """Initial u of each sample index (N,), float32."""
    parts = [part.to(torch.int64) for part in sample.split(_CHUNK)]
    return torch.cat([_four_initials(seed, part, torch.zeros_like(part), U_STREAM)[..., 0] for part in parts])


def initial_v(seed: int, sample: Tensor, class_: Tensor) -> Tensor:
    """Initial v of (sample, class) pairs, float32. Both int tensors have the same shape."""
    sample, class_ = sample.to(torch.int64), class_.to(torch.int64)
    four = _four_initials(seed, sample, class_ >> 2, V_STREAM)  # (..., 4)
    return four.gather(-1, (class_ & 3).unsqueeze(-1)).squeeze(-1)


def fill_initial_v(out: Tensor, seed: int, sample: Tensor) -> Tensor:
    """Write the initial v of all classes of each sample into `out` (len(sample), K) and return it."""
    classes = out.shape[1]
    quads = torch.arange((classes + 3) // 4, device=out.device)  # (Q,)
    rows = max(1, _CHUNK // len(quads))
    for start in range(0, len(sample), rows):
        part = sample[start : start + rows].to(torch.int64)
        grid_sample, grid_quad = torch.broadcast_tensors(part[:, None], quads[None, :])  # (rows, Q)
        four = _four_initials(seed, grid_sample, grid_quad, V_STREAM)  # (rows, Q, 4)
        out[start : start + rows] = four.flatten(1)[:, :classes]
    return out

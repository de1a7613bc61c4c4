"""Initial values of v on the GPU: the arithmetic of `noise/counter.py`, operation for operation.

Divisions and square roots round as IEEE 754 says (`div_rn`, `sqrt_rn`), and callers compile without fused multiply-add,
so the results equal those of the CPU, bit for bit.
"""

import triton
import triton.language as tl

from ..counter import INITIAL_STD, V_STREAM

_STD = tl.constexpr(INITIAL_STD)
_V_STREAM = tl.constexpr(V_STREAM)


@triton.jit
def _box_muller(radius_word, angle_word):
    # 1. Odd integers in (0, 2^24).
    radius_odd = ((radius_word >> 9).to(tl.int32) * 2) + 1
    angle_odd = ((angle_word >> 9).to(tl.int32) * 2) + 1

    # 2. ln(odd / 2^24) = ln m + (e - 24) ln 2, ln m = 2 atanh f.
    bits = radius_odd.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - (127 + 24)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    high = mantissa > 1.41421354
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    exponent = tl.where(high, exponent + 1, exponent).to(tl.float32)
    f = tl.math.div_rn(mantissa - 1.0, mantissa + 1.0)
    s = f * f
    series = ((((s * 0.11111111) + 0.14285715) * s + 0.2) * s + 0.33333334) * s + 1.0
    log = exponent * 0.6931472 + (f * 2.0) * series
    radius = tl.sqrt_rn(log * -2.0)

    # 3. cos and sin of odd / 2^24 turns.
    quarter = (angle_odd + (1 << 21)) >> 22
    y = (angle_odd - (quarter << 22)).to(tl.float32) * 3.7450704e-07
    y2 = y * y
    sine = ((((y2 * 2.7557319e-06) - 1.9841270e-04) * y2 + 8.3333338e-03) * y2 - 1.6666667e-01) * y2
    sine = sine * y + y
    cosine = ((((y2 * 2.4801588e-05) - 1.3888889e-03) * y2 + 4.1666668e-02) * y2 - 0.5) * y2 + 1.0
    odd = (quarter & 1) == 1
    quarter = quarter & 3
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    cos = tl.where((quarter == 1) | (quarter == 2), -cos, cos)
    sin = tl.where(quarter >= 2, -sin, sin)
    return radius * cos, radius * sin


@triton.jit
def initial_v(seed, sample, class_):
    """Initial v of one (sample, class): int64 sample, int32 class, float32 result."""
    sample_low = (sample & 0xFFFFFFFF).to(tl.uint32)
    sample_high = ((sample >> 32) & 0xFFFFFFFF).to(tl.uint32)
    quad = (class_ >> 2).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quad, sample_low, sample_high, quad * 0 + _V_STREAM)
    n0, n1 = _box_muller(w0, w1)
    n2, n3 = _box_muller(w2, w3)
    lane = class_ & 3
    normal = tl.where(lane == 0, n0, tl.where(lane == 1, n1, tl.where(lane == 2, n2, n3)))
    return normal * _STD

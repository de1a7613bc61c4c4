"""Initial values of the noise table: random numbers from a counter, the same bits on every device."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from sopdist.noise import counter
from sopdist.noise.kernels.triton_counter import initial_v as triton_initial_v
from sopdist.noise.rounding import sqrt_rounded
from sopdist.noise.sop import SMALLEST_EPS
from sopdist.philox import philox

seeds = st.integers(0, 2**63 - 1)
samples = st.integers(0, 2**40)


def words(seed: int, counters: tuple[int, int, int, int]) -> list[int]:
    return [int(word) for word in philox(seed, *(torch.tensor([c]) for c in counters))]


def test_philox_gives_the_published_known_answers() -> None:
    ones = 0xFFFFFFFF
    assert words(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(ones | ones << 32, (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    key = 0xA4093822 | 0x299F31D0 << 32
    assert words(key, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


def float64_normal(seed: int, sample: int, class_: int, stream: int) -> float:
    """Box-Muller with NumPy's own log, cos and sin on the same integers."""
    w = words(seed, (class_ // 4, sample & 0xFFFFFFFF, sample >> 32, stream))
    lane = class_ % 4
    first, second = (w[0], w[1]) if lane < 2 else (w[2], w[3])
    uniform, angle = ((2 * (x >> 9) + 1) / 2**24 for x in (first, second))
    turn = np.cos if lane % 2 == 0 else np.sin
    return float(np.sqrt(-2 * np.log(uniform)) * turn(2 * np.pi * angle))


@given(seeds, samples, st.integers(0, 21_999))
def test_initial_values_are_box_muller_normals_of_the_philox_words(seed: int, sample: int, class_: int) -> None:
    got_v = counter.initial_v(seed, torch.tensor([sample]), torch.tensor([class_]))
    got_u = counter.initial_u(seed, torch.tensor([sample]))
    assert abs(float(got_v) - 1e-8 * float64_normal(seed, sample, class_, counter.V_STREAM)) < 2e-14
    assert abs(float(got_u) - 1e-8 * float64_normal(seed, sample, 0, counter.U_STREAM)) < 2e-14


def test_initial_values_are_standard_normal_times_1e_8() -> None:
    v = counter.fill_initial_v(torch.empty(20_000, 50), 7, torch.arange(20_000)).double() / 1e-8
    count = v.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((v**power).mean()) - moment) < 4.5 * (variance / count) ** 0.5
    assert abs(float((v[:, :-1] * v[:, 1:]).mean())) < 4.5 / count**0.5  # neighbouring classes
    assert abs(float((v[:-1] * v[1:]).mean())) < 4.5 / count**0.5  # neighbouring samples
    inside = float((v.abs() < 1.959964).double().mean())
    assert abs(inside - 0.95) < 4.5 * (0.95 * 0.05 / count) ** 0.5


def test_no_word_gives_zero_and_the_extremes_stay_within_bounds() -> None:
    extreme = torch.tensor([0, 1, 2**9, 2**31, 2**32 - 1, 2**32 - 2**9, 2**30, 2**29])
    radius, angle = torch.meshgrid(extreme, extreme, indexing="ij")
    for normals in counter._box_muller(radius.flatten(), angle.flatten()):
        assert float((normals * counter.INITIAL_STD).abs().min()) > 1e-18  # its square is a normal float32
        assert float((normals * counter.INITIAL_STD).abs().max()) <= counter.INITIAL_MAX


def test_the_square_of_an_initial_value_never_changes_a_probability_that_is_not_clipped() -> None:
    """Therefore slots may leave unchanged entries out of p - v^2."""
    smallest = torch.tensor(SMALLEST_EPS)
    below = smallest - torch.nextafter(smallest, torch.tensor(0.0))
    assert float(below) / 4 > counter.INITIAL_MAX**2


@given(seeds, st.integers(0, 2**35), st.integers(1, 70))
def test_a_value_does_not_depend_on_the_others_computed_with_it(seed: int, first: int, classes: int) -> None:
    sample = torch.arange(first, first + 5)
    table = counter.fill_initial_v(torch.empty(5, classes), seed, sample)
    again = counter.fill_initial_v(torch.empty(1, classes + 9), seed, sample[3:4])[0, :classes]
    single = counter.initial_v(seed, sample[3:4], torch.tensor([classes - 1]))
    assert torch.equal(table[3], again)
    assert table[3, -1] == single[0]


@triton.jit
def _initial_v_kernel(out_ptr, sample_ptr, class_ptr, words_ptr, seed):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    sample = tl.load(sample_ptr + i)
    class_ = tl.load(class_ptr + i)
    tl.store(out_ptr + i, triton_initial_v(seed, sample, class_))
    w0, _, _, _ = tl.randint4x(seed, i)
    tl.store(words_ptr + i, w0.to(tl.int64) & 0xFFFFFFFF)


def test_triton_computes_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randint(0, 2**40, (64,), generator=generator)
    class_ = torch.randint(0, 22_000, (64,), generator=generator).to(torch.int32)
    for seed in (0, 12345, 2**62 + 17):
        out, first_words = torch.empty(64), torch.empty(64, dtype=torch.int64)
        _initial_v_kernel[(64,)](out, sample, class_, first_words, seed)
        assert torch.equal(out, counter.initial_v(seed, sample, class_))
        zero = torch.zeros(64, dtype=torch.int64)
        assert torch.equal(first_words, philox(seed, torch.arange(64), zero, zero, zero)[0])  # tl.randn's stream


@given(st.floats(2.0**-60, 2.0**60, width=32))
def test_the_square_root_is_correctly_rounded(x: float) -> None:
    """So that the root of a square is the number itself, which `torch.sqrt` does not promise on a CPU."""
    value = torch.tensor([x, x * 0.37, x * 1.7])
    assert torch.equal(sqrt_rounded(value * value), value)
    assert torch.equal(sqrt_rounded(value), value.double().sqrt().float())
    assert sqrt_rounded(value[0]).shape == ()

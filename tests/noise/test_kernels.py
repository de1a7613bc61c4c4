"""The compiled kernels against the reference: C, and Triton in its interpreter; then Triton compiled for real GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sopdist import SOP
from sopdist.noise.kernels import choose_kernels, native_kernels, reference, triton_kernels
from sopdist.noise.kernels.facts import DROPPED, Facts
from sopdist.noise.kernels.triton_loss import ONE_TILE
from sopdist.noise.rates import VOTES, Flow, Official, Paper, Step
from sopdist.noise.rows import NoiseTable

RULES: list[Step] = [Flow(4).step(), Paper(30, 300, 0.02).step(), Official(100, 300, 128).step(), VOTES]
LAYOUTS = ("dense", "slots")
COMPILED = pytest.mark.parametrize("kernels", [native_kernels, triton_kernels], ids=["native", "triton"])


def noisy_table(samples: int, classes: int, layout: Any, *, slots: int = 3) -> NoiseTable:
    """Rows with small noise, large noise, and noise above 1, as `official` may have."""
    table = NoiseTable(samples, classes, layout=layout, slots=slots, seed=11)
    generator = torch.Generator().manual_seed(2)
    table.u.copy_(torch.rand(samples, generator=generator) * 2.4 - 1.2)
    values = torch.rand(samples, min(slots, classes), generator=generator) * 2.4 - 1.2
    numbers = torch.rand(samples, classes, generator=generator).topk(values.shape[1]).indices
    if table.classes is None:
        table.v.scatter_(1, numbers, values)
    else:
        table.v[::2], table.classes[::2] = values[::2], numbers[::2].to(table.classes.dtype)
    return table


def assert_close(got: Any, expected: Any) -> None:
    kept = expected.facts.predicted != DROPPED
    assert torch.equal(got.facts.predicted, expected.facts.predicted)
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=1e-6)
    gradient = [result.gradient * result.scale[:, None] for result in (got, expected)]
    torch.testing.assert_close(*gradient, rtol=1e-4, atol=1e-6)
    for a, b in zip(got.facts[1:], expected.facts[1:], strict=True):
        torch.testing.assert_close(a[kept], b[kept], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.facts.fit, expected.facts.fit, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("classes", [2, 3, 127, 1000, ONE_TILE, ONE_TILE + 1, 22_000])
@pytest.mark.parametrize(("reclip", "target"), [(False, 0.0), (True, 0.0), (False, 0.5)])
@COMPILED
def test_the_loss_kernel_agrees_with_the_reference(
    kernels: Any, layout: Any, classes: int, reclip: bool, target: float
) -> None:
    generator = torch.Generator().manual_seed(classes)
    table = noisy_table(9, classes, layout)
    batch = 5
    index = torch.randperm(9, generator=generator)[:batch]
    z = torch.randn(batch, classes, generator=generator) * torch.tensor([[0.1], [1], [5], [5], [30]])
    labels = torch.randint(classes, (batch,), generator=generator)
    eps = min(1e-4, 0.1 / classes)
    arguments = (z, labels, index, table.block, None)
    got, expected = (k.fused_loss(*arguments, eps=eps, reclip=reclip, target=target) for k in (kernels, reference))
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@COMPILED
def test_the_loss_kernel_handles_dtypes_ties_strides_and_dropped_samples(kernels: Any, dtype: torch.dtype) -> None:
    table = noisy_table(8, 50, "slots")
    generator = torch.Generator().manual_seed(0)
    z = (torch.randn(8, 2 * 50, generator=generator) * 2).to(dtype)[:, ::2]  # columns two apart
    z[0] = 1.0  # all tied: the lowest class wins
    z[1, 3], z[2, 4], z[3, 5] = float("nan"), float("inf"), float("-inf")
    labels = torch.tensor([7, 1, 2, 3, 4, 5, 6, 0]).repeat_interleave(2)[::2]
    keep = torch.tensor([True, True, True, True, False, True, True, True]).repeat_interleave(2)[::2]
    index = torch.arange(16)[::2] // 2
    arguments = (z, labels, index, table.block, keep)
    got, expected = (k.fused_loss(*arguments, eps=1e-4, reclip=False, target=0.5) for k in (kernels, reference))
    assert_close(got, expected)
    assert got.facts.predicted[:5].tolist() == [0, DROPPED, DROPPED, DROPPED, DROPPED]
    assert not got.gradient[1:5].any()


def random_facts(batch: int, classes: int, generator: torch.Generator) -> Facts:
    predicted = torch.randint(classes, (batch,), generator=generator)
    predicted[torch.rand(batch, generator=generator) < 0.15] = DROPPED
    loss, margin, pull, fit = torch.randn(4, batch, generator=generator)
    return Facts(predicted, loss.abs(), margin.tanh(), pull, fit.sigmoid())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", RULES, ids=lambda step: step.rule)
@pytest.mark.parametrize(("samples", "classes", "batch"), [(6, 5, 20), (40, 1100, 9), (3, 2, 7), (2, 33_000, 3)])
@COMPILED
def test_the_row_kernels_give_the_bits_of_the_reference(
    kernels: Any, layout: Any, step: Step, samples: int, classes: int, batch: int
) -> None:
    """With duplicates in the batch, dropped samples, evictions, and a partitioned table."""
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (
        NoiseTable(samples * 2, classes, layout=layout, slots=3, seed=2**62 + 5, first=1, stride=2) for _ in range(2)
    )
    for _ in range(5):
        index = torch.randint(samples, (batch,), generator=generator)
        facts = Facts(*(fact[::2] for fact in random_facts(2 * batch, min(classes, 8), generator)))  # two apart
        for table, implementation in ((ours, kernels), (theirs, reference)):
            implementation.update_rows(table, index, index % classes, facts, step)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    if theirs.evictions is not None and classes == 5:
        assert int(theirs.evictions.sum()) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["native", "triton"])
def test_the_module_runs_with_each_kernel(layout: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> tuple[list[float], Tensor]:
        generator = torch.Generator().manual_seed(0)
        sop, losses = SOP(12, 6, onset="always", layout=layout), []
        for _ in range(4):
            z = (torch.randn(8, 6, generator=generator) * 3).requires_grad_()
            loss = sop(z, torch.arange(8) % 6, torch.arange(8))
            loss.backward()
            assert z.grad is not None
            losses += [float(loss.detach()), float(z.grad.abs().sum())]
        return losses, sop.table.dense_v(torch.arange(12))

    monkeypatch.setenv("SOPDIST_KERNELS", "reference")
    expected = train()
    monkeypatch.setenv("SOPDIST_KERNELS", name)
    got = train()
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert torch.equal(got[1], expected[1])


def test_kernels_are_chosen_by_device_dtype_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("SOPDIST_KERNELS", raising=False)
    assert choose_kernels(cpu) is native_kernels
    assert choose_kernels(cuda) is triton_kernels
    assert choose_kernels(torch.device("mps")) is reference
    assert choose_kernels(cuda, torch.float64) is reference
    for name, kernels in (("reference", reference), ("native", native_kernels), ("triton", triton_kernels)):
        monkeypatch.setenv("SOPDIST_KERNELS", name)
        assert choose_kernels(cpu) is kernels
    monkeypatch.setenv("SOPDIST_KERNELS", "cuda")
    with pytest.raises(ValueError, match="must be 'reference', 'native' or 'triton', got 'cuda'"):
        choose_kernels(cpu)
    monkeypatch.setenv("SOPDIST_KERNELS", "native")
    with pytest.raises(RuntimeError, match="native is for CPU tensors, but these are on cuda"):
        choose_kernels(cuda)
    monkeypatch.setenv("SOPDIST_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        choose_kernels(cpu)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_do_not_change_a_bit(layout: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(300, 700, generator=generator) * 3
    index, labels = torch.randint(40, (300,), generator=generator), torch.randint(700, (300,), generator=generator)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            table = noisy_table(40, 700, layout, slots=200)
            loss = native_kernels.fused_loss(z, labels, index, table.block, None, eps=1e-4, reclip=False, target=0.5)
            native_kernels.update_rows(table, index, labels, loss.facts, Flow(4).step())
            results.append((loss.losses, loss.gradient, *table.buffers()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def run_python(*arguments: str | Path) -> None:
    """Run Python in a new process with Triton's compiler: this process uses its interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, *arguments], env=environment, check=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel compiled for every target."""
    out: Path = tmp_path_factory.mktemp("aot") / "kernels.json"
    run_python("-m", "sopdist", "bench", "kernels", "--out", out)
    kernels: list[dict[str, Any]] = json.loads(out.read_text())["kernels"]
    return kernels


def test_every_kernel_compiles_for_every_target(compiled: list[dict[str, Any]]) -> None:
    for target in ("sm_80", "sm_90", "sm_100"):
        for classes in (10, 1000, 22_000):
            mine = [k for k in compiled if k["target"] == target and k["classes"] == classes]
            assert {(k["kernel"], k["layout"]) for k in mine} == {(a, b) for a in ("loss", "rows") for b in LAYOUTS}
            assert {k["detail"] for k in mine if k["kernel"] == "loss"} == {"float32", "bfloat16", "float16"}
            assert {k["detail"] for k in mine if k["kernel"] == "rows"} == {"flow", "paper", "official", "votes"}
            assert all(0 < k["registers"] <= 255 and k["cubin_bytes"] > 1000 for k in mine)


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]) -> None:
    assert [k for k in compiled if k["spilled_bytes"]] == []


def test_the_row_kernels_use_only_operations_that_all_devices_round_equally(compiled: list[dict[str, Any]]) -> None:
    assert [k for k in compiled if k["kernel"] == "rows" and k["inexact"]] == []
    assert all(k["inexact"] for k in compiled if k["kernel"] == "loss")  # the search works


SPECIALISED_ON_ONE = """
import dataclasses
from sopdist.noise.kernels import aot

for build in aot.builds((1000,)):
    for name in {"B", "seed", "sample_first", "sample_stride"} & build.signature.keys():
        signature, constants = build.signature | {name: "constexpr"}, build.constants | {name: 1}
        aot.compile_build(dataclasses.replace(build, signature=signature, constants=constants), 90)
"""


def test_the_kernels_compile_where_triton_turns_an_argument_of_1_into_a_constant() -> None:
    """A batch of one sample, seed 1, rank 1: cases that the interpreter does not distinguish."""
    run_python("-c", SPECIALISED_ON_ONE)

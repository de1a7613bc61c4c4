"""`sopdist bench table`: its baselines learn the same table as SOP, and verdicts follow from the measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sopdist import SOP
from sopdist.bench.table import FULL, LOSSES, QUICK, Cell, Verdict, add_arguments, judge, run
from sopdist.bench.table_candidates import (
    AUTHORS,
    CANDIDATES,
    CROSS_ENTROPY,
    OURS,
    SETTLED,
    AutogradStep,
    DenseParameters,
    Sizes,
    SparseEmbedding,
    draw_batches,
)
from sopdist.bench.timing import Timing
from sopdist.noise.rows import Layout

SAMPLES, CLASSES, BATCH = 24, 6, 8
RATE = 1.0


def _run(*given: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(given))


def test_a_quick_run_writes_its_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "table.json"
    assert _run("--quick", "--out", str(out)) == 0
    found = json.loads(out.read_text())

    assert found["environment"].keys() >= {"torch", "sopdist", "python", "cpu_count", "threads", "date"}
    assert len(found["table"]) == sum(map(len, QUICK.sweeps.values()))
    for cell in found["table"]:
        assert cell["candidates"].keys() == CANDIDATES.keys()
        assert not cell["skipped"]
        for timing in cell["candidates"].values():
            assert 0 < timing["lower"] <= timing["median"] <= timing["upper"]
            assert 3 <= timing["calls"] <= QUICK.repeats
    assert found["loss"]["candidates"].keys() == {*LOSSES, CROSS_ENTROPY}
    assert all(verdict["met"] in (True, False, None) for verdict in found["verdicts"])

    printed = capsys.readouterr().out
    assert all(name in printed for name in CANDIDATES)
    assert printed.count("not measured") == sum(verdict["met"] is None for verdict in found["verdicts"]) > 0


def test_tables_over_the_memory_limit_are_skipped_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    limit = CANDIDATES["sparse embedding"].nbytes(Sizes(2000, 10, 32)) / 2**30
    assert _run("--quick", "--out", str(out), "--max-gib", repr(limit)) == 0
    skipped = json.loads(out.read_text())["table"][1]["skipped"]
    assert "--max-gib" in skipped[AUTHORS]
    assert "sparse embedding" not in skipped
    assert f"skipped {AUTHORS}" in capsys.readouterr().out


@pytest.mark.parametrize("name", CANDIDATES)
def test_bytes_are_the_sum_over_the_tensors(name: str) -> None:
    sizes = Sizes(300, 20, 16)
    step = CANDIDATES[name].build(sizes)
    batch = draw_batches(sizes, 1)[0]
    step(*batch)
    if isinstance(step, SOP):
        tensors = [step.table.get_buffer(key) for key in step.table.state_dict() if key not in ("meta", "skipped")]
    elif isinstance(step, AutogradStep):
        tensors = [step.u, step.v, *(x.grad for x in (step.u, step.v) if x.grad is not None and not x.grad.is_sparse)]
    else:
        tensors = []
    assert CANDIDATES[name].nbytes(sizes) == sum(x.numel() * x.element_size() for x in tensors)


def _training_stream(epochs: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of a network with a fixed prediction for every sample, right or wrong, plus some noise at every visit."""
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=random)
    prediction = 2 * torch.randn(SAMPLES, CLASSES, generator=random)
    stream = []
    for _ in range(epochs):
        for index in torch.randperm(SAMPLES, generator=random).split(BATCH):
            stream.append(
                (prediction[index] + 0.3 * torch.randn(BATCH, CLASSES, generator=random), labels[index], index)
            )
    return stream


@pytest.mark.parametrize("layout", ["dense", "slots"])
@pytest.mark.parametrize("table", [DenseParameters, SparseEmbedding])
def test_baselines_learn_the_same_table_as_sop(
    table: type[DenseParameters] | type[SparseEmbedding], layout: Layout
) -> None:
    sop = SOP(SAMPLES, CLASSES, variant="official", layout=layout, batch_size=BATCH, lr_u=RATE, lr_v=RATE)
    all_samples = torch.arange(SAMPLES)
    u, v = sop.table.u.clone(), sop.table.dense_v(all_samples).clone()
    baseline = AutogradStep(table(u.clone(), v.clone()), lr_u=RATE, lr_v=RATE, eps=sop.eps)
    for batch in _training_stream(epochs=70):
        sop(*batch)
        baseline(*batch)

    learned_u, learned_v = sop.table.u, sop.table.dense_v(all_samples)
    assert (learned_v.square() > 0.5).any()  # far from the initial 1e-8, so that equality means something
    assert (learned_u.square() > 0.5).any()
    torch.testing.assert_close(baseline.u[:, 0].detach(), learned_u, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(baseline.v.detach(), learned_v, rtol=1e-4, atol=1e-6)


def _cells(authors: float, ours_small: float, ours_large: float) -> dict[Sizes, Cell]:
    small, *_, large = FULL.sweeps["against N"]
    cells = {}
    for sizes, seconds in ((small, ours_small), (large, ours_large)):
        medians = {**dict.fromkeys([*OURS, SETTLED], seconds), AUTHORS: authors}
        cells[sizes] = Cell(sizes, {name: Timing(x, x, x, 1) for name, x in medians.items()}, {}, {})
    return cells


def _loss_cell(plain: float, own: float) -> Cell:
    medians = {**dict.fromkeys(LOSSES, own), CROSS_ENTROPY: plain}
    return Cell(FULL.loss, {name: Timing(x, x, x, 1) for name, x in medians.items()}, {}, {})


def _met(verdicts: list[Verdict], part: str) -> set[bool | None]:
    return {verdict.met for verdict in verdicts if part in verdict.target}


def test_verdicts_follow_from_the_medians() -> None:
    good = judge(_cells(authors=0.2, ours_small=1e-3, ours_large=1.2e-3), _loss_cell(plain=1e-3, own=1.9e-3))
    bad = judge(_cells(authors=0.2, ours_small=1e-3, ours_large=2.1e-3), _loss_cell(plain=1e-3, own=2.1e-3))
    for part in ("as fast as", "time at", "cross-entropy"):
        assert _met(good, part) == {True}
        assert _met(bad, part) == {False}


def test_missing_measurements_get_no_verdict() -> None:
    small, *_ = FULL.sweeps["against N"]
    only_small = {small: _cells(0.2, 1e-3, 1e-3)[small]}
    assert _met(judge(only_small, _loss_cell(1e-3, 1e-3)), "N=1,000,000") == {None}

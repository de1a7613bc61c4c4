"""`sopdist bench input`: every candidate runs and yields comparable batches, and the results are the measured ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sopdist.bench.input_candidates import CANDIDATES, DALI_READER, OURS_CPU, OURS_DALI, WEBDATASET, Setting
from sopdist.bench.input_plan import PlanFigures, _equal_pairs, plan_figures
from sopdist.bench.input_rates import Rate, _verdicts
from sopdist.bench.photos import photo_jpegs, write_photo_shards
from sopdist.cli import main
from sopdist.data.headers import read_header


def test_a_quick_run_writes_its_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "input.json"
    assert main(["bench", "input", "--quick", "--cores", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["rates"]) == set(CANDIDATES)
    assert all(rate["images_per_second"] > 0 and rate["cpu_ms_per_image"] > 0 for rate in found["rates"].values())
    assert len(found["verdicts"]) == 8
    printed = capsys.readouterr().out
    for name in CANDIDATES:
        assert name in printed


def test_candidates_that_are_compared_yield_the_same_kind_of_batch(tmp_path: Path) -> None:
    jpegs = photo_jpegs(12)
    write_photo_shards(tmp_path, jpegs, "jpg", per_shard=4)
    setting = Setting(tmp_path, "imagenet", 4, 1, jpegs)
    for name in (OURS_CPU, OURS_DALI, DALI_READER, WEBDATASET):
        for batch in itertools.islice(CANDIDATES[name](setting), 4):
            assert batch.dtype == torch.float32, name
            assert batch.numel() == 4 * 3 * 224 * 224, name
            assert -2.2 < float(batch.min()) < -0.5 < 0.5 < float(batch.max()) < 2.7, f"{name}: normalised"


def test_the_photos_are_realistic() -> None:
    jpegs = photo_jpegs(20)
    assert 40_000 < np.mean([len(jpeg) for jpeg in jpegs]) < 90_000
    assert {(read_header(jpeg).width, read_header(jpeg).height) for jpeg in jpegs} > {(500, 375), (256, 256)}
    assert len(set(jpegs)) == 20


def test_verdicts_follow_from_the_measurements() -> None:
    plan = PlanFigures(1, seconds=3.0, peak_bytes=10, correlation=0, neighbours=0, neighbours_if_full=0)
    rates = {name: Rate(100.0, 90.0, 110.0, 1.0) for name in CANDIDATES}
    verdicts = {verdict.target: verdict for verdict in _verdicts(rates, {0: 1.0, 10_000: 2.0}, plan)}
    assert verdicts[f"{OURS_DALI} >= 0.95 x {DALI_READER}"].met
    assert not verdicts[f"{OURS_CPU} >= 1.5 x {WEBDATASET}"].met
    assert not verdicts["first batch of a resume <= 1.5 x that of a start"].met
    assert not verdicts["plan in < 2 s"].met
    assert verdicts["plan in < 1 GB"].met


def test_pairs_from_the_same_shard_are_counted() -> None:
    assert _equal_pairs(np.array([1, 1, 1, 2, 2, 5])) == 4
    figures = plan_figures(50_000)  # 50 shards: a full shuffle
    assert figures.neighbours == pytest.approx(figures.neighbours_if_full, rel=0.25)
    assert abs(figures.correlation) < 0.03

"""`sopdist bench regimes`: its noise, its choice of settings, its verdicts, and a real run that continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sopdist.bench.fashion_mnist_data import DEFAULT_DATA
from sopdist.bench.regimes import ELR_TUNED, choose_tuned, report, verdicts
from sopdist.bench.regimes_data import make_noise
from sopdist.bench.regimes_figure import plot_results
from sopdist.bench.regimes_training import REGIMES, TUNED, Result, schedule, shift_and_flip
from sopdist.cli import main
from sopdist.errors import DataError


def result(method: str, test: float, seed: int = 0, noise: str = "sym-40", validation: float = 0.5) -> Result:
    return Result("quick", noise, method, seed, test, validation, wrong=0.36, seconds=1.0)


@pytest.mark.parametrize(("noise", "rate"), [("sym-40", 0.36), ("asym-40", 0.28), ("inst-40", 0.4), ("clean", 0.0)])
def test_labels_are_wrong_at_the_rate_that_the_name_says(noise: str, rate: float) -> None:
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(6000) % 10
    images = torch.randn(6000, 8, 8, generator=draws) + torch.nn.functional.one_hot(labels, 64).reshape(-1, 8, 8) * 2
    noisy = make_noise(noise, images, labels, 10, seed=1)
    assert float((noisy != labels).float().mean()) == pytest.approx(rate, abs=0.03)
    assert torch.equal(noisy, make_noise(noise, images, labels, 10, seed=1))


def test_labels_of_clear_images_are_seldom_wrong_with_instance_dependent_noise() -> None:
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(4000) % 10
    strength = torch.where(torch.arange(4000) < 2000, 8.0, 0.5)[:, None]
    images = torch.randn(4000, 10, generator=draws) + torch.nn.functional.one_hot(labels, 10) * strength
    wrong = make_noise("inst-20", images, labels, 10, seed=0) != labels
    assert float(wrong[:2000].float().mean()) < 0.5 * float(wrong[2000:].float().mean())


def test_unknown_noise_is_refused() -> None:
    with pytest.raises(DataError, match=r"noise 'flip-40': must be clean, sym-R, asym-R or inst-R"):
        make_noise("flip-40", torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), 10, 0)


def test_augmentation_shifts_and_mirrors_each_image() -> None:
    images = torch.zeros(200, 9, 9)
    images[:, 4, 4] = 1
    moved = shift_and_flip(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    positions = {tuple(position[1:]) for position in moved.nonzero().tolist()}
    assert len(positions) > 50
    assert moved.sum(dim=(1, 2)).unique().tolist() == [1.0], "a shift of up to 4 pixels keeps the centre inside"


def test_schedules_end_at_zero_or_in_small_steps() -> None:
    assert [schedule("steps", x) for x in (0.0, 0.6, 0.9)] == [1.0, 0.1, 0.01]
    assert schedule("warm-up", 0.0) == 0.0
    for name in ("cosine", "warm-up"):
        assert schedule(name, 1.0) == pytest.approx(0.0, abs=1e-12)


def test_elr_is_tuned_on_noisy_validation_and_not_on_test() -> None:
    first, second, *_ = TUNED
    runs = [result("ce", 0.7)]
    runs += [result(name, 0.6, validation=0.4) for name in TUNED if name not in (first, second)]
    runs += [result(first, 0.9, validation=0.3), result(second, 0.5, validation=0.45)]
    (chosen,) = [run for run in choose_tuned(runs) if run.method == ELR_TUNED]
    assert chosen.test == 0.5


def test_verdicts_compare_with_cross_entropy_regime_by_regime() -> None:
    good = [
        result(name, test, seed) for seed in (0, 1) for name, test in (("ce", 0.7), ("elr", 0.7), ("sop-auto", 0.8))
    ]
    assert [verdict.met for verdict in verdicts(good)[:2]] == [True, True]
    bad = [*good, result("ce", 0.9, noise="clean"), result("sop-auto", 0.88, noise="clean")]
    regret, elr, *_ = verdicts(bad)
    assert (regret.met, elr.met) == (False, True)
    assert "2.0 points (quick clean)" in regret.measured
    assert "| quick | clean |" in report(bad)
    assert "-2.0" in report(bad)


def about_labels(noise: str, wrong: float, rate: float, flagged: float, **more: Any) -> Result:
    found = {"provisional": False, "flag_precision": None, **more}
    return Result("quick", noise, "sop-auto", 0, 0.8, 0.5, wrong, 1.0, rate=rate, flagged=flagged, **found)


def test_verdicts_judge_what_is_said_about_the_labels() -> None:
    clean = about_labels("clean", 0.0, 0.02, 0.03)
    firm = about_labels("sym-40", 0.36, 0.40, 0.40, flag_precision=0.8)
    hint = about_labels("asym-40", 0.28, 0.26, 0.26, flag_precision=0.5, provisional=True)
    assert [verdict.met for verdict in verdicts([clean, firm, hint])] == [True] * 4
    for worse, expected in (
        (about_labels("clean", 0.0, 0.02, 0.06), [True, True, False, True]),
        (about_labels("clean", 0.0, 0.06, 0.03), [True, False, True, True]),
        (about_labels("clean", 0.0, 0.2, 0.03), [False, False, True, True]),
    ):
        assert [verdict.met for verdict in verdicts([worse, firm, hint])] == expected
    wrong_flags = about_labels("sym-40", 0.36, 0.40, 0.40, flag_precision=0.6)
    assert [verdict.met for verdict in verdicts([clean, wrong_flags])] == [True, True, True, False]


def test_the_figures_are_written(tmp_path: Path) -> None:
    runs = [result(name, test) for name, test in (("ce", 0.7), ("elr", 0.75), ("sop-auto", 0.8))]
    runs[-1] = replace(runs[-1], signal=[None, None, 0.1, 0.09, 0.12], onset=5)
    plot_results(runs, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onset.png", "regimes.png"]


needs_data = pytest.mark.skipif(not DEFAULT_DATA.is_dir(), reason="needs Debian's dataset-fashion-mnist")


@needs_data
def test_the_command_runs_and_continues_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "regimes.json"
    options = ["--samples", "600", "--epochs", "3", "--seeds", "1", "--jobs", "2", "--out", str(out)]
    assert main(["bench", "regimes", "--regimes", "small,digits", "--methods", "ce,sop-auto,elr-tuned", *options]) == 0
    shown = capsys.readouterr().out
    assert "| small | asym-40 |" in shown
    content = json.loads(out.read_text())
    cells = sum(len(REGIMES[name].noises) for name in ("small", "digits"))
    assert len(content["runs"]) == 4 * cells, "one row each for ce, sop-auto, ELR and the chosen ELR"
    log = out.with_suffix(".jsonl")
    lines = log.read_text().splitlines()
    assert len(lines) == (3 + len(TUNED)) * cells, "the published ELR is a candidate, too"
    log.write_text("\n".join(lines[:-2]) + '\n{"regime": "dig')  # killed while it wrote
    assert main(["bench", "regimes", "--regimes", "small,digits", "--methods", "ce,sop-auto,elr-tuned", *options]) == 0
    assert f"{len(lines) - 2} of {len(lines)} runs are in" in capsys.readouterr().out
    again = json.loads(out.read_text())["runs"]
    assert [run | {"seconds": 0} for run in again] == [run | {"seconds": 0} for run in content["runs"]]


@needs_data
@pytest.mark.long
def test_waiting_for_the_onset_helps_where_labels_are_memorised_and_costs_nothing_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "regimes.json"
    options = ["--methods", "ce,sop-always,sop-auto", "--seeds", "1", "--out", str(out)]
    assert main(["bench", "regimes", "--regimes", "features,slow,digits", *options]) == 0
    runs = {(run["regime"], run["noise"], run["method"]): run for run in json.loads(out.read_text())["runs"]}

    def gain(regime: str, noise: str, method: str = "sop-auto") -> float:
        return float(runs[regime, noise, method]["test"] - runs[regime, noise, "ce"]["test"])

    assert gain("features", "sym-40") > 0.1
    assert gain("digits", "sym-40") > 0.15
    for noise in REGIMES["slow"].noises:
        assert gain("slow", noise) == 0, "the gate stays closed: cross-entropy, bit for bit"
    assert gain("slow", "clean", "sop-always") < -0.01, "what waiting avoids"

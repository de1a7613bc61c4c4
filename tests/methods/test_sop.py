"""SOP as a method of the trainer: its settings, and what its onset does to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sopdist.checkpoint import complete_checkpoints, open_checkpoint
from sopdist.checkpoint.tensor_file import read_tensors
from sopdist.methods.sop import SOPMethod, SOPSettings
from sopdist.train.record.metrics_file import read_lines
from sopdist.train.run import run_config
from tests.support.grey_images import write_images

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
optim: {lr: 0.05}
train: {epochs: 4, batch: 9}
engine: {threads: 1}
log: {every: 1, wandb: 'off'}
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "shards" / "train", 61)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def network_of(run: str) -> dict[str, list[float]]:
    return {
        name: value.flatten().tolist()
        for name, value in read_tensors(Path(f"runs/{run}/network-last.safetensors")).items()
    }


def noise_lines(run: str) -> list[dict[str, float]]:
    return [line for line in read_lines(Path(f"runs/{run}/metrics.jsonl")) if line["kind"] == "noise"]


@pytest.mark.usefixtures("workspace")
def test_until_the_onset_a_run_is_one_with_cross_entropy_bit_for_bit() -> None:
    assert run_config("tiny.yaml", ["run.name=ce", "method.name=ce"]) == 0
    assert run_config("tiny.yaml", ["run.name=never", "method.onset=never"]) == 0
    assert network_of("never") == network_of("ce")
    assert all("onset" not in line and line["active_rows"] == 0 for line in noise_lines("never"))
    assert noise_lines("never")[-1]["flagged"] > 0, "provisional, from the votes"


@pytest.mark.usefixtures("workspace")
def test_from_the_onset_on_the_table_acts_and_the_log_says_since_when() -> None:
    assert run_config("tiny.yaml", ["run.name=ce", "method.name=ce"]) == 0
    assert run_config("tiny.yaml", ["run.name=second", "method.onset=2"]) == 0
    assert network_of("second") != network_of("ce")
    assert [line.get("onset") for line in noise_lines("second")] == [None, 2, 2, 2]
    assert noise_lines("second")[-1]["active_rows"] > 0


@pytest.mark.usefixtures("workspace")
def test_the_decision_is_in_the_checkpoint() -> None:
    assert (
        run_config("tiny.yaml", ["run.name=auto", "method.onset=auto", "checkpoint.steps=3", "checkpoint.keep=9"]) == 0
    )
    for folder in complete_checkpoints(Path("runs/auto")):
        saved = open_checkpoint(folder)
        state = saved.read("method/onset").tolist()
        assert (state[0], state[1]) == (-1, saved.step // 7), "closed; windows so far"


@pytest.mark.parametrize(
    ("settings", "earliest"),
    [
        (SOPSettings(), 5),
        (SOPSettings(onset=7), 8),
        (SOPSettings(onset="always", visits=2.0), 2),
        (SOPSettings(variant="official", lr_v=100.0), 13),
    ],
)
def test_the_outlook_says_whether_the_table_can_act_in_time(settings: SOPSettings, earliest: int) -> None:
    for planned in (earliest, earliest - 1):
        outlook = SOPMethod(settings).outlook(visits=planned, lr=0.1)
        assert outlook is not None
        assert (outlook.visits, outlook.works) == (earliest, planned == earliest)


def test_nothing_is_forecast_for_a_table_that_shall_never_act() -> None:
    assert SOPMethod(SOPSettings(onset="never")).outlook(visits=3, lr=0.1) is None


@pytest.mark.usefixtures("workspace")
def test_a_run_without_an_onset_says_what_it_was_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    assert run_config("tiny.yaml", ["run.name=auto"]) == 0
    (warning,) = json.loads(Path("runs/auto/summary.json").read_text())["warnings"]
    assert "no sign that the network memorises labels. The run was plain cross-entropy" in warning
    assert "train longer, with less augmentation or with a larger network" in warning
    assert sum(warning in message for message in caplog.messages) == 1
    last = noise_lines("auto")[-1]
    assert last["provisional"] == 1
    assert last["rate_low"] <= last["rate"] <= last["rate_high"]


@pytest.mark.usefixtures("workspace")
def test_a_late_onset_is_reported_and_one_that_is_asked_for_never_is_not() -> None:
    assert run_config("tiny.yaml", ["run.name=late", "method.onset=4"]) == 0
    (warning, *_) = json.loads(Path("runs/late/summary.json").read_text())["warnings"]
    assert "acts since epoch 4 of 4" in warning
    assert "review suspects.csv" in warning
    assert run_config("tiny.yaml", ["run.name=never", "method.onset=never"]) == 0
    assert json.loads(Path("runs/never/summary.json").read_text())["warnings"] == []


@pytest.mark.usefixtures("workspace")
def test_every_line_of_the_log_says_since_when_the_table_acts() -> None:
    assert run_config("tiny.yaml", ["run.name=second", "method.onset=2"]) == 0
    lines = [line for line in read_lines(Path("runs/second/metrics.jsonl")) if line["kind"] == "train"]
    assert [line.get("onset") for line in lines] == [None] * 13 + [2] * 15, (
        "7 steps per epoch; the 14th ends the second"
    )

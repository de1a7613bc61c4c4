"""A run that diverges ends on all ranks at the same step, and reports the step and its samples, also in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sopdist.cli import main
from tests.e2e.test_lost_ranks import UNSUPERVISED, codes_of
from tests.support.breaking import RUN, arguments, summary_of
from tests.support.launchers import run, start

NOT_FINITE = 3  # exit code
DIVERGING = ("optim.lr=1e30", "train.max_nonfinite_steps=2", "log.every=1")


def stopped_with_a_dump(folder: Path, stderr: str) -> int:
    """Check that the message, the file and the summary agree, and return the step at which the run stopped."""
    (path,) = (folder / RUN).glob("nonfinite-step-*.json")
    dump = json.loads(path.read_text())
    assert path.name == f"nonfinite-step-{dump['step']}.json"
    assert dump["consecutive_steps"] == 3
    assert dump["samples"]
    assert all("shard-00000" in sample["where"] for sample in dump["samples"])
    assert len({sample["index"] for sample in dump["samples"]}) == len(dump["samples"])
    assert stderr.count("sopdist: the loss is not finite for 3 consecutive steps") == 1
    assert f"the last is step {dump['step']}, " in stderr
    assert f"with {len(dump['samples'])} samples: index {dump['samples'][0]['index']}" in stderr
    assert str(path) in stderr
    assert "Traceback" not in stderr
    summary = summary_of(folder)
    assert summary["finished"] is False
    assert summary["exit"].startswith("NonFiniteError: the loss is not finite")
    return int(dump["step"])


@pytest.mark.parametrize("method", ["ce", "sop"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_learning_rate_that_is_far_too_large_ends_the_run(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, accumulate: int
) -> None:
    more = (*DIVERGING, f"method.name={method}", f"train.accumulate={accumulate}")
    assert main(["train", *arguments(digits, tmp_path, *more, kind="auto")]) == NOT_FINITE
    step = stopped_with_a_dump(tmp_path, capsys.readouterr().err)
    assert 3 <= step < 20, "the first step is finite, and the network diverges soon"


def test_weights_that_are_not_finite_end_the_run_at_once_even_with_one_step_per_epoch(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = arguments(digits, tmp_path / "before", "train.max_steps=1", "evaluate.splits={}", kind="auto")
    assert main(["train", *healthy]) == 0
    weights = load_file(tmp_path / "before" / RUN / "network-last.safetensors")
    next(value for value in weights.values() if value.dim() == 2).view(-1)[0] = math.nan
    save_file(weights, tmp_path / "nan.safetensors")
    more = (*DIVERGING, "optim.lr=0.01", f"model.weights={tmp_path}/nan.safetensors", "train.batch=1438")
    assert main(["train", *arguments(digits, tmp_path, *more, kind="auto")]) == NOT_FINITE
    assert stopped_with_a_dump(tmp_path, capsys.readouterr().err) == 2


def test_bf16_trains_on_a_cpu(digits: Path, tmp_path: Path) -> None:
    more = ("engine.precision=bf16", "train.epochs=2", "method.name=ce")
    assert main(["train", *arguments(digits, tmp_path, *more, kind="auto")]) == 0
    last = summary_of(tmp_path)["last"]
    assert last["nonfinite"] == 0
    assert last["test/top1"] > 0.7
    weights = load_file(tmp_path / RUN / "network-last.safetensors")
    assert all(value.dtype == torch.float32 for value in weights.values() if value.is_floating_point())


@pytest.mark.long
def test_two_ranks_stop_at_the_same_step_with_the_same_code(digits: Path, tmp_path: Path) -> None:
    started = start(UNSUPERVISED, arguments(digits, tmp_path, *DIVERGING, "train.accumulate=2"), tmp_path)
    assert codes_of(started, 150) == [NOT_FINITE, NOT_FINITE]
    stopped_with_a_dump(tmp_path, started.err.read_text())
    (path,) = (tmp_path / RUN).glob("nonfinite-step-*.json")
    assert {sample["rank"] for sample in json.loads(path.read_text())["samples"]} == {0, 1}


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "more"), [("torchrun", "engine.kind=ddp"), ("deepspeed", "engine.zero=1")])
def test_a_launcher_fails_with_the_message(digits: Path, tmp_path: Path, launcher: str, more: str) -> None:
    given = arguments(digits, tmp_path, *DIVERGING, more, "method.name=ce", kind="deepspeed")
    ended = run(launcher, given, tmp_path)
    assert ended.code != 0
    assert ended.err.count("sopdist: the loss is not finite for 3 consecutive steps") == 1, ended.output
    assert summary_of(tmp_path)["exit"].startswith("NonFiniteError: ")

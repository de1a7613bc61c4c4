"""A run that is stopped and resumed equals an uninterrupted one, on any number of ranks and with another engine."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sopdist.checkpoint import complete_checkpoints, open_checkpoint, verify_checkpoint
from sopdist.cli.commands.checkpoint import list_checkpoints
from sopdist.noise.rows import NoiseTable
from sopdist.train.record.run_folder import LOCK
from sopdist.train.run import run_config
from tests.support.launchers import run
from tests.support.records import lines_of, losses_of, newest_checkpoint, table_in
from tests.support.small_run import STEPS, train_small_run

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: small_conv}
method: {visits: 1.5}
optim: {lr: 0.05, warmup_epochs: 0.5}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
checkpoint: {keep: 9}
log: {every: 1, wandb: 'off'}
"""

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a config, and the run `whole` of three epochs that was never interrupted."""
    return train_small_run(tmp_path_factory.mktemp("runs"), CONFIG)


@pytest.fixture
def train(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train in this process and return the run folder."""

    def start(name: str, *overrides: str, resume: str = "none", code: int = 0) -> Path:
        monkeypatch.chdir(workspace)
        assert run_config("small.yaml", [f"run.name={name}", *overrides], resume=resume) == code
        return workspace / "runs" / name

    return start


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a run, without its lock file."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != LOCK}


def assert_same_final_state(one: Path, other: Path) -> None:
    """Network, optimizer and noise table, bit for bit."""
    for name in ("network", "optimizer"):
        found, wanted = (open_checkpoint(newest_checkpoint(run)).section(f"{name}/") for run in (one, other))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
    found, wanted = (table_in(newest_checkpoint(run)) for run in (one, other))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert wanted["u"].abs().max() > 0.01  # otherwise equality would mean little


def test_checkpoints_are_written_after_each_epoch_with_the_best_result_so_far(workspace: Path) -> None:
    folders = complete_checkpoints(workspace / "runs" / "whole")
    assert [folder.name for folder in folders] == ["step-00000007", "step-00000014", "step-00000021"]
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"rank-0-of-1.safetensors", "checkpoint.json", "complete"}
    evals = lines_of(workspace / "runs" / "whole", "eval")
    assert [verify_checkpoint(folder).best for folder in folders] == [line["best"] for line in evals]


@pytest.mark.parametrize("network", ["small_conv", "mlp"])
def test_a_run_that_starts_from_a_checkpoint_continues_bit_for_bit(train: Train, workspace: Path, network: str) -> None:
    """With a cosine schedule, and for the mlp with running batch statistics."""
    uninterrupted = workspace / "runs" / "whole" if network == "small_conv" else train("whole-mlp", "model.name=mlp")
    resumed = train(f"resumed-{network}", f"model.name={network}", resume=str(checkpoint(uninterrupted, STEPS)))
    assert [line["step"] for line in lines_of(resumed)] == list(range(STEPS + 1, 3 * STEPS + 1))
    assert [line["loss"] for line in lines_of(resumed)] == losses_of(uninterrupted)[STEPS:]
    for kind, keys in (("eval", ("val/top1", "val/loss")), ("noise", ("auroc", "rate", "flagged"))):
        found, wanted = lines_of(resumed, kind), lines_of(uninterrupted, kind)[1:]
        assert [[line[key] for key in keys] for line in found] == [[line[key] for key in keys] for line in wanted]
    assert_same_final_state(resumed, uninterrupted)


@pytest.mark.parametrize("stop", [STEPS, STEPS + 3])
def test_a_run_that_stops_after_or_within_an_epoch_and_resumes_equals_an_uninterrupted_one(
    train: Train, stop: int
) -> None:
    """With a constant learning rate: a cosine schedule ends where the run ends, so max_steps would change it."""
    uninterrupted = train(f"constant-{stop}", "optim.schedule=constant", "train.epochs=2")
    constant = ("optim.schedule=constant", "train.epochs=2")
    stopped = train(f"stopped-{stop}", *constant, f"train.max_steps={stop}")
    assert len(losses_of(stopped)) == stop
    resumed = train(f"stopped-{stop}", *constant, resume="auto")
    assert resumed == stopped
    assert losses_of(resumed) == losses_of(uninterrupted)
    assert_same_final_state(resumed, uninterrupted)
    assert json.loads((resumed / "summary.json").read_text())["finished"] is True


def test_resuming_a_finished_run_does_nothing(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    folder = train("finished", "train.epochs=1")
    before = files_of(folder)
    with caplog.at_level(logging.INFO, "sopdist.train"):
        train("finished", "train.epochs=1", "optim.lr=0.001", resume="auto")  # not its learning rate
    assert "runs/finished has already finished; increase train.epochs to continue it" in caplog.text
    assert files_of(folder) == before
    train("finished", "train.epochs=2", resume="auto")
    assert len(losses_of(folder)) == 2 * STEPS


def test_a_config_that_ends_before_the_checkpoint_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train("long", "train.epochs=2")
    before = files_of(folder)
    assert run_config("small.yaml", ["run.name=long", "train.epochs=1"], resume="auto") == 2
    stderr = capsys.readouterr().err
    assert f"was saved at step {2 * STEPS}, but this config ends the run after step {STEPS}; increase" in stderr
    assert files_of(folder) == before


def test_resuming_a_run_that_does_not_exist_starts_it(train: Train) -> None:
    folder = train("fresh", "train.max_steps=2", resume="auto")
    assert len(losses_of(folder)) == 2


@pytest.mark.parametrize(("slots", "warns"), [(1, True), (8, False)])
def test_entries_that_do_not_fit_into_the_slots_of_a_resumed_run_are_counted(
    train: Train, workspace: Path, caplog: pytest.LogCaptureFixture, slots: int, warns: bool
) -> None:
    resume_from = checkpoint(workspace / "runs" / "whole", 3 * STEPS)
    keys = ("method.layout=slots", f"method.slots={slots}", "train.epochs=3")
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        train(f"slots-{slots}", *keys, resume=str(resume_from))
    rows = table_in(resume_from)
    start = NoiseTable(len(rows["v"]), rows["v"].shape[1], layout="dense", seed=0).v
    dropped = int(((rows["v"] != start).sum(1) - slots).clamp_min(0).sum())
    assert (dropped > 0) == warns
    assert (f"dropped the {dropped:,} smallest entries. method.slots=..." in caplog.text) == warns
    assert ("smallest entries" in caplog.text) == warns


def test_a_table_is_resumed_in_the_other_layout(train: Train, workspace: Path) -> None:
    resume_from = checkpoint(workspace / "runs" / "whole", STEPS)
    resumed = train("slots", "method.layout=slots", resume=str(resume_from))
    assert [line["loss"] for line in lines_of(resumed)] == losses_of(workspace / "runs" / "whole")[STEPS:]
    found, wanted = (table_in(newest_checkpoint(folder)) for folder in (resumed, workspace / "runs" / "whole"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=5", "run.seed: 0 in the checkpoint, 5 in this run"),
        ("train.batch=10", "train.batch: 9 in the checkpoint, 10 in this run"),
        ("model.name=mlp", "model.name: small_conv in the checkpoint, mlp in this run"),
        ('method={"name":ce}', "method.name: sop in the checkpoint, ce in this run"),
        ("method.variant=paper method.visits=null", "method.variant: flow in the checkpoint, paper in this run"),
        ("optim.name=adamw", "optim.name: sgd in the checkpoint, adamw in this run"),
        ("data.balanced_per_epoch=20", "data.balanced_per_epoch: 0 in the checkpoint, 20 in this run"),
        ("data.labels=given", "labels: "),
        ("data.split=val data.labels=wrong", "samples: 61 in the checkpoint, 30 in this run"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(
    train: Train, workspace: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    resume_from = checkpoint(workspace / "runs" / "whole", STEPS)
    name = "".join(filter(str.isalnum, override))
    train(f"refused-{name}", *override.split(), resume=str(resume_from), code=1)
    stderr = capsys.readouterr().err
    assert f"{resume_from}: belongs to another run:" in stderr
    assert message in stderr
    assert " in the checkpoint, " in stderr
    assert "start a new run with a different run.name" in stderr


def test_a_refused_resume_leaves_the_run_unchanged(train: Train) -> None:
    folder = train("left-alone", "train.epochs=1")
    before = {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}  # without the lock
    train("left-alone", "train.epochs=1", "model.name=mlp", resume="auto", code=1)
    assert {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()} == before


def test_going_back_sets_aside_later_checkpoints_which_can_still_be_resumed(train: Train) -> None:
    folder = train("back", "train.epochs=2", "checkpoint.keep=2")
    train("back", "train.epochs=2", "checkpoint.keep=2", "train.max_steps=9", resume=str(checkpoint(folder, STEPS)))
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000007", "step-00000009"]
    listed = [(entry["step"], entry["state"]) for entry in list_checkpoints(folder)]
    assert listed == [(7, "complete"), (9, "complete"), (14, "later")]
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 10))
    later = checkpoint(folder, 2 * STEPS).with_suffix(".later")
    verify_checkpoint(later)
    train("back", "train.epochs=3", "checkpoint.keep=2", "train.max_steps=15", resume=str(later))
    assert [line["step"] for line in lines_of(folder)] == [*range(1, 10), 15]


def test_a_checkpoint_of_another_run_is_refused_in_a_folder_that_contains_a_run(
    train: Train, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("taken", "train.max_steps=2")
    train("taken", resume=str(checkpoint(workspace / "runs" / "whole", STEPS)), code=1)
    assert (
        "belongs to another run, but runs/taken already has checkpoints; choose a different run.name"
        in capsys.readouterr().err
    )


def test_incomplete_checkpoints_are_ignored_and_removed_at_the_next_start(train: Train) -> None:
    folder = train("incomplete", "train.max_steps=9")
    shutil.copytree(checkpoint(folder, 9), checkpoint(folder, 11))
    (checkpoint(folder, 11) / "complete").unlink()
    shutil.copytree(checkpoint(folder, 7), folder / "checkpoints" / "step-00000014.partial")  # as format 1 left them
    train("incomplete", "train.max_steps=10", resume="auto")
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["step-00000007", "step-00000009", "step-00000010"]


def test_a_missing_checkpoint_is_an_error_that_names_the_option(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train("nothing", resume="runs/nobody", code=1)
    assert "--resume runs/nobody: not a checkpoint, and not a run that has one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rank-0-of-1.safetensors", "checkpoint.json", "complete"])
def test_auto_falls_back_to_the_checkpoint_before_a_damaged_one_and_reports_it(
    train: Train, workspace: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = train(f"damaged-{name}", "train.max_steps=14", "optim.schedule=constant")
    newest = checkpoint(folder, 14)
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        train(f"damaged-{name}", "optim.schedule=constant", resume="auto")
    assert "step-00000014 cannot be used; trying the previous checkpoint" in caplog.text
    assert str(newest.relative_to(workspace)) in caplog.text
    assert (folder / "checkpoints" / "step-00000014.damaged").is_dir()
    assert len(losses_of(folder)) == 3 * STEPS


def test_a_damaged_checkpoint_that_was_requested_is_an_error(
    train: Train, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "step-00000007"
    shutil.copytree(checkpoint(workspace / "runs" / "whole", STEPS), damaged)
    file = damaged / "rank-0-of-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    train("asked-for", resume=str(damaged), code=1)
    assert f"{file}: is damaged: it has" in capsys.readouterr().err


def test_a_run_without_an_intact_checkpoint_does_not_silently_start_from_scratch(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("all-damaged", "train.epochs=2")
    for path in complete_checkpoints(folder):
        (path / "rank-0-of-1.safetensors").unlink()
    before = (folder / "metrics.jsonl").read_text()
    train("all-damaged", "train.epochs=2", resume="auto", code=1)
    assert "none of its 2 checkpoints is intact" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == before


OLD_KEYS = {"method.name": "objective.name", "method.variant": "objective.variant"}


def old_format(saved: Path, folder: Path) -> Path:
    """Rewrite a checkpoint in format 1, with one file per kind of state."""
    folder.mkdir(parents=True)
    found = open_checkpoint(saved)
    save_file(found.network(), folder / "network.safetensors")
    save_file(found.section("optimizer/"), folder / "optimizer.safetensors")
    save_file(found.section("tables/noise/0/"), folder / "noise-0-of-1.safetensors")
    state = {
        "format": 1, "sopdist": "0.1.0", "torch": torch.__version__, "step": found.step, "best": found.best, "ranks": 1,
        "fingerprint": {OLD_KEYS.get(key, key): value for key, value in found.fingerprint.items()},
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("network", ["small_conv", "mlp"])
def test_a_checkpoint_of_format_1_can_be_resumed(train: Train, workspace: Path, tmp_path: Path, network: str) -> None:
    uninterrupted = workspace / "runs" / "whole" if network == "small_conv" else train("old-mlp", "model.name=mlp")
    old = old_format(checkpoint(uninterrupted, STEPS), tmp_path / "step-00000007")
    resumed = train(f"resumed-old-{network}", f"model.name={network}", resume=str(old))
    assert [line["loss"] for line in lines_of(resumed)] == losses_of(uninterrupted)[STEPS:]
    assert_same_final_state(resumed, uninterrupted)


def test_a_checkpoint_without_rows_or_with_an_unknown_format_is_refused(
    train: Train, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intact = checkpoint(workspace / "runs" / "whole", STEPS)
    without_rows = old_format(intact, tmp_path / "step-00000007")
    (without_rows / "noise-0-of-1.safetensors").unlink()
    train("without-rows", resume=str(without_rows), code=1)
    assert "has no noise table" in capsys.readouterr().err
    (without_rows / "state.json").write_text("{")
    train("torn", resume=str(without_rows), code=1)
    assert f"{without_rows / 'state.json'}: cannot be read" in capsys.readouterr().err
    future = tmp_path / "future"
    shutil.copytree(intact, future)
    content = (intact / "checkpoint.json").read_text().replace('"format": 3', '"format": 99').encode()
    (future / "checkpoint.json").write_bytes(content)
    (future / "complete").write_text(hashlib.sha256(content).hexdigest() + "\n")
    train("future", resume=str(future), code=1)
    stderr = capsys.readouterr().err
    assert "has format 99" in stderr
    assert "the sopdist that wrote it" in stderr


def test_only_the_newest_checkpoints_are_kept_and_the_interval_is_configurable(train: Train) -> None:
    folder = train("kept", "checkpoint.keep=2", "train.epochs=4")
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000021", "step-00000028"]
    folder = train("seldom", "checkpoint.every=2", "train.epochs=3", "checkpoint.keep=9")
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000014", "step-00000021"]
    folder = train("none", "checkpoint.every=0", "train.epochs=1")
    assert complete_checkpoints(folder) == []
    assert (folder / "network-last.safetensors").is_file()


def test_a_checkpoint_that_cannot_be_written_costs_a_warning_not_the_run(
    train: Train, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = workspace / "runs" / "unlucky"
    folder.mkdir()
    (folder / "checkpoints").write_text("in the way")
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        train("unlucky", "train.epochs=1")
    assert "checkpoint could not be saved; training continues" in caplog.text
    assert (folder / "network-last.safetensors").is_file()
    assert len(losses_of(folder)) == STEPS


@pytest.mark.long
def test_a_run_resumes_with_more_or_fewer_ranks_and_with_another_engine(workspace: Path) -> None:
    """One rank, two ranks of DDP, ZeRO-1, three ranks, one rank: an epoch each, compared with one rank throughout."""
    keys = ["--cfg", "small.yaml", "train.epochs=6", "optim.schedule=constant"]
    ended = run("python", [*keys, "run.name=constant"], workspace, 1)
    assert ended.code == 0, ended.output
    zero = ("engine.kind=deepspeed", "engine.zero=1")
    stages = [("python", 1, ()), ("torchrun", 2, ()), ("torchrun", 2, zero), ("torchrun", 3, ()), ("python", 1, ())]
    for epoch, (launcher, ranks, more) in enumerate(stages, 1):
        arguments = [*keys, "run.name=switches", f"train.max_steps={epoch * STEPS}", *more, "--resume", "auto"]
        ended = run(launcher, arguments, workspace, ranks)
        assert ended.code == 0, ended.output
        written = newest_checkpoint(workspace / "runs" / "switches")
        assert written.name == f"step-{epoch * STEPS:08d}"
        assert len(list(written.glob(f"rank-*-of-{ranks}.safetensors"))) == ranks
    uninterrupted, switched = workspace / "runs" / "constant", workspace / "runs" / "switches"
    assert losses_of(switched) == pytest.approx(losses_of(uninterrupted)[: 5 * STEPS], rel=1e-4)
    found, wanted = table_in(newest_checkpoint(switched)), table_in(checkpoint(uninterrupted, 5 * STEPS))
    assert torch.equal(found["visits"], wanted["visits"])
    for name in ("u", "v"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-5)

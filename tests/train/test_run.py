"""From a config to an exit code: what each kind of run returns, prints and leaves behind."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import IO

import pytest

from sopdist.checkpoint import verify_checkpoint
from sopdist.errors import DataError
from sopdist.train.distributed.run_ranks import BAD_CONFIG, FAILED, OK, lost_contact
from sopdist.train.nonfinite import NonFiniteError
from sopdist.train.record.run_folder import lock_run
from sopdist.train.run import _reason, run_config
from sopdist.train.saving.resume import ResumePoint
from tests.support.small_splits import sample, samples, write_split

CONFIG = """
data: {{root: {root}, recipe: cifar10, threads: 1}}
model: {{name: mlp}}
run: {{folder: {runs}}}
train: {{epochs: 2, batch: 6}}
engine: {{threads: 1}}
log: {{wandb: off}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config with 12 samples and without evaluation; its run is runs/small."""
    write_split(tmp_path / "shards", samples())
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.format(root=tmp_path / "shards", runs=tmp_path / "runs"))
    return str(path)


def summary(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "runs/small/summary.json").read_text())
    return found


def test_a_finished_run_returns_0_and_its_summary_says_so(config: str, tmp_path: Path) -> None:
    assert run_config(config) == OK
    assert summary(tmp_path).items() >= {"finished": True, "steps": 4, "ranks": 1, "failed_saves": 0}.items()


def test_a_run_that_is_too_short_for_its_method_warns_with_the_visits_of_the_plan(
    config: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Six balanced epochs with half of the samples are three visits. The batch, which is not full, does not count."""
    keys = ["data.balanced_per_epoch=6", "train.batch=5", "train.epochs=6"]
    assert run_config(config, keys) == OK
    assert "3 epochs of one visit each are planned" in caplog.text
    caplog.clear()
    longer = run_config(config, [*keys, "train.epochs=10", "run.name=longer"])
    assert longer == OK, "the table can act in the fifth visit"
    assert "are planned" not in caplog.text


def test_config_errors_and_data_errors_have_different_exit_codes(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_config(config, ["method.lr_u=1"]) == BAD_CONFIG  # found when the parts are put together
    assert run_config(config, ["data.prefetch=0"]) == BAD_CONFIG
    assert run_config(config, ["data.labels=other"]) == FAILED
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["sopdist"] * 3
    assert not (tmp_path / "runs/small/summary.json").exists()


def test_bad_data_found_during_training_ends_the_run_without_a_traceback(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [sample(index, image=b"no image") if index == 7 else sample(index) for index in range(12)]
    write_split(tmp_path / "shards", members)
    assert run_config(config, ["data.max_bad_fraction=0"]) == FAILED
    stderr = capsys.readouterr().err
    assert "1 samples could not be read in epoch 0" in stderr
    assert "shard-000001.tar" in stderr
    assert "Traceback" not in stderr
    assert str(summary(tmp_path)["exit"]).startswith("TooManyBadSamplesError: ")
    assert run_config(config, ["data.max_bad_fraction=0.1", "run.name=again"]) == OK, "with a limit it continues"


def test_a_failed_resume_leaves_nothing_behind_that_looks_like_a_run(config: str, tmp_path: Path) -> None:
    assert run_config(config, resume=str(tmp_path / "nowhere")) == FAILED
    assert not (tmp_path / "runs").exists()
    assert run_config(config) == OK
    assert run_config(config) == FAILED, "the run already exists"
    assert run_config(config, resume="auto") == OK


def test_a_run_resumes_from_the_checkpoint_that_the_previous_process_saved_while_this_one_waited(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_config(config) == OK
    newest, later = tmp_path / "runs/small/checkpoints/step-00000004", tmp_path / "later"
    newest.rename(later)

    def save_then_lock(folder: Path) -> IO[str] | None:
        later.rename(newest)
        return lock_run(folder)

    monkeypatch.setattr("sopdist.train.session.lock_run", save_then_lock)
    with caplog.at_level(logging.INFO, "sopdist.train"):
        assert run_config(config, ["train.epochs=100", "train.max_steps=5"], resume="auto") == OK
    assert f"resuming from {newest} at step 4" in caplog.text


def test_a_checkpoint_saved_after_the_resume_point_was_chosen_is_never_removed(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a file system without locks, the previous process may still be running."""
    assert run_config(config) == OK
    older, newest = (tmp_path / f"runs/small/checkpoints/step-0000000{step}" for step in (2, 4))
    for chosen in (ResumePoint(older), ResumePoint()):
        monkeypatch.setattr("sopdist.train.saving.resume.find_resume_point", lambda *_, chosen=chosen: chosen)
        assert run_config(config, resume="auto") == FAILED
        assert ": was saved by another process while this one started" in capsys.readouterr().err
        verify_checkpoint(older)
        verify_checkpoint(newest)


def test_a_port_in_use_is_an_error_that_names_it(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (env | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        assert run_config(config, ["engine.timeout=5"]) == FAILED
    stderr = capsys.readouterr().err
    assert f"sopdist: rank 0: cannot connect to the other ranks at 127.0.0.1:{port}: " in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), "another rank was lost"),
        (NonFiniteError("step 3"), "NonFiniteError: step 3"),
        (RuntimeError("shapes do not fit"), "RuntimeError: shapes do not fit"),
    ],
)
def test_the_summary_gives_the_reason_in_plain_words(error: BaseException, reason: str) -> None:
    assert _reason(error) == reason


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4711",
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 120000ms for recv operation to complete",
        "[gloo/transport/tcp/pair.cc:446] Application timeout caused pair closure",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27",
        "NCCL communicator was aborted on rank 1.",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600 ms before timing out.",
    ],
)
def test_a_closed_connection_a_timeout_and_an_aborted_communicator_mean_a_lost_rank(text: str) -> None:
    assert lost_contact(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details). Duplicate GPU detected",
        "NCCL error: unhandled cuda error. out of memory",
        "ProcessGroupNCCL does not support this dtype",
        "[gloo/allreduce.cc:80] Enforce failed: sizes do not fit",
    ],
)
def test_other_errors_of_nccl_and_gloo_do_not_mean_a_lost_rank(text: str) -> None:
    assert not lost_contact(RuntimeError(text))


def test_file_and_data_errors_never_mean_a_lost_rank() -> None:
    assert not lost_contact(DataError("shards/gloo: Broken pipe"))
    assert not lost_contact(OSError("Connection reset by peer"))

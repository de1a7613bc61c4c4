"""The run folder: who may write to it, and what stays secret."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sopdist.config import build, load_config, to_tree
from sopdist.errors import ConfigError, DataError
from sopdist.train.config import Config
from sopdist.train.record import run_folder
from sopdist.train.record.run_folder import CONFIG, METRICS, SUMMARY_JSON, find_run, lock_run, open_run, shown
from tests.data.test_prepare_again import can_mount

SECRETS = ("hunter2", "abc123")


def make_config(folder: Path | str, root: str = "shards", **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "first", "folder": str(folder)}, "data": {"root": root, "recipe": "cifar10"},
        "model": {"name": "mlp"}, "train": {"epochs": 3, "batch": 8},
    }  # fmt: skip
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return build(Config, tree)


def test_a_new_run_has_a_folder_with_its_config_which_loads_again(tmp_path: Path) -> None:
    config = make_config(tmp_path / "a" / "b", optim={"lr": 0.5})
    old = os.umask(0o027)
    try:
        folder = open_run(config, resume=False)
    finally:
        os.umask(old)
    assert folder == tmp_path / "a" / "b" / "first"
    assert load_config(Config, folder / CONFIG) == config
    assert folder.stat().st_mode & 0o777 == 0o750, "as the user's umask says"
    assert (folder / CONFIG).stat().st_mode & 0o777 == 0o640
    assert [path.name for path in folder.iterdir()] == [CONFIG]


@pytest.mark.parametrize("file", [METRICS, SUMMARY_JSON])
def test_an_existing_run_is_left_unchanged_unless_it_is_resumed(tmp_path: Path, file: str) -> None:
    folder = open_run(make_config(tmp_path), resume=False)
    (folder / file).write_text("")
    before = (folder / CONFIG).read_bytes()
    message = r"first already contains a run: resume it with --resume auto, or start another with run.name=\.\.\."
    with pytest.raises(DataError, match=message):
        open_run(make_config(tmp_path, optim={"lr": 9.0}), resume=False)
    assert (folder / CONFIG).read_bytes() == before
    assert open_run(make_config(tmp_path), resume=True) == folder


def test_a_start_that_failed_before_the_first_step_is_not_a_run(tmp_path: Path) -> None:
    open_run(make_config(tmp_path, root="wrong"), resume=False)
    folder = open_run(make_config(tmp_path, root="right"), resume=False)
    assert load_config(Config, folder / CONFIG).data.root == "right"


def test_resuming_a_run_that_does_not_exist_starts_it(tmp_path: Path) -> None:
    assert (open_run(make_config(tmp_path), resume=True) / CONFIG).is_file()


def test_resuming_with_other_settings_names_them_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_run(make_config(tmp_path, root="https://me:hunter2@host/a"), resume=False)
    with caplog.at_level(logging.WARNING):
        open_run(make_config(tmp_path, root="https://me:hunter2@host/a"), resume=True)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        open_run(make_config(tmp_path, root="https://me:abc123@host/b", optim={"lr": 0.5}), resume=True)
    assert "first resumes with different settings: " in caplog.text
    assert "optim.lr = 0.5, was 0.02" in caplog.text
    assert "data.root = https://***@host/b, was https://***@host/a" in caplog.text
    assert not any(secret in caplog.text for secret in SECRETS)


@pytest.mark.parametrize(
    ("root", "redacted"),
    [
        ("https://me:hunter2@host/a", "https://***@host/a"),
        ("https://host/a?sig=abc123", "https://host/a?***"),
        ("pipe:curl -u me:hunter2 https://host/{}", "pipe:curl ***"),
        ("pipe:", "pipe: ***"),
    ],
)
def test_a_config_with_a_secret_is_readable_only_by_its_owner_and_loads_again(
    tmp_path: Path, root: str, redacted: str
) -> None:
    config = make_config(tmp_path, root=root, evaluate={"splits": {"val": root}})
    folder = open_run(config, resume=False)
    assert (folder / CONFIG).stat().st_mode & 0o777 == 0o600
    assert load_config(Config, folder / CONFIG) == config
    shown_tree = shown(to_tree(config))
    assert shown_tree["data"]["root"] == shown_tree["evaluate"]["splits"]["val"] == redacted
    assert not any(secret in str(shown_tree) for secret in SECRETS)
    del shown_tree["data"]["root"], shown_tree["evaluate"]
    rest = to_tree(config)
    del rest["data"]["root"], rest["evaluate"]
    assert shown_tree == rest, "everything else is shown unchanged"


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that not even root may write to")
def test_a_folder_that_cannot_be_written_is_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^/sys/kernel/first: cannot be written: .*; choose another folder with run.folder="
    ):
        open_run(make_config("/sys/kernel"), resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/first: cannot be written: Not a directory"):
        open_run(make_config(tmp_path / "file"), resume=False)


def test_a_run_without_a_name_has_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: must be set"):
        open_run(make_config(tmp_path, run={"name": "", "folder": str(tmp_path)}), resume=False)


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small file system")
@pytest.mark.parametrize(("size", "message"), [("1m", "the disk is full (728.00 KiB free)"), ("20m", "")])
def test_a_full_disk_is_detected_before_the_run_starts(tmp_path: Path, size: str, message: str) -> None:
    """A file system of the given size, of which some is used already."""
    (tmp_path / "runs").mkdir()
    code = (
        "from tests.train.record.test_run_folder import *\n"
        "try: open_run(make_config('runs'), resume=False)\n"
        "except DataError as error: print('refused:', error)\n"
    )
    script = f'mount -t tmpfs -o size={size} tmpfs runs && head -c 300000 /dev/zero > runs/other && "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert ("refused: runs/first: " + message in result.stdout) if message else not result.stdout


def test_a_folder_with_only_checkpoints_contains_a_run(tmp_path: Path) -> None:
    """They may have been copied from elsewhere; a run that starts from scratch would remove them."""
    settings = make_config(tmp_path)
    saved = find_run(settings, resume=False) / "checkpoints" / "step-00000007"
    saved.mkdir(parents=True)
    (saved / "complete").touch()
    with pytest.raises(DataError, match="already contains a run: resume it with --resume auto"):
        find_run(settings, resume=False)
    find_run(settings, resume=True)


def test_two_processes_cannot_train_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_LOCK_TIMEOUT", 0.3)
    program = "import sys, pathlib; from sopdist.train.record.run_folder import lock_run; "
    program += "lock = lock_run(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(
            DataError, match=rf"another process is already using this run: pid {other.pid} on .*sopdist stop"
        ):
            lock_run(tmp_path)
        other.kill()
        other.wait(30)
    lock = lock_run(tmp_path)  # a process that has exited holds no lock
    assert lock is not None
    lock.close()

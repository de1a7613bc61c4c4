"""`sopdist prepare` a second time: after an interrupt, after completion, with other options, on a full disk."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sopdist.data.labels import list_labels, read_labels, write_labels
from sopdist.data.manifest import read_manifest
from sopdist.data.prepare import engine, job
from sopdist.errors import DataError

from ..support.pictures import encoded, picture
from .test_prepare import contents, make_images, prepare

IN_FIVES = ("--samples-per-shard", "5", "--order", "source")


def fail_for_lack_of_space(root: Path, out: Path, *options: str, max_bytes: int) -> None:
    """Prepare while no file may grow beyond `max_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        assert prepare(root, out, *options) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_is_resumed_and_gives_the_same_bytes(tmp_path: Path, how: signal.Signals) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(encoded(picture(0, 1000, 700), quality=90))
    for number in range(110):
        path = tmp_path / "in" / ("even", "odd")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(photo)
    (tmp_path / "in" / "odd" / "0.jpg").write_bytes(b"")
    options = ("--resize", "350", "--samples-per-shard", "5")
    folder = tmp_path / "out" / "train"
    command = [sys.executable, "-m", "sopdist", "prepare", "imagefolder", "--root", "in", "--out", "out", *options]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*.done"))) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        signalled = time.monotonic()
        process.send_signal(how)
        _, error = process.communicate(timeout=60)
    done = {path.with_suffix(".tar") for path in folder.glob("*.done")}
    assert 3 <= len(done) < 22  # interrupted in the middle
    with pytest.raises(DataError, match="interrupted"):
        read_manifest(folder)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert time.monotonic() - signalled < 5
        assert "run the same command again" in error
        assert "Traceback" not in error
        assert not list(folder.rglob("*.part"))
    written = {path: path.stat().st_mtime_ns for path in done}

    assert prepare(tmp_path / "in", tmp_path / "out", *options) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == written  # finished shards are kept
    assert not list(folder.rglob("*.part"))
    assert prepare(tmp_path / "in", tmp_path / "through", *options, "--workers", "1") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")


def test_a_failed_write_gives_advice_and_the_run_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "in", count=20)
    (tmp_path / "in" / "dog" / "large.png").write_bytes(encoded(picture(0, 300, 200), "PNG"))
    fail_for_lack_of_space(tmp_path / "in", tmp_path / "out", *IN_FIVES, "--workers", "1", max_bytes=80_000)
    error = capsys.readouterr().err
    assert "shard-000004.tar: cannot be written: File too large" in error
    assert "run the same command again" in error
    folder = tmp_path / "out" / "train"
    assert len(list(folder.glob("*.done"))) == 4
    assert not list(folder.glob("*.part"))
    assert not (folder / "shard-000004.tar").exists()
    with pytest.raises(DataError, match="interrupted"):
        read_manifest(folder)
    assert prepare(tmp_path / "in", tmp_path / "out", *IN_FIVES) == 0
    assert prepare(tmp_path / "in", tmp_path / "through", *IN_FIVES) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")


def can_mount() -> bool:
    """Whether a file system can be mounted in a private namespace."""
    try:
        return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small file system")
def test_a_full_disk_leaves_no_split_that_looks_complete(tmp_path: Path) -> None:
    make_images(tmp_path / "in", count=60)
    (tmp_path / "out").mkdir()
    script = 'mount -t tmpfs -o size=200k tmpfs out && "$@"; echo "code $?"; ls out/train'
    prepare_ = [sys.executable, "-m", "sopdist", "prepare", "imagefolder", "--root", "in", "--out", "out", *IN_FIVES]
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *prepare_]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "code 1\n" in result.stdout, result.stderr
    assert "cannot be written: No space left on device; free some space" in result.stderr
    assert "out/train/shard-0000" in result.stderr
    assert "Traceback" not in result.stderr
    left = result.stdout.split()
    assert "manifest.json" not in left
    assert not [name for name in left if name.endswith(".part")]
    assert len([name for name in left if name.endswith(".done")]) >= 1


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder where not even root may write")
def test_a_folder_that_is_not_writable_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "in")
    assert prepare(tmp_path / "in", Path("/sys/kernel/sopdist")) == 1
    assert "sopdist: /sys/kernel/sopdist" in (error := capsys.readouterr().err)
    assert "cannot be written" in error
    (tmp_path / "file").write_text("")
    assert prepare(tmp_path / "in", tmp_path / "file") == 1
    assert "Not a directory" in capsys.readouterr().err


def test_a_complete_split_and_its_added_label_sets_are_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "in")
    folder = tmp_path / "out" / "train"
    assert prepare(tmp_path / "in", tmp_path / "out") == 0
    manifest = read_manifest(folder)
    write_labels(folder, manifest, "corrected", [0] * 12, {})
    before = contents(folder)
    (folder / "shard-000000.done").write_text("{}")  # as if killed right after the manifest was written
    (folder / "prepare.json").write_text("{}")
    capsys.readouterr()
    assert prepare(tmp_path / "in", tmp_path / "out", "--workers", "3", "--max-bad", "0") == 0
    assert "already prepared" in capsys.readouterr().out
    assert contents(folder) == before


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a file system")
def test_a_complete_split_may_be_on_a_read_only_file_system(tmp_path: Path) -> None:
    make_images(tmp_path / "in")
    prepare_ = [sys.executable, "-m", "sopdist", "prepare", "imagefolder", "--root", "in", "--out", "out"]
    assert prepare(tmp_path / "in", tmp_path / "out") == 0
    script = 'mount --bind out out && mount -o remount,ro,bind out && "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *prepare_]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "already prepared" in result.stdout


def test_for_a_complete_split_no_missing_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only file system, even the attempt is an error."""
    make_images(tmp_path / "in")
    assert prepare(tmp_path / "in", tmp_path / "out") == 0

    def refuse(path: Path, missing_ok: bool = False) -> None:  # noqa: ARG001
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert prepare(tmp_path / "in", tmp_path / "out") == 0


def test_a_different_job_is_refused_with_the_differences_unless_overwriting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "in")
    folder = tmp_path / "out" / "train"
    assert prepare(tmp_path / "in", tmp_path / "out", *IN_FIVES) == 0
    (folder / "notes.txt").write_text("mine")
    write_labels(folder, read_manifest(folder), "noisy", [0] * 12, {})
    before = contents(folder)
    capsys.readouterr()
    assert prepare(tmp_path / "in", tmp_path / "out", "--samples-per-shard", "6", "--resize", "16") == 1
    error = capsys.readouterr().err
    for says in ("samples per shard (was 5, now 6)", "resize (was None, now 16)", "--overwrite"):
        assert says in error
    (tmp_path / "in" / "dog" / "new.jpg").write_bytes(encoded(picture(99)))
    assert prepare(tmp_path / "in", tmp_path / "out", *IN_FIVES) == 1
    assert "images (was 12, now 13), paths, labels;" in capsys.readouterr().err
    assert contents(folder) == before

    assert prepare(tmp_path / "in", tmp_path / "out", "--samples-per-shard", "13", "--overwrite") == 0
    assert list_labels(folder) == ["given"]  # the others belonged to other indices
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    assert prepare(tmp_path / "in", tmp_path / "through", "--samples-per-shard", "13") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")


def test_a_label_set_added_later_omits_skipped_images(tmp_path: Path) -> None:
    files = list(make_images(tmp_path / "in", count=20))
    (tmp_path / "in" / files[7]).write_bytes(b"")
    table = tmp_path / "in" / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{path},{number % 4}\n" for number, path in enumerate(files)))
    options = ("--samples-per-shard", "3", "--max-bad", "0.1")
    assert prepare(tmp_path / "in", tmp_path / "out", *options, source="csv") == 0
    lines = "".join(f"{path},{number % 4},{number // 5}\n" for number, path in enumerate(files))
    table.write_text(f"path,label,clean\n{lines}")
    assert prepare(tmp_path / "in", tmp_path / "out", *options, source="csv") == 0
    folder = tmp_path / "out" / "train"
    clean = [number // 5 for number in range(20) if number != 7]
    assert read_labels(folder, read_manifest(folder), "clean").labels.tolist() == clean
    assert prepare(tmp_path / "in", tmp_path / "through", *options, source="csv") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")


def test_a_run_that_was_started_differently_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "in", count=20)
    options = (*IN_FIVES, "--workers", "1")
    (tmp_path / "in" / "dog" / "large.png").write_bytes(encoded(picture(0, 300, 200), "PNG"))
    fail_for_lack_of_space(tmp_path / "in", tmp_path / "out", *options, max_bytes=80_000)
    capsys.readouterr()
    assert prepare(tmp_path / "in", tmp_path / "out", "--samples-per-shard", "4", "--order", "source") == 1
    assert "was started differently: samples per shard (was 5, now 4)" in capsys.readouterr().err
    assert prepare(tmp_path / "in", tmp_path / "out", "--samples-per-shard", "30", "--overwrite") == 0
    assert prepare(tmp_path / "in", tmp_path / "through", "--samples-per-shard", "30") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")


def test_a_split_does_not_look_complete_after_a_failed_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "in")
    folder = tmp_path / "out" / "train"
    assert prepare(tmp_path / "in", tmp_path / "out") == 0
    (folder / "shard-000007.done").mkdir()  # cannot be deleted as a file
    assert prepare(tmp_path / "in", tmp_path / "out", "--overwrite") == 1
    assert "shard-000007.done" in capsys.readouterr().err
    with pytest.raises(DataError):
        read_manifest(folder)
    (folder / "shard-000007.done").rmdir()
    assert prepare(tmp_path / "in", tmp_path / "out") == 1
    assert "its manifest.json is missing" in capsys.readouterr().err
    assert prepare(tmp_path / "in", tmp_path / "out", "--overwrite") == 0


@pytest.mark.parametrize("options", [("--overwrite",), ("--overwrite-once", "job-7")])
def test_an_interrupted_overwrite_leaves_no_split_that_looks_complete_and_can_be_resumed(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "val"):
        make_images(tmp_path / "in" / name)
    assert prepare(tmp_path / "in", tmp_path / "out", *IN_FIVES) == 0
    write_shards = engine._write_shards

    def interrupted(*args: Any) -> NoReturn:
        write_shards(*args)
        raise KeyboardInterrupt

    other = ("--samples-per-shard", "4")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_write_shards", interrupted)
        assert prepare(tmp_path / "in", tmp_path / "out", *other, *options) == 130
    for name in ("train", "val"):
        with pytest.raises(DataError):
            read_manifest(tmp_path / "out" / name)
    (shard, *_) = written = sorted((tmp_path / "out" / "train").glob("*.tar"))
    times = [path.stat().st_mtime_ns for path in written]
    again = () if "--overwrite" in options else options
    assert prepare(tmp_path / "in", tmp_path / "out", *other, *again) == 0
    assert [path.stat().st_mtime_ns for path in written] == times, "finished shards are kept"
    assert prepare(tmp_path / "in", tmp_path / "through", *other) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")
    if again:  # the run is complete: a new run of that name overwrites again
        assert prepare(tmp_path / "in", tmp_path / "out", *other, *again) == 0
        assert shard.stat().st_mtime_ns != times[0]


@pytest.mark.parametrize("name", ["", "a/b", "..\n"])
def test_the_name_of_overwrite_once_must_be_valid_in_a_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit):
        prepare(tmp_path, tmp_path / "out", "--overwrite-once", name)


@pytest.mark.parametrize("name", ["holiday.jpg", "manifest.json"])
def test_a_folder_with_other_files_is_never_changed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "in")
    folder = tmp_path / "out" / "train"
    folder.mkdir(parents=True)
    (folder / name).write_text("{}")
    for options in ([], ["--overwrite"]):
        assert prepare(tmp_path / "in", tmp_path / "out", *options) == 1
        assert f"not created by `sopdist prepare` (it has {name})" in capsys.readouterr().err
    assert contents(folder) == {name: b"{}"}


def test_all_splits_are_checked_before_the_first_is_written(tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_images(tmp_path / "in" / name)
    (tmp_path / "out" / "val").mkdir(parents=True)
    (tmp_path / "out" / "val" / "thesis.tex").write_text("mine")
    assert prepare(tmp_path / "in", tmp_path / "out") == 1
    assert not (tmp_path / "out" / "train").exists()


def test_shards_damaged_after_an_interrupt_are_written_again(tmp_path: Path) -> None:
    make_images(tmp_path / "in", count=21)
    (tmp_path / "in" / "dog" / "large.png").write_bytes(encoded(picture(0, 300, 200), "PNG"))
    fail_for_lack_of_space(tmp_path / "in", tmp_path / "out", *IN_FIVES, "--workers", "1", max_bytes=80_000)
    folder = tmp_path / "out" / "train"
    os.truncate(folder / "shard-000000.tar", 1000)
    (folder / "shard-000001.idx").unlink()
    (folder / "shard-000002.done").write_text("{not json")
    assert prepare(tmp_path / "in", tmp_path / "out", *IN_FIVES) == 0
    assert prepare(tmp_path / "in", tmp_path / "through", *IN_FIVES) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "through")


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "in")
    with job.locked(tmp_path / "out" / "train"):
        assert prepare(tmp_path / "in", tmp_path / "out") == 1
    assert "another `sopdist prepare` is running here" in capsys.readouterr().err
    assert prepare(tmp_path / "in", tmp_path / "out") == 0

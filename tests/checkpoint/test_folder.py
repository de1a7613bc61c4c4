"""Which checkpoints of a run there are, which go, and that nothing goes that is not the run's."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.folder import clean, forget_after, is_complete, name_of, prune, remove, set_aside, step_of
from sopdist.checkpoint.pieces import Piece
from sopdist.data.errors import DataError
from tests.checkpoint.checkpoints import pieces_of, write, write_in


def begun(run: Path, name: str) -> Path:
    """A folder as a save leaves it that was not completed."""
    folder = write(run / "checkpoints" / name)
    (folder / "complete").unlink()
    return folder


def old(run: Path, name: str) -> Path:
    """What of a checkpoint of the first format says that it is complete."""
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    return folder


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@given(st.integers(0, 10**17))
def test_a_steps_name_tells_the_step(step: int) -> None:
    assert step_of(Path("runs") / name_of(step)) == step


def test_names_sort_as_steps_do_also_past_eight_digits(tmp_path: Path) -> None:
    steps = [99_999_998, 99_999_999, 100_000_000, 100_000_001, 2_000_000_000, 7]
    for step in steps:
        write_in(tmp_path, step)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == sorted(steps)
    prune(tmp_path, 2, best=99_999_999)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [99_999_999, 100_000_001, 2_000_000_000]


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path / "nowhere") == []
    (tmp_path / "checkpoints").mkdir()
    assert complete_checkpoints(tmp_path) == []
    clean(tmp_path)
    prune(tmp_path, 1, best=-1)
    forget_after(tmp_path, 0)


def test_complete_is_what_has_its_marker_of_either_format(tmp_path: Path) -> None:
    wanted = [write_in(tmp_path, 2), old(tmp_path, "step-00000003"), write_in(tmp_path, 5)]
    begun(tmp_path, "step-00000004")
    (tmp_path / "checkpoints" / "step-00000006").mkdir()
    assert complete_checkpoints(tmp_path) == wanted
    (wanted[0] / "state.json").write_text("{}")  # which belongs to the other format
    assert is_complete(wanted[0])
    (wanted[0] / "complete").unlink()
    assert not is_complete(wanted[0])


def foreign(run: Path) -> set[str]:
    """What is in the folder of checkpoints, and is none of ours."""
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    names = {"notes.txt", "step-00000009.txt", "step-9", "step-0000000x", "step-00000003.damaged", "step-00000001"}
    for name in names - {"step-9"}:
        (folder / name).write_text("somebody's")
    (folder / "step-9").mkdir()
    return names


def test_foreign_files_and_folders_are_neither_taken_nor_removed(tmp_path: Path) -> None:
    names = foreign(tmp_path)
    kept = [write_in(tmp_path, step) for step in (2, 4, 6)]
    begun(tmp_path, "step-00000005")
    assert complete_checkpoints(tmp_path) == kept
    clean(tmp_path)
    prune(tmp_path, 1, best=-1)
    forget_after(tmp_path, 1)
    assert set(names_in(tmp_path)) == {*names, "step-00000006.later"}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_newest_stay_and_the_best(tmp_path: Path, number: int) -> None:
    steps = [10, 20, 30, 40]
    for step in steps:
        write_in(tmp_path, step)
    prune(tmp_path, number, best=20)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == sorted({20, *steps[-number:]})
    prune(tmp_path, number, best=-1)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == steps[-number:]


def test_what_is_not_complete_does_not_count_among_the_newest(tmp_path: Path) -> None:
    write_in(tmp_path, 1)
    begun(tmp_path, "step-00000002")
    prune(tmp_path, 1, best=-1)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    clean(tmp_path)
    assert names_in(tmp_path) == ["step-00000001"]


def test_one_that_cannot_be_removed_costs_a_warning_and_stays_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [write_in(tmp_path, step) for step in (1, 2)]
    (folders[0] / "complete").unlink()
    (folders[0] / "complete").mkdir()  # a folder cannot be removed as a file is
    (folders[0] / "state.json").write_text("{}")
    (folders[0] / "checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING, "sopdist.checkpoint"):
        prune(tmp_path, 1, best=-1)
    assert f"{folders[0]}: CANNOT BE REMOVED" in caplog.text
    assert (folders[0] / "rank-0-of-1.safetensors").is_file()
    assert is_complete(folders[0])


def test_cleaning_removes_what_saves_left_behind_of_either_format(tmp_path: Path) -> None:
    write_in(tmp_path, 1)
    begun(tmp_path, "step-00000002")
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    old(tmp_path, "step-00000004.partial")
    (tmp_path / "checkpoints" / "step-00000005.partial").write_text("a file is nothing that a save leaves")
    clean(tmp_path)
    assert names_in(tmp_path) == ["step-00000001", "step-00000005.partial"]


def test_a_damaged_one_is_put_aside_also_a_second_time(tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        folder = write_in(tmp_path, 3)
        (folder / "complete").write_bytes(content)
        set_aside(folder)
        assert names_in(tmp_path) == ["step-00000003.damaged"]
        assert (tmp_path / "checkpoints" / "step-00000003.damaged" / "complete").read_bytes() == content
    assert complete_checkpoints(tmp_path) == []
    clean(tmp_path)
    assert names_in(tmp_path) == ["step-00000003.damaged"]


def test_going_back_puts_later_ones_aside_and_no_others(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100_000_000):
        write_in(tmp_path, step)
    forget_after(tmp_path, 2)
    aside = ["step-00000003.later", "step-100000000.later"]
    assert names_in(tmp_path) == ["step-00000001", "step-00000002", *aside]
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2]
    clean(tmp_path)
    prune(tmp_path, 1, best=-1)
    forget_after(tmp_path, 2)  # as every start does
    assert names_in(tmp_path) == ["step-00000002", *aside]
    verify_checkpoint(tmp_path / "checkpoints" / aside[0])


def test_going_back_again_removes_what_was_put_aside_before_but_not_what_it_goes_on_from(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_in(tmp_path, step)
    forget_after(tmp_path, 1)
    start = tmp_path / "checkpoints" / "step-00000002.later"
    write_in(tmp_path, 4)
    forget_after(tmp_path, 2, start)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002.later", "step-00000004.later"]


def test_links_are_not_followed_when_removing_or_choosing(tmp_path: Path) -> None:
    """What a link in the folder leads to belongs to somebody else."""
    elsewhere = write(tmp_path / "elsewhere" / "step-00000009")
    run = tmp_path / "run"
    write_in(run, 1)
    link = run / "checkpoints" / "step-00000009"
    link.symlink_to(elsewhere)
    assert [step_of(path) for path in complete_checkpoints(run)] == [1]
    (run / "checkpoints" / "step-00000002.partial").symlink_to(elsewhere)
    clean(run)
    prune(run, 1, best=-1)
    forget_after(run, 0)
    verify_checkpoint(elsewhere)
    remove(link)
    assert not link.is_symlink()
    verify_checkpoint(elsewhere)


def test_the_folder_of_checkpoints_itself_may_be_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large disk")
    folder = write_in(tmp_path / "run", 4)
    assert complete_checkpoints(tmp_path / "run") == [folder]
    verify_checkpoint(folder)


def test_half_removed_is_never_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every single file operation of a removal may be the last before a power cut."""
    seen: list[tuple[bool, int]] = []
    folder = write_in(tmp_path, 1)
    unlink, os_unlink = Path.unlink, os.unlink

    def look() -> None:
        seen.append((is_complete(folder), len(list(folder.iterdir()))))

    def watched(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        look()

    def os_watched(path: str, *, dir_fd: int | None = None) -> None:
        os_unlink(path, dir_fd=dir_fd)
        look()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", watched)
        patch.setattr(os, "unlink", os_watched)
        remove(folder)
    assert not folder.exists()
    assert len(seen) >= 4
    assert not any(complete for complete, _ in seen)


def test_verifying_in_parts_checks_every_file_once(tmp_path: Path) -> None:
    """As ranks do that share the reading: whatever is damaged, one of them finds it."""
    folder = write(tmp_path / "step", pieces_of())
    file = folder / "rank-0-of-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = []
    for part in range(3):
        try:
            verify_checkpoint(folder, part, 3)
        except DataError as error:
            found.append(str(error))
    assert found == [f"{file}: is damaged: its checksum has changed since it was written"]


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    told: list[int] = []
    folder = write(tmp_path / "step")
    verify_checkpoint(folder, progress=told.append)
    assert told == [(folder / "rank-0-of-1.safetensors").stat().st_size]


def test_a_copy_of_a_checkpoint_is_one(tmp_path: Path) -> None:
    """Nothing in it depends on where it is."""
    folder = write(tmp_path / "step", {"network/w": Piece.whole(torch.ones(3))})
    shutil.copytree(folder, tmp_path / "copied")
    assert verify_checkpoint(tmp_path / "copied").network()["w"].tolist() == [1, 1, 1]

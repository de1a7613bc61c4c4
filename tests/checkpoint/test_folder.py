"""Listing, pruning and removing checkpoints of a run, without touching anything that is not part of the run."""

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
from sopdist.checkpoint.folder import clean, is_complete, name_of, prune, remove, set_aside, set_aside_after, step_of
from sopdist.checkpoint.fragments import Fragment
from sopdist.errors import DataError
from tests.support.checkpoints import fragments_of, write, write_in


def incomplete(run: Path, name: str) -> Path:
    """The folder of a save that was not completed."""
    folder = write(run / "checkpoints" / name)
    (folder / "complete").unlink()
    return folder


def old(run: Path, name: str) -> Path:
    """The marker of a complete checkpoint of format 1."""
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    return folder


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@given(st.integers(0, 10**17))
def test_a_folder_name_contains_the_step(step: int) -> None:
    assert step_of(Path("runs") / name_of(step)) == step


def test_checkpoints_are_sorted_by_step_also_past_eight_digits(tmp_path: Path) -> None:
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
    set_aside_after(tmp_path, 0)


def test_a_checkpoint_with_the_marker_of_either_format_is_complete(tmp_path: Path) -> None:
    wanted = [write_in(tmp_path, 2), old(tmp_path, "step-00000003"), write_in(tmp_path, 5)]
    incomplete(tmp_path, "step-00000004")
    (tmp_path / "checkpoints" / "step-00000006").mkdir()
    assert complete_checkpoints(tmp_path) == wanted
    (wanted[0] / "state.json").write_text("{}")  # the marker of format 1
    assert is_complete(wanted[0])
    (wanted[0] / "complete").unlink()
    assert not is_complete(wanted[0])


def foreign(run: Path) -> set[str]:
    """Add files and folders to the checkpoints folder that are not checkpoints."""
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    names = {"notes.txt", "step-00000009.txt", "step-9", "step-0000000x", "step-00000003.damaged", "step-00000001"}
    for name in names - {"step-9"}:
        (folder / name).write_text("not ours")
    (folder / "step-9").mkdir()
    return names


def test_foreign_files_and_folders_are_neither_used_nor_removed(tmp_path: Path) -> None:
    names = foreign(tmp_path)
    kept = [write_in(tmp_path, step) for step in (2, 4, 6)]
    incomplete(tmp_path, "step-00000005")
    assert complete_checkpoints(tmp_path) == kept
    clean(tmp_path)
    prune(tmp_path, 1, best=-1)
    set_aside_after(tmp_path, 1)
    assert set(names_in(tmp_path)) == {*names, "step-00000006.later"}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_newest_and_the_best_are_kept(tmp_path: Path, number: int) -> None:
    steps = [10, 20, 30, 40]
    for step in steps:
        write_in(tmp_path, step)
    prune(tmp_path, number, best=20)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == sorted({20, *steps[-number:]})
    prune(tmp_path, number, best=-1)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == steps[-number:]


def test_incomplete_checkpoints_do_not_count_as_newest(tmp_path: Path) -> None:
    write_in(tmp_path, 1)
    incomplete(tmp_path, "step-00000002")
    prune(tmp_path, 1, best=-1)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    clean(tmp_path)
    assert names_in(tmp_path) == ["step-00000001"]


def test_a_checkpoint_that_cannot_be_removed_stays_complete_and_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [write_in(tmp_path, step) for step in (1, 2)]
    (folders[0] / "complete").unlink()
    (folders[0] / "complete").mkdir()  # unlink fails on a folder
    (folders[0] / "state.json").write_text("{}")
    (folders[0] / "checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING, "sopdist.checkpoint"):
        prune(tmp_path, 1, best=-1)
    assert f"{folders[0]}: cannot be removed" in caplog.text
    assert (folders[0] / "rank-0-of-1.safetensors").is_file()
    assert is_complete(folders[0])


def test_clean_removes_leftovers_of_saves_of_either_format(tmp_path: Path) -> None:
    write_in(tmp_path, 1)
    incomplete(tmp_path, "step-00000002")
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    old(tmp_path, "step-00000004.partial")
    (tmp_path / "checkpoints" / "step-00000005.partial").write_text("saves do not leave plain files")
    clean(tmp_path)
    assert names_in(tmp_path) == ["step-00000001", "step-00000005.partial"]


def test_a_damaged_checkpoint_is_set_aside_also_a_second_time(tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        folder = write_in(tmp_path, 3)
        (folder / "complete").write_bytes(content)
        set_aside(folder)
        assert names_in(tmp_path) == ["step-00000003.damaged"]
        assert (tmp_path / "checkpoints" / "step-00000003.damaged" / "complete").read_bytes() == content
    assert complete_checkpoints(tmp_path) == []
    clean(tmp_path)
    assert names_in(tmp_path) == ["step-00000003.damaged"]


def test_going_back_sets_aside_later_checkpoints_and_no_others(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100_000_000):
        write_in(tmp_path, step)
    set_aside_after(tmp_path, 2)
    aside = ["step-00000003.later", "step-100000000.later"]
    assert names_in(tmp_path) == ["step-00000001", "step-00000002", *aside]
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2]
    clean(tmp_path)
    prune(tmp_path, 1, best=-1)
    set_aside_after(tmp_path, 2)  # as at every start
    assert names_in(tmp_path) == ["step-00000002", *aside]
    verify_checkpoint(tmp_path / "checkpoints" / aside[0])


def test_going_back_again_removes_checkpoints_set_aside_before_except_the_one_resumed_from(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_in(tmp_path, step)
    set_aside_after(tmp_path, 1)
    start = tmp_path / "checkpoints" / "step-00000002.later"
    write_in(tmp_path, 4)
    set_aside_after(tmp_path, 2, start)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002.later", "step-00000004.later"]


def test_links_are_not_followed_when_removing_or_choosing(tmp_path: Path) -> None:
    """The target of a link in the folder is not part of the run."""
    elsewhere = write(tmp_path / "elsewhere" / "step-00000009")
    run = tmp_path / "run"
    write_in(run, 1)
    link = run / "checkpoints" / "step-00000009"
    link.symlink_to(elsewhere)
    assert [step_of(path) for path in complete_checkpoints(run)] == [1]
    (run / "checkpoints" / "step-00000002.partial").symlink_to(elsewhere)
    clean(run)
    prune(run, 1, best=-1)
    set_aside_after(run, 0)
    verify_checkpoint(elsewhere)
    remove(link)
    assert not link.is_symlink()
    verify_checkpoint(elsewhere)


def test_the_checkpoints_folder_itself_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large disk")
    folder = write_in(tmp_path / "run", 4)
    assert complete_checkpoints(tmp_path / "run") == [folder]
    verify_checkpoint(folder)


def test_a_partly_removed_checkpoint_is_never_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file operation of a removal may be the last before a power cut."""
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
    """As ranks do that divide the files among them: whichever file is damaged, one rank detects it."""
    folder = write(tmp_path / "step", fragments_of())
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


def test_progress_is_reported_in_bytes(tmp_path: Path) -> None:
    reported: list[int] = []
    folder = write(tmp_path / "step")
    verify_checkpoint(folder, progress=reported.append)
    assert reported == [(folder / "rank-0-of-1.safetensors").stat().st_size]


def test_a_copy_of_a_checkpoint_is_a_checkpoint(tmp_path: Path) -> None:
    """Its content does not depend on its path."""
    folder = write(tmp_path / "step", {"network/w": Fragment.full(torch.ones(3))})
    shutil.copytree(folder, tmp_path / "copied")
    assert verify_checkpoint(tmp_path / "copied").network()["w"].tolist() == [1, 1, 1]

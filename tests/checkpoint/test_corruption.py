"""Verifying detects any damage to any file of a checkpoint and names the file in a DataError."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sopdist.checkpoint import open_checkpoint, verify_checkpoint
from sopdist.errors import DataError
from tests.support.checkpoints import common_tensors, own_tensors, write
from tests.support.ranks import run_on_ranks

FILES = {
    1: ["rank-0-of-1.safetensors", "checkpoint.json", "complete"],
    2: ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors", "checkpoint.json", "complete"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints written by one and two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks([partial(_write, folder / "two")], 2, folder)
    return {1: write(folder / "one"), 2: folder / "two"}


def _write(folder: Path, group: dist.ProcessGroup) -> None:
    write(folder, group=group)


@pytest.fixture(scope="module")
def old_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of format 1."""
    folder = tmp_path_factory.mktemp("old")
    common = common_tensors()
    for part in ("network", "optimizer"):
        tensors = {name.removeprefix(f"{part}/"): value for name, value in common.items() if name.startswith(part)}
        save_file(tensors, folder / f"{part}.safetensors")
    for rank in range(2):
        prefix = f"tables/noise/{rank}/"
        own = {name: value for name, value in own_tensors(rank, 2).items() if name.startswith(prefix)}
        rows = {name.removeprefix(prefix): value for name, value in own.items()}
        save_file(rows, folder / f"noise-{rank}-of-2.safetensors")
    state = {"format": 1, "sopdist": "0.1.0", "torch": "2.0", "step": 5, "best": 0.5, "ranks": 2, "fingerprint": {}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def damaged(original: Path, tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes) -> Path:
    """A copy in which one file has other content. The other files are hard links, which is faster than copying."""
    folder = tmp_path_factory.mktemp("damaged")
    for path in original.iterdir():
        if path.name == name:
            (folder / name).write_bytes(content)
        else:
            os.link(path, folder / path.name)
    return folder


def assert_detected(folder: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        verify_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert name in str(caught.value)


def test_undamaged_checkpoints_are_intact(checkpoints: dict[int, Path], old_checkpoint: Path) -> None:
    for ranks, folder in checkpoints.items():
        assert {path.name for path in folder.iterdir()} == set(FILES[ranks])
        saved = verify_checkpoint(folder)
        assert saved.network().keys() == {"layer.weight", "layer.bias", "batches", "norm.running_mean"}
        assert saved.table("noise")["u"].shape == (23,)
    assert verify_checkpoint(old_checkpoint).table("noise")["u"].shape == (23,)


@settings(max_examples=300)
@given(st.sampled_from([1, 2]), st.data())
def test_a_flipped_bit_anywhere_is_detected(
    checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory, ranks: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(FILES[ranks]))
    content = bytearray((checkpoints[ranks] / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    assert_detected(damaged(checkpoints[ranks], tmp_path_factory, name, bytes(content)), name)


def test_every_bit_of_the_marker_is_checked(
    checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    original = (checkpoints[1] / "complete").read_bytes()
    for bit in range(8 * len(original)):
        content = bytearray(original)
        content[bit // 8] ^= 1 << bit % 8
        assert_detected(damaged(checkpoints[1], tmp_path_factory, "complete", bytes(content)), "complete")


@settings(max_examples=100)
@given(st.sampled_from([1, 2]), st.data())
def test_a_truncated_or_extended_file_is_detected(
    checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory, ranks: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(FILES[ranks]))
    content = (checkpoints[ranks] / name).read_bytes()
    other = data.draw(
        st.one_of(
            st.integers(0, len(content) - 1).map(lambda end: content[:end]),
            st.binary(min_size=1, max_size=9).map(lambda more: content + more),
            st.binary(min_size=1, max_size=9).map(lambda more: more + content),
            st.just(bytes(len(content))),
            st.just(b"\n"),
        )
    )
    assert_detected(damaged(checkpoints[ranks], tmp_path_factory, name, other), name)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to("../moved")


def to_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_dev_zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


CHANGES: list[Callable[[Path], object]] = [
    Path.unlink, lambda path: path.write_bytes(b""), to_folder, to_link, to_dangling_link, to_pipe,
    to_dev_zero,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: getattr(change, "__name__", ""))
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in FILES for name in FILES[ranks]])
def test_a_missing_or_irregular_file_is_detected(
    checkpoints: dict[int, Path], tmp_path: Path, ranks: int, name: str, change: Callable[[Path], object]
) -> None:
    folder = tmp_path / "step"
    shutil.copytree(checkpoints[ranks], folder)
    change(folder / name)
    assert_detected(folder, name)
    if name.startswith("rank"):
        with pytest.raises(DataError, match=name):
            open_checkpoint(folder).table("noise")


@pytest.mark.parametrize("name", ["rank-2-of-2.safetensors", "notes.txt", "rank-0-of-2.safetensors.part", "state.json"])
def test_an_unexpected_file_is_detected(checkpoints: dict[int, Path], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step"
    shutil.copytree(checkpoints[2], folder)
    (folder / name).write_bytes(b"{}")
    with pytest.raises(DataError, match=f"{name}: does not belong to the checkpoint"):
        verify_checkpoint(folder)


def test_mixed_up_files_of_two_checkpoints_are_detected(checkpoints: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(checkpoints[2], folder)
    one, other = (folder / name for name in FILES[2][:2])
    one.rename(tmp_path / "kept")
    other.rename(one)
    (tmp_path / "kept").rename(other)
    assert_detected(folder, "rank-0-of-2.safetensors")
    shutil.copy(checkpoints[1] / "checkpoint.json", folder)
    assert_detected(folder, "checkpoint.json")


OLD = ["network.safetensors", "optimizer.safetensors", "noise-0-of-2.safetensors", "noise-1-of-2.safetensors"]


@settings(max_examples=60)
@given(st.sampled_from(OLD), st.data())
def test_changed_sizes_of_files_of_format_1_are_detected(
    old_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    content = (old_checkpoint / name).read_bytes()
    other = data.draw(
        st.one_of(
            st.integers(0, len(content) - 1).map(lambda end: content[:end]),
            st.binary(min_size=1, max_size=9).map(lambda more: content + more),
        )
    )
    assert_detected(damaged(old_checkpoint, tmp_path_factory, name, other), name)


@settings(max_examples=150)
@given(st.sampled_from([*OLD, "state.json"]), st.data())
def test_a_flipped_bit_in_a_file_of_format_1_gives_a_value_or_a_data_error_and_nothing_else(
    old_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    content = bytearray((old_checkpoint / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    folder = damaged(old_checkpoint, tmp_path_factory, name, bytes(content))
    try:
        saved = verify_checkpoint(folder)
        saved.network(), saved.section("optimizer/"), saved.table("noise", 0, 3)
    except DataError as error:
        message = str(error)
    else:
        message = str(folder)
    assert str(folder) in message


@settings(max_examples=60)
@given(st.data())
def test_a_truncated_state_file_of_format_1_is_detected(
    old_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = (old_checkpoint / "state.json").read_bytes()
    end = data.draw(st.integers(0, len(content) - 1))
    assert_detected(damaged(old_checkpoint, tmp_path_factory, "state.json", content[:end]), "state.json")


def test_a_missing_file_of_format_1_is_detected(old_checkpoint: Path, tmp_path: Path) -> None:
    for number, name in enumerate(OLD):
        folder = tmp_path / str(number)
        shutil.copytree(old_checkpoint, folder)
        (folder / name).unlink()
        with pytest.raises(DataError, match=name.partition("-")[0].partition(".")[0]):
            verify_checkpoint(folder).table("noise")
    folder = tmp_path / "of other ranks"
    shutil.copytree(old_checkpoint, folder)
    save_file({"u": torch.zeros(1)}, folder / "noise-0-of-3.safetensors")
    with pytest.raises(DataError, match=r"noise-0-of-3\.safetensors: is not of a checkpoint of 2 ranks"):
        verify_checkpoint(folder)

"""An untrusted checkpoint is data: nothing in it is executed, followed outside its folder, or trusted."""

from __future__ import annotations

import json
import os
import pickle
import resource
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from sopdist.checkpoint import open_checkpoint, verify_checkpoint
from sopdist.checkpoint.fragments import Fragment
from sopdist.errors import DataError
from sopdist.train.run import run_config
from tests.support.checkpoints import put_index, rewrite_index, write
from tests.support.grey_images import write_images

FILE = "rank-0-of-1.safetensors"
WEIGHT = "network/layer.weight"
Tree = dict[str, Any]

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
train: {epochs: 2, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
log: {every: 1, wandb: 'off', suspects: 5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint."""
    return write(tmp_path / "run" / "step-00000007")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with shards and a config, in which a run can start."""
    write_images(tmp_path / "shards" / "train", 30)
    write_images(tmp_path / "shards" / "val", 10)
    (tmp_path / "small.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_all(folder: Path) -> None:
    """Read everything that any command reads."""
    saved = verify_checkpoint(folder)
    saved.network(), saved.section("optimizer/"), saved.table("noise", 0, 2), saved.read("step_metrics/0")


@contextmanager
def little_memory(more: int = 1 << 30) -> Iterator[None]:
    """Limit memory to `more` bytes above the current use: code that trusts large numbers fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def assert_refused(folder: Path, match: str | None = None) -> None:
    """The checkpoint is refused with a DataError that names it, without allocating the memory it claims to need."""
    with little_memory(), pytest.raises(DataError, match=match) as caught:
        read_all(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 2000


def no_pickle(*_: object, **__: object) -> NoReturn:
    raise AssertionError("something was unpickled")


def without_pickle(patch: pytest.MonkeyPatch) -> None:
    """From now on, any attempt to unpickle fails."""
    for module, name in (
        (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "_Unpickler"),
        (torch, "load"), (torch.serialization, "load"), (torch.serialization, "_load"),
    ):  # fmt: skip
        patch.setattr(module, name, no_pickle)


def test_nothing_is_unpickled_when_a_checkpoint_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        without_pickle(patch)
        with pytest.raises(AssertionError, match="unpickled"):
            pickle.loads(pickle.dumps(1))
        read_all(folder)


def test_nothing_is_unpickled_when_a_run_resumes_and_saves(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_config("small.yaml", ["train.max_steps=4", "run.name=x"]) == 0  # by then torch has imported everything
    with monkeypatch.context() as patch:
        without_pickle(patch)
        assert run_config("small.yaml", ["run.name=x"], resume="auto") == 0
    assert json.loads((workspace / "runs/x/summary.json").read_text())["steps"] == 8


def test_a_pickle_in_place_of_tensors_is_not_loaded(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / FILE)
    rewrite_index(folder, lambda tree: tree["files"][FILE].update(bytes=(folder / FILE).stat().st_size))
    with pytest.raises(DataError, match=f"{FILE}: "):
        open_checkpoint(folder).network()


@pytest.mark.parametrize(
    "name",
    [
        "../rank-0-of-1.safetensors", "../../etc/passwd", "/etc/passwd", "a/rank-0-of-1.safetensors", "", ".", "..",
        "rank-0-of-1.safetensors\0", "\0", "rank-0-of-1.safetensors\n", "rank-0-of-2.safetensors",
        "rank-1-of-1.safetensors", "checkpoint.json", "complete", "rank-9999999999-of-1.safetensors", "x" * 100_000,
        "rank-00-of-1.safetensors", "rank-0-of-1.pt", "RANK-0-of-1.safetensors", "rank-\u0660-of-1.safetensors",
        "\\..\\x", "rank-0-of-1.safetensors/",
    ],
    ids=lambda name: repr(name[:30]),
)  # fmt: skip
def test_only_files_of_ranks_in_the_folder_itself_are_accepted(folder: Path, name: str) -> None:
    def change(tree: Tree) -> None:
        tree["files"] = {name: tree["files"][FILE]}
        for info in tree["tensors"].values():
            info["pieces"] = [[name, start, stop] for _, start, stop in info["pieces"]]

    rewrite_index(folder, change)
    assert_refused(folder, "is not a file name")


def set_weight(**fields: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["tensors"][WEIGHT].update(fields)


def huge(size: int) -> Callable[[Tree], None]:
    """A tensor of `size` elements, in a file that claims to be that large."""

    def change(tree: Tree) -> None:
        tree["tensors"][WEIGHT].update(shape=[size], pieces=[[FILE, 0, size]])
        tree["files"][FILE]["bytes"] = 2**53 - 1

    return change


def of_top(**fields: Any) -> Callable[[Tree], None]:
    return lambda tree: tree.update(fields)


def without(*keys: str) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        for key in keys:
            del tree[key]

    return change


LIES: dict[str, Callable[[Tree], Any]] = {
    "shape of 2**62": set_weight(shape=[2**62], pieces=[[FILE, 0, 2**62]]),
    "shape that overflows": set_weight(shape=[2**40, 2**40], pieces=[[FILE, 0, 2**80]]),
    "shape that overflows but for a zero": set_weight(shape=[2**52, 2**52, 0], pieces=[[FILE, 0, 0]]),
    "larger than its file": set_weight(shape=[2**40], pieces=[[FILE, 0, 2**40]]),
    "as large as its file claims to be": huge(2**50),
    "as large as memory might be": huge(2**35),
    "many dimensions": set_weight(shape=[1] * 100_000, pieces=[[FILE, 0, 1]]),
    "many large dimensions": set_weight(shape=[2**52] * 100_000, pieces=[[FILE, 0, 1]]),
    "negative size": set_weight(shape=[-48]),
    "two negative sizes": set_weight(shape=[-4, -12]),
    "negative start": set_weight(pieces=[[FILE, -1, 48]]),
    "gap": set_weight(pieces=[[FILE, 0, 20], [FILE, 21, 48]]),
    "overlap": set_weight(pieces=[[FILE, 0, 20], [FILE, 19, 48]]),
    "backwards": set_weight(pieces=[[FILE, 0, 20], [FILE, 20, 10], [FILE, 10, 48]]),
    "out of order": set_weight(pieces=[[FILE, 20, 48], [FILE, 0, 20]]),
    "too short": set_weight(pieces=[[FILE, 0, 47]]),
    "too long": set_weight(pieces=[[FILE, 0, 49]]),
    "no fragments": set_weight(pieces=[]),
    "fragments of another type": set_weight(pieces={"a": 1}),
    "fragment without an end": set_weight(pieces=[[FILE, 0]]),
    "fragments of another file": set_weight(pieces=[["rank-1-of-2.safetensors", 0, 48]]),
    "unknown type": set_weight(dtype="F128"),
    "invalid type": set_weight(dtype=[]),
    "true for one": set_weight(shape=[True, 48], pieces=[[FILE, 0, 48]]),
    "true for an end": lambda tree: tree["tensors"]["network/batches"].update(pieces=[[FILE, False, True]]),
    "a fraction for a size": set_weight(shape=[48.0]),
    "text for a size": set_weight(shape=["48"]),
    "text for a shape": set_weight(shape="48"),
    "null for a shape": set_weight(shape=None),
    "tensors that are a list": of_top(tensors=[]),
    "a tensor that is a number": lambda tree: tree["tensors"].update({WEIGHT: 4}),
    "files that are a list": of_top(files=[FILE]),
    "a file without a checksum": lambda tree: tree["files"][FILE].update(sha256=None),
    "an invalid checksum": lambda tree: tree["files"][FILE].update(sha256="0" * 63 + "g"),
    "a file of true bytes": lambda tree: tree["files"][FILE].update(bytes=True),
    "a file of negative bytes": lambda tree: tree["files"][FILE].update(bytes=-1),
    "no ranks": of_top(ranks=0),
    "too many ranks": of_top(ranks=2**52),
    "half a rank": of_top(ranks=1.5),
    "an invalid step": of_top(step="7"),
    "a step below 0": of_top(step=-1),
    "no step": without("step"),
    "no best": without("best"),
    "an invalid best": of_top(best=[]),
    "an invalid epoch": of_top(epoch="soon"),
    "an invalid best step": of_top(best_step="x"),
    "unreadable samples below 0": of_top(unreadable=-1),
    "no engine": without("engine"),
    "an engine that is a number": of_top(engine=4),
    "versions that are a list": of_top(versions=[1]),
    "versions that are numbers": of_top(versions={"sopdist": 1}),
    "an invalid scale": of_top(loss_scale=["scale"]),
    "a scale that is text": of_top(loss_scale={"scale": "1"}),
    "no fingerprint": without("fingerprint"),
    "a fingerprint that is text": of_top(fingerprint="x"),
    "no config": without("config"),
    "a config that is a list": of_top(config=[]),
    "no tensors": without("tensors"),
    "no files": without("files"),
    "no format": without("format"),
    "another format": of_top(format="2"),
    "true for a format": of_top(format=True),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_and_nothing_is_allocated_for_it(folder: Path, lie: str) -> None:
    rewrite_index(folder, LIES[lie])
    assert_refused(folder)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000])
@pytest.mark.parametrize("key", ["best", "epoch", "step", "ranks"])
def test_numbers_that_are_not_finite_are_refused(folder: Path, key: str, number: str) -> None:
    """1e999 is infinite as well."""
    put_number(folder, key, number)
    assert_refused(folder, r"checkpoint\.json: is not a checkpoint index: (Value|Overflow)Error")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_are_refused_anywhere_in_the_index(folder: Path, number: str) -> None:
    put_number(folder, "more", number)
    assert_refused(folder, f"{number} is not a number")


def put_number(folder: Path, key: str, number: str) -> None:
    """Write a number into the index that Python's json module would not write."""
    tree = json.loads((folder / "checkpoint.json").read_text()) | {key: "HERE"}
    put_index(folder, json.dumps(tree).replace('"HERE"', number).encode())


@pytest.mark.parametrize("key", ["format", "tensors", "files", WEIGHT, FILE])
def test_a_duplicate_key_is_refused(folder: Path, key: str) -> None:
    """Two readers might interpret it differently."""
    text = (folder / "checkpoint.json").read_text()
    put_index(folder, text.replace(f'"{key}":', f'"{key}": {{}}, "{key}":', 1).encode())
    assert_refused(folder, "duplicate key")


@pytest.mark.parametrize("nested", ["[" * 200_000, '{"a":' * 200_000, '{"format": 2, "config": ' + '{"a":' * 200_000])
def test_deep_nesting_is_refused(folder: Path, nested: str) -> None:
    put_index(folder, nested.encode())
    assert_refused(folder, "is not a checkpoint index")


def test_a_million_claimed_ranks_take_no_memory(folder: Path) -> None:
    """A hundred names of a few bytes would be repeated for each rank."""
    ranks = 999_999
    file = f"rank-0-of-{ranks}.safetensors"
    (folder / FILE).rename(folder / file)

    def claim(tree: Tree) -> None:
        nothing = {"dtype": "F32", "shape": [0], "pieces": [[file, 0, 0]]}
        tree["tensors"] = {f"statistics/0/mean{number}": nothing for number in range(100)}
        tree["files"] = {file: tree["files"][FILE]}
        tree["ranks"] = ranks

    rewrite_index(folder, claim)
    assert_refused(folder, f"'mean0' has statistics of 1 ranks, not of {ranks}")


def test_an_oversized_index_is_not_read(folder: Path) -> None:
    """300 MB, as a sparse file."""
    os.truncate(folder / "checkpoint.json", 300 << 20)
    assert_refused(folder, "checkpoint.json: is too large: more than 268,435,456 bytes")


def test_an_oversized_marker_is_not_read(folder: Path) -> None:
    os.truncate(folder / "complete", 300 << 20)
    with little_memory(100 << 20):
        assert_refused(folder, "complete: is too large: more than 1,024 bytes")


def rewrite_header(path: Path, change: Callable[[Tree], object], *, length: int | None = None) -> None:
    """Change the header of a tensor file, but not the tensors."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    tree = json.loads(content[8 : 8 + size])
    change(tree)
    header = json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + content[8 + size :])


HEADERS: dict[str, Callable[[Path], None]] = {
    "more than the file has": lambda path: rewrite_header(
        path, lambda tree: tree[WEIGHT].update(data_offsets=[0, 2**40])
    ),
    "overlapping": lambda path: rewrite_header(
        path, lambda tree: tree[WEIGHT].update(data_offsets=tree["network/layer.bias"]["data_offsets"], shape=[4])
    ),
    "beyond 2**64": lambda path: rewrite_header(path, lambda tree: tree[WEIGHT].update(data_offsets=[2**64, 2**65])),
    "negative": lambda path: rewrite_header(path, lambda tree: tree[WEIGHT].update(data_offsets=[-192, 0])),
    "shape of 2**62": lambda path: rewrite_header(path, lambda tree: tree[WEIGHT].update(shape=[2**62])),
    "one tensor less": lambda path: rewrite_header(path, lambda tree: tree.pop(WEIGHT)),
    "another name": lambda path: rewrite_header(path, lambda tree: tree.update({"network/x": tree.pop(WEIGHT)})),
    "unknown type": lambda path: rewrite_header(path, lambda tree: tree[WEIGHT].update(dtype="F7")),
    "another type": lambda path: rewrite_header(path, lambda tree: tree[WEIGHT].update(dtype="I32")),
    "a header that is longer than the file": lambda path: rewrite_header(path, lambda _: None, length=10**6),
    "a header of 2**63 bytes": lambda path: rewrite_header(path, lambda _: None, length=2**63),
    "a truncated header": lambda path: rewrite_header(path, lambda _: None, length=20),
}  # fmt: skip


@pytest.mark.parametrize("lie", HEADERS)
def test_a_file_whose_header_lies_is_refused_even_if_its_checksum_is_right(folder: Path, lie: str) -> None:
    from hashlib import sha256

    HEADERS[lie](folder / FILE)
    content = (folder / FILE).read_bytes()
    fields = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    rewrite_index(folder, lambda tree: tree["files"][FILE].update(fields))
    assert_refused(folder, FILE)


@pytest.mark.parametrize(
    "meta",
    [[], [0], [0, 2**45, 3, 5, 0, 1], [0, -5, 3, 5, 0, 1], [0, 22, 3, 5, 0, 1], [0, 23, 3, 5, 0, 0], [2**62] * 6],
)
def test_a_noise_table_that_lies_about_its_rows_is_refused(tmp_path: Path, meta: list[int]) -> None:
    """Requests the rows of rank 1 of 2, so that the table is resharded."""
    columns = {"u": torch.zeros(23), "skipped": torch.zeros(2, dtype=torch.int64)}
    columns["meta"] = torch.tensor(meta, dtype=torch.int64)
    folder = write(
        tmp_path / "step", {f"tables/noise/0/{name}": Fragment.full(column) for name, column in columns.items()}
    )
    with little_memory(), pytest.raises(DataError, match=str(folder)):
        open_checkpoint(folder).table("noise", 1, 2)


def test_the_folder_may_be_a_link_but_its_files_may_not(folder: Path, tmp_path: Path) -> None:
    """A user who names a link knows its target; a user who copies a checkpoint does not know the links in it."""
    (tmp_path / "latest").symlink_to(folder)
    read_all(tmp_path / "latest")
    secret = tmp_path / "secret"
    (folder / FILE).rename(secret)
    (folder / FILE).symlink_to(secret)
    assert_refused(folder, f"{FILE}: is not a regular file")
    with pytest.raises(DataError, match=f"{FILE}: is not a regular file"):
        open_checkpoint(folder).network()


@pytest.mark.parametrize("mask", [0o027, 0o002, 0o077])
def test_files_of_a_run_follow_the_umask_and_are_never_world_writable(workspace: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert run_config("small.yaml", ["run.name=x", "train.epochs=1"]) == 0
    finally:
        os.umask(before)
    found = [workspace / "runs", *(workspace / "runs").rglob("*")]
    names = {path.name for path in found}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "summary.csv", "suspects.csv", "network-last.safetensors",
            "checkpoints", FILE, "checkpoint.json", "complete"} <= names  # fmt: skip
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path
        assert not mode & stat.S_IWOTH

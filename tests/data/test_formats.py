"""Damaged, foreign or malicious manifests and label sets are refused with a reason."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sopdist.data.labels import parse_labels, read_labels, write_labels
from sopdist.data.manifest import Manifest, parse_manifest, read_manifest
from sopdist.errors import DataError
from tests.support.small_splits import write_split


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_split(tmp_path / "train")


def changed(folder: Path, **changes: Any) -> bytes:
    return json.dumps({**json.loads((folder / "manifest.json").read_text()), **changes}).encode()


def shard(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    first, *others = json.loads((folder / "manifest.json").read_text())["shards"]
    return [{**first, **changes}, *others]


@pytest.mark.usefixtures("manifest")
def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    found = read_manifest(tmp_path / "train")
    assert found.samples == 12
    assert found.classes == ("cat", "dog", "owl")
    assert found.firsts.tolist() == [0, 4, 8, 12]
    assert found.shard_of(np.array([0, 3, 4, 11])).tolist() == [0, 0, 1, 2]


@pytest.mark.usefixtures("manifest")
@pytest.mark.parametrize(
    ("changes", "of_shard", "message"),
    [
        ({"format": 2}, {}, "format 2, this version of sopdist reads format 1"),
        ({"samples": 13}, {}, "samples is 13"),
        ({"digest": "0" * 64}, {}, "digest is"),
        ({"classes": []}, {}, "no classes"),
        ({"classes": [1]}, {}, "not a list of names"),
        ({"classes": "abcd"}, {}, "not a list of names"),
        ({"shards": []}, {}, "no shards"),
        ({"shards": 7}, {}, "damaged"),
        ({}, {"name": "../../shard-000000.tar"}, "shard name"),
        ({}, {"name": "/etc/shard-000000.tar"}, "shard name"),
        ({}, {"name": "shard-000001.tar"}, "lists a shard twice"),
        ({}, {"samples": 5}, "starts at index 4, expected 5"),
        ({}, {"samples": -4}, "samples = -4"),
        ({}, {"samples": True}, "samples = True"),
        ({}, {"samples": 4.0}, r"samples = 4\.0"),
        ({}, {"bytes": 10**40}, "bytes = 1"),
        ({}, {"sha256": "x"}, "checksum"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], of_shard: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "train"
    if of_shard:
        changes = {**changes, "shards": shard(folder, **of_shard)}
    with pytest.raises(DataError, match=f"here: .*{message}"):
        parse_manifest(changed(folder, **changes), "here")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": 1}'])
def test_files_that_are_not_manifests_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="here: "):
        parse_manifest(content, "here")


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


HUGE = npy(np.zeros(12, np.int32)).replace(b"(12,), }", b"(99999999999,), }")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a NumPy array"),
        (b"PK\x03\x04" + b"\0" * 50, "not a NumPy array"),
        (b"\x93NUMPY\x01\0\x10\0{'descr': (((((", "not a NumPy array"),
        (HUGE, "99999999999"),
        (npy(np.array([print] * 12, dtype=object), allow_pickle=True), "not a NumPy array"),
        (npy(np.zeros(12)), "float64"),
        (npy(np.zeros((3, 4), np.int32)), "shape"),
        (npy(np.zeros(11, np.int32)), "11 labels for 12 samples"),
        (npy(np.full(12, 3)), "label 3 at index 0 .*0 to 2"),
        (npy(np.full(12, -2)), "label -2"),
        (npy(np.full(12, 2**64 - 1, np.uint64)), "label 18446744073709551615"),
    ],
)
def test_an_invalid_label_set_is_refused_with_the_reason(manifest: Manifest, content: bytes, message: str) -> None:
    about = {"format": 1, "sha256": hashlib.sha256(content).hexdigest(), "recipe": {}}
    with pytest.raises(DataError, match=f"here: .*{message}"):
        parse_labels(about, content, manifest, "x", "here")


def test_a_label_set_must_match_its_description(manifest: Manifest, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write_labels(folder, manifest, "mine", np.arange(12) % 3, {"by": "me"})
    assert read_labels(folder, manifest, "mine").recipe == {"by": "me"}
    (folder / "labels" / "mine.npy").write_bytes(npy(np.zeros(12, np.int32)))
    with pytest.raises(DataError, match="does not match the checksum"):
        read_labels(folder, manifest, "mine")
    (folder / "labels" / "mine.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="incomplete or damaged"):
        read_labels(folder, manifest, "mine")
    (folder / "labels" / "mine.json").unlink()
    with pytest.raises(DataError, match="incomplete or damaged"):
        read_labels(folder, manifest, "mine")


@pytest.mark.parametrize("name", ["", "../given", "a/b", ".hidden", "a" * 101, "a b", "a\n"])
def test_label_set_names_that_could_be_paths_are_refused(manifest: Manifest, tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="label set name"):
        read_labels(tmp_path / "train", manifest, name)

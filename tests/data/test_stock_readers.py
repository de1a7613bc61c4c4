"""Our shards are plain WebDataset: stock readers read the same samples from them, also with our index."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

from sopdist.data.headers import FORMATS
from sopdist.data.keys import key_of
from sopdist.data.shards import Member, parse_index, scan_tar, write_shard
from sopdist.data.split import open_split
from sopdist.errors import ShardError
from tests.support.pictures import encoded, picture
from tests.support.small_splits import write_split

PATHS = [
    "plain.jpg",
    "sub/folder/dots.in.name.jpg",
    "blank in name.jpg",
    "ünïcode/名.jpg",
    "d" * 120 + "/" + "n" * 150 + ".jpg",
]


def members() -> list[Member]:
    formats = ["jpg", "png", "webp", "jpg", "jpg"]
    saved = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
    return [
        Member(key_of(path), kind, encoded(picture(number, 20, 16), saved[kind]), {"label": number % 3, "path": path})
        for number, (path, kind) in enumerate(zip(PATHS, formats, strict=True))
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path / "train", members(), per_shard=3)
    return tmp_path / "train"


def test_stock_webdataset_reads_our_shards(folder: Path) -> None:
    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    found = list(wds.WebDataset(shards, shardshuffle=False))
    assert [entry["__key__"] for entry in found] == [member.key for member in members()]
    for entry, member in zip(found, members(), strict=True):
        assert entry[member.extension] == member.image
        assert json.loads(entry["json"]) == member.record
    decoded = list(wds.WebDataset(shards, shardshuffle=False).decode("rgb8"))
    assert decoded[0]["jpg"].shape == (16, 20, 3)


def test_stock_dali_reads_our_shards_with_our_index(folder: Path) -> None:
    from nvidia.dali import fn, pipeline_def

    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    indices = [str(path) for path in sorted(folder.glob("*.idx"))]

    @pipeline_def(batch_size=len(PATHS), num_threads=1, device_id=None)
    def graph() -> tuple[object, ...]:
        found: tuple[object, ...] = fn.readers.webdataset(
            paths=tars, index_paths=indices, ext=["jpg;png;webp", "json"], missing_component_behavior="error"
        )
        return tuple(found)

    pipeline = graph()
    pipeline.build()
    images, records = pipeline.run()
    for position, member in enumerate(members()):
        assert bytes(np.asarray(images.at(position))) == member.image
        assert json.loads(bytes(np.asarray(records.at(position)))) == member.record


def test_the_index_is_identical_to_that_of_the_dali_tool(folder: Path) -> None:
    import wds2idx

    for tar in folder.glob("*.tar"):
        with wds2idx.IndexCreator(str(tar), str(tar) + ".by_dali", verbose=False) as creator:
            creator.create_index()
        assert Path(str(tar) + ".by_dali").read_bytes() == tar.with_suffix(".idx").read_bytes()


def test_tar_and_index_do_not_depend_on_time_or_user(tmp_path: Path) -> None:
    a, b = (write_shard(tmp_path / f"shard-00000{number}.tar", members()) for number in range(2))
    assert (a.bytes, a.sha256, a.samples) == (b.bytes, b.sha256, b.samples)
    with tarfile.open(tmp_path / a.name) as tar:
        assert {(info.mtime, info.uid, info.gid, info.uname, info.mode) for info in tar} == {(0, 0, 0, "", 0o644)}


names = st.text(st.characters(blacklist_characters="/\0\\", blacklist_categories=("Cs",)), min_size=1, max_size=30)


@settings(max_examples=40)
@given(st.lists(st.tuples(names, st.binary(max_size=2000), st.sampled_from(FORMATS)), min_size=1, max_size=6))
def test_any_name_and_content_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[str, bytes, str]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    written = [
        Member(key_of(f"{position}/{name.strip('.') or 'x'}.jpg"), kind, data, {"label": position, "path": name})
        for position, (name, data, kind) in enumerate(samples)
    ]
    info = write_shard(folder / "shard-000000.tar", written)
    index = parse_index((folder / info.index_name).read_text(), "index")
    assert index.keys == [member.key for member in written]
    in_tar = {name: (offset, size) for name, offset, size in scan_tar(folder / info.name)}
    for position, member in enumerate(written):
        assert in_tar[f"{member.key}.{member.extension}"] == (index.offsets[position], index.sizes[position])
    found = list(wds.WebDataset(str(folder / info.name), shardshuffle=False))
    assert [(entry["__key__"], entry[m.extension]) for entry, m in zip(found, written, strict=True)] == [
        (member.key, member.image) for member in written
    ]


def test_reading_by_index_returns_image_record_and_location(folder: Path) -> None:
    with open_split(folder) as split:
        assert len(split) == 5
        for index, member in enumerate(members()):
            assert split.image(index) == member.image
            assert split.record(index) == member.record
            assert split.where(index) == f"shard-{index // 3:06d}.tar, key {member.key}, index {index}"


@pytest.mark.parametrize(
    "text",
    [
        "", "v1.2 0\n", "v1.1 1\nx\n", "v1.2 1\njpg 0 1 a.jpg\n", "v1.2 1\njpg x 1 a.jpg json 0 1 a.json\n",
        f"v1.2 1\njpg {2**62} {2**62} a.jpg json 0 1 a.json\n", f"v1.2 1\njpg 1 {2**63 - 1} a.jpg json 0 1 a.json\n",
        "v1.2 1\njpg -5 1 a.jpg json 0 1 a.json\n", f"v1.2 1\njpg 0 {10**30} a.jpg json 0 1 a.json\n", "\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_index_is_an_error_when_the_shard_is_opened(tmp_path: Path, text: str) -> None:
    write_split(tmp_path / "train", members()[:1])
    (tmp_path / "train" / "shard-000000.idx").write_bytes(text.encode("latin-1"))
    with open_split(tmp_path / "train") as split, pytest.raises(ShardError, match=r"shard-000000\.(idx|tar)"):
        split.image(0)

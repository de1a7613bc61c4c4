"""`sopdist verify`: every kind of damage is found and reported with shard, key and index."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sopdist.cli import main
from sopdist.cli.output import progress_bar
from sopdist.data.checking.verify import verify_split
from sopdist.data.checking.verify_shard import Checks
from sopdist.data.headers import read_header
from sopdist.data.labels import write_labels
from sopdist.data.manifest import Manifest, read_manifest
from sopdist.data.shards import Member, parse_index
from sopdist.files import sha256_of
from tests.support.pictures import encoded, picture
from tests.support.small_splits import CLASSES, jpeg, sample, samples, write_split

SECOND = "shard-000001.tar"  # samples 4 to 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path / "train")
    return tmp_path / "train"


def problems(folder: Path, **checks: object) -> list[str]:
    _, found = verify_split(folder, Checks(**checks))
    assert found.total == len(found.as_json())
    return [f"{kind}: {problem}" for kind, kept in found.problems.items() for problem in kept]


def write_raw_shard(folder: Path, members: list[tuple[str, bytes]]) -> None:
    """Replace the second shard by a tar with any members and update the manifest, but not the index."""
    path = folder / SECOND
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    accept_shard(folder)


def accept_shard(folder: Path, **changes: int) -> None:
    """Update the manifest to match the second shard as it is now, except for `changes`."""
    manifest = read_manifest(folder)
    path = folder / SECOND
    info = replace(manifest.shards[1], bytes=path.stat().st_size, sha256=sha256_of(path), **changes)
    shards, first = [], 0
    for shard in (manifest.shards[0], info, manifest.shards[2]):
        shards.append(replace(shard, first=first))
        first += shard.samples
    Manifest(manifest.dataset, manifest.split, manifest.classes, tuple(shards)).write(folder)


def test_an_intact_split_has_no_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--quick"], ["--decode"], ["--workers", "3"]):
        assert main(["verify", str(folder), *options]) == 0
        out = capsys.readouterr().out
        assert "12 samples in 3 shards" in out
        assert "no problems found" in out


def test_every_format_and_long_names_pass(tmp_path: Path) -> None:
    members = [
        sample(0, key="long/" * 60 + "name"),
        sample(1, extension="png", image=encoded(picture(1), "PNG")),
        sample(2, extension="webp", image=encoded(picture(2), "WEBP")),
        sample(3, image=encoded(picture(3).convert("CMYK"))),
    ]
    write_split(tmp_path, members)
    seen: list[int] = []
    assert problems(tmp_path, decode=lambda content: seen.append(len(content))) == []
    assert seen == [len(member.image) for member in members]


def test_a_flipped_bit_is_found_by_the_checksum(folder: Path) -> None:
    path = folder / SECOND
    content = bytearray(path.read_bytes())
    content[content.index(jpeg(0)) + len(jpeg(0)) // 2] ^= 4
    path.write_bytes(content)
    assert problems(folder) == [
        f"checksum: {SECOND}: its SHA-256 does not match the manifest; copy or prepare it again"
    ]
    assert problems(folder, quick=True) == []  # --quick does not read the tars


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_a_truncated_tar_is_reported_with_its_last_sample(folder: Path, part: float) -> None:
    path = folder / SECOND
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    found = problems(folder)
    assert f"size: {SECOND}: {int(part * len(content))} bytes, the manifest says {len(content)}" in found[0]
    assert any(line.startswith(f"checksum: {SECOND}") for line in found)
    (tar,) = [line for line in found if line.startswith(f"tar: {SECOND}: damaged tar")]
    assert "after sample k/" in tar
    assert any(line.startswith("size") for line in problems(folder, quick=True))


def test_a_tar_without_its_end_is_damaged(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-1024])
    accept_shard(folder)
    assert [line.partition(" at byte")[0] for line in problems(folder)] == [f"tar: {SECOND}: damaged tar: truncated"]


def test_a_damaged_tar_header_is_not_the_end_of_the_archive(folder: Path) -> None:
    """Python's tarfile takes it for the end."""
    path = folder / SECOND
    index = parse_index((folder / "shard-000001.idx").read_text(), "")
    content = bytearray(path.read_bytes())
    content[index.offsets[2] - 512] ^= 1  # the first letter of the third name
    path.write_bytes(content)
    accept_shard(folder)
    (found,) = problems(folder)
    what = "damaged tar: neither a member nor the end of the archive"
    assert found.startswith(f"tar: {SECOND}: {what} at byte {index.offsets[2] - 512}")
    assert found.endswith("after sample k/5")


def test_missing_files_are_reported(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / "shard-000002.idx").unlink()
    for quick in (False, True):
        found = problems(folder, quick=quick)
        assert len(found) == 2
        assert found[0].startswith(f"missing file: {SECOND}: listed in the manifest")
        assert found[1].startswith("missing file: shard-000002.idx: ")


def test_swapped_lines_of_an_index_are_reported_with_key_and_index(folder: Path) -> None:
    path = folder / "shard-000001.idx"
    lines = path.read_text().split("\n")
    lines[2], lines[3] = lines[3], lines[2]
    path.write_text("\n".join(lines))
    first, second = problems(folder)
    assert first.startswith("index: shard-000001.idx, key k/5, index 5: line 3 is 'jpg ")
    assert second.startswith("index: shard-000001.idx, key k/6, index 6: line 4 is 'jpg ")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("jpg 512 ", "jpg 513 "), "key k/4, index 4: line 2 is 'jpg 513 "),
        (lambda text: text.replace("k/6.json", "k/7.json"), "key k/6, index 6: line 4 is"),
        (lambda text: text.replace("jpg 512 ", "jpg x "), "an offset or a size is not an integer"),
        (lambda text: text.replace("jpg 512 ", "gif 512 "), "line 2: expected an image and its json"),
        (lambda text: text.replace("v1.2", "v1.1"), "not a complete index"),
        (lambda text: text[:-20], "key k/7, index 7"),
        (lambda _: "", "not a complete index"),
        (lambda _: "\udcff", "not text"),
    ],
)
def test_a_damaged_index_is_reported(folder: Path, damage: Callable[[str], str], message: str) -> None:
    path = folder / "shard-000001.idx"
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    found = problems(folder)
    assert all(line.startswith("index: shard-000001.idx") for line in found)
    assert any(message in line for line in found)


def test_an_index_with_missing_lines_is_reported(folder: Path) -> None:
    path = folder / "shard-000001.idx"
    path.write_text("\n".join(["v1.2 3", *path.read_text().split("\n")[1:4], ""]))
    for quick in (False, True):
        count, *lines = problems(folder, quick=quick)
        assert count == "count: shard-000001.idx: 3 samples, the manifest says 4"
        assert [line.partition(":")[2].partition(":")[0] for line in lines] == (
            [] if quick else [" shard-000001.idx, key k/7, index 7"]
        )


def test_a_wrong_count_in_the_manifest_is_reported_for_its_shard(folder: Path) -> None:
    accept_shard(folder, samples=5)
    write_labels(folder, read_manifest(folder), "given", np.array([0, 1, 2, 0, 1, 2, 0, 1, 0, 2, 0, 1, 2]), {})
    assert problems(folder) == [
        "count: shard-000001.idx: 4 samples, the manifest says 5",
        f"count: {SECOND}: 4 samples, the manifest says 5",
    ]
    accept_shard(folder, samples=3)
    found = problems(folder)
    assert f"count: {SECOND}: 4 samples, the manifest says 3" in found
    assert any(line.startswith("label set: labels/given.npy: 13 labels for 11 samples") for line in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields["shards"][1].update(samples=5), "shard-000002.tar starts at index 8, expected 9"),
        (lambda fields: fields["shards"][1].update(name="../shard-000001.tar"), "shard name '../shard-000001.tar'"),
        (lambda fields: fields["shards"][1].update(name="/shard-000001.tar"), "shard name '/shard-000001.tar'"),
        (lambda fields: fields["shards"][1].update(sha256="0" * 64), "digest is"),
        (lambda fields: fields.update(samples=13), "samples is 13"),
        (lambda fields: fields.pop("classes"), "damaged (KeyError: 'classes')"),
    ],
)
def test_a_wrong_manifest_is_refused(
    folder: Path, change: Callable[[dict[str, object]], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    change(fields)
    (folder / "manifest.json").write_text(json.dumps(fields))
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "  manifest.json: " in out
    assert message in out


def test_a_duplicate_key_is_reported_with_both_samples(tmp_path: Path) -> None:
    for first, second in ((1, 10), (5, 6)):
        members = samples()
        members[second] = sample(second, key=f"k/{first}")
        write_split(tmp_path, members)
        for quick in (False, True):
            assert problems(tmp_path, quick=quick) == [
                f"key: shard-{second // 4:06d}.tar, key k/{first}, index {second}: "
                f"the same key as shard-{first // 4:06d}.tar, index {first}"
            ]


@pytest.mark.parametrize("key", ["/etc/passwd", "../../escape", "a//b", "a b", "k\x1b[31m", "a/../b"])
def test_unsafe_keys_are_reported(tmp_path: Path, key: str) -> None:
    members = samples()
    members[5] = sample(5, key=key)
    write_split(tmp_path, members)
    (found,) = [line for line in problems(tmp_path) if line.startswith("key: ")]
    assert "index 5" in found
    assert found.isprintable()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"label": 3}, "label 3 in its json; must be from 0 to 2"),
        ({"label": -2}, "label -2 in its json"),
        ({"label": 0}, "label 0 in its json, but 2 in label set 'given'"),
        ({"label": "2"}, "has no integer `label`"),
        ({"label": True}, "has no integer `label`"),
        ({}, "has no integer `label`"),
        ([1], "has no integer `label`"),
    ],
)
def test_a_wrong_label_in_a_json_is_reported(tmp_path: Path, record: object, message: str) -> None:
    members = samples()
    members[5] = sample(5, record=record)
    write_split(tmp_path, members)
    (found,) = problems(tmp_path)
    assert f"{SECOND}, key k/5, index 5: {message}" in found


def second_shard(**changes: tuple[str, bytes] | None) -> list[tuple[str, bytes]]:
    """Members of the second shard; `changes` replaces (or drops, if None) the `image` or the `record` of sample 5."""
    members = []
    for index in range(4, 8):
        good = sample(index)
        image, record = (f"{good.key}.jpg", good.image), (f"{good.key}.json", json.dumps(good.record).encode())
        if index == 5:
            image, record = changes.get("image", image), changes.get("record", record)
        members += [member for member in (image, record) if member is not None]
    return members


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"record": None},
            "sample: {}, key k/5, index 5: has jpg, expected an image (jpg, png, webp) followed by a json",
        ),
        ({"image": None}, "sample: {}, key k/5, index 5: has json, expected"),
        ({"image": ("k/5.pkl", b"cos\nsystem\n")}, "sample: {}, key k/5, index 5: has pkl and json, expected"),
        ({"image": ("k/5.seg.jpg", jpeg(1))}, "sample: {}, key k/5, index 5: has seg.jpg and json, expected"),
        ({"record": ("k/5.json", b"{")}, "json: {}, key k/5, index 5: not JSON"),
        ({"record": ("k/5.json", b"[" * 100_000)}, "json: {}, key k/5, index 5: not JSON"),
        ({"record": ("k/5.json", b"\xff\xfe\x00")}, "json: {}, key k/5, index 5: not JSON"),
    ],
)
def test_a_sample_must_be_an_image_and_a_json(
    folder: Path, changes: dict[str, tuple[str, bytes] | None], message: str
) -> None:
    write_raw_shard(folder, second_shard(**changes))
    found = [line for line in problems(folder) if not line.startswith("index: ")]  # the index belongs to another tar
    assert len(found) == 1
    assert found[0].startswith(message.format(SECOND))


def test_links_in_a_tar_are_reported(folder: Path) -> None:
    with tarfile.open(folder / SECOND, "w") as tar:
        link = tarfile.TarInfo("k/5.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    accept_shard(folder)
    assert problems(folder) == [f"tar: {SECOND}: 'k/5.jpg' at byte 0 is not a regular file"]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"", "image: {}: empty file"),
        (b"<html>", "image: {}: HTML or XML, not JPEG"),
        (jpeg(0)[:-2], "image: {}: truncated JPEG"),
        (encoded(picture(0), "PNG"), "extension: {}: the extension is .jpg, but the content is png"),
    ],
)
def test_broken_images_and_wrong_extensions_are_reported(tmp_path: Path, image: bytes, message: str) -> None:
    members = samples()
    members[5] = sample(5, image=image)
    write_split(tmp_path, members)
    (found,) = problems(tmp_path)
    assert found.startswith(message.format(f"{SECOND}, key k/5, index 5"))


def test_an_image_that_cannot_be_decoded_is_found_with_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intact = encoded(picture(0, 200, 150), "PNG")
    damaged = intact[:2000] + b"\0" * 1000 + intact[3000:]
    assert read_header(damaged).width == 200
    members = samples()
    members[5] = Member("k/5", "png", damaged, {"label": 2})
    write_split(tmp_path, members)
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path), "--decode"]) == 1
    assert f"{SECOND}, key k/5, index 5: damaged PNG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda labels: np.save(labels / "x.npy", np.zeros(11, int)), "does not match the checksum"),
        (lambda labels: (labels / "x.npy").unlink(), "incomplete or damaged"),
        (lambda labels: (labels / "x.json").unlink(), "incomplete or damaged"),
        (lambda labels: (labels / "x.json").write_text("{}"), "label set format None"),
        (lambda labels: (labels / "x.npy").rename(labels / "x y.npy"), "label set name 'x y'"),
    ],
)
def test_a_damaged_label_set_is_reported(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    write_labels(folder, read_manifest(folder), "x", np.zeros(12, int), {})
    damage(folder / "labels")
    found = problems(folder, quick=True)
    assert all(line.startswith("label set: labels/x") for line in found)
    assert any(message in line for line in found)


def test_a_label_set_of_the_wrong_length_or_range_is_reported(folder: Path, tmp_path: Path) -> None:
    longer = write_split(tmp_path / "longer", samples(13))
    wider = write_split(tmp_path / "wider", classes=(*CLASSES, "newt"))
    write_labels(folder, longer, "long", np.zeros(13, int), {})
    write_labels(folder, wider, "wide", np.array([0] * 5 + [3] + [0] * 6), {})
    long, wide = problems(folder, quick=True)
    assert long == "label set: labels/long.npy: 13 labels for 12 samples"
    assert wide.startswith("label set: labels/wide.npy: label 3 at index 5")


def test_a_split_needs_its_given_labels(folder: Path) -> None:
    (folder / "labels" / "given.npy").unlink()
    (folder / "labels" / "given.json").unlink()
    (found,) = problems(folder)
    assert "label set: labels/given.npy: " in found
    assert "no label set 'given'" in found


def test_stray_files_are_reported(folder: Path) -> None:
    names = ("labels/x.npy.part", "shard-000003.tar", "shard-000007.tar.part", "shard-000009.idx")
    for name in names:
        (folder / name).touch()
    (folder / "README").touch()  # other files of the user are ignored
    found = problems(folder, quick=True)
    assert [line.split(": ")[:2] for line in found] == [["stray file", name] for name in names]


def test_checking_continues_after_a_problem_and_counts_all_of_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_split(folder, [sample(index, record={"label": 9}) for index in range(50)], per_shard=7)
    (folder / "shard-000003.tar").unlink()
    assert main(["verify", str(folder), "--json", str(folder / "all.json")]) == 1
    out = capsys.readouterr().out
    assert "label: 43" in out
    assert out.count("label 9 in its json") == 20
    assert "... and 23 more; --json FILE writes all" in out
    assert "50 samples in 8 shards" in out
    assert "44 problems" in out
    report = json.loads((folder / "all.json").read_text())
    assert report["ok"] is False
    assert report["splits"][0]["counts"] == {"label": 43, "missing file": 1}
    indices = [problem["index"] for problem in report["splits"][0]["problems"] if problem["kind"] == "label"]
    assert indices == [*range(21), *range(28, 50)]


def test_all_splits_in_a_folder_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path / "train")
    write_split(tmp_path / "val")
    (tmp_path / "notes").mkdir()
    assert main(["verify", str(tmp_path)]) == 0
    assert "0 of 2 splits have problems" in capsys.readouterr().out
    (tmp_path / "train" / "manifest.json").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "`sopdist prepare` was interrupted" in out
    assert "1 of 2 splits have problems" in out
    assert "no problems found" in out  # val


def test_folders_without_a_split_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in ((tmp_path, "no manifest.json"), (tmp_path / "absent", "no such folder")):
        assert main(["verify", str(path)]) == 1
        out, err = capsys.readouterr()
        assert message in err
        assert (out, err.count("\n")) == ("", 1)


def test_a_split_that_was_not_finished_is_incomplete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = folder.parent / "val"
    started.mkdir()
    (started / "prepare.json").write_text("{}")
    for path in (folder.parent, started):
        assert main(["verify", str(path)]) == 1
        assert "incomplete: 1\n  val: `sopdist prepare` was interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["labels", "list"]])
def test_a_url_is_refused(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "https://example.org/train"])
    assert stop.value.code == 2
    assert "https://example.org/train is a URL; this command works on a local folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", [SECOND, "shard-000001.idx", "labels/given.npy"])
def test_a_pipe_does_not_block(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for options in ([], ["--quick"]):
        command = [sys.executable, "-m", "sopdist", "verify", str(folder), *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1
        assert "not a regular file" in result.stdout


def test_a_sample_that_is_missing_in_the_tar_is_reported(folder: Path) -> None:
    for missing in (5, 7):
        members = [member for member in second_shard() if not member[0].startswith(f"k/{missing}.")]
        write_raw_shard(folder, members)
        assert f"sample: {SECOND}, key k/{missing}, index {missing}: in the index, but not in the tar" in (
            problems(folder)
        )


def test_a_progress_bar_does_not_flood_a_log_file() -> None:
    with progress_bar(total=10, file=io.StringIO()) as bar:
        assert bar.mininterval == 30


def test_invalid_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--workers", "0"], ["--quick", "--decode"]):
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(tmp_path), *options])
        assert stop.value.code == 2
    assert "not an integer >= 1" in capsys.readouterr().err

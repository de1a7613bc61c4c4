"""`sopdist prepare` end to end, on real files: which images are written, and which are skipped."""

from __future__ import annotations

import errno
import io
import os
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from sopdist.cli import main
from sopdist.data.manifest import read_manifest
from sopdist.data.sources import imagefolder, lists
from sopdist.data.split import open_split

from ..support.pictures import encoded, picture

CLASSES = ("bird", "cat", "dog")


def make_images(root: Path, count: int = 12, width: int = 60, height: int = 40) -> dict[str, bytes]:
    """Write a folder of real JPEGs, PNGs and WebPs in three classes; returns {path: content}, in order."""
    files = {}
    for number in range(count):
        format_ = ("JPEG", "PNG", "WEBP")[number % 3]
        path = f"{CLASSES[number * 3 // count]}/{number:03d}.{format_.lower()}"
        files[path] = encoded(picture(number, width, height), format_)
    write_files(root, files)
    return files


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def prepare(root: Path, out: Path, *options: str, source: str = "imagefolder") -> int:
    return main(["prepare", source, "--root", str(root), "--out", str(out), *options])


def contents(folder: Path) -> dict[str, bytes]:
    """All files in a folder, with their bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_images_are_copied_byte_for_byte_and_stock_readers_can_read_them(tmp_path: Path) -> None:
    files = make_images(tmp_path / "in")
    assert prepare(tmp_path / "in", tmp_path / "out", "--samples-per-shard", "5", "--order", "source") == 0
    folder = tmp_path / "out" / "train"
    shards = sorted(folder.glob("*.tar"))
    assert [path.name for path in shards] == [f"shard-00000{n}.tar" for n in range(3)]
    found = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            found.update({info.name: tar.extractfile(info).read() for info in tar})
    extension = {".jpeg": ".jpg", ".png": ".png", ".webp": ".webp"}
    for path, content in files.items():
        stem, suffix = os.path.splitext(path)
        assert found[stem + extension[suffix]] == content
    samples = list(webdataset.WebDataset([str(path) for path in shards], shardshuffle=False).decode())
    assert [sample["json"]["path"] for sample in samples] == list(files)
    assert [CLASSES[sample["json"]["label"]] for sample in samples] == [path.split("/")[0] for path in files]
    with open_split(folder) as split:
        assert split.manifest.classes == CLASSES
        assert [split.image(index) for index in range(len(split))] == list(files.values())
        assert split.labels("given").labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert split.labels("given").recipe["source"] == "imagefolder"
    left = {path.name for path in folder.iterdir()} - {path.name for path in folder.glob("shard-*")}
    assert left == {"manifest.json", "source.json", "labels"}


@pytest.mark.parametrize("options", [[], ["--resize", "20"]], ids=["as is", "resized"])
def test_the_same_input_gives_the_same_bytes_with_any_number_of_workers(tmp_path: Path, options: list[str]) -> None:
    files = make_images(tmp_path / "in", count=30)
    files["cat/broken.jpg"] = b"no image"
    write_files(tmp_path / "in", files)
    options = [*options, "--samples-per-shard", "4", "--max-bad", "0.1"]
    for workers in ("1", "3", "8"):
        assert prepare(tmp_path / "in", tmp_path / workers, "--workers", workers, *options) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "3") == contents(tmp_path / "8")
    assert prepare(tmp_path / "in", tmp_path / "3", *options, "--overwrite") == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_resize_shrinks_large_images_and_copies_small_ones(tmp_path: Path) -> None:
    large, small = encoded(picture(0, 90, 60), "PNG"), encoded(picture(1, 30, 20), "PNG")
    write_files(tmp_path / "in", {"a/large.png": large, "b/small.png": small})
    assert prepare(tmp_path / "in", tmp_path / "out", "--resize", "32", "--quality", "50") == 0
    with open_split(tmp_path / "out" / "train") as split:
        shrunk = Image.open(io.BytesIO(split.image(0)))
        assert (shrunk.format, shrunk.size) == ("JPEG", (48, 32))
        assert split.image(1) == small


def test_bad_images_are_skipped_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = encoded(picture(0))
    png = encoded(picture(1), "PNG")
    turned = Image.Exif()
    turned[0x0112] = 6
    files = {
        "a/00 ok.jpg": good,
        "a/01 truncated.jpg": good[:-200],
        "a/02 empty.jpg": b"",
        "a/03 cmyk.jpg": encoded(picture(3).convert("CMYK")),
        "a/04 deep.png": encoded(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999), "PNG"),
        "a/05 palette.png": encoded(picture(5).convert("P"), "PNG"),
        "a/06 animated.webp": encoded(picture(6), "WEBP", save_all=True, append_images=[picture(7)]),
        "a/07 animated.gif": encoded(picture(6), "GIF", save_all=True, append_images=[picture(7)]),
        "b/08 turned.jpg": encoded(picture(8), exif=turned),
        "b/09 bomb.png": png[:16] + struct.pack(">II", 70_000, 70_000) + png[24:],
        "b/10 page.jpg": b"<!DOCTYPE html><html>Not found</html>",
        "b/11 really.a.png.jpg": png,
        "b/12.jpg": good,
        "b/12.png": png,
        "b/14 tab\tin it.jpg": b"",
    }
    write_files(tmp_path / "in", files)
    (tmp_path / "in" / "b" / "13 gone.jpg").symlink_to("nowhere.jpg")
    assert (
        prepare(tmp_path / "in", tmp_path / "out", "--max-bad", "0.4", "--samples-per-shard", "4", "--order", "source")
        == 0
    )
    folder = tmp_path / "out" / "train"
    lines = [line.split("\t") for line in (folder / "skipped.txt").read_text().splitlines()]
    assert {path: reason.split(" (")[0] for path, reason in lines} == {
        "a/01 truncated.jpg": "truncated JPEG: no end marker",
        "a/02 empty.jpg": "empty file",
        "b/09 bomb.png": "70000 x 70000 pixels, more than the 134,217,728 allowed",
        "b/10 page.jpg": "HTML or XML, not JPEG, PNG or WebP",
        "b/13 gone.jpg": "no such file",
        "b/14%20tab%09in%20it.jpg": "empty file",
    }
    skipped = {path for path, _ in lines} | {"b/14 tab\tin it.jpg"}
    kept = [path for path in sorted(files) if path not in skipped]
    with open_split(folder) as split:
        records = [split.record(index) for index in range(len(split))]
        assert [record["path"] for record in records] == kept
        labels = [0 if path.startswith("a/") else 1 for path in kept]
        assert [record["label"] for record in records] == split.labels("given").labels.tolist() == labels
        for index, path in enumerate(kept):
            if path.endswith(".gif"):
                assert Image.open(io.BytesIO(split.image(index))).format == "PNG"
            else:
                assert split.image(index) == files[path]
        keys = [key for shard in split.manifest.shards for key in split.locate(shard.first)[0].index.keys]
        assert "b/12%2Ejpg" in keys
        assert "b/12%2Epng" in keys
        shard, position = split.locate(kept.index("b/11 really.a.png.jpg"))
        assert shard.index.extensions[position] == "png"  # by content, not by name
    out = capsys.readouterr().out
    assert re.search(r"train +10 +4 +0\.\d +2 +6\n", out)
    assert "skipped.txt" in out


def test_too_many_bad_images_are_an_error_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = make_images(tmp_path / "in", count=20)
    lost = list(files)[3:8]
    for path in lost:
        (tmp_path / "in" / path).write_bytes(b"")
    options = ["--samples-per-shard", "2", "--order", "source"]
    folder = tmp_path / "out" / "train"
    assert prepare(tmp_path / "in", tmp_path / "out", *options) == 1
    error = capsys.readouterr().err
    assert "sopdist: " in error
    for says in ("5 of 20", "25.0%", "Is --root correct?", lost[0], "empty file", "skipped.txt", "--max-bad 0.25"):
        assert says in error
    assert len((folder / "skipped.txt").read_text().splitlines()) == 5
    assert not (folder / "manifest.json").exists()

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.tar")}
    assert prepare(tmp_path / "in", tmp_path / "out", *options, "--max-bad", "0.25") == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.tar")} == before  # nothing is written twice
    manifest = read_manifest(folder)
    assert manifest.samples == 15
    assert "shard-000002.tar" not in [shard.name for shard in manifest.shards]  # it has no usable images
    with open_split(folder) as split:
        assert [split.image(i) for i in range(15)] == [files[path] for path in files if path not in lost]


def test_skipped_images_that_became_usable_are_included_when_resuming(tmp_path: Path) -> None:
    """The effects of a wrong --root or an unavailable server must not persist in finished shards."""
    files = make_images(tmp_path / "in", count=20)
    for path in list(files)[:9]:
        (tmp_path / "in" / path).write_bytes(b"")
    options = ["--samples-per-shard", "5"]
    assert prepare(tmp_path / "in", tmp_path / "out", *options) == 1
    write_files(tmp_path / "in", files)
    assert prepare(tmp_path / "in", tmp_path / "out", *options) == 0
    assert prepare(tmp_path / "in", tmp_path / "fresh", *options) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert not (tmp_path / "out" / "train" / "skipped.txt").exists()


def failing_reader(bad: str, reason: int) -> Callable[[Path, list[str]], Callable[[int], bytes]]:
    """Like lists.reader, but reading one of the images raises an OSError."""

    def reader(root: Path, paths: list[str]) -> Callable[[int], bytes]:
        read = lists.reader(root, paths)

        def fail(number: int) -> bytes:
            if paths[number] == bad:
                raise OSError(reason, os.strerror(reason), bad)
            return read(number)

        return fail

    return reader


@pytest.mark.parametrize("reason", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENOMEM])
def test_a_temporary_error_stops_the_run_and_loses_no_sample(
    tmp_path: Path, reason: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_images(tmp_path / "in", count=20)
    options = ["--samples-per-shard", "5", "--order", "source", "--workers", "1", "--max-bad", "1"]
    bad = list(files)[12]
    with monkeypatch.context() as patch:
        patch.setattr(imagefolder, "reader", failing_reader(bad, reason))
        assert prepare(tmp_path / "in", tmp_path / "out", *options) == 1
    error = capsys.readouterr().err
    assert f"{bad}: cannot be read: {os.strerror(reason)}" in error
    assert "run the same command again" in error
    assert len(list((tmp_path / "out" / "train").glob("*.done"))) >= 2
    assert prepare(tmp_path / "in", tmp_path / "out", *options) == 0
    assert prepare(tmp_path / "in", tmp_path / "fresh", *options) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert not (tmp_path / "out" / "train" / "skipped.txt").exists()


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR])
def test_a_permanent_error_of_an_image_skips_it(tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_images(tmp_path / "in")
    bad = list(files)[3]
    monkeypatch.setattr(imagefolder, "reader", failing_reader(bad, reason))
    assert prepare(tmp_path / "in", tmp_path / "out", "--max-bad", "0.1") == 0
    listed = (tmp_path / "out" / "train" / "skipped.txt").read_text()
    assert listed == f"{bad}\tcannot be read: {os.strerror(reason)}\n"


def test_a_file_name_may_contain_a_backslash(tmp_path: Path) -> None:
    image = encoded(picture(0))
    write_files(tmp_path / "in", {"a/x\\y.jpg": image, "b/1.jpg": image})
    assert prepare(tmp_path / "in", tmp_path / "out") == 0
    with open_split(tmp_path / "out" / "train") as split:
        assert split.record(0)["path"] == "a/x\\y.jpg"
        assert split.locate(0)[0].index.keys[0] == "a/x%5Cy"


def test_a_split_needs_at_least_one_usable_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "in", {"a/1.jpg": b"", "b/2.jpg": b""})
    assert prepare(tmp_path / "in", tmp_path / "out", "--max-bad", "1") == 1
    error = capsys.readouterr().err
    assert "2 of 2" in error
    assert "To skip them" not in error


def test_names_may_be_invalid_utf8(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"in\xff")
    image = encoded(picture(0))
    (root / "b").mkdir(parents=True)
    (root / os.fsdecode(b"caf\xe9")).mkdir()
    (root / os.fsdecode(b"caf\xe9") / os.fsdecode(b"na\xefve name.jpg")).write_bytes(image)
    (root / "b" / "grün.jpg").write_bytes(image)
    assert prepare(root, tmp_path / "out") == 0
    with open_split(tmp_path / "out" / "train") as split:
        assert split.manifest.dataset == "in%FF"
        assert split.manifest.classes == ("b", "caf%E9")
        assert [split.record(i)["path"] for i in range(2)] == ["b/grün.jpg", "caf%E9/na%EFve%20name.jpg"]
        assert split.image(1) == image


def test_splits_can_be_selected_and_a_summary_suggests_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("train", 12), ("val", 6), ("test", 3)):
        make_images(tmp_path / "in" / name, count)
    assert prepare(tmp_path / "in", tmp_path / "out", "--splits", "test, train") == 0
    output = capsys.readouterr()
    assert "images/s" in output.err
    assert re.search(r"train +12 +1 +0\.\d +3 +0\ntest +3 +1 ", output.out)
    assert output.out.endswith(f"next: sopdist verify {tmp_path / 'out' / 'train'}\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test", "train"]
    assert prepare(tmp_path / "in", tmp_path / "out", "--splits", "valid") == 1
    assert "no split 'valid'; available: train, val, test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--resize", "0", "not an integer >= 1"),
        ("--quality", "101", "from 1 to 100"),
        ("--samples-per-shard", "many", "not an integer"),
        ("--workers", "-1", "not an integer >= 1"),
        ("--max-bad", "1.5", "from 0 to 1"),
        ("--max-bad", "nan", "from 0 to 1"),
    ],
)
def test_options_out_of_range_are_refused(
    option: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        prepare(tmp_path, tmp_path / "out", option, value)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert option in error
    assert says in error

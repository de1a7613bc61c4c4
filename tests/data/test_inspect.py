"""`sopdist inspect`: its summary of a split, and the contact sheet."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sopdist.cli import main
from sopdist.cli.commands.inspect_text import histogram_text
from sopdist.cli.units import format_bytes
from sopdist.data.checking import contact_sheet
from sopdist.data.checking.contact_sheet import Tile, decode_upright, draw_sheet
from sopdist.data.checking.inspection import choose
from sopdist.data.labels import write_labels
from sopdist.data.shards import Member
from sopdist.errors import ImageError
from tests.support.pictures import encoded, picture
from tests.support.small_splits import jpeg, sample, samples, write_split

RED, BLUE = (198, 40, 40), (21, 101, 192)


def rotated(image: Image.Image, orientation: int) -> bytes:
    """The image as a camera with this orientation stores it."""
    stored = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image if stored is None else image.transpose(stored), "PNG", exif=exif)


def odd_split(folder: Path) -> None:
    """Everything a sheet may show: all formats, rotated, transparent and broken images, and wrong labels."""
    rgba = picture(4).convert("RGBA")
    rgba.putalpha(100)
    members = [
        sample(0),
        sample(1, extension="png", image=rotated(picture(1, 60, 20), 6)),
        sample(2, extension="webp", image=encoded(picture(2), "WEBP")),
        sample(3, image=encoded(picture(3).convert("CMYK"))),
        sample(4, extension="png", image=encoded(rgba, "PNG")),
        sample(5, image=b"<html>gone</html>"),
        sample(6, extension="png", image=encoded(picture(6).convert("P"), "PNG")),
        sample(7, extension="png", image=encoded(picture(7, 1, 1), "PNG")),
        sample(8, extension="png", image=encoded(picture(8, 700, 2), "PNG")),
    ]
    manifest = write_split(folder, members)
    clean = np.array([index % 3 for index in range(9)])
    clean[[0, 3]], clean[8] = 1, -1
    write_labels(folder, manifest, "clean", clean, {})


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def count(sheet: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    return int((sheet == colour).all(axis=-1).sum())


def test_the_summary_describes_the_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd_split(tmp_path / "train")
    assert main(["inspect", str(tmp_path / "train")]) == 0
    out = capsys.readouterr().out
    for line in (
        "pets, split train",
        "KiB in 3 tars",
        "label sets  clean, given",
        "3 to 3 samples per class, median 3",
        "1 dog  3  33.3%  ####",
        "headers of 9 of 9",
        "formats: png 62.5%, jpg 25.0%, webp 12.5%",
        "rotated or mirrored by EXIF: 12.5%",
        "animated): 37.5%",  # CMYK, RGBA, palette
        "broken: 1",
        "shard-000001.tar, key k/5, index 5: HTML or XML, not JPEG, PNG or WebP",
        "no contact sheet was written; --sheet FILE.png writes one",
    ):
        assert line in out, line
    sizes = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ")}
    assert sizes["width"] == ["1", "64", "700"]
    assert sizes["height"] == ["1", "39", "48"]  # upright, so without the 60 of the rotated image
    assert not list(tmp_path.glob("*.png"))


def test_the_sheet_shows_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd_split(tmp_path / "train")
    path = tmp_path / "sheet.png"
    assert main(["inspect", str(tmp_path / "train"), "--sheet", str(path)]) == 0
    assert f"contact sheet: {path}, 9 of 9 samples (seed 0)" in capsys.readouterr().out
    sheet = pixels(path)
    frame = 4 * 129  # pixels around a thumbnail
    assert 2 * frame <= count(sheet, RED) < 3 * frame  # of the two wrong labels
    main(["inspect", str(tmp_path / "train"), "--sheet", str(path), "--labels", "clean"])
    assert count(pixels(path), RED) < frame


def test_only_a_label_that_differs_from_the_clean_label_is_coloured() -> None:
    white = encoded(Image.new("RGB", (40, 30), "white"))
    for clean in (None, "owl"):
        sheet = np.asarray(Image.open(io.BytesIO(draw_sheet([Tile(7, white, "cat", clean)], "title")))).astype(int)
        red, green, _ = np.moveaxis(sheet, -1, 0)  # (height, width) each
        assert ((red > green + 50).any(), (green > red + 50).any()) == (clean is not None, clean is not None)


def test_the_sheet_depends_on_the_class_and_the_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path / "train", samples(90), per_shard=30)
    arguments = ["inspect", str(tmp_path / "train"), "--count", "4", "--class", "owl", "--sheet"]
    sheets = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert main([*arguments, str(tmp_path / f"{name}.png"), "--seed", seed]) == 0
        assert "4 of 30 samples" in capsys.readouterr().out
        sheets.append((tmp_path / f"{name}.png").read_bytes())
    assert sheets[0] == sheets[1] != sheets[2]


def test_samples_of_an_unreadable_shard_are_shown_as_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path / "train")
    (tmp_path / "train" / "shard-000001.tar").unlink()
    assert main(["inspect", str(tmp_path / "train"), "--sheet", str(tmp_path / "s.png")]) == 0
    assert "broken: 4" in capsys.readouterr().out
    assert count(pixels(tmp_path / "s.png"), RED) > 100


@pytest.mark.parametrize("orientation", range(1, 9))
def test_thumbnails_are_upright(orientation: int) -> None:
    image = picture(0, 30, 20)
    np.testing.assert_array_equal(np.asarray(decode_upright(rotated(image, orientation))), np.asarray(image))


def test_a_broken_image_raises_an_error_with_the_reason() -> None:
    whole = encoded(picture(0, 200, 150), "PNG")
    for content, message in (
        (jpeg(0)[:300], "truncated"),
        (whole[:2000] + b"\0" * 1000 + whole[3000:], "damaged PNG"),
    ):
        with pytest.raises(ImageError, match=message):
            decode_upright(content)


def test_of_many_classes_only_the_largest_and_the_smallest_are_shown() -> None:
    labels = np.repeat(np.arange(100), np.arange(1, 101)).astype(np.int32)
    labels = np.concatenate((labels, np.full(5, -1, dtype=np.int32)))
    text = histogram_text(labels, [f"class-{k}" for k in range(100)], "given")
    assert "1 to 100 samples per class, median 50, 5 unknown" in text
    assert "99 class-99" in text
    assert "0 class-0 " in text
    assert "50 class-50" not in text
    assert "... 80 more classes ..." in text


def test_choices_are_random_and_ascending() -> None:
    everything = np.arange(1000)
    some = choose(everything, 50, seed=0)
    assert (np.diff(some) > 0).all()
    assert len(some) == 50
    assert (choose(everything, 50, seed=0) == some).all()
    assert (choose(everything, 50, seed=1) != some).any()
    assert choose(everything[:7], 50, seed=0).tolist() == list(range(7))


def test_sizes_are_readable() -> None:
    assert [format_bytes(size) for size in (0, 999, 1000, 1_234_567, 5 * 10**12)] == [
        "0 bytes", "999 bytes", "1,000 bytes", "1.18 MiB", "4.55 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--labels", "best"], 1, "no label set 'best'"),
        (["--class", "newt"], 1, "--class: no class 'newt'"),
        (["--class", "Dog"], 1, "--class: no class 'Dog'; did you mean 'dog'?"),
        (["--index", "1,3"], 1, "--index 3: must be from 0 to 2"),
        (["--index", "1,x"], 1, "--index 1,x: neither comma-separated indices"),
        (["--index", "1", "--class", "dog"], 2, "--class cannot be used with --index"),
        (["--class", "dog", "--labels", "ones"], 1, "no sample has this label"),
        (["--sheet", "absent/s.png"], 1, "cannot be written"),
        (["--sheet", "s.jpg"], 2, "must end with .png"),
        (["--count", "0"], 2, "not an integer from 1 to 1000"),
        (["--seed", "-1"], 2, "not an integer from 0"),
    ],
)
def test_invalid_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    manifest = write_split(tmp_path, samples(3))
    write_labels(tmp_path, manifest, "ones", np.zeros(3, int), {})
    if code == 2:
        with pytest.raises(SystemExit) as stop:
            main(["inspect", str(tmp_path), *options])
        assert stop.value.code == 2
    else:
        assert main(["inspect", str(tmp_path), *options]) == 1
    out, err = capsys.readouterr()
    assert message in err
    assert not out or "cannot be written" in message  # checked before anything is printed


def test_a_class_name_in_another_script_can_be_drawn(tmp_path: Path) -> None:
    write_split(tmp_path, [Member("k", "jpg", jpeg(0), {"label": 0})], classes=("猫" * 30,))
    assert main(["inspect", str(tmp_path), "--sheet", str(tmp_path / "s.png")]) == 0


def test_an_umlaut_is_drawn_or_replaced_by_its_base_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    def sheet(label: str) -> bytes:
        return draw_sheet([Tile(0, jpeg(0), label)], "Größe \ud800")

    if contact_sheet._system_font() is not None:
        assert sheet("Bär") != sheet("Bar")
    monkeypatch.setattr(contact_sheet, "_system_font", lambda: None)
    assert sheet("Bär") == sheet("Bar")


def test_without_clean_labels_those_that_differ_from_their_base_are_marked(tmp_path: Path) -> None:
    manifest = write_split(tmp_path / "train", samples(3))
    write_labels(tmp_path / "train", manifest, "noisy", np.array([0, 1, 1]), {"kind": "symmetric", "from": "given"})
    path = tmp_path / "s.png"
    frame = 4 * 129
    for name, marked in (("given", 0), ("noisy", 1)):
        assert main(["inspect", str(tmp_path / "train"), "--labels", name, "--sheet", str(path)]) == 0
        assert marked * frame <= count(pixels(path), BLUE) < (marked + 1) * frame
        assert count(pixels(path), RED) < frame


@pytest.mark.parametrize("written", ["11,3,5", "list.npy", "list.txt"])
def test_requested_samples_are_listed_and_drawn_in_the_given_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    write_split(tmp_path / "train")
    np.save(tmp_path / "list.npy", [11, 3, 5])
    (tmp_path / "list.txt").write_text("11\n3\n\n5\n")
    where = written if "," in written else str(tmp_path / written)
    assert main(["inspect", str(tmp_path / "train"), "--index", where, "--sheet", str(tmp_path / "s.png")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["index", "label", "key", "path"])
    assert lines[at + 2 : at + 5] == [
        ["11", "2", "owl", "k/11", "k/11.jpg"],
        ["3", "0", "cat", "k/3", "k/3.jpg"],
        ["5", "2", "owl", "k/5", "k/5.jpg"],
    ]
    tiles = [Tile(index, jpeg(index % 5), label) for index, label in ((11, "2 owl"), (3, "0 cat"), (5, "2 owl"))]
    assert (tmp_path / "s.png").read_bytes() == draw_sheet(tiles, "pets, train: 3 samples with label set given")


def test_an_invalid_list_of_samples_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path / "train")
    for content, message in (
        (np.array([1, 12]), "index 12 at position 1: must be from 0 to 11"),
        (np.array([1.0]), "expected a list of integers"),
        ("1\n12\n", "line 2: index '12': must be from 0 to 11"),
        ("\n", "contains no samples"),
    ):
        path = tmp_path / ("list.txt" if isinstance(content, str) else "list.npy")
        if isinstance(content, str):
            path.write_text(content)
        else:
            np.save(path, content)
        assert main(["inspect", str(tmp_path / "train"), "--index", str(path)]) == 1
        assert message in capsys.readouterr().err

"""ILSVRC 2012 validation images: classes from the development kit, from class folders or from a list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from sopdist.data.sources import ilsvrc12

from .test_sources import error_of, find, jpeg, write_tree

RANDOM = np.random.default_rng(0)
WNIDS = [f"n{number:08d}" for number in range(1440764, 1440764 + 3 * 1000, 3)]  # sorted
SYNSETS = [WNIDS[i] for i in RANDOM.permutation(1000)]  # WebVision's order, here unsorted
KIT = [WNIDS[i] for i in RANDOM.permutation(1000)]  # by ILSVRC2012_ID - 1; unsorted in the real kit, too
# 120 images: two of each of WebVision's first 50 classes and 20 of others, shuffled.
TRUTH = RANDOM.permutation([*SYNSETS[:50] * 2, *SYNSETS[50:70]]).tolist()
NAMES = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 121)]
IMAGES = {name: jpeg(number) for number, name in enumerate(NAMES)}
WANTED = [(name, SYNSETS.index(wnid)) for name, wnid in zip(NAMES, TRUTH, strict=True) if wnid in SYNSETS[:50]]


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """meta.mat as in the kit: 1000 classes, followed by 860 inner nodes of the tree."""
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
    synsets = np.zeros((1860, 1), dtype=[(name, object) for name in fields])
    for i in range(1860):
        wnid = KIT[i] if i < 1000 else f"n{9000000 + i:08d}"
        children = [] if i < 1000 else [i - 999, i - 998]
        synsets[i, 0] = (float(i + 1), wnid, "a word", "a gloss", float(len(children)), children, 0.0)
    path = tmp_path_factory.mktemp("kit") / "meta.mat"
    savemat(path, {"synsets": synsets, "other": np.arange(3)})
    return path.read_bytes()


@pytest.fixture
def synsets(tmp_path: Path) -> str:
    write_tree(tmp_path, {"info/synsets.txt": "".join(f"{wnid} words\n" for wnid in SYNSETS)})
    return str(tmp_path / "info" / "synsets.txt")


def flat(folder: str) -> dict[str, bytes | str]:
    return {folder + name: content for name, content in IMAGES.items()}


def kit(meta: bytes, folder: str) -> dict[str, bytes | str]:
    truth = "".join(f"{KIT.index(wnid) + 1}\n" for wnid in TRUTH)
    return {f"{folder}meta.mat": meta, f"{folder}ILSVRC2012_validation_ground_truth.txt": truth}


def val_list() -> str:
    return "".join(f"{name} {WNIDS.index(wnid)}\n" for name, wnid in zip(NAMES, TRUTH, strict=True))


def in_class_folders(folder: str) -> dict[str, bytes | str]:
    return {f"{folder}{wnid}/{name}": IMAGES[name] for name, wnid in zip(NAMES, TRUTH, strict=True)}


def check(root: Path, synsets: str) -> None:
    splits = find(ilsvrc12, root, "--synsets", synsets)
    assert list(splits) == ["ilsvrc12"]
    split = splits["ilsvrc12"]
    assert split.classes == tuple(f"{wnid} words" for wnid in SYNSETS[:50])
    assert list(zip(split.paths, split.labels["given"].tolist(), strict=True)) == WANTED
    assert split.labels["clean"].tolist() == split.labels["given"].tolist()
    assert [split.read(number) for number in range(100)] == [IMAGES[name] for name, _ in WANTED]


@pytest.mark.parametrize("kit_folder", ["ILSVRC2012_devkit_t12/data/", "devkit/data/", "data/", ""])
@pytest.mark.parametrize("image_folder", ["val/", "ILSVRC2012_img_val/", ""])
def test_classes_are_read_from_the_development_kit(
    kit_folder: str, image_folder: str, meta: bytes, synsets: str, tmp_path: Path
) -> None:
    check(write_tree(tmp_path / "imagenet", {**flat(image_folder), **kit(meta, kit_folder)}), synsets)


@pytest.mark.parametrize("image_folder", ["val/", "ILSVRC2012_img_val/", ""])
def test_classes_are_read_from_class_folders(image_folder: str, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", in_class_folders(image_folder))
    write_tree(root, {f"{image_folder}{SYNSETS[0]}/._ILSVRC2012_val_00000001.JPEG": b"x"})  # as macOS creates them
    check(root, synsets)


@pytest.mark.parametrize("list_folder", ["", "val/"])
def test_classes_are_read_from_a_list_by_sorted_wnid(list_folder: str, synsets: str, tmp_path: Path) -> None:
    check(write_tree(tmp_path / "imagenet", {**flat("val/"), f"{list_folder}val.txt": val_list()}), synsets)


def test_the_labels_of_the_kit_are_not_in_wnid_order(meta: bytes, synsets: str, tmp_path: Path) -> None:
    """Checks that the fixtures above can distinguish the two orders."""
    truth = [KIT.index(wnid) for wnid in TRUTH]
    assert np.mean([KIT[label] == WNIDS[label] for label in truth]) < 0.1
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, ""), "val.txt": "nonsense"})
    check(root, synsets)  # the kit takes precedence over val.txt


def test_all_classes_can_be_selected(meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "")})
    split = find(ilsvrc12, root, "--synsets", synsets, "--classes-count", "1000")["ilsvrc12"]
    assert split.paths == NAMES
    assert [SYNSETS[label] for label in split.labels["given"]] == TRUTH
    assert len(split.classes) == 1000


@pytest.mark.parametrize("count", ["0", "1001"])
def test_a_wrong_number_of_classes_is_refused(count: str, synsets: str, tmp_path: Path) -> None:
    assert "has 1000 classes" in error_of(ilsvrc12, tmp_path, "--synsets", synsets, "--classes-count", count)


def test_a_missing_synsets_file_is_reported(tmp_path: Path) -> None:
    assert "gone.txt: cannot be read" in error_of(ilsvrc12, tmp_path, "--synsets", str(tmp_path / "gone.txt"))


def test_the_error_for_an_empty_root_lists_the_folders_searched(synsets: str, tmp_path: Path) -> None:
    error = error_of(ilsvrc12, tmp_path, "--synsets", synsets)
    assert f"no ILSVRC2012_val_*.JPEG and no class folders such as {SYNSETS[0]}" in error
    assert str(tmp_path / "ILSVRC2012_img_val") in error


def test_images_without_known_classes_are_refused(meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "data/")})
    (root / "data" / "meta.mat").unlink()
    error = error_of(ilsvrc12, root, "--synsets", synsets)
    assert f"no val.txt in {root}" in error
    assert "missing: meta.mat; looked in" in error


def test_a_list_by_sorted_wnid_needs_all_wnids(synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), "val.txt": val_list()})
    Path(synsets).write_text("\n".join(SYNSETS[:50]))
    assert "has 50; use the full synsets.txt" in error_of(ilsvrc12, root, "--synsets", synsets)


def test_a_missing_class_folder_is_reported(synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", in_class_folders("val/"))
    (root / "val" / SYNSETS[7]).rename(root / "val" / "seven")
    error = error_of(ilsvrc12, root, "--synsets", synsets)
    assert f"1 of 50 class folders are missing, e.g. {SYNSETS[7]}" in error


def test_the_same_name_in_two_class_folders_is_refused(synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", in_class_folders("val/"))
    for wnid in SYNSETS[:2]:
        write_tree(root, {f"val/{wnid}/twice.JPEG": jpeg(0)})
    assert "twice.JPEG have the same name" in error_of(ilsvrc12, root, "--synsets", synsets)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("5\n0\n", "line 2: '0' is not the ILSVRC2012_ID of a class"),
        ("5\n1001\n", "line 2: '1001' is not"),  # an inner node
        ("5\nn01440764\n", "line 2: 'n01440764' is not"),
        ("5\n\n6\n", "line 2: blank"),
    ],
)
def test_a_wrong_line_of_the_ground_truth_is_reported(
    truth: str, message: str, meta: bytes, synsets: str, tmp_path: Path
) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "")})
    write_tree(root, {"ILSVRC2012_validation_ground_truth.txt": truth})
    assert message in error_of(ilsvrc12, root, "--synsets", synsets)


@pytest.mark.parametrize("file", ["ILSVRC2012_validation_ground_truth.txt", "val.txt"])
def test_a_truncated_list_is_refused(file: str, meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **(kit(meta, "") if file[0] == "I" else {})})
    lines = (val_list() if file[0] == "v" else (root / file).read_text()).splitlines(keepends=True)
    write_tree(root, {file: "".join(lines[:90])})
    error = error_of(ilsvrc12, root, "--synsets", synsets)
    assert f"{file}: lists the classes of 90 images, but {root / 'val'} has 120, and 30 of them are not listed" in error
    assert "ILSVRC2012_val_00000091.JPEG" in error
    write_tree(root, {file: "".join(lines)})
    check(root, synsets)


def test_a_kit_of_another_data_set_is_refused(meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "")})
    Path(synsets).write_text("n00000001 nothing\n" + "\n".join(SYNSETS))
    assert "meta.mat: has no class n00000001" in error_of(ilsvrc12, root, "--synsets", synsets)
    for content in (b"", b"MATLAB 7.3 MAT-file" + bytes(200), meta[:1000]):
        write_tree(root, {"meta.mat": content})
        assert "meta.mat: not the meta.mat of the kit" in error_of(ilsvrc12, root, "--synsets", synsets)

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from sopdist.data.sources import ilsvrc12

from .test_sources import complaint, find, jpeg, write_tree

RANDOM = np.random.default_rng(0)
WNIDS = [f"n{number:08d}" for number in range(1440764, 1440764 + 3 * 1000, 3)]  # sorted
SYNSETS = [WNIDS[place] for place in RANDOM.permutation(1000)]  # WebVision's order, here an unsorted one
KIT = [WNIDS[place] for place in RANDOM.permutation(1000)]  # by ILSVRC2012_ID - 1, in the real kit unsorted, too
# 120 images: two of each of WebVision's first 50 classes, 20 of others, shuffled.
TRUTH = RANDOM.permutation([*SYNSETS[:50] * 2, *SYNSETS[50:70]]).tolist()
NAMES = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 121)]
IMAGES = {name: jpeg(number) for number, name in enumerate(NAMES)}
WANTED = [(name, SYNSETS.index(wnid)) for name, wnid in zip(NAMES, TRUTH, strict=True) if wnid in SYNSETS[:50]]


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """meta.mat as in the kit: 1000 classes, then 860 inner nodes of the tree, whose IDs come after."""
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
    synsets = np.zeros((1860, 1), dtype=[(name, object) for name in fields])
    for place in range(1860):
        wnid = KIT[place] if place < 1000 else f"n{9000000 + place:08d}"
        children = [] if place < 1000 else [place - 999, place - 998]
        synsets[place, 0] = (float(place + 1), wnid, "a word", "a gloss", float(len(children)), children, 0.0)
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
def test_the_kit_says_the_classes(
    kit_folder: str, image_folder: str, meta: bytes, synsets: str, tmp_path: Path
) -> None:
    check(write_tree(tmp_path / "imagenet", {**flat(image_folder), **kit(meta, kit_folder)}), synsets)


@pytest.mark.parametrize("image_folder", ["val/", "ILSVRC2012_img_val/", ""])
def test_a_folder_for_each_class_says_the_classes(image_folder: str, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", in_class_folders(image_folder))
    write_tree(root, {f"{image_folder}{SYNSETS[0]}/._ILSVRC2012_val_00000001.JPEG": b"x"})  # as macOS leaves them
    check(root, synsets)


@pytest.mark.parametrize("list_folder", ["", "val/"])
def test_a_list_by_sorted_wnid_says_the_classes(list_folder: str, synsets: str, tmp_path: Path) -> None:
    check(write_tree(tmp_path / "imagenet", {**flat("val/"), f"{list_folder}val.txt": val_list()}), synsets)


def test_the_number_of_the_kit_less_one_is_not_the_sorted_label(meta: bytes, synsets: str, tmp_path: Path) -> None:
    """The trap, so that the fixtures above are known to tell the two apart."""
    truth = [KIT.index(wnid) for wnid in TRUTH]
    assert np.mean([KIT[label] == WNIDS[label] for label in truth]) < 0.1
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, ""), "val.txt": "nonsense"})
    check(root, synsets)  # the kit goes before val.txt


def test_all_classes_on_demand(meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "")})
    split = find(ilsvrc12, root, "--synsets", synsets, "--classes-count", "1000")["ilsvrc12"]
    assert split.paths == NAMES
    assert [SYNSETS[label] for label in split.labels["given"]] == TRUTH
    assert len(split.classes) == 1000


@pytest.mark.parametrize("count", ["0", "1001"])
def test_a_count_that_synsets_cannot_give_is_refused(count: str, synsets: str, tmp_path: Path) -> None:
    assert "has 1000 classes" in complaint(ilsvrc12, tmp_path, "--synsets", synsets, "--classes-count", count)


def test_missing_synsets_are_named(tmp_path: Path) -> None:
    assert "gone.txt: cannot be read" in complaint(ilsvrc12, tmp_path, "--synsets", str(tmp_path / "gone.txt"))


def test_no_images_at_all(synsets: str, tmp_path: Path) -> None:
    said = complaint(ilsvrc12, tmp_path, "--synsets", synsets)
    assert f"no ILSVRC2012_val_*.JPEG and no class folders such as {SYNSETS[0]}" in said
    assert str(tmp_path / "ILSVRC2012_img_val") in said


def test_images_of_which_nothing_says_the_classes(meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "data/")})
    (root / "data" / "meta.mat").unlink()
    said = complaint(ilsvrc12, root, "--synsets", synsets)
    assert f"no val.txt in {root}" in said
    assert "missing: meta.mat; looked in" in said


def test_a_list_by_sorted_wnid_needs_all_wnids(synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), "val.txt": val_list()})
    Path(synsets).write_text("\n".join(SYNSETS[:50]))
    assert "has 50; give the whole synsets.txt" in complaint(ilsvrc12, root, "--synsets", synsets)


def test_a_missing_class_folder_is_named(synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", in_class_folders("val/"))
    (root / "val" / SYNSETS[7]).rename(root / "val" / "seven")
    said = complaint(ilsvrc12, root, "--synsets", synsets)
    assert f"1 of 50 class folders are missing, e.g. {SYNSETS[7]}" in said


def test_the_same_name_in_two_class_folders_is_refused(synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", in_class_folders("val/"))
    for wnid in SYNSETS[:2]:
        write_tree(root, {f"val/{wnid}/twice.JPEG": jpeg(0)})
    assert "twice.JPEG have the same name" in complaint(ilsvrc12, root, "--synsets", synsets)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("5\n0\n", "line 2: '0' is not the ILSVRC2012_ID of a class"),
        ("5\n1001\n", "line 2: '1001' is not"),  # an inner node
        ("5\nn01440764\n", "line 2: 'n01440764' is not"),
        ("5\n\n6\n", "line 2: blank"),
    ],
)
def test_a_wrong_line_of_the_ground_truth_is_named(
    truth: str, message: str, meta: bytes, synsets: str, tmp_path: Path
) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "")})
    write_tree(root, {"ILSVRC2012_validation_ground_truth.txt": truth})
    assert message in complaint(ilsvrc12, root, "--synsets", synsets)


@pytest.mark.parametrize("file", ["ILSVRC2012_validation_ground_truth.txt", "val.txt"])
def test_a_list_that_is_cut_short_is_not_a_smaller_set(file: str, meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **(kit(meta, "") if file[0] == "I" else {})})
    lines = (val_list() if file[0] == "v" else (root / file).read_text()).splitlines(keepends=True)
    write_tree(root, {file: "".join(lines[:90])})
    said = complaint(ilsvrc12, root, "--synsets", synsets)
    assert f"{file}: says the classes of 90 images, but {root / 'val'} has 120, and 30 of them are not listed" in said
    assert "ILSVRC2012_val_00000091.JPEG" in said
    write_tree(root, {file: "".join(lines)})
    check(root, synsets)


def test_a_kit_of_another_data_set_is_refused(meta: bytes, synsets: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "imagenet", {**flat("val/"), **kit(meta, "")})
    Path(synsets).write_text("n00000001 nothing\n" + "\n".join(SYNSETS))
    assert "meta.mat: has no class n00000001" in complaint(ilsvrc12, root, "--synsets", synsets)
    for content in (b"", b"MATLAB 7.3 MAT-file" + bytes(200), meta[:1000]):
        write_tree(root, {"meta.mat": content})
        assert "meta.mat: not the meta.mat of the kit" in complaint(ilsvrc12, root, "--synsets", synsets)

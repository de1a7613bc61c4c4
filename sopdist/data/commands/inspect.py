"""Look at a prepared split: what it is, how its classes are filled, how large its images are, what they show.

Sizes and formats come from the headers of 2,000 images drawn at random, or of all with --all. A contact sheet, a PNG
with thumbnails and their labels, is written only if --sheet names a file; where `clean` is known and differs, the label
is red and the true class below it green. Without a label set `clean`, labels are blue that differ from those of the set
that this one was made from. With --index, exactly these samples are shown, in that order, and listed with their keys
and paths: this is how to look at suspects.

    sopdist inspect data/train
    sopdist inspect data/train --sheet cats.png --class cat --labels sym-0.4-seed0
    sopdist inspect data/train --sheet suspects.png --index 3,17,42
"""

from __future__ import annotations

import argparse
import re
import warnings
from pathlib import Path

import numpy as np

from ..checking.inspection import (
    Indices,
    choose,
    histogram_text,
    images_text,
    label_title,
    look_at,
    manifest_text,
    samples_text,
)
from ..errors import DataError
from ..labelling.files import ClassReader, read_indices
from ..labels import CLEAN, GIVEN, UNKNOWN, Labels, LabelSet
from ..manifest import Manifest
from ..split import Split, open_split
from .arguments import local_folder, seed, whole
from .output import progress_bar, write_output

IMAGES = 2000
COUNT = 40
MOST_TILES = 1000  # of a contact sheet: beyond, viewers give up on the file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist inspect`."""
    parser.add_argument("folder", metavar="SPLIT_FOLDER", type=local_folder, help="where the split's manifest.json is")
    parser.add_argument("--labels", metavar="SET", default=GIVEN, help=f"which label set to show ({GIVEN})")
    parser.add_argument("--class", dest="only", metavar="NAME", help="images of this class only, by name or number")
    parser.add_argument(
        "--index", metavar="I,J,...|FILE", help="these samples only; FILE: .npy, or text with a number a line"
    )
    parser.add_argument("--all", action="store_true", help=f"look at the header of every image, not of {IMAGES:,}")
    parser.add_argument("--sheet", metavar="FILE.png", type=Path, help="write a contact sheet")
    parser.add_argument(
        "--count", type=whole(1, MOST_TILES), help=f"samples on the sheet, up to {MOST_TILES} ({COUNT})"
    )
    parser.add_argument("--seed", type=seed, help="another seed, other samples (0)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print the summary; write the contact sheet if one is wanted."""
    _check_options(args)
    with open_split(args.folder) as split:
        label_set = split.labels(args.labels)
        labels = label_set.labels
        candidates = _candidates(args, labels, split.manifest)
        print(manifest_text(split.manifest, split.store.list_labels()) + "\n")
        if args.index is not None:
            print(samples_text(split, labels, candidates) + "\n")
            chosen, how = candidates, f"{len(candidates):,} samples in the order of --index"
        else:
            _print_summary(args, split, labels, candidates)
            chosen = choose(candidates, args.count or COUNT, args.seed or 0)
            how = f"{len(chosen)} of {len(candidates):,} samples (seed {args.seed or 0})"
        if args.sheet:
            _write_sheet(args, split, label_set, chosen)
            print(f"contact sheet: {args.sheet}, {how}")
        else:
            print("no contact sheet was written; --sheet FILE.png writes one")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.sheet and args.sheet.suffix.lower() != ".png":
        args.usage_error(f"--sheet {args.sheet}: is written as PNG, so its name must end with .png")
    if args.index is not None:
        for option, value in (("class", args.only), ("count", args.count), ("seed", args.seed), ("all", args.all)):
            if value not in (None, False):
                args.usage_error(f"--{option} does not go with --index, which names the samples")


def _candidates(args: argparse.Namespace, labels: Labels, manifest: Manifest) -> Indices:
    if args.index is not None:
        return _named(args, manifest.samples)
    if args.only is None:
        return np.arange(len(labels))
    found = np.flatnonzero(labels == ClassReader(manifest.classes).number(args.only, "--class"))
    if not len(found):
        raise DataError(f"--class {args.only}: no sample has this label in label set {args.labels!r}")
    return found


def _named(args: argparse.Namespace, samples: int) -> Indices:
    """The samples of --index."""
    if re.fullmatch(r"\s*-?[0-9]+\s*(,\s*-?[0-9]+\s*)*", args.index, re.ASCII):
        numbers = [int(number) for number in args.index.split(",")]
        for number in numbers:
            if not 0 <= number < samples:
                raise DataError(f"--index {number}: samples are 0 to {samples - 1}")
        found = np.array(numbers)
    elif not Path(args.index).is_file():
        raise DataError(f"--index {args.index}: neither numbers with commas between them nor a file")
    else:
        found = read_indices(Path(args.index), samples)
    if not len(found):
        raise DataError(f"--index {args.index}: names no sample")
    if args.sheet and len(found) > MOST_TILES:
        raise DataError(f"--index {args.index}: {len(found):,} samples; a sheet shows at most {MOST_TILES}")
    return found


def _print_summary(args: argparse.Namespace, split: Split, labels: Labels, candidates: Indices) -> None:
    print(histogram_text(labels, split.manifest.classes, args.labels) + "\n")
    looked_at = candidates if args.all else choose(candidates, IMAGES, args.seed or 0)
    with progress_bar(total=len(looked_at), desc="headers", unit="image", leave=False) as bar:
        looks = []
        for look in look_at(split, looked_at):
            looks.append(look)
            bar.update()
    print(images_text(looks, len(candidates), split.where) + "\n")


def _write_sheet(args: argparse.Namespace, split: Split, label_set: LabelSet, chosen: Indices) -> None:
    try:
        from ..checking.contact_sheet import Tile, draw_sheet
    except ImportError as error:
        raise DataError(f"--sheet needs Pillow ({error}): pip install 'sopdist[data]'") from None
    warnings.filterwarnings("ignore", module=r"PIL\.")  # they name no file; what matters is raised
    manifest = split.manifest
    reference = _reference(split, label_set)
    tiles = []
    for index in chosen.tolist():
        try:
            image: bytes | str = split.image(index)
        except (DataError, OSError) as error:
            image = str(error)
        label = int(label_set.labels[index])
        other = UNKNOWN if reference is None else int(reference.labels[index])
        title, clean, base = label_title(label, manifest.classes, width=100), None, None
        if reference is not None and other not in (UNKNOWN, label):
            instead = label_title(other, manifest.classes, width=100)
            clean, base = (instead, None) if reference.name == CLEAN else (None, f"{reference.name}: {instead}")
        tiles.append(Tile(index, image, title, clean, base))
    text = f"{manifest.dataset}, {manifest.split}: {len(tiles)} samples with label set {args.labels}"
    if args.only is not None:
        text += f", class {args.only}"
    write_output(args.sheet, draw_sheet(tiles, text))


def _reference(split: Split, label_set: LabelSet) -> LabelSet | None:
    """What the labels are held against: the truth, or else the set that they were made from."""
    known = split.store.list_labels()
    base = label_set.recipe.get("from") or label_set.recipe.get("base")  # of a noise draw, of a file
    name = CLEAN if CLEAN in known else base
    return split.labels(name) if name in known else None

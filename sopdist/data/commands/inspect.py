"""Look at a prepared split: what it is, how its classes are filled, how large its images are, what they show.

Sizes and formats come from the headers of 2,000 images drawn at random, or of all with --all. A contact sheet, a PNG
with thumbnails and their labels, is written only if --sheet names a file; where `clean` is known and differs, the label
is red and the true class below it green.

    sopdist inspect data/train
    sopdist inspect data/train --sheet cats.png --class cat --labels sym-0.4-seed0
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..checking.inspection import Indices, choose, histogram_text, images_text, look_at, manifest_text
from ..errors import DataError
from ..labelling.diff import class_title
from ..labelling.files import ClassReader
from ..labels import CLEAN, GIVEN, UNKNOWN, Labels
from ..split import Split, open_split
from .output import write_output

IMAGES = 2000
COUNT = 40
MOST_TILES = 1000  # of a contact sheet: beyond, viewers give up on the file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist inspect`."""
    parser.add_argument("folder", metavar="SPLIT_FOLDER", type=Path, help="where the split's manifest.json is")
    parser.add_argument("--labels", metavar="SET", default=GIVEN, help=f"which label set to show ({GIVEN})")
    parser.add_argument("--class", dest="only", metavar="NAME", help="images of this class only, by name or number")
    parser.add_argument("--all", action="store_true", help=f"look at the header of every image, not of {IMAGES:,}")
    parser.add_argument("--sheet", metavar="FILE.png", type=Path, help="write a contact sheet")
    parser.add_argument("--count", type=int, default=COUNT, help=f"samples on the sheet, up to {MOST_TILES} ({COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other samples (0)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print the summary; write the contact sheet if one is wanted."""
    _check_options(args)
    with open_split(args.folder) as split:
        manifest = split.manifest
        labels = split.labels(args.labels).labels
        print(manifest_text(manifest, split.store.list_labels()) + "\n")
        print(histogram_text(labels, manifest.classes, args.labels) + "\n")
        candidates = _candidates(args, labels, manifest.classes)
        looked_at = candidates if args.all else choose(candidates, IMAGES, args.seed)
        looks = list(tqdm(look_at(split, looked_at), total=len(looked_at), desc="headers", unit="image", leave=False))
        print(images_text(looks, len(candidates), split.where) + "\n")
        if args.sheet:
            chosen = choose(candidates, args.count, args.seed)
            _write_sheet(args, split, labels, chosen)
            print(f"contact sheet: {args.sheet}, {len(chosen)} of {len(candidates):,} samples (seed {args.seed})")
        else:
            print("no contact sheet was written; --sheet FILE.png writes one")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if not 1 <= args.count <= MOST_TILES:
        args.usage_error(f"--count {args.count}: must be from 1 to {MOST_TILES}")
    if args.seed < 0:
        args.usage_error(f"--seed {args.seed}: must not be negative")
    if args.sheet and args.sheet.suffix.lower() != ".png":
        args.usage_error(f"--sheet {args.sheet}: is written as PNG, so its name must end with .png")


def _candidates(args: argparse.Namespace, labels: Labels, classes: tuple[str, ...]) -> Indices:
    if args.only is None:
        return np.arange(len(labels))
    found = np.flatnonzero(labels == ClassReader(classes).number(args.only, "--class"))
    if not len(found):
        raise DataError(f"--class {args.only}: no sample has this label in label set {args.labels!r}")
    return found


def _write_sheet(args: argparse.Namespace, split: Split, labels: Labels, chosen: Indices) -> None:
    try:
        from ..checking.contact_sheet import Tile, draw_sheet
    except ImportError as error:
        raise DataError(f"--sheet needs Pillow ({error}): pip install 'sopdist[data]'") from None
    warnings.filterwarnings("ignore", module=r"PIL\.")  # they name no file; what matters is raised
    manifest = split.manifest
    clean = split.labels(CLEAN).labels if CLEAN in split.store.list_labels() else np.full_like(labels, UNKNOWN)

    def title(label: int) -> str:
        return "unknown" if label == UNKNOWN else class_title(label, manifest.classes, width=100)

    tiles = []
    for index in chosen.tolist():
        try:
            image: bytes | str = split.image(index)
        except (DataError, OSError) as error:
            image = str(error)
        label, true = int(labels[index]), int(clean[index])
        tiles.append(Tile(index, image, title(label), title(true) if true not in (UNKNOWN, label) else None))
    text = f"{manifest.dataset}, {manifest.split}: {len(tiles)} samples with label set {args.labels}"
    if args.only is not None:
        text += f", class {args.only}"
    write_output(args.sheet, draw_sheet(tiles, text))

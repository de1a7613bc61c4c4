"""Show the contents of a prepared split: samples per class, image sizes and formats, and a contact sheet.

Sizes and formats are read from the headers of 2,000 random images, or of all images with --all. --sheet FILE writes a
contact sheet: a PNG of thumbnails with their labels. A label that differs from `clean` is red, with the clean label
below it in green. Without a label set `clean`, a label that differs from the label set it was derived from is blue.
--index shows exactly these samples, in the given order, and lists their keys and paths. Use it to look at suspects.

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

from ...data.checking.inspection import Indices, choose, read_headers
from ...data.labelling.files import ClassReader, read_indices
from ...data.labels import CLEAN, GIVEN, UNKNOWN, Labels, LabelSet
from ...data.manifest import Manifest
from ...data.split import Split, open_split
from ...errors import DataError
from ..arguments import integer, local_folder, seed
from ..output import progress_bar, write_output
from .inspect_text import histogram_text, images_text, manifest_text, samples_text
from .labels_text import label_title

HEADERS = 2000  # images whose headers are read without --all
COUNT = 40  # thumbnails on a contact sheet by default
MAX_TILES = 1000  # thumbnails on a contact sheet: image viewers fail on larger files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist inspect`."""
    parser.add_argument("folder", metavar="SPLIT_FOLDER", type=local_folder, help="folder with a manifest.json")
    parser.add_argument("--labels", metavar="SET", default=GIVEN, help=f"label set to show ({GIVEN})")
    parser.add_argument("--class", dest="only", metavar="NAME", help="only samples of this class (name or index)")
    parser.add_argument(
        "--index", metavar="I,J,...|FILE", help="only these samples; FILE: .npy, or text with one index per line"
    )
    parser.add_argument("--all", action="store_true", help=f"read the header of every image, not just {HEADERS:,}")
    parser.add_argument("--sheet", metavar="FILE.png", type=Path, help="write a contact sheet")
    parser.add_argument(
        "--count", type=integer(1, MAX_TILES), help=f"samples on the sheet, at most {MAX_TILES} ({COUNT})"
    )
    parser.add_argument("--seed", type=seed, help="random seed of the choice of samples (0)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print the summary; write the contact sheet if requested."""
    _check_options(args)
    with open_split(args.folder) as split:
        label_set = split.labels(args.labels)
        labels = label_set.labels
        candidates = _candidates(args, labels, split.manifest)
        print(manifest_text(split.manifest, split.store.list_labels()) + "\n")
        if args.index is not None:
            print(samples_text(split, labels, candidates) + "\n")
            chosen, which = candidates, f"{len(candidates):,} samples in the order of --index"
        else:
            _print_summary(args, split, labels, candidates)
            chosen = choose(candidates, args.count or COUNT, args.seed or 0)
            which = f"{len(chosen)} of {len(candidates):,} samples (seed {args.seed or 0})"
        if args.sheet:
            _write_sheet(args, split, label_set, chosen)
            print(f"contact sheet: {args.sheet}, {which}")
        else:
            print("no contact sheet was written; --sheet FILE.png writes one")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.sheet and args.sheet.suffix.lower() != ".png":
        args.usage_error(f"--sheet {args.sheet}: the sheet is a PNG file, so its name must end with .png")
    if args.index is not None:
        for option, value in (("class", args.only), ("count", args.count), ("seed", args.seed), ("all", args.all)):
            if value not in (None, False):
                args.usage_error(f"--{option} cannot be used with --index, which names the samples")


def _candidates(args: argparse.Namespace, labels: Labels, manifest: Manifest) -> Indices:
    if args.index is not None:
        return _requested(args, manifest.samples)
    if args.only is None:
        return np.arange(len(labels))
    found = np.flatnonzero(labels == ClassReader(manifest.classes).parse(args.only, "--class"))
    if not len(found):
        raise DataError(f"--class {args.only}: no sample has this label in label set {args.labels!r}")
    return found


def _requested(args: argparse.Namespace, samples: int) -> Indices:
    """Samples of --index."""
    if re.fullmatch(r"\s*-?[0-9]+\s*(,\s*-?[0-9]+\s*)*", args.index, re.ASCII):
        indices = [int(index) for index in args.index.split(",")]
        for index in indices:
            if not 0 <= index < samples:
                raise DataError(f"--index {index}: must be from 0 to {samples - 1}")
        found = np.array(indices)
    elif not Path(args.index).is_file():
        raise DataError(f"--index {args.index}: neither comma-separated indices nor a file")
    else:
        found = read_indices(Path(args.index), samples)
    if not len(found):
        raise DataError(f"--index {args.index}: contains no samples")
    if args.sheet and len(found) > MAX_TILES:
        raise DataError(f"--index {args.index}: {len(found):,} samples; a sheet shows at most {MAX_TILES}")
    return found


def _print_summary(args: argparse.Namespace, split: Split, labels: Labels, candidates: Indices) -> None:
    print(histogram_text(labels, split.manifest.classes, args.labels) + "\n")
    chosen = candidates if args.all else choose(candidates, HEADERS, args.seed or 0)
    with progress_bar(total=len(chosen), desc="headers", unit="image", leave=False) as bar:
        results = []
        for result in read_headers(split, chosen):
            results.append(result)
            bar.update()
    print(images_text(results, len(candidates), split.where) + "\n")


def _write_sheet(args: argparse.Namespace, split: Split, label_set: LabelSet, chosen: Indices) -> None:
    try:
        from ...data.checking.contact_sheet import Tile, draw_sheet
    except ImportError as error:
        raise DataError(f"--sheet needs Pillow ({error}): pip install 'sopdist[data]'") from None
    warnings.filterwarnings("ignore", module=r"PIL\.")  # they do not name the file; real errors are raised
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
            expected = label_title(other, manifest.classes, width=100)
            clean, base = (expected, None) if reference.name == CLEAN else (None, f"{reference.name}: {expected}")
        tiles.append(Tile(index, image, title, clean, base))
    text = f"{manifest.dataset}, {manifest.split}: {len(tiles)} samples with label set {args.labels}"
    if args.only is not None:
        text += f", class {args.only}"
    write_output(args.sheet, draw_sheet(tiles, text))


def _reference(split: Split, label_set: LabelSet) -> LabelSet | None:
    """Label set to compare with: `clean` if it exists, else the one that this label set was derived from."""
    known = split.store.list_labels()
    base = label_set.recipe.get("from") or label_set.recipe.get("base")  # of `labels noise` and `labels add`
    name = CLEAN if CLEAN in known else base
    return split.labels(name) if name in known else None

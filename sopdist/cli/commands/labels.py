"""Manage the label sets of a split: labels/NAME.npy with one integer per sample in index order, and NAME.json.

Images are written once. Label sets are overlays on them, and a run trains on the label set that its config names.
`given` holds the labels that came with the data set. They are also stored in the shards and cannot be changed. `clean`
holds the clean labels where they are known.

    sopdist labels list  data/train
    sopdist labels noise data/train symmetric --rate 0.4 --seed 0     # writes sym-0.4-seed0
    sopdist labels add   data/train relabelled --from fixes.csv --base given --source "two annotators"
    sopdist labels diff  data/train given relabelled
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...data.labelling import noise as label_noise
from ...data.labelling.diff import compare_labels, diff_rows
from ...data.labelling.files import NAMES, NUMBERS, ClassReader, read_label_file, read_matrix
from ...data.labels import CLEAN, FOLDER, GIVEN, UNKNOWN, Labels, check_name, list_labels, read_labels, write_labels
from ...data.manifest import Manifest, read_manifest
from ...errors import DataError
from ...files import sha256_of
from ..arguments import fraction, local_folder, seed
from ..output import cannot_write, write_output
from ..tables import format_table
from .labels_text import class_title, diff_text

ADD = """\
Write a label set from a file. The file is one of
  .npy         N integers, in index order;
  .txt, .csv   N lines with one class each, as index or name, in index order;
  .csv, .txt   a table with a header line and the columns `label` and one of `index`, `key` or `path` (the first of them
               that exists is used; other columns are ignored). A key is the sample's key in the shards; a path is the
               image's path in the source, relative to the --root of `sopdist prepare`.
A table may leave samples out: their labels are copied from --base, or are unknown (-1)."""
NOISE = """\
Add synthetic label noise and write it as a label set, with the recipe and the measured noise rate. KIND is one of
  symmetric    with probability --rate, resample the label from all K classes: --rate x (1 - 1/K) become wrong;
  exclusive    with probability --rate, resample the label from the K - 1 other classes: --rate become wrong;
  pair         with probability --rate, replace the class by its pair in --pairs or --preset (alias: asymmetric);
  matrix       replace label k by j with the probability in row k, column j of --matrix.
The result depends only on the labels, the kind, the rate and the seed, not on the machine or on library versions.
Unknown labels stay unknown.
Presets:
""" + "\n".join(f"  {name:<12} {meaning}" for name, meaning in label_noise.PRESETS.items())
LIST = "Name, samples, unknown labels, fraction that differs from `clean` where both are known, and origin."
DIFF = """\
Compare two label sets: how many labels differ, overall and per class, and which label became which. Samples whose label
is unknown in one of the two sets are left out and counted separately."""
REMOVE = "Delete a label set. `given` belongs to the shards and cannot be removed."

KINDS = {"symmetric": "sym", "exclusive": "excl", "pair": "pair", "asymmetric": "pair", "matrix": "matrix"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist labels`."""
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    add = _subcommand(commands, "add", "write a label set from a file", ADD, _add)
    add.add_argument("name", metavar="NAME", help="name of the label set")
    add.add_argument("--from", dest="file", metavar="FILE", type=Path, required=True, help="file with the labels")
    add.add_argument("--base", metavar="SET", help="label set for the samples that a table leaves out")
    add.add_argument("--source", metavar="TEXT", help="a note on the origin of the labels, stored in NAME.json")
    add.add_argument(
        "--as", dest="written_as", choices=(NUMBERS, NAMES), help="only needed if class names are also numbers"
    )
    noise = _subcommand(commands, "noise", "add synthetic label noise", NOISE, _noise)
    noise.add_argument("kind", metavar="KIND", choices=list(KINDS), help="symmetric, exclusive, pair or matrix")
    noise.add_argument("--rate", type=fraction, help="noise probability, 0 to 1; for all kinds but matrix")
    noise.add_argument("--seed", type=seed, default=0, help="random seed of the noise (0)")
    noise.add_argument(
        "--from", dest="base", metavar="SET", help="label set to start from (clean if present, else given)"
    )
    noise.add_argument("--name", help="name of the new label set (such as sym-0.4-seed0, matrix-FILE-seed0)")
    noise.add_argument("--pairs", help="for pair: FROM:TO,FROM:TO,... as class index or name")
    noise.add_argument(
        "--preset", choices=list(label_noise.PRESETS), help="for pair: pairs from the literature, see above"
    )
    noise.add_argument("--matrix", metavar="FILE", type=Path, help="for matrix: a K x K matrix in .npy, .csv or .txt")
    noise.set_defaults(usage_error=noise.error)
    for writer in (add, noise):
        writer.add_argument("--overwrite", action="store_true", help="replace an existing label set of this name")
    _subcommand(commands, "list", "list all label sets", LIST, _list)
    diff = _subcommand(commands, "diff", "compare two label sets", DIFF, _diff)
    diff.add_argument("before", metavar="A", help="a label set")
    diff.add_argument("after", metavar="B", help="another label set")
    diff.add_argument(
        "--csv", metavar="FILE", type=Path, help="write every transition: from,from_name,to,to_name,count"
    )
    remove = _subcommand(commands, "remove", "delete a label set", REMOVE, _remove)
    remove.add_argument("name", metavar="NAME", help="name of the label set")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    subcommand: Callable[[argparse.Namespace, Manifest], None] = args.subcommand
    subcommand(args, read_manifest(args.folder))
    return 0


def _subcommand(
    commands: Any, name: str, summary: str, description: str, action: Callable[[argparse.Namespace, Manifest], None]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="SPLIT_FOLDER", type=local_folder, help="folder with a manifest.json")
    parser.set_defaults(subcommand=action)
    return parser


def _add(args: argparse.Namespace, manifest: Manifest) -> None:
    base = read_labels(args.folder, manifest, args.base) if args.base else None
    found = read_label_file(args.file, args.folder, manifest, base.labels if base else None, args.written_as)
    recipe: dict[str, Any] = {"file": args.file.name, "file_sha256": sha256_of(args.file), "named": found.named}
    if base:
        recipe |= {"base": base.name, "base_sha256": base.sha256}
    if args.source:
        recipe["source"] = args.source
    written = _store(args, manifest, args.name, found.labels, recipe)
    unknown = int((found.labels == UNKNOWN).sum())
    print(f"{written}: {found.named:,} of {manifest.samples:,} labels from {args.file}, {unknown:,} unknown")


def _noise(args: argparse.Namespace, manifest: Manifest) -> None:
    kind = "pair" if args.kind == "asymmetric" else args.kind
    _check_noise_options(args, kind)
    start = args.base or (CLEAN if CLEAN in list_labels(args.folder) else GIVEN)
    base = read_labels(args.folder, manifest, start)
    classes = len(manifest.classes)
    recipe: dict[str, Any] = {"kind": kind, "rate": args.rate, "seed": args.seed, "from": start}
    if kind == "matrix":
        labels = label_noise.draw_matrix(base.labels, read_matrix(args.matrix, classes), args.seed)
        recipe |= {"matrix": args.matrix.name, "matrix_sha256": sha256_of(args.matrix)}
    elif kind == "pair":
        pairs = label_noise.preset_pairs(args.preset, classes) if args.preset else _pairs(args.pairs, manifest)
        recipe["pairs"] = [list(pair) for pair in pairs.items()]
        labels = label_noise.draw_pairs(base.labels, pairs, classes, args.rate, args.seed)
        print("pairs: " + _pairs_text(pairs, manifest))
    else:
        draw = label_noise.draw_symmetric if kind == "symmetric" else label_noise.draw_exclusive
        labels = draw(base.labels, classes, args.rate, args.seed)
    changed, rate = int((labels != base.labels).sum()), label_noise.measured_rate(base.labels, labels)
    recipe |= {"from_sha256": base.sha256, "changed": changed, "measured_rate": rate}
    written = _store(args, manifest, args.name or _default_name(args, kind), labels, recipe)
    known = int((labels != UNKNOWN).sum())
    print(f"{written}: {changed:,} of {known:,} known labels differ from {start} ({rate:.2%})")


def _check_noise_options(args: argparse.Namespace, kind: str) -> None:
    """Each kind has its own options; an option that would be ignored is an error."""
    options_of: dict[str, list[set[str]]] = {"matrix": [{"matrix"}], "pair": [{"rate"}, {"pairs", "preset"}]}
    needs = options_of.get(kind, [{"rate"}])
    present = {option for option in ("rate", "matrix", "pairs", "preset") if getattr(args, option) is not None}
    for options in needs:  # exactly one option of each set
        if len(present & options) != 1:
            args.usage_error(f"{args.kind} noise needs " + " or ".join(f"--{option}" for option in sorted(options)))
    for option in present.difference(*needs):
        args.usage_error(f"--{option} cannot be used with {args.kind} noise")


def _pairs(text: str, manifest: Manifest) -> dict[int, int]:
    reader, pairs = ClassReader(manifest.classes), dict[int, int]()
    for pair in text.split(","):
        where = f"--pairs {pair.strip()!r}"
        source, colon, target = (part.strip() for part in pair.partition(":"))
        if not colon:
            raise DataError(f"{where}: expected FROM:TO; use the index of classes with a comma or colon in their names")
        label = reader.parse(source, where)
        if label in pairs:
            raise DataError(f"{where}: class {source} already has a pair; use --matrix for several targets")
        pairs[label] = reader.parse(target, where)
        if pairs[label] == label:
            raise DataError(f"{where}: the class is paired with itself")
    return pairs


def _pairs_text(pairs: Mapping[int, int], manifest: Manifest) -> str:
    shown = [f"{class_title(a, manifest.classes)} -> {class_title(b, manifest.classes)}" for a, b in pairs.items()]
    return ", ".join(shown[:20]) + (f", and {len(shown) - 20} more" if len(shown) > 20 else "")


def _default_name(args: argparse.Namespace, kind: str) -> str:
    what = args.matrix.stem if kind == "matrix" else f"{args.rate:.12g}"
    return f"{KINDS[kind]}-{what}-seed{args.seed}"


def _store(args: argparse.Namespace, manifest: Manifest, name: str, labels: Labels, recipe: dict[str, Any]) -> str:
    """Write the label set, unless it would silently replace a different one. Returns the start of a message."""
    _refuse_given(name, "the shards contain the same labels. Choose another name")
    try:
        check_name(name)
    except DataError as error:
        raise DataError(str(error) + ("" if args.name else "; choose another with --name")) from None
    if name in list_labels(args.folder) and not args.overwrite:
        try:
            existing = read_labels(args.folder, manifest, name)
        except DataError as error:
            raise DataError(f"{error}; --overwrite replaces it") from None
        if (existing.labels != labels).any():
            raise DataError(
                f"{args.folder}: label set {name!r} already exists, with other labels; choose another name, or replace "
                "it with --overwrite"
            )
        return f"{name} already exists, with the same labels"
    with cannot_write(args.folder / FOLDER / name):
        write_labels(args.folder, manifest, name, labels, recipe)
    return f"wrote {name}"


def _list(args: argparse.Namespace, manifest: Manifest) -> None:
    names = list_labels(args.folder)
    clean = None
    rows = []
    for name in sorted(names, key=lambda name: (name != CLEAN, name)):  # clean first: the others are compared with it
        try:
            found = read_labels(args.folder, manifest, name)
        except DataError as error:
            rows.append([name, "", "", "", f"DAMAGED: {error}"])
            continue
        if name == CLEAN:
            clean = found.labels
        wrong = "-" if clean is None else f"{label_noise.measured_rate(clean, found.labels):.2%}"
        unknown = int((found.labels == UNKNOWN).sum())
        rows.append([name, f"{len(found.labels):,}", f"{unknown:,}", wrong, _recipe_text(found.recipe)])
    print(format_table(["name", "samples", "unknown", "wrong", "from"], rows, left=(0, 4)))
    if clean is None:
        print("\nwrong: not known without a label set `clean`")


def _recipe_text(recipe: Mapping[str, Any], width: int = 80) -> str:
    if "kind" in recipe and "seed" in recipe:
        what = recipe["matrix"] if recipe["kind"] == "matrix" else recipe["rate"]
        return f"{recipe['kind']} noise, {what}, of {recipe['from']}, seed {recipe['seed']}"
    text = ", ".join(f"{key} {value}" for key, value in recipe.items() if not key.endswith("sha256"))
    return text if len(text) <= width else text[: width - 3] + "..."


def _diff(args: argparse.Namespace, manifest: Manifest) -> None:
    names, classes = (args.before, args.after), manifest.classes
    before, after = (read_labels(args.folder, manifest, name).labels for name in names)
    diff = compare_labels(before, after, len(classes))
    print(diff_text(diff, names, classes))
    if args.csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, ("from", "from_name", "to", "to_name", "count"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(diff_rows(diff, classes))
        write_output(args.csv, text.getvalue().encode(errors="backslashreplace"))


def _remove(args: argparse.Namespace, manifest: Manifest) -> None:  # noqa: ARG001 - only a split has label sets
    _refuse_given(args.name, "it belongs to the shards and cannot be removed")
    if args.name not in list_labels(args.folder):
        raise DataError(f"{args.folder}: no label set {args.name!r}; available: {', '.join(list_labels(args.folder))}")
    with cannot_write(args.folder / FOLDER / args.name):
        for suffix in (".json", ".npy"):  # in this order: an interrupt never leaves a recipe without its array
            (args.folder / FOLDER / (args.name + suffix)).unlink(missing_ok=True)
    print(f"removed {args.name}")


def _refuse_given(name: str, why: str) -> None:
    if name == GIVEN:
        raise DataError(f"label set {GIVEN!r} holds the labels that came with the data set: {why}")

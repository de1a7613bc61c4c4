"""Export the network or the noise table of a checkpoint for use elsewhere. Verifies all files of the checkpoint first.

  network   model.safetensors and config.json, for sopdist.models.load_exported("DIR") and, if the network comes from
            timm, for timm.create_model("local-dir:DIR", pretrained=True)
  onnx      model.onnx, for any batch size; mean, std and class names are in its metadata
  noise     noise.parquet: one row per sample with score, label, flag, proposed label, u and the largest entries of v

Checkpoints contain neither class names nor labels. They are read from the split that the run was trained on, found
through its config or --data; without it, class names, labels and proposed labels are omitted. onnx and noise need more
packages: pip install 'sopdist[export]'.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ... import __version__
from ...checkpoint import names
from ...checkpoint.checkpoint import Checkpoint, open_checkpoint
from ...checkpoint.folder import find_checkpoint, is_complete, name_of, verify_checkpoint
from ...config import build
from ...data.augment.recipes import find_recipe
from ...data.settings import DataSettings
from ...errors import ConfigError, DataError
from ...export import require_packages
from ...export.network import describe, write_network
from ...export.noise_table import NAME as NOISE_FILE
from ...export.noise_table import TOP, write_noise
from ...export.onnx import write_onnx
from ...export.training_split import TrainingSplit, find_training_split
from ...methods import DEFAULT, METHODS, Method
from ...models.exported import build_network
from ...models.settings import ModelSettings
from ...train.config import upgrade
from ..arguments import integer, local_folder
from ..output import cannot_write
from ..units import format_bytes

_PACKAGES: dict[str, tuple[str, ...]] = {  # what can be exported, and the packages it needs
    "network": (),
    "onnx": ("onnx", "onnxscript"),
    "noise": ("pyarrow",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint export`."""
    about = "use the checkpoint of the run's best network so far, instead of the newest"
    parser.add_argument("--best", action="store_true", help=about)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write to")
    about = f"what to export, separated by commas: {', '.join(_PACKAGES)} (default: network)"
    parser.add_argument("--what", metavar="LIST", type=_what_list, default=["network"], help=about)
    about = "the split that the run was trained on, if it has moved since"
    parser.add_argument("--data", metavar="SPLIT_FOLDER", type=local_folder, help=about)
    about = "label set to compare with (default: the one used in training, which must not have changed)"
    parser.add_argument("--labels", metavar="SET", help=about)
    about = f"entries of v per row of {NOISE_FILE} ({TOP})"
    parser.add_argument("--top", metavar="N", type=integer(1, 10_000), default=TOP, help=about)
    parser.add_argument("--force", action="store_true", help="replace files of the same names in DIR")


def run(args: argparse.Namespace) -> int:
    """`sopdist checkpoint export`; prints the files it wrote."""
    for what in args.what:
        require_packages(*_PACKAGES[what], what=what)
    folder = find_best(args.folder) if args.best else find_checkpoint(args.folder)
    _check_out(args.out, force=args.force)
    saved = verify_checkpoint(folder)
    if "noise" in args.what and "noise" not in saved.table_names:
        raise DataError(f"{folder}: has no noise table to export: the method it was trained with does not use one")
    tree = config_of(saved)
    data = build(DataSettings, tree["data"], "data.")
    split = find_training_split(saved.fingerprint, data, args.data, args.labels)
    if split.missing:
        print(f"class names, labels and proposed labels are omitted: {split.missing}")
    with cannot_write(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        written = _write(args, saved, tree, data, split)
    for path in written:
        print(f"{path}  {format_bytes(path.stat().st_size)}")
    return 0


def find_best(path: Path) -> Path:
    """The checkpoint of the run's best network so far."""
    newest = open_checkpoint(find_checkpoint(path))
    step = int(newest.index.about.get("best_step", -1))
    best = newest.folder.with_name(name_of(step))
    if step < 0:
        raise DataError(
            f"{path}: has no best network: no split was named to select it (`val`, or evaluate.best), or the "
            "checkpoint has format 1; omit --best"
        )
    if not is_complete(best):
        raise DataError(f"{path}: its best network is from step {step:,}, which has no checkpoint; omit --best")
    return best


def config_of(saved: Checkpoint) -> dict[str, Any]:
    """The config of the run, from the checkpoint or, for format 1, from the run's folder."""
    tree: Any = saved.config
    if not tree:
        path = Path(os.path.abspath(saved.folder)).parent.parent / "config.yaml"
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(
                f"{saved.folder}: has format {saved.format}, which does not contain the config, and the run's config "
                f"cannot be read ({error}); export it from inside its run"
            ) from None
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("model", "data")):
        raise DataError(f"{saved.folder}: its config lacks the section model or data")
    return tree


def _write(
    args: argparse.Namespace, saved: Checkpoint, tree: dict[str, Any], data: DataSettings, split: TrainingSplit
) -> list[Path]:
    written: list[Path] = []
    if {"network", "onnx"} & set(args.what):
        settings, classes = build(ModelSettings, tree["model"], "model."), int(saved.fingerprint["classes"])
        exported = describe(settings, find_recipe(data.recipe), classes, split.label_names)
        exported = replace(exported, step=saved.step, epoch=saved.epoch)
        try:
            network = build_network(exported, dict(_method_of(tree).backbone_weights(saved.network())))
        except ConfigError as error:
            raise DataError(f"{saved.folder}: {error}") from None
        if "network" in args.what:
            written += write_network(args.out, network, exported)
        if "onnx" in args.what:
            written += write_onnx(args.out, network, exported)
    if "noise" in args.what:
        about = {
            "version": __version__,
            "step": saved.step,
            "epoch": saved.epoch,
            "label_set": split.label_set or None,
            "label_names": None if split.label_names is None else list(split.label_names),
        }
        path = args.out / NOISE_FILE
        onset = saved.section(names.METHOD).get("onset")
        write_noise(path, saved.table("noise"), split.labels, top=args.top, about=about, onset=onset)
        written.append(path)
    return written


def _method_of(tree: dict[str, Any]) -> Method:
    """The method of the run."""
    section = upgrade(tree).get("method") or {}
    kind = METHODS.get(section.get("name", DEFAULT)) if isinstance(section, dict) else None
    if kind is None:
        raise ConfigError(f"its config has a method that is unknown here: {section!r}")
    return kind(build(kind.Settings, section, "method."))


def _check_out(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out}: is a file; name a folder")
    if not force and out.is_dir() and any(out.iterdir()):
        raise DataError(f"--out {out}: is not empty; --force replaces files of the same names in it")


def _what_list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _PACKAGES:
            raise argparse.ArgumentTypeError(f"{name!r} cannot be exported; must be one of {', '.join(_PACKAGES)}")
    return list(dict.fromkeys(names))

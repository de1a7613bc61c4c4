"""Write what is in a checkpoint for use elsewhere, after all of its files have been verified.

  network   model.safetensors and config.json, for sopdist.models.load_exported("DIR") and, if the network is one of
            timm's, for timm.create_model("local-dir:DIR", pretrained=True)
  onnx      model.onnx, for any number of images; mean, std and names of classes in its metadata
  noise     noise.parquet: a row a sample with score, label, flag, proposed label, u and the largest entries of v

Names of classes and labels are in no checkpoint. They are taken from the split that the run was trained on, where its
config says or --data; without it, names, labels and proposed labels are left out. onnx and noise need more packages:
pip install 'sopdist[export]'.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ... import __version__
from ...config import ConfigError, build
from ...data.augment.recipes import find_recipe
from ...data.commands.arguments import local_folder, whole
from ...data.commands.output import cannot_write
from ...data.errors import DataError
from ...data.settings import DataSettings
from ...models.exported import filled
from ...models.settings import ModelSettings
from ..export.describing import describe
from ..export.extras import need
from ..export.network_folder import write_network
from ..export.noise_file import NAME as NOISE_FILE
from ..export.noise_file import TOP, write_noise
from ..export.onnx_file import write_onnx
from ..export.split_at_hand import SplitAtHand, find_split
from ..folder import verify_checkpoint
from ..saved import Saved
from .finding import WHICH, find_best, find_one
from .sizes import size_text

_WHAT: dict[str, tuple[str, ...]] = {  # and the packages that each needs
    "network": (),
    "onnx": ("onnx", "onnxscript"),
    "noise": ("pyarrow",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint export`."""
    parser.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=WHICH)
    parser.add_argument("--best", action="store_true", help="of a run, the checkpoint of its best network so far")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write to")
    about = f"what to write, with commas: {', '.join(_WHAT)} (default: network)"
    parser.add_argument("--what", metavar="LIST", type=_parts, default=["network"], help=about)
    about = "the split that the run was trained on, if it is not where the run's config says"
    parser.add_argument("--data", metavar="SPLIT_FOLDER", type=local_folder, help=about)
    about = "label set to compare with (default: the one of the training, which must not have changed)"
    parser.add_argument("--labels", metavar="SET", help=about)
    about = f"entries of v in a row of {NOISE_FILE} ({TOP})"
    parser.add_argument("--top", metavar="N", type=whole(1, 10_000), default=TOP, help=about)
    parser.add_argument("--force", action="store_true", help="replace files of the same names in DIR")


def run(args: argparse.Namespace) -> int:
    """Export; names what it wrote."""
    for what in args.what:
        need(*_WHAT[what], what=what)
    folder = find_best(args.folder) if args.best else find_one(args.folder)
    _check_out(args.out, force=args.force)
    saved = verify_checkpoint(folder)
    if "noise" in args.what and not saved.has_noise:
        raise DataError(f"{folder}: has no noise table to export; it was trained without one (objective.name = ce)")
    tree = config_of(saved)
    data = build(DataSettings, tree["data"], "data.")
    split = find_split(saved.fingerprint, data, args.data, args.labels)
    if split.missing:
        print(f"names of classes, labels and proposed labels are left out: {split.missing}")
    with cannot_write(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        written = _write(args, saved, tree, data, split)
    for path in written:
        print(f"{path}  {size_text(path.stat().st_size)}")
    return 0


def config_of(saved: Saved) -> dict[str, Any]:
    """The config of the run: in the checkpoint, or, of the old format, in the run's folder."""
    tree: Any = saved.config
    if not tree:
        path = Path(os.path.abspath(saved.folder)).parent.parent / "config.yaml"
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(
                f"{saved.folder}: is of format {saved.format}, which has no config of its own, and the one of its run "
                f"cannot be read ({error}); export it from inside of its run"
            ) from None
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("model", "data")):
        raise DataError(f"{saved.folder}: its config has no sections model and data")
    return tree


def _write(
    args: argparse.Namespace, saved: Saved, tree: dict[str, Any], data: DataSettings, split: SplitAtHand
) -> list[Path]:
    written: list[Path] = []
    if {"network", "onnx"} & set(args.what):
        settings, classes = build(ModelSettings, tree["model"], "model."), int(saved.fingerprint["classes"])
        exported = describe(settings, find_recipe(data.recipe), classes, split.label_names)
        exported = replace(exported, step=saved.step, epoch=saved.epoch)
        try:
            network = filled(exported, saved.network())
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
        write_noise(path, saved.noise(), split.labels, top=args.top, about=about)
        written.append(path)
    return written


def _check_out(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out}: is a file; name a folder")
    if not force and out.is_dir() and any(out.iterdir()):
        raise DataError(f"--out {out}: is not empty; --force replaces files of the same names in it")


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _WHAT:
            raise argparse.ArgumentTypeError(f"{name!r} cannot be exported; there is {', '.join(_WHAT)}")
    return list(dict.fromkeys(names))

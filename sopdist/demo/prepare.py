"""Everything the demo needs before it trains: required packages, the output folder, and digits with wrong labels.

This file imports only packages that sopdist always has, so that `check_installed` can report the others.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

from ..cli.output import cannot_write
from ..data.labelling.noise import measured_rate
from ..data.labels import CLEAN
from ..data.split import open_split
from ..errors import DataError
from ..files import write_atomic

REQUIRED = ("sklearn", "PIL", "yaml", "safetensors", "accelerate")
REQUIRED_BY_LAUNCHER = {"deepspeed": ("deepspeed", "transformers"), "torchrun": ()}
MARKER = ".gitignore"  # hides the folder from git and identifies it as a demo folder
_MARKER_TEXT = "# Created by `sopdist demo`, which replaces its runs in this folder.\n*\n"
_OLD_MARKER_TEXT = "# Made by `sopdist demo`, which replaces its runs in here.\n*\n"  # of earlier versions


def default_launcher() -> str:
    """DeepSpeed, if it is installed."""
    return "torchrun" if _missing(REQUIRED_BY_LAUNCHER["deepspeed"]) else "deepspeed"


def check_installed(launcher: str) -> None:
    """Raise DataError, with install instructions, if a package that the demo needs is missing."""
    missing = _missing((*REQUIRED, *REQUIRED_BY_LAUNCHER[launcher]))
    if missing:
        other = "; --launcher torchrun does not need DeepSpeed" if launcher == "deepspeed" else ""
        raise DataError(
            f"the demo with {launcher} needs {', '.join(missing)}: `make env` installs everything in the right order; "
            f"or, after torch, setuptools and ninja: pip install --no-build-isolation 'sopdist[data,train]'{other}"
        )


def _missing(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def open_folder(out: Path, runs: Sequence[str]) -> Path:
    """Create the output folder, or remove these `runs` from that of an earlier demo. Returns the absolute path."""
    folder = out.resolve()
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_demo_folder(folder) and any(folder.iterdir()):
            raise DataError(f"--out {out}: not empty and not a demo folder; use a new folder or one of an earlier demo")
        write_atomic(folder / MARKER, _MARKER_TEXT.encode())
        for name in runs:
            if (folder / "runs" / name).exists():
                shutil.rmtree(folder / "runs" / name)
    return folder


def _is_demo_folder(folder: Path) -> bool:
    marker = folder / MARKER
    return marker.is_file() and marker.read_text(errors="replace") in (_MARKER_TEXT, _OLD_MARKER_TEXT)


class DemoData(NamedTuple):
    """The data that both runs train on."""

    labels: str  # name of the label set with the wrong labels
    train: int  # training images
    test: int  # test images
    wrong: float  # fraction of wrong training labels


def prepare_data(folder: Path, noise: float, seed: int) -> DemoData:
    """Write shards and labels to FOLDER/digits, unless they exist. The output goes to FOLDER/logs/prepare.log."""
    digits, labels = folder / "digits", f"sym-{noise:.12g}-seed{seed}"
    (folder / "logs").mkdir(exist_ok=True)
    log = folder / "logs" / "prepare.log"
    with log.open("w") as file, redirect_stdout(file):
        _run_command("prepare", "digits", "--out", str(digits))
        options = ("--rate", f"{noise:.12g}", "--seed", str(seed), "--from", CLEAN, "--name", labels)
        _run_command("labels", "noise", str(digits / "train"), "symmetric", *options)
    with open_split(digits / "train") as train, open_split(digits / "test") as test:
        wrong = measured_rate(train.labels(CLEAN).labels, train.labels(labels).labels)
        return DemoData(labels, len(train), len(test), wrong)


def _run_command(*arguments: str) -> None:
    from ..cli import main

    print("$ sopdist", *arguments, flush=True)
    code = main(arguments)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise DataError(f"the demo failed: `sopdist {' '.join(arguments[:2])}` exited with code {code}")

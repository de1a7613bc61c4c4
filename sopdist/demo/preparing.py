"""The data of the demo: digits as shards with wrong labels, made by the commands that anybody would use."""

from __future__ import annotations

from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

from ..data.errors import DataError
from ..data.labelling.noise import measured_rate
from ..data.labels import CLEAN
from ..data.split import open_split


class Prepared(NamedTuple):
    """What there is to train on."""

    labels: str  # the label set with the wrong labels
    train: int  # images
    test: int  # images
    wrong: float  # share of the training labels


def prepare(folder: Path, noise: float, seed: int) -> Prepared:
    """Write shards and labels into FOLDER/digits, unless they are there. Details go to FOLDER/logs/prepare.log."""
    digits, labels = folder / "digits", f"sym-{noise:.12g}-seed{seed}"
    (folder / "logs").mkdir(exist_ok=True)
    log = folder / "logs" / "prepare.log"
    with log.open("w") as file, redirect_stdout(file):
        _command("prepare", "digits", "--out", str(digits))
        draw = ("--rate", f"{noise:.12g}", "--seed", str(seed), "--from", CLEAN, "--name", labels)
        _command("labels", "noise", str(digits / "train"), "symmetric", *draw)
    with open_split(digits / "train") as train, open_split(digits / "test") as test:
        wrong = measured_rate(train.labels(CLEAN).labels, train.labels(labels).labels)
        return Prepared(labels, len(train), len(test), wrong)


def _command(*arguments: str) -> None:
    from ..cli import main

    print("$ sopdist", *arguments, flush=True)
    code = main(arguments)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise DataError(f"the demo stops: `sopdist {' '.join(arguments[:2])}` has failed")

"""`sopdist bench methods`: training time of every method, relative to cross-entropy.

Trains a small network on Fashion-MNIST with 50% of the labels resampled, as in the training-time table of the SOP paper
(there: CIFAR-10 and a V100). The methods take turns: each turn is a run of three epochs through the trainer. Only the
last two count, because the first may be a warm-up or a first stage. Their time includes predictions on the training
split between epochs, and excludes evaluation. Ratios compare turns of the same round.

The output ends with the ratios of the paper, and whether they were met.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tqdm import tqdm

from ..cli.arguments import integer
from ..cli.tables import format_table
from ..errors import DataError
from .fashion_mnist_data import DEFAULT_DATA
from .results import Verdict, add_out, finish_bench, start_bench
from .timing import Ratio, paired_ratio

EPOCHS, COUNTED_FROM = 3, 1
MIN_ROUNDS = 3  # for a verdict

METHODS = {
    "ce": "{name: ce}",
    "gce": "{name: gce}",
    "sl": "{name: sl}",
    "forward": "{name: forward, first_epochs: 1}",
    "mixup": "{name: mixup}",
    "elr": "{name: elr}",
    "cores2": "{name: cores2, warmup: 0, ramp_end: 1, sieve_from: 1}",
    "cores2_star": "{name: cores2_star, sieve_epochs: 1}",
    "sop": "{name: sop, onset: always}",
    "sop+": "{name: sop, onset: always, consistency: 0.9, balance: 0.1}",
    "coteaching": "{name: coteaching, forget: 0.45}",
    "coteaching_plus": "{name: coteaching_plus, forget: 0.45, warmup: 1}",
    "elr_plus": "{name: elr_plus}",
    "dividemix": "{name: dividemix, warmup: 1}",
}
PAPER = {"coteaching_plus": 4.9, "dividemix": 6.0, "elr_plus": 2.6, "sop": 1.1, "sop+": 2.3}  # hours relative to CE

CONFIG = """
data: {{root: {root}, split: train, recipe: fashion-mnist, labels: sym-0.5-seed0, backend: cpu}}
model: {{name: {network}}}
optim: {{lr: 0.02}}
train: {{epochs: {epochs}, batch: 128}}
checkpoint: {{every: 0}}
log: {{every: 1000000, wandb: 'off', suspects: 0}}
"""


@dataclass(frozen=True)
class Result:
    """The measured time of one method."""

    seconds: float  # per epoch, median over rounds
    ratio: Ratio  # to cross-entropy


def seconds_per_epoch(run: Path) -> float:
    """Training time of the epochs that count, from the record of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train" and line["epoch"] >= COUNTED_FROM]
    return sum(line["samples"] / line["samples_per_second"] for line in lines) / (EPOCHS - COUNTED_FROM)


def judge(results: Mapping[str, Result], *, judged: bool) -> list[Verdict]:
    """Compare with the ratios of the paper; a quick run is too short for a verdict."""
    verdicts = []
    for name, limit in PAPER.items():
        if name in results:
            ratio = results[name].ratio
            decided = judged and ratio.rounds >= MIN_ROUNDS
            target = f"{name}: training time <= {limit} x CE, the ratio of the paper"
            verdicts.append(Verdict(target, str(ratio), ratio.median <= limit if decided else None))
    return verdicts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench methods`."""
    parser.add_argument("--quick", action="store_true", help="smoke test: 600 images, one round")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, metavar="FOLDER", help="Fashion-MNIST (%(default)s)")
    parser.add_argument("--methods", help=f"comma-separated, of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--network", default="small_conv", help="any model.name (default: %(default)s)")
    parser.add_argument("--rounds", type=integer(1), default=3, help="turns of each method (default: %(default)s)")
    add_out(parser, "methods")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the results file. Returns 0 whether or not the targets are met."""
    names = _chosen(args.methods)
    environment = start_bench()
    rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory() as folder:
        root = _prepare(args.data, Path(folder), share=0.01 if args.quick else 0.05)
        turns = _take_turns(names, root, args.network, rounds)
    ce = turns["ce"]
    results = {name: Result(median(seconds), paired_ratio(seconds, ce)) for name, seconds in turns.items()}
    rows = [
        [name, f"{found.seconds:.2f}", f"{found.ratio.median:.2f}", str(PAPER.get(name, ""))]
        for name, found in results.items()
    ]
    print(format_table(["method", "s per epoch", "x CE", "x CE in the paper"], rows))
    content = {"network": args.network, "methods": {name: asdict(found) for name, found in results.items()}}
    finish_bench(args.out, environment, content, judge(results, judged=not args.quick))
    return 0


def _chosen(text: str | None) -> list[str]:
    names = list(METHODS) if text is None else text.split(",")
    for name in names:
        if name not in METHODS:
            raise DataError(f"--methods {name}: must be one of {', '.join(METHODS)}")
    return names if "ce" in names else ["ce", *names]


def _prepare(data: Path, folder: Path, *, share: float) -> Path:
    """Shards of a part of Fashion-MNIST, with 50% of the labels resampled."""
    from ..cli import main

    root = folder / "shards"
    commands = [
        ["prepare", "fashion-mnist", "--root", str(data), "--out", str(root), "--val", str(1 - share)],
        ["labels", "noise", str(root / "train"), "symmetric", "--rate", "0.5"],
    ]
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            failed = main(command)
        if failed:
            raise DataError(f"sopdist {' '.join(command)} failed:\n{said.getvalue()}")
    return root


def _take_turns(names: Sequence[str], root: Path, network: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per epoch of each method, one per round, after a run that does not count."""
    from ..train.run import run_config

    config = root.parent / "bench.yaml"
    config.write_text(CONFIG.format(root=root, network=network, epochs=EPOCHS))
    found: dict[str, list[float]] = {name: [] for name in names}
    turns = [("ce", 0)]
    order, shuffle = list(names), random.Random(0).shuffle
    for number in range(1, rounds + 1):
        shuffle(order)
        turns += [(name, number) for name in order]
    for name, number in tqdm(turns, unit="run", leave=False):
        overrides = [f"method={METHODS[name]}", f"run.folder={root.parent / 'runs'}", f"run.name={name}-{number}"]
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said), _quiet():
            code = run_config(str(config), overrides)
        if code:
            raise DataError(f"the run of {name} ended with exit code {code}:\n{said.getvalue()[-2000:]}")
        if number:
            found[name].append(seconds_per_epoch(root.parent / "runs" / f"{name}-{number}"))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log only errors."""
    logger = logging.getLogger("sopdist")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""Everything at once, on real data: handwritten digits, 40% of the training labels drawn anew, cross-entropy and SOP.

The digits of scikit-learn (nothing is downloaded) become shards, wrong labels are drawn, and a launcher trains a
network on two ranks: once with plain cross-entropy, once with SOP. Then both are compared, and the most suspicious
labels are shown. It is the trainer as it is, with configs/demo.yaml; everything stays in --out to be looked at.

  sopdist demo
  sopdist demo --noise 0.6 --epochs 30
  sopdist demo --launcher torchrun          without DeepSpeed: DDP instead
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..data.commands.arguments import share, whole

BOTH = {"ce": "plain cross-entropy", "sop": "SOP"}  # the two runs, by objective.name
SUSPECTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist demo`."""
    parser.add_argument("--noise", type=share, default=0.4, help="share of training labels drawn anew (%(default)s)")
    parser.add_argument("--epochs", type=whole(1), default=60, help="passes over the training data (%(default)s)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="of noise, weights and order (%(default)s)")
    parser.add_argument("--ranks", type=whole(1), default=2, help="processes; on GPUs no more than those (%(default)s)")
    where = "folder for shards, runs and logs (%(default)s); runs of an earlier demo in it are replaced"
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="FOLDER", help=where)
    how = "who starts the ranks: deepspeed, with its engine, or torchrun, with DDP (%(default)s)"
    parser.add_argument("--launcher", choices=("deepspeed", "torchrun"), default="deepspeed", help=how)


def run(args: argparse.Namespace) -> int:
    """Prepare, train twice, compare."""
    from .needs import check_installed

    check_installed(args.launcher)
    from .comparing import comparison, read_run
    from .folder import open_folder
    from .launching import Launch, on_device
    from .preparing import prepare
    from .suspects import draw_suspects

    begun = time.monotonic()
    ranks, device = on_device(args.ranks)
    folder = open_folder(args.out, list(BOTH))
    _say(f"1. Handwritten digits become shards, and {args.noise:.0%} of the training labels are drawn anew: {folder}")
    data = prepare(folder, args.noise, args.seed)
    images = f"{data.train:,} images to train on, {data.test:,} to test"
    _say(f"   {images}; {data.wrong:.1%} of the training labels are wrong\n")
    for number, (objective, name) in enumerate(BOTH.items(), 2):
        many = f"{ranks} ranks on {device}s" if ranks > 1 else f"one rank on a {device}"
        _say(f"{number}. {args.launcher} starts {many}, to train with {name}: {args.epochs} epochs")
        Launch(args.launcher, ranks, device, objective, folder, data.labels, args.epochs, args.seed).run()
        _say("")
    _say(comparison(*(read_run(folder / "runs" / objective) for objective in BOTH)))
    _say(draw_suspects(folder / "runs" / "sop", SUSPECTS))
    _say(_next(args.out, time.monotonic() - begun))
    return 0


def _say(text: str) -> None:
    """At once: in a log file, too, it must stand before what the ranks print."""
    print(text, flush=True)


def _next(out: Path, seconds: float) -> str:
    run = out / "runs" / "sop"
    return f"""
All of it took {seconds:.0f} s. Where to look next:
  {run}   the run: config.yaml, metrics.jsonl, summary.csv, checkpoints
  sopdist eval {run} --which last
  sopdist inspect {out / "digits" / "train"} --sheet digits.png
  sopdist train --help-config     every setting; docs/train.md explains training, README.md SOP in a loop of your own"""

"""Train on scikit-learn's handwritten digits with 40% of the labels resampled: plain cross-entropy against SOP.

The demo writes the digits as shards (nothing is downloaded), resamples part of the training labels, and starts two
training runs on two ranks each: one with cross-entropy, one with SOP. It then compares the runs and shows the most
suspicious labels. It runs the regular trainer with configs/demo.yaml and keeps all files in --out.

  sopdist demo
  sopdist demo --noise 0.6 --epochs 30
  sopdist demo --launcher torchrun          DDP instead of DeepSpeed
  sopdist demo --figure demo.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..cli.arguments import fraction, integer

METHODS = {"ce": "plain cross-entropy", "sop": "SOP"}  # method.name of the two runs -> name to print
SUSPECTS = 5  # labels to show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist demo`."""
    parser.add_argument(
        "--noise", type=fraction, default=0.4, help="fraction of training labels to resample (%(default)s)"
    )
    parser.add_argument("--epochs", type=integer(1), default=60, help="passes over the training data (%(default)s)")
    seed = "seed of the label noise, the weights and the sample order (%(default)s)"
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help=seed)
    parser.add_argument("--ranks", type=integer(1), default=2, help="ranks; at most one per GPU (%(default)s)")
    out = "folder for shards, runs and logs (%(default)s); runs of an earlier demo in it are replaced"
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="FOLDER", help=out)
    figure = "also draw accuracy and memorised labels over the epochs, e.g. demo.png or demo.svg"
    parser.add_argument("--figure", type=_figure_path, metavar="FILE", help=figure)
    launcher = "start the ranks with deepspeed and its engine (the default if it is installed), or torchrun and DDP"
    parser.add_argument("--launcher", choices=("deepspeed", "torchrun"), help=launcher)


def _figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return path


def run(args: argparse.Namespace) -> int:
    """Prepare the data, train twice, compare the runs."""
    from .prepare import check_installed, default_launcher, open_folder, prepare_data

    launcher = args.launcher or default_launcher()
    check_installed(launcher)
    # These import packages that check_installed looks for.
    from .launch import Launch, ranks_and_device
    from .results import draw_suspects, format_comparison, read_run

    started = time.monotonic()
    ranks, device = ranks_and_device(args.ranks)
    folder = open_folder(args.out, list(METHODS))
    _print(f"1. Writing handwritten digits as shards and resampling {args.noise:.0%} of the training labels: {folder}")
    data = prepare_data(folder, args.noise, args.seed)
    images = f"{data.train:,} training images, {data.test:,} test images"
    _print(f"   {images}; {data.wrong:.1%} of the training labels are wrong\n")
    for number, (method, name) in enumerate(METHODS.items(), 2):
        where = f"{ranks} ranks on {device}s" if ranks > 1 else f"one rank on a {device}"
        _print(f"{number}. Training with {name} for {args.epochs} epochs: {launcher}, {where}")
        Launch(launcher, ranks, device, method, folder, data.labels, args.epochs, args.seed).run()
        _print("")
    _print(format_comparison(*(read_run(folder / "runs" / method) for method in METHODS)))
    _print(draw_suspects(folder / "runs" / "sop", SUSPECTS))
    if args.figure is not None:
        from .figure import plot_runs

        names = {"ce": "cross-entropy", "sop": "SOP"}
        plot_runs({names[method]: folder / "runs" / method for method in METHODS}, args.figure)
    _print(_next_steps(args.out, time.monotonic() - started))
    return 0


def _print(text: str) -> None:
    """Print without buffering: when stdout is a file, the text must come before the output of the ranks."""
    print(text, flush=True)


def _next_steps(out: Path, seconds: float) -> str:
    run = out / "runs" / "sop"
    return f"""
The demo took {seconds:.0f} s. Next steps:
  {run}   the run: config.yaml, metrics.jsonl, summary.csv, checkpoints
  sopdist eval {run} --which last
  sopdist inspect {out / "digits" / "train"} --sheet digits.png
  sopdist train --help-config     every setting; see docs/train.md for training, README.md for SOP in your own loop"""

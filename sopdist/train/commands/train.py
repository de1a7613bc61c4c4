"""Train a network on wrong labels, and find out which labels are wrong.

One process with `sopdist train`; any number with a launcher and `launch/train.py`, which takes the same options:

  deepspeed launch/train.py --cfg webvision.yaml            torchrun --nproc-per-node 8 launch/train.py --cfg ...
  accelerate launch --multi_gpu --num_processes 8 launch/train.py ...
  srun python launch/train.py ...

A config is a YAML file; its name may stand for a file in configs/. `key=value` changes a key of it:

  sopdist train --cfg cifar10 data.root=/data/cifar10 data.labels=sym-0.6-seed0 optim.lr=0.05 run.name=sixty

The run's folder (run.folder/run.name) gets the resolved config, metrics.jsonl, summary.json, summary.csv, checkpoints.

A run saves itself as checkpoint.* says. SIGTERM or SIGUSR1 to any rank, or `sopdist stop`, make it save and end with
code 75 after the step at hand (a launcher may make another code of it; summary.json says "preempted", or, if that step
could not be saved, "preempted, not saved"). The same command with --resume auto goes on, on any number of ranks.

exit codes: 0 finished, 1 data or files, 2 config, 3 the loss is not finite, 70 another rank was lost,
            75 asked to stop (summary.json says whether the last step is saved), 130 interrupted
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist train` and `launch/train.py`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("--cfg", metavar="NAME_OR_PATH", help="the config: a file, or a name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config to change")
    resume = "go on from the run's newest checkpoint, if there is one (auto), from a given one (an earlier one of the "
    resume += "same run goes back: later ones are renamed to step-*.later), or begin anew (default)"
    parser.add_argument("--resume", default="none", metavar="auto|PATH|none", help=resume)
    allow = "go on although this differs from the checkpoint: labels, objective.name, objective.variant or optim.name; "
    allow += "may be given several times"
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=allow)
    parser.add_argument("--help-config", action="store_true", help="print every key with its default and meaning")
    # The deepspeed launcher adds this; the environment says it, too.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    if args.help_config:
        from ...config import describe
        from ..config import Config

        print(describe(Config).strip())
        return 0
    from ...config import ConfigError
    from ..running import run_config

    if args.cfg is None:
        raise ConfigError("--cfg: which config? It is a file, or a name in configs/; --help-config explains its keys")
    return run_config(args.cfg, args.overrides, resume=args.resume, allow_change=args.allow_change)

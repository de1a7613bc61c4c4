"""Train a network on noisy labels, and find out which labels are wrong.

`sopdist train` runs one process. For more, use a launcher with `launch/train.py`, which takes the same options:

  deepspeed launch/train.py --cfg webvision.yaml            torchrun --nproc-per-node 8 launch/train.py --cfg ...
  accelerate launch --multi_gpu --num_processes 8 launch/train.py ...
  srun python launch/train.py ...

A config is a YAML file, given by its path or by its name in configs/. `key=value` overrides a key:

  sopdist train --cfg cifar10 data.root=/data/cifar10 data.labels=sym-0.6-seed0 optim.lr=0.05 run.name=sixty

The folder of the run (run.folder/run.name) receives the resolved config, metrics.jsonl, summary.json, summary.csv and
checkpoints.

A run saves checkpoints according to checkpoint.*. SIGTERM or SIGUSR1 to any rank, or `sopdist stop`, makes it finish
the current step, save, and exit with code 75 (a launcher may change the code; summary.json says "preempted", or
"preempted, not saved" if that step could not be saved). To resume on any number of ranks, repeat the command with
--resume auto.

exit codes: 0 finished, 1 error in data or files, 2 error in the config, 3 loss not finite, 70 another rank was lost,
            75 stopped on request (summary.json says whether the last step was saved), 130 interrupted
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist train` and `launch/train.py`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("--cfg", metavar="NAME_OR_PATH", help="config: a path, or a name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override config keys")
    resume = "auto: resume from the newest checkpoint of the run, if there is one; PATH: from this checkpoint "
    resume += "(later ones of the same run are renamed to step-*.later); none: start from scratch (default)"
    parser.add_argument("--resume", default="none", metavar="auto|PATH|none", help=resume)
    allow = "allow KEY to differ from the checkpoint: labels, method.name, method.variant or optim.name; "
    allow += "may be repeated"
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=allow)
    parser.add_argument(
        "--help-config", action="store_true", help="print every config key with its default and meaning"
    )
    # The deepspeed launcher adds this option. It is ignored: the environment has the local rank too.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code."""
    if args.help_config:
        from ...config import describe
        from ...train.config import Config

        print(describe(Config).strip())
        return 0
    from ...errors import ConfigError
    from ...train.run import run_config

    if args.cfg is None:
        raise ConfigError(
            "--cfg: must be set to the path of a config, or its name in configs/; --help-config explains the keys"
        )
    return run_config(args.cfg, args.overrides, resume=args.resume, allow_change=args.allow_change)

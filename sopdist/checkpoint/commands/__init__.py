"""Checkpoints of a run: which there are, what is in them, whether they are intact, and what to make of them elsewhere.

    sopdist checkpoint list    runs/cifar10
    sopdist checkpoint show    runs/cifar10                               its newest one
    sopdist checkpoint verify  runs/cifar10                               all of them
    sopdist checkpoint export  runs/cifar10 --out exported --what network,onnx,noise
    sopdist checkpoint reshard runs/cifar10/checkpoints/step-00004224 --ranks 512 --out dealt

exit codes: 0 done, 1 data or files (verify: one is damaged), 2 config or options, 130 interrupted
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import cast

from ...data.commands.arguments import Commands
from . import export, listing, reshard, show, verify

_SUBCOMMANDS = {
    "list": (listing, "name the checkpoints of a run, the newest last"),
    "show": (show, "what is in a checkpoint"),
    "verify": (verify, "read everything and compare it with its checksums"),
    "export": (export, "the network for timm, for sopdist.models and as ONNX; the noise table as Parquet"),
    "reshard": (reshard, "the same checkpoint for another number of ranks"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint`."""
    commands = cast(Commands, parser.add_subparsers(required=True, metavar="SUBCOMMAND", action=Commands))
    for name, (module, summary) in _SUBCOMMANDS.items():

        def declare(parser: argparse.ArgumentParser, module: object = module) -> None:
            parser.description = (module.__doc__ or "").strip()
            module.add_arguments(parser)  # type: ignore[attr-defined]
            parser.set_defaults(subcommand=module.run)  # type: ignore[attr-defined]

        commands.add(name, summary, declare)


def run(args: argparse.Namespace) -> int:
    """Do what the subcommand says."""
    subcommand: Callable[[argparse.Namespace], int] = args.subcommand
    return subcommand(args)

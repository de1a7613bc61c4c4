"""`sopdist ...`: each subcommand is a thin call into the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from . import __version__
from .data.errors import DataError


class Command(Protocol):
    """A module that is a subcommand."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do its work; returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
    except DataError as error:
        print(f"sopdist: {error}", file=sys.stderr)
        code = 1
    except BrokenPipeError:  # e.g. `sopdist bench table | head`
        sys.stderr.close()
        code = 1
    except KeyboardInterrupt:
        print("\nsopdist: interrupted", file=sys.stderr)
        code = 130
    return code


def _parser() -> argparse.ArgumentParser:
    from . import demo
    from .bench import input as bench_input
    from .bench import kernels as bench_kernels
    from .bench import table as bench_table
    from .data.commands import inspect, labels, prepare, verify

    parser = argparse.ArgumentParser(
        prog="sopdist", description="Train image classifiers on wrong labels, and find out which labels are wrong."
    )
    parser.add_argument("--version", action="version", version=f"sopdist {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, demo, "demo", "train with 40% of the labels redrawn, with and without SOP, and name the wrong ones")
    _add(commands, prepare, "prepare", "write a data set as shards")
    _add(commands, verify, "verify", "check the shards, indices and label sets of a split")
    _add(commands, inspect, "inspect", "look at a split: classes, sizes, a sheet of thumbnails")
    _add(commands, labels, "labels", "add, draw, list and compare label sets")
    bench = commands.add_parser("bench", help="measure sopdist against its peers, in one run")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    _add(benches, bench_table, "table", "cost and bytes of the noise table against N and K")
    _add(benches, bench_input, "input", "images/s of the input pipeline, beside DALI's reader and stock webdataset")
    _add(benches, bench_kernels, "kernels", "compile the CUDA kernels ahead of time: registers, spills (needs no GPU)")
    return parser


def _add(commands: Any, module: Command, name: str, summary: str) -> None:
    """Hang the module's command into the parser; its docstring is the help text."""
    doc = (module.__doc__ or "").strip()
    parser = commands.add_parser(
        name, help=summary.replace("%", "%%"), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)

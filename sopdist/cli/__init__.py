"""The `sopdist` command. Each subcommand is a thin call into the package and is imported only when it is used."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

from .. import __version__
from ..errors import ConfigError, DataError, UserError
from .arguments import Commands, Parser


class Command(Protocol):
    """A module that implements a subcommand; its docstring is the help text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit code."""


class Entry(NamedTuple):
    """A command of the command line."""

    module: str  # relative to this package
    summary: str  # one line for --help
    extra: str = ""  # the optional dependencies it needs: pip install 'sopdist[EXTRA]'


COMMANDS = {
    "demo": Entry("..demo", "train with 40% of the labels resampled, with and without SOP, and list the wrong ones"),
    "prepare": Entry(".commands.prepare", "convert a dataset to shards"),
    "verify": Entry(".commands.verify", "check the shards, index files and label sets of a split"),
    "inspect": Entry(".commands.inspect", "summarize a split: classes, image sizes, a contact sheet"),
    "labels": Entry(".commands.labels", "add, generate, list and compare label sets"),
    "train": Entry(".commands.train", "train a network on noisy labels; use launch/train.py for several ranks"),
    "compare": Entry(".commands.compare", "train several methods with the same seeds, and print one table"),
    "stop": Entry(".commands.stop", "ask a run to save a checkpoint and stop after its next step"),
    "eval": Entry(".commands.eval", "evaluate the network of a run or checkpoint on any splits"),
    "checkpoint": Entry(".commands.checkpoint", "list, show, verify, export and reshard checkpoints"),
    "plan": Entry(".commands.plan", "estimate steps, memory and communication of a run before it starts"),
    "doctor": Entry(
        "..doctor", "check whether torch, CUDA, DeepSpeed, DALI, W&B, ... work here, and what to do if not"
    ),
}
BENCHES = {
    "table": Entry("..bench.table", "time and memory of the noise table for several N and K"),
    "input": Entry("..bench.input", "images/s of the input pipeline, compared with DALI's reader and plain webdataset"),
    "step": Entry("..bench.step", "time of a training step with SOP on several ranks, compared with cross-entropy"),
    "exchange": Entry("..bench.exchange", "bytes and time to exchange table rows between ranks, pushed and on demand"),
    "checkpoint": Entry("..bench.checkpoint", "how long a save blocks training, and how long a resume takes"),
    "methods": Entry("..bench.methods", "training time of every method, compared with cross-entropy"),
    "fashion-mnist": Entry("..bench.fashion_mnist", "accuracy of SOP and robust losses on wrong labels"),
    "regimes": Entry("..bench.regimes", "whether SOP is ever worse than cross-entropy, however a network learns"),
    "kernels": Entry("..bench.kernels", "compile the CUDA kernels ahead of time: registers, spills (needs no GPU)"),
}
THEORY = {
    "implicit-bias": Entry(
        "..theory.implicit_bias",
        "gradient descent on (theta, u, v) against the convex program it should solve",
        "theory",
    ),
    "lambda": Entry("..theory.effect_of_lambda", "how well theta and s are recovered, depending on lambda", "theory"),
    "phase": Entry("..theory.phase", "for which sparsity and rank recovery succeeds", "theory"),
    "landscape": Entry("..theory.landscape", "every critical point is a global minimum or a strict saddle", "theory"),
    "flow": Entry("..theory.visits", "one label of a noise table over its visits, under each update rule", "theory"),
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # class names may be any text, but the terminal may be ASCII only
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            args = _parser().parse_args(argv)
            code: int = args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # flush here, where a full disk can still be reported
    except UserError as error:
        print(f"sopdist: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # e.g. `sopdist bench table | head`
        _drop_output()
        code = 1
    except KeyboardInterrupt:
        # In a terminal, the current line holds ^C and perhaps a progress bar.
        print(("\n" if sys.stderr.isatty() else "") + "sopdist: interrupted", file=sys.stderr)
        code = 130
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        print(f"sopdist: cannot write: {error.strerror}", file=sys.stderr)
        _drop_output()
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sopdist", description="Train image classifiers on noisy labels, and find out which labels are wrong."
    )
    parser.add_argument("--version", action="version", version=f"sopdist {__version__}")
    commands = _add(parser, COMMANDS, "COMMAND")
    about_theory = "experiments and figures for section 3 of the paper"
    commands.add("theory", about_theory, lambda theory: _add(theory, THEORY, "NAME"))
    commands.add("bench", "benchmark sopdist against alternatives", lambda bench: _add(bench, BENCHES, "WHAT"))
    return parser


def _add(parser: argparse.ArgumentParser, entries: Mapping[str, Entry], metavar: str) -> Commands:
    commands = cast(Commands, parser.add_subparsers(required=True, metavar=metavar, action=Commands))
    for name, entry in entries.items():
        commands.add(name, entry.summary, _declaration(entry))
    return commands


def _declaration(entry: Entry) -> Callable[[argparse.ArgumentParser], None]:
    def declare(parser: argparse.ArgumentParser) -> None:
        try:
            command = cast(Command, importlib.import_module(entry.module, __package__))
        except ModuleNotFoundError as error:
            if not entry.extra or (error.name or "").startswith("sopdist."):
                raise
            raise DataError(f"this needs {error.name}: pip install 'sopdist[{entry.extra}]'") from None
        parser.description = (command.__doc__ or "").strip()
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)

    return declare


def _drop_output() -> None:
    """Redirect stdout to /dev/null: what is still buffered cannot be written, and flushing it at exit would fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

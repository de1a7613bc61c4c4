"""`sopdist ...`: each subcommand is a thin call into the package, and is imported only if it is the one asked for."""

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

from . import __version__
from .data.commands.arguments import Commands, Parser
from .data.errors import DataError


class Command(Protocol):
    """A module that is a subcommand; its docstring is the help text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do its work; returns the exit code."""


class Entry(NamedTuple):
    """A command that can be asked for by name."""

    place: str  # its module
    summary: str  # a line for --help
    extra: str = ""  # of `pip install 'sopdist[EXTRA]'`, if it needs one to be loaded


COMMANDS = {
    "demo": Entry(".demo", "train with 40% of the labels redrawn, with and without SOP, and name the wrong ones"),
    "prepare": Entry(".data.commands.prepare", "write a data set as shards"),
    "verify": Entry(".data.commands.verify", "check the shards, indices and label sets of a split"),
    "inspect": Entry(".data.commands.inspect", "look at a split: classes, sizes, a sheet of thumbnails"),
    "labels": Entry(".data.commands.labels", "add, draw, list and compare label sets"),
    "train": Entry(".train.commands.train", "train a network on wrong labels; launch/train.py does it on many ranks"),
    "stop": Entry(".train.commands.stop", "ask a run to save and to stop after its next step"),
    "eval": Entry(".train.commands.eval", "evaluate the network of a run or a checkpoint on any splits"),
    "checkpoint": Entry(".checkpoint.commands", "list, show, verify, export and reshard the checkpoints of a run"),
    "plan": Entry(".train.commands.plan", "steps, memory and bytes on the wire of a run, before it is started"),
    "doctor": Entry(".doctor", "what of torch, CUDA, DeepSpeed, DALI, W&B, ... is usable here, and what to do"),
}
BENCHES = {
    "table": Entry(".bench.table", "cost and bytes of the noise table against N and K"),
    "input": Entry(".bench.input", "images/s of the input pipeline, beside DALI's reader and stock webdataset"),
    "step": Entry(".bench.step", "a training step with SOP on several ranks, beside one with cross-entropy"),
    "exchange": Entry(".bench.exchange", "bytes and time of rows and facts between ranks, sent ahead and asked for"),
    "checkpoint": Entry(".bench.checkpoint", "how long training stands still for a save, and a resume takes"),
    "kernels": Entry(".bench.kernels", "compile the CUDA kernels ahead of time: registers, spills (needs no GPU)"),
}
THEORY = {
    "implicit-bias": Entry(
        ".theory.implicit_bias", "descent on (theta, u, v) against the convex program that it should solve", "theory"
    ),
    "lambda": Entry(".theory.effect_of_lambda", "how well theta and s are recovered, against lambda", "theory"),
    "phase": Entry(".theory.phase", "for which sparsity and rank recovery succeeds", "theory"),
    "landscape": Entry(".theory.landscape", "every critical point is a global minimum or has a way down", "theory"),
    "flow": Entry(".theory.visits", "one label of a noise table over its visits, by each rule", "theory"),
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a class may be called anything, a terminal may know ASCII only
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            args = _parser().parse_args(argv)
            code: int = args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk can still be told
    except DataError as error:
        print(f"sopdist: {error}", file=sys.stderr)
        code = 1
    except BrokenPipeError:  # e.g. `sopdist bench table | head`
        _drop_output()
        code = 1
    except KeyboardInterrupt:
        # In a terminal, ^C and perhaps a progress bar stand in the line.
        print(("\n" if sys.stderr.isatty() else "") + "sopdist: interrupted", file=sys.stderr)
        code = 130
    except OSError as error:
        if error.errno not in _FULL:
            raise
        print(f"sopdist: cannot write: {error.strerror}", file=sys.stderr)
        _drop_output()
        code = 1
    except Exception as error:
        if not _is_config_error(error):
            raise
        print(f"sopdist: {error}", file=sys.stderr)
        code = 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sopdist", description="Train image classifiers on wrong labels, and find out which labels are wrong."
    )
    parser.add_argument("--version", action="version", version=f"sopdist {__version__}")
    commands = _add(parser, COMMANDS, "COMMAND")
    commands.add("theory", "section 3 of the paper as experiments with figures", lambda it: _add(it, THEORY, "NAME"))
    commands.add("bench", "measure sopdist against its peers, in one run", lambda bench: _add(bench, BENCHES, "WHAT"))
    return parser


def _add(parser: argparse.ArgumentParser, entries: Mapping[str, Entry], metavar: str) -> Commands:
    commands = cast(Commands, parser.add_subparsers(required=True, metavar=metavar, action=Commands))
    for name, entry in entries.items():
        commands.add(name, entry.summary, _declaration(entry))
    return commands


def _declaration(entry: Entry) -> Callable[[argparse.ArgumentParser], None]:
    def declare(parser: argparse.ArgumentParser) -> None:
        try:
            command = cast(Command, importlib.import_module(entry.place, __package__))
        except ModuleNotFoundError as error:
            if not entry.extra or (error.name or "").startswith(f"{__package__}."):
                raise
            raise DataError(f"this needs {error.name}: pip install 'sopdist[{entry.extra}]'") from None
        parser.description = (command.__doc__ or "").strip()
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)

    return declare


def _is_config_error(error: Exception) -> bool:
    """Only a command that reads configs can raise one, and has then loaded their file; others work without PyYAML."""
    config = sys.modules.get(f"{__package__}.config")
    return config is not None and isinstance(error, config.ConfigError)


def _drop_output() -> None:
    """What is still in the buffer cannot be written: not now, and not, with a traceback, when Python ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

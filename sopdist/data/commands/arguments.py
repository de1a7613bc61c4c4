"""What commands share in reading their arguments: a parser that is strict and helps, subcommands that are loaded when
they are asked for, and types of values. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_SEED = 2**64 - 1


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, so that a typo is not an option, and offers the nearest of a list of choices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.intermixed = False  # whether a list of positionals may stand before, between and after options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As usual; a subparser is asked in this way, too."""
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # it asks this method for its parts
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            close = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
            if close:
                error.message += f"; did you mean {close[0]!r}?"
            raise


class Commands(argparse._SubParsersAction):
    """Subcommands of which only the one that is asked for is loaded: no other costs time, or fails with it.

    >>> commands = parser.add_subparsers(action=Commands, metavar="COMMAND", required=True)
    >>> commands.add("verify", "check a split", declare)  # declare(parser) is called if it is verify
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._declare: dict[str, Callable[[argparse.ArgumentParser], object]] = {}

    def add(self, name: str, summary: str, declare: Callable[[argparse.ArgumentParser], object]) -> None:
        """Name a subcommand; `declare` gives its parser a description and options when it is needed."""
        formatter = argparse.RawDescriptionHelpFormatter
        self.add_parser(name, help=summary.replace("%", "%%"), formatter_class=formatter)
        self._declare[name] = declare

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Load the one that is asked for, and let it read the rest of the line."""
        declare = self._declare.pop(values[0], None)
        if declare is not None:
            declare(self.choices[values[0]])
        super().__call__(parser, namespace, values, option_string)


def whole(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """A type for add_argument: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        number = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 100 else None
        if number is None or number < least or (most is not None and number > most):
            limits = f"from {least} up" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return number

    return parse


def usable_cores() -> int:
    """How many cores this process may use: the default of options that ask for workers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed(text: str) -> int:
    """A type for add_argument: a seed."""
    try:
        return whole(0, _MOST_SEED)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^64 - 1") from None


def share(text: str) -> float:
    """A type for add_argument: a rate, a share, a probability."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def local_folder(text: str) -> Path:
    """A type for add_argument: a folder of this machine. Only training reads from elsewhere."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL; this command works on a local folder, so copy it first")
    return Path(text)

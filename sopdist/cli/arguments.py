"""Argument parsing shared by all commands: a strict parser, lazily loaded subcommands, and argument types.

Imports nothing that takes time to load.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_SEED = 2**64 - 1


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts no abbreviated options and suggests the closest of the valid choices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.intermixed = False  # whether positionals may come before, between and after options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse intermixed arguments if `intermixed` is set. argparse calls this method for subparsers, too."""
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # parse_known_intermixed_args calls this method
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
    """Lazily loaded subcommands: only the requested one is imported, so the others cost no time and cannot fail.

    >>> commands = parser.add_subparsers(action=Commands, metavar="COMMAND", required=True)
    >>> commands.add("verify", "check a split", declare)  # declare(parser) is called if the user runs `verify`
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._declare: dict[str, Callable[[argparse.ArgumentParser], object]] = {}

    def add(self, name: str, summary: str, declare: Callable[[argparse.ArgumentParser], object]) -> None:
        """Add a subcommand; `declare` sets the description and options of its parser when it is needed."""
        formatter = argparse.RawDescriptionHelpFormatter
        self.add_parser(name, help=summary.replace("%", "%%"), formatter_class=formatter)
        self._declare[name] = declare

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Load the requested subcommand and let it parse the remaining arguments."""
        declare = self._declare.pop(values[0], None)
        if declare is not None:
            declare(self.choices[values[0]])
        super().__call__(parser, namespace, values, option_string)


def integer(minimum: int = 0, maximum: int | None = None) -> Callable[[str], int]:
    """Argument type: an integer from `minimum` to `maximum`, both included."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        number = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 100 else None
        if number is None or number < minimum or (maximum is not None and number > maximum):
            limits = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer {limits}")
        return number

    return parse


def seed(text: str) -> int:
    """Argument type: a random seed, an unsigned 64-bit integer."""
    try:
        return integer(0, _MAX_SEED)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2^64 - 1") from None


def fraction(text: str) -> float:
    """Argument type: a number from 0 to 1, such as a rate or a probability."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def local_folder(text: str) -> Path:
    """Argument type: a folder on this machine. Only training reads remote data."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL; this command works on a local folder: download it first")
    return Path(text)

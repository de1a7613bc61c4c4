"""Entries: the methods of a comparison, as written on the command line.

NAME                            the method with its defaults, or with the config's settings if it is the config's method
NAME:key=value:key=value        keys of the section `method`; a key with a dot, such as optim.lr, is any config key
NAME@CONFIG                     with a config of its own, a path or a name in configs/, whose method is NAME
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..methods import METHODS

_START_OF_SETTING = re.compile(r":(?=[A-Za-z_][\w.]*=)")  # other colons belong to a value, such as a URL
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+]+")
_LONGEST_NAME = 100  # characters; a run's folder is named after the entry, the label set and the seed

# Config keys that a comparison sets itself, and what to use instead.
_RESERVED = {
    "run.name": "runs are named after method, label set and seed",
    "run.folder": "use --out",
    "run.seed": "use --seeds",
}


@dataclass(frozen=True)
class Entry:
    """A method with its settings: a row of the table."""

    text: str  # as the user wrote it
    method: str  # method.name
    config: str = ""  # a config of its own; empty: the config of the comparison
    overrides: tuple[str, ...] = ()  # config overrides of its own

    @property
    def name(self) -> str:
        """The text as part of a file name: `gce-q-0.5` for `gce:q=0.5`."""
        words = [self.method, *([Path(self.config).stem] if self.config else [])]
        words += [override.removeprefix("method.") for override in self.overrides]
        return "-".join(_NOT_IN_NAMES.sub("-", word).strip("-.") for word in words)


def parse_entries(text: str) -> tuple[Entry, ...]:
    """The entries of `--methods`, separated by commas. ConfigError if one is invalid, or is listed twice."""
    entries = tuple(_parse(part.strip()) for part in _split_outside_brackets(text))
    names: dict[str, str] = {}
    for entry in entries:
        if entry.name in names:
            same = "it is there twice" if names[entry.name] == entry.text else f"too similar to {names[entry.name]}"
            raise ConfigError(f"--methods {entry.text}: {same}; runs of both would be called {entry.name}")
        if len(entry.name) > _LONGEST_NAME:
            raise ConfigError(f"--methods {entry.text}: too long for the name of a run; write NAME@CONFIG instead")
        names[entry.name] = entry.text
    return entries


def check_overrides(overrides: Sequence[str], where: str) -> None:
    """ConfigError if an override sets what the comparison sets itself. `where` starts the message."""
    for override in overrides:
        key = override.partition("=")[0]
        if key in _RESERVED:
            raise ConfigError(f"{where}{override}: cannot be set here; {_RESERVED[key]}")


def _parse(text: str) -> Entry:
    where = f"--methods {text}: "
    head, *settings = _START_OF_SETTING.split(text)
    name, at, config = head.partition("@")
    if ":" in name:
        raise ConfigError(f"{where}a setting must have the form key=value, as in NAME:key=value")
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        advice = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{where}no method {name!r}; {advice}There are: {', '.join(METHODS)}")
    if at and not config:
        raise ConfigError(f"{where}no config after the @; write NAME@CONFIG, where CONFIG is a path or a name")
    overrides = tuple(setting if "." in setting.partition("=")[0] else f"method.{setting}" for setting in settings)
    check_overrides(overrides, where)
    for override in overrides:
        if override.startswith("method.name="):
            raise ConfigError(f"{where}the method is {name}; write its name first")
        if override.startswith("data.labels="):
            raise ConfigError(f"{where}all methods train on the same labels; use --noise")
    return Entry(text, name, config, overrides)


def _split_outside_brackets(text: str) -> list[str]:
    """Split at commas, but not inside a value such as [40, 80]."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts

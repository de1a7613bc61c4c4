"""What the commands `sopdist theory ...` share: their options, and what they leave behind."""

from __future__ import annotations

import argparse
import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..data.commands.arguments import local_folder, seed, usable_cores, whole
from ..data.commands.output import cannot_write, write_json, write_output
from .figures import save_figure
from .problem import ProblemError

_LIBRARIES = ("sopdist", "numpy", "scipy", "cvxpy", "clarabel")


def add_common_arguments(parser: argparse.ArgumentParser, *, trials: str) -> None:
    """--trials, --seed, --jobs, --out, --quick. `trials` says what a trial is, and how many there are by default."""
    parser.add_argument("--trials", type=whole(1, 100_000), metavar="N", help=trials)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of everything that is drawn (default 0)")
    parser.add_argument(
        "--jobs", type=whole(1, 1024), default=usable_cores(), metavar="N",
        help="processes (default: one for each core); the numbers do not depend on it",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=local_folder, default=Path("theory"), metavar="DIR", help="where files go (default: theory)"
    )
    parser.add_argument("--quick", action="store_true", help="a coarser picture within a minute")


def add_sizes(parser: argparse.ArgumentParser, *, samples: int = 100, parameters: int = 150) -> None:
    """--samples and --parameters: the shape of J."""
    _add_size(parser, "--samples", samples, "N, observations")
    _add_size(parser, "--parameters", parameters, "p, entries of theta")


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The sizes of one small problem, the paper's (20, 40, 3, 3) by default."""
    add_sizes(parser, samples=20, parameters=40)
    _add_size(parser, "--rank", 3, "r, rank of J")
    _add_size(parser, "--wrong", 3, "k, wrong observations")


def _add_size(parser: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    parser.add_argument(option, type=whole(1, 2000), default=default, metavar="N", help=f"{text} (default {default})")


def positive(text: str) -> float:
    """A type for add_argument: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return number


def open_folder(folder: Path) -> None:
    """Before hours of work: that files can be written there."""
    if folder.exists() and not folder.is_dir():
        raise ProblemError(f"{folder}: is a file, not a folder")
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()


def counted(number: int, what: str) -> str:
    """`1 problem`, `4 problems`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def leave(
    name: str,
    args: argparse.Namespace,
    figure: Figure,
    rows: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Any],
    verdict: str,
) -> None:
    """Write NAME.png, .svg, .csv (a line a row) and .json (settings, numbers, verdict), and print the verdict."""
    stem = args.out / name
    files = save_figure(figure, stem)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    files.append(stem.with_suffix(".csv"))
    write_output(files[-1], table.getvalue().encode())
    files.append(stem.with_suffix(".json"))
    hidden = ("run", "out", "jobs")  # they change no number
    settings = {key: value for key, value in vars(args).items() if key not in hidden}
    versions = {library: version(library) for library in _LIBRARIES}
    content = {"command": name, "settings": settings, "versions": versions, "verdict": verdict, **numbers}
    write_json(files[-1], _plain(content))
    print(textwrap.fill(verdict, 100))
    print(f"\n{files[0].parent}: {', '.join(path.name for path in files)}")


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    """For JSON: arrays as lists, numbers to six digits, what is not finite as null."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value

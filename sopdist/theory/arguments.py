"""Shared by the commands `sopdist theory ...`: their options, and the files that they write."""

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

from ..cli.arguments import integer, local_folder, seed
from ..cli.output import cannot_write, write_json, write_output
from ..cores import usable_cores
from .figures import save_figure
from .problem import ProblemError

_LIBRARIES = ("sopdist", "numpy", "scipy", "cvxpy", "clarabel")


def add_common_arguments(parser: argparse.ArgumentParser, *, trials: str) -> None:
    """--trials, --seed, --jobs, --out, --quick. `trials` is the help text of --trials."""
    parser.add_argument("--trials", type=integer(1, 100_000), metavar="N", help=trials)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of all random numbers (default 0)")
    parser.add_argument(
        "--jobs", type=integer(1, 1024), default=usable_cores(), metavar="N",
        help="processes (default: one per core); the numbers do not depend on it",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=local_folder, default=Path("theory"), metavar="DIR", help="output folder (default: theory)"
    )
    parser.add_argument("--quick", action="store_true", help="coarser figures, within a minute")


def add_sizes(parser: argparse.ArgumentParser, *, samples: int = 100, parameters: int = 150) -> None:
    """--samples and --parameters: the shape of J."""
    _add_size(parser, "--samples", samples, "N, observations")
    _add_size(parser, "--parameters", parameters, "p, entries of theta")


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The sizes of one small problem, by default the paper's (20, 40, 3, 3)."""
    add_sizes(parser, samples=20, parameters=40)
    _add_size(parser, "--rank", 3, "r, rank of J")
    _add_size(parser, "--wrong", 3, "k, wrong observations")


def _add_size(parser: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    parser.add_argument(option, type=integer(1, 2000), default=default, metavar="N", help=f"{text} (default {default})")


def positive(text: str) -> float:
    """A type for add_argument: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return number


def create_folder(folder: Path) -> None:
    """Create the output folder and check, before the long computation, that it can be written."""
    if folder.exists() and not folder.is_dir():
        raise ProblemError(f"{folder}: is a file, not a folder")
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()


def write_results(
    name: str,
    args: argparse.Namespace,
    figure: Figure,
    rows: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Any],
    verdict: str,
) -> None:
    """Write NAME.png, .svg, .csv (the rows) and .json (settings, numbers, verdict), and print the verdict."""
    stem = args.out / name
    files = save_figure(figure, stem)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _round(value) for key, value in row.items()} for row in rows)
    files.append(stem.with_suffix(".csv"))
    write_output(files[-1], table.getvalue().encode())
    files.append(stem.with_suffix(".json"))
    hidden = ("run", "out", "jobs")  # they do not affect the numbers
    settings = {key: value for key, value in vars(args).items() if key not in hidden}
    versions = {library: version(library) for library in _LIBRARIES}
    content = {"command": name, "settings": settings, "versions": versions, "verdict": verdict, **numbers}
    write_json(files[-1], _to_json(content))
    print(textwrap.fill(verdict, 100))
    print(f"\n{files[0].parent}: {', '.join(path.name for path in files)}")


def _round(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def _to_json(value: Any) -> Any:
    """Arrays become lists, floats are rounded to six digits, and non-finite ones become null."""
    if isinstance(value, Mapping):
        return {key: _to_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_to_json(part) for part in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value

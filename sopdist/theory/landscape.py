"""`sopdist theory landscape`: every critical point is a global minimum or a strict saddle.

Critical points of 1/2 |J theta + u*u - v*v - y|^2 are constructed, with u_i = v_i = 0 for a given number of entries,
and searched for by minimising |gradient|^2 from random starts. For each point, the command computes the residual and
the smallest eigenvalue of the Hessian. The paper proves that this eigenvalue is at most -2 max|r_i|.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..cli.tables import format_table
from ..processes import run_tasks
from .arguments import add_common_arguments, add_problem, create_folder, write_results
from .critical_points import Point, construct_critical_point, find_critical_point, gradient, hessian, residual
from .figures import COLOURS, MARKERS, new_figure
from .problem import Problem, check_sizes, random_problem, trial_generator

NAME = "landscape"
ZERO = 1e-6  # a residual (relative to the largest |y|) or an eigenvalue below this counts as 0
KINDS = ("minimum", "strict saddle", "neither")


@dataclass(frozen=True)
class CriticalPoint:
    """The measurements of a critical point."""

    origin: str  # "made" (constructed) or "found" (by search)
    unexplained: int  # entries with u = v = 0
    gradient: float  # largest entry
    residual: float  # largest entry, relative to the largest |y|
    eigenvalue: float  # the smallest, relative to the largest |y|
    bound: float  # the paper's upper bound of the eigenvalue

    @property
    def kind(self) -> str:
        """One of KINDS; "neither" would contradict the proposition."""
        if self.residual <= ZERO:
            return "minimum"
        return "strict saddle" if self.eigenvalue < -ZERO else "neither"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist theory landscape`."""
    add_common_arguments(parser, trials="random problems (default 20, with --quick 4)")
    add_problem(parser)


def run(args: argparse.Namespace) -> int:
    """Construct, find and measure critical points; print a table, write figure and numbers."""
    sizes = (args.samples, args.parameters, args.rank, args.wrong)
    check_sizes(*sizes)
    create_folder(args.out)
    args.trials = args.trials or (4 if args.quick else 20)
    measure = partial(measure_problem, sizes=sizes, seed=args.seed, searches=4 if args.quick else 20)
    measured = run_tasks(measure, range(args.trials), args.jobs, title=NAME, unit="problem")
    points = [point for found, _ in measured for point in found]
    numbers = summarise(points) | {"searches_that_ended_nowhere": sum(failed for _, failed in measured)}
    rows = [{**vars(point), "kind": point.kind} for point in points]
    print(table(points), end="\n\n")
    write_results(NAME, args, plot(points), rows, numbers, verdict(numbers))
    return 0


def measure_problem(
    trial: int, sizes: tuple[int, int, int, int], seed: int, searches: int
) -> tuple[list[CriticalPoint], int]:
    """The critical points of one problem, and the number of searches that did not converge to one."""
    generator = trial_generator(seed, trial)
    problem = random_problem(*sizes, generator)
    made = [construct_critical_point(problem, zeros, generator) for zeros in range(problem.samples + 1)]
    found = [find_critical_point(problem, generator) for _ in range(searches)]
    points = [measure_point(problem, "made", point) for point in made]
    points += [measure_point(problem, "found", point) for point in found if point is not None]
    return points, found.count(None)


def measure_point(problem: Problem, origin: str, point: Point) -> CriticalPoint:
    """Measure a point. Entries of u and v that the search has brought close to 0 count as 0."""
    scale = np.abs(problem.y).max()
    left, flat = np.abs(residual(problem, point)), np.maximum(np.abs(point.u), np.abs(point.v)) < ZERO
    return CriticalPoint(
        origin,
        int(flat.sum()),
        float(np.abs(gradient(problem, point)).max()),
        float(left.max() / scale),
        float(np.linalg.eigvalsh(hessian(problem, point))[0] / scale),
        float(-2 * left[flat].max() / scale) if flat.any() else 0.0,
    )


def summarise(points: list[CriticalPoint]) -> dict[str, Any]:
    """The number of points of each kind, and the extreme values."""
    numbers: dict[str, Any] = {}
    for origin in ("made", "found"):
        own = [point for point in points if point.origin == origin]
        saddles = [point for point in own if point.kind == "strict saddle"]
        numbers[origin] = {
            "points": len(own),
            "minima": sum(point.kind == "minimum" for point in own),
            "strict_saddles": len(saddles),
            "neither": sum(point.kind == "neither" for point in own),
            "largest_gradient": max((point.gradient for point in own), default=None),
            "eigenvalue_nearest_to_zero_of_a_saddle": max((point.eigenvalue for point in saddles), default=None),
            "largest_excess_over_the_bound": max((point.eigenvalue - point.bound for point in saddles), default=None),
        }
    return numbers


def table(points: list[CriticalPoint]) -> str:
    """One row per origin and number of entries with u = v = 0."""
    rows = []
    for origin in ("made", "found"):
        for zeros in sorted({point.unexplained for point in points if point.origin == origin}):
            own = [point for point in points if (point.origin, point.unexplained) == (origin, zeros)]
            saddles = [point.eigenvalue for point in own if point.kind == "strict saddle"]
            span = f"{min(saddles):.2g} to {max(saddles):.2g}" if saddles else "-"
            kinds = [str(sum(point.kind == kind for point in own)) for kind in KINDS]
            rows.append([origin, str(zeros), str(len(own)), *kinds, f"{max(p.gradient for p in own):.0e}", span])
    header = ["origin", "u = v = 0", "points", "minima", "saddles", "neither", "gradient"]
    return format_table([*header, "eigenvalues of saddles / max|y|"], rows)


def verdict(numbers: dict[str, Any]) -> str:
    """The result in one paragraph."""
    made, found = numbers["made"], numbers["found"]
    saddles = [part for part in (made, found) if part["strict_saddles"]]
    nearest = max((part["eigenvalue_nearest_to_zero_of_a_saddle"] for part in saddles), default=float("nan"))
    excess = max((part["largest_excess_over_the_bound"] for part in saddles), default=float("nan"))
    return (
        f"Of {made['points']} constructed critical points, {made['minima']} are global minima and "
        f"{made['strict_saddles']} are strict saddles; of {found['points']} found by search, {found['minima']} and "
        f"{found['strict_saddles']} ({numbers['searches_that_ended_nowhere']} more searches did not converge). "
        f"Neither: {made['neither'] + found['neither']}. The smallest eigenvalue of every saddle is at most "
        f"{nearest:.2g} (relative to the largest |y|) and exceeds the bound of the proof, -2 max|r_i|, by at most "
        f"{max(excess, 0.0):.1g}."
    )


def plot(points: list[CriticalPoint]) -> Figure:
    """Residual against smallest eigenvalue, with the bound."""
    figure, axes = new_figure(1, 1, (6, 4.2))
    panel = axes[0, 0]
    for i, (origin, label) in enumerate((("made", "constructed"), ("found", "found by search"))):
        own = [point for point in points if point.origin == origin]
        x = [max(point.residual, ZERO / 10) for point in own]
        y = [max(-point.eigenvalue, ZERO / 10) for point in own]
        panel.scatter(x, y, s=14, color=COLOURS[i], marker=MARKERS[i], alpha=0.6, linewidths=0, label=label)
    line = np.geomspace(ZERO, max(point.residual for point in points) * 1.2, 200)
    panel.plot(line, 2 * line, color=COLOURS[6], linewidth=1, label=r"$2\,\max|r_i|$, the bound of the proof")
    panel.axvspan(ZERO / 20, ZERO, color=COLOURS[2], alpha=0.15, linewidth=0, label="no residual: global minima")
    panel.set(
        xscale="log", xlabel=r"largest residual $|r_i|$ over the largest $|y_i|$", xlim=(ZERO / 20, None), yscale="log",
        ylabel=r"$-$ smallest eigenvalue of the Hessian over $\max|y_i|$",
        title=f"critical points (values below {ZERO / 10:g} are shown as {ZERO / 10:g})",
    )  # fmt: skip
    panel.legend(loc="lower right")
    return figure

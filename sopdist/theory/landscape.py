"""`sopdist theory landscape`: every critical point is a global minimum, or there is a way down.

Critical points of 1/2 |J theta + u*u - v*v - y|^2 are made to order, with u_i = v_i = 0 in a given number of places,
and searched for by minimising |gradient|^2 from random starts. Of each, the residual and the smallest eigenvalue of the
Hessian. By the paper's proof that eigenvalue is at most -2 max|r_i|.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..text_table import format_table
from .arguments import add_common_arguments, add_problem, leave, open_folder
from .critical_points import Point, find_critical_point, gradient, hessian, make_critical_point, residual
from .figures import COLOURS, MARKERS, new_figure
from .problem import Problem, check_sizes, draw_problem
from .trials import generator_of, work_off

NAME = "landscape"
ZERO = 1e-6  # a residual, as a share of the largest |y|, or an eigenvalue that counts as 0


@dataclass(frozen=True)
class Critical:
    """What a critical point is like."""

    origin: str  # "made" or "found"
    unexplained: int  # places with u = v = 0
    gradient: float  # largest entry
    residual: float  # largest entry, as a share of the largest |y|
    eigenvalue: float  # smallest, over the largest |y|
    bound: float  # what the proof promises: at most that

    @property
    def kind(self) -> str:
        """What it turned out to be; "neither" would be against the proposition."""
        if self.residual <= ZERO:
            return "minimum"
        return "strict saddle" if self.eigenvalue < -ZERO else "neither"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add_common_arguments(parser, trials="problems to draw (default 20, with --quick 4)")
    add_problem(parser)


def run(args: argparse.Namespace) -> int:
    """Make and find points, look at each, write."""
    sizes = (args.samples, args.parameters, args.rank, args.wrong)
    check_sizes(*sizes)
    open_folder(args.out)
    args.trials = args.trials or (4 if args.quick else 20)
    look = partial(look_at_problem, sizes=sizes, seed=args.seed, searches=4 if args.quick else 20)
    looks = work_off(look, range(args.trials), args.jobs, title=NAME, unit="problem")
    points = [point for found, _ in looks for point in found]
    numbers = summarise(points) | {"searches_that_ended_nowhere": sum(lost for _, lost in looks)}
    rows = [{**vars(point), "kind": point.kind} for point in points]
    print(table(points), end="\n\n")
    leave(NAME, args, draw(points), rows, numbers, verdict(numbers))
    return 0


def look_at_problem(
    trial: int, sizes: tuple[int, int, int, int], seed: int, searches: int
) -> tuple[list[Critical], int]:
    """Points of one problem, and how many searches did not end in one."""
    generator = generator_of(seed, trial)
    problem = draw_problem(*sizes, generator)
    made = [make_critical_point(problem, places, generator) for places in range(problem.samples + 1)]
    found = [find_critical_point(problem, generator) for _ in range(searches)]
    points = [look_at(problem, "made", point) for point in made]
    points += [look_at(problem, "found", point) for point in found if point is not None]
    return points, found.count(None)


def look_at(problem: Problem, origin: str, point: Point) -> Critical:
    """Measure a point. u and v that the search has brought close to 0 count as 0."""
    scale = np.abs(problem.y).max()
    left, flat = np.abs(residual(problem, point)), np.maximum(np.abs(point.u), np.abs(point.v)) < ZERO
    return Critical(
        origin,
        int(flat.sum()),
        float(np.abs(gradient(problem, point)).max()),
        float(left.max() / scale),
        float(np.linalg.eigvalsh(hessian(problem, point))[0] / scale),
        float(-2 * left[flat].max() / scale) if flat.any() else 0.0,
    )


def summarise(points: list[Critical]) -> dict[str, Any]:
    """How many of each kind, and the extremes."""
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


def table(points: list[Critical]) -> str:
    """By how many places are unexplained."""
    lines = []
    for origin in ("made", "found"):
        for places in sorted({point.unexplained for point in points if point.origin == origin}):
            own = [point for point in points if (point.origin, point.unexplained) == (origin, places)]
            saddles = [point.eigenvalue for point in own if point.kind == "strict saddle"]
            span = f"{min(saddles):.2g} to {max(saddles):.2g}" if saddles else "-"
            kinds = [str(sum(point.kind == kind for point in own)) for kind in ("minimum", "strict saddle", "neither")]
            lines.append([origin, str(places), str(len(own)), *kinds, f"{max(p.gradient for p in own):.0e}", span])
    header = [
        "origin",
        "u = v = 0 in",
        "points",
        "minima",
        "saddles",
        "neither",
        "gradient",
        "eigenvalues of saddles / max|y|",
    ]
    return format_table(header, lines)


def verdict(numbers: dict[str, Any]) -> str:
    """One paragraph."""
    made, found = numbers["made"], numbers["found"]
    saddles = [part for part in (made, found) if part["strict_saddles"]]
    nearest = max((part["eigenvalue_nearest_to_zero_of_a_saddle"] for part in saddles), default=float("nan"))
    excess = max((part["largest_excess_over_the_bound"] for part in saddles), default=float("nan"))
    return (
        f"Of {made['points']} critical points made to order {made['minima']} are global minima and "
        f"{made['strict_saddles']} strict saddles; of {found['points']} found by search (another "
        f"{numbers['searches_that_ended_nowhere']} searches ended in no critical point) {found['minima']} and "
        f"{found['strict_saddles']}. Neither: {made['neither'] + found['neither']}. No saddle's smallest eigenvalue is "
        f"above {nearest:.2g} (over the largest |y|), and none is above the bound of the proof, -2 max|r_i|, by more "
        f"than {max(excess, 0.0):.1g}."
    )


def draw(points: list[Critical]) -> Figure:
    """Residual against smallest eigenvalue, with the bound."""
    figure, axes = new_figure(1, 1, (6, 4.2))
    panel = axes[0, 0]
    for i, (origin, text) in enumerate((("made", "made to order"), ("found", "found by search"))):
        own = [point for point in points if point.origin == origin]
        x = [max(point.residual, ZERO / 10) for point in own]
        y = [max(-point.eigenvalue, ZERO / 10) for point in own]
        panel.scatter(x, y, s=14, color=COLOURS[i], marker=MARKERS[i], alpha=0.6, linewidths=0, label=text)
    line = np.geomspace(ZERO, max(point.residual for point in points) * 1.2, 200)
    panel.plot(line, 2 * line, color=COLOURS[6], linewidth=1, label=r"$2\,\max|r_i|$, the bound of the proof")
    panel.axvspan(ZERO / 20, ZERO, color=COLOURS[2], alpha=0.15, linewidth=0, label="no residual: global minima")
    panel.set(
        xscale="log", xlabel=r"largest residual $|r_i|$ over the largest $|y_i|$", xlim=(ZERO / 20, None), yscale="log",
        ylabel=r"$-$ smallest eigenvalue of the Hessian over $\max|y_i|$",
        title=f"critical points of the landscape (what is below {ZERO / 10:g} is drawn there)",
    )  # fmt: skip
    panel.legend(loc="lower right")
    return figure

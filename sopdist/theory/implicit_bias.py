"""`sopdist theory implicit-bias`: descent on (theta, u, v), its flow, and the convex program that both should solve.

For one drawn problem, a map of how far descent with alpha and the program with lambda are apart, over a grid of both.
On the curve alpha = -log(gamma) / (2 lambda) they should agree; three solvers are compared there: the descent itself,
its limit of small steps (an ordinary differential equation), and CVXPY.

How well they agree at a gamma that is not 0 can be foreseen: where the program has nu_i = lambda, the flow ends with
nu_i = lambda (1 + log|s_i| / (2 |log gamma|)). Where recovery is exact, theta does not depend on nu, and the difference
is tiny. Elsewhere it shrinks as slowly as 1 / |log gamma|: gamma is squared once or twice to show it.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .arguments import add_common_arguments, add_problem, counted, leave, open_folder, positive
from .convex import ConvexProgram
from .descent import TOLERANCE, descend
from .figures import COLOURS, MARKERS, heat_map, new_figure
from .gradient_flow import alpha_of, follow_flow, weights_of
from .problem import Array, Problem, ProblemError, check_sizes, draw_problem, relative_difference, relative_error
from .trials import generator_of, work_off

NAME = "implicit-bias"
ALPHAS, LAMBDAS = (4.0, 4000.0), (1e-4, 1.0)  # the paper's ranges
CLOSE = 1e-2  # relative difference up to which two solvers agree
RECOVERED = 1e-3  # relative error up to which a solution counts as the truth
SMALLEST_GAMMA = 1e-30  # its fourth power is used, too, and must not vanish when it is squared
_FAR = 2.0  # off the curve: lambda at least so many times, or so many times less, than on it
_NAMES = ("theta", "s")
Solution = tuple[Array, Array]  # c (r,) and s (N,)


@dataclass(frozen=True)
class Grid:
    """How finely."""

    alphas: Array
    weights: Array  # the lambdas
    gammas: int  # how many for the second figure, each the square of the one before


@dataclass(frozen=True)
class Trial:
    """What one problem gives. Last axis 2: theta and s."""

    apart: Array  # (A, L, 2): descent at alpha against the program at lambda
    on_curve: dict[str, Array]  # pair of solvers -> (A, 2), lambda being that of the curve
    recovered: Array  # (A,) whether the program finds the truth there
    residual: Array  # (A,) of the descent
    converged: Array  # (A,) whether that is at most the tolerance
    steps: Array  # (A,)
    by_gamma: Array  # (gammas, A, 2): flow against program on the curve, at gamma, gamma^2, gamma^4, ...


FULL = Grid(np.geomspace(*ALPHAS, 61), np.geomspace(*LAMBDAS, 81), 3)
QUICK = Grid(np.geomspace(*ALPHAS, 13), np.geomspace(*LAMBDAS, 17), 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add_common_arguments(parser, trials="problems to draw; the maps show the first (default 10, with --quick 1)")
    add_problem(parser)
    parser.add_argument(
        "--gamma", type=positive, default=math.exp(-8), metavar="X", help="where u and v start (default e^-8)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw, solve, compare, write."""
    sizes = (args.samples, args.parameters, args.rank, args.wrong)
    check_sizes(*sizes)
    alpha_of(1.0, args.gamma)  # refuses what is not between 0 and 1
    if args.gamma < SMALLEST_GAMMA:
        raise ProblemError(f"gamma = {args.gamma:g}: must be at least {SMALLEST_GAMMA:g}")
    open_folder(args.out)
    grid = QUICK if args.quick else FULL
    args.trials = args.trials or (1 if args.quick else 10)
    solve = partial(solve_trial, sizes=sizes, seed=args.seed, gamma=args.gamma, grid=grid)
    trials = work_off(solve, range(args.trials), args.jobs, title=NAME, unit="problem")
    numbers = summarise(trials, grid, args.gamma)
    rows = [
        {"alpha": float(alpha), "lambda": float(weight), "theta": float(cell[0]), "s": float(cell[1])}
        for alpha, line in zip(grid.alphas, trials[0].apart, strict=True)
        for weight, cell in zip(grid.weights, line, strict=True)
    ]
    leave(NAME, args, draw(trials, grid, args.gamma), rows, numbers, verdict(numbers, args.trials))
    return 0


def solve_trial(trial: int, sizes: tuple[int, int, int, int], seed: int, gamma: float, grid: Grid) -> Trial:
    """All solvers on one problem."""
    problem = draw_problem(*sizes, generator_of(seed, trial))
    program = ConvexProgram(problem.samples, problem.rank)
    descent = descend(problem, grid.alphas, gamma)
    descents = list(zip(descent.c, descent.s, strict=True))
    optima = [_solve(program, problem, weight) for weight in grid.weights]

    weights = weights_of(grid.alphas, gamma)
    curve = [_solve(program, problem, weight) for weight in weights]
    gammas = [gamma ** (2**power) for power in range(grid.gammas)]
    flows = [[_flow(problem, weight, small) for weight in weights] for small in gammas]
    return Trial(
        apart=np.array([[_apart(one, other) for other in optima] for one in descents]),
        on_curve={
            "descent, program": _along(descents, curve),
            "flow, program": _along(flows[0], curve),
            "descent, flow": _along(descents, flows[0]),
        },
        recovered=np.array([relative_error(c, problem.c) < RECOVERED for c, _ in curve]),
        residual=descent.residual,
        converged=descent.converged,
        steps=descent.steps,
        by_gamma=np.array([_along(flow, curve) for flow in flows]),
    )


def _solve(program: ConvexProgram, problem: Problem, weight: float) -> Solution:
    optimum = program.solve(problem, weight)
    return optimum.c, optimum.s


def _flow(problem: Problem, weight: float, gamma: float) -> Solution:
    limit = follow_flow(problem, alpha_of(weight, gamma), gamma)
    return limit.c, limit.s


def _along(ones: list[Solution], others: list[Solution]) -> Array:
    """(A, 2): differences along the curve."""
    return np.array([_apart(one, other) for one, other in zip(ones, others, strict=True)])


def _apart(one: Solution, other: Solution) -> tuple[float, float]:
    """Relative differences in theta and s."""
    return relative_difference(one[0], other[0]), relative_difference(one[1], other[1])


def summarise(trials: list[Trial], grid: Grid, gamma: float) -> dict[str, Any]:
    """Medians over all problems: on the curve, off it, where recovery is exact and where it is not."""
    far = np.abs(np.log(grid.weights / weights_of(grid.alphas, gamma)[:, None])) > math.log(_FAR)  # (A, L)
    exact = np.concatenate([trial.recovered for trial in trials])
    numbers: dict[str, Any] = {
        "on_curve": {}, "off_curve": _by_name(np.concatenate([trial.apart[far] for trial in trials])),
        "share_recovered": float(exact.mean()),
    }  # fmt: skip
    for pair in trials[0].on_curve:
        values = np.concatenate([trial.on_curve[pair] for trial in trials])  # (trials A, 2)
        numbers["on_curve"][pair] = {
            "all": _by_name(values), "recovered": _by_name(values[exact]), "not recovered": _by_name(values[~exact]),
            "largest": {name: float(values[:, i].max()) for i, name in enumerate(_NAMES)},
        }  # fmt: skip
    close = (np.concatenate([trial.on_curve["descent, program"] for trial in trials])[exact] < CLOSE).all(axis=1)
    numbers["share_close_where_recovered"] = float(close.mean()) if len(close) else None
    by_gamma = np.concatenate([trial.by_gamma for trial in trials], axis=1)  # (gammas, trials A, 2)
    numbers["by_gamma"] = [
        {"gamma": gamma ** (2**power), "recovered": _by_name(values[exact]), "not recovered": _by_name(values[~exact])}
        for power, values in enumerate(by_gamma)
    ]
    converged = np.concatenate([trial.converged for trial in trials])
    numbers["descents"], numbers["converged"] = len(converged), int(converged.sum())
    numbers["largest_residual"] = float(max(trial.residual.max() for trial in trials))
    numbers["most_steps"] = int(max(trial.steps.max() for trial in trials))
    return numbers


def _by_name(values: Array) -> dict[str, float | None]:
    return {name: float(np.median(values[:, i])) if len(values) else None for i, name in enumerate(_NAMES)}


def verdict(numbers: dict[str, Any], trials: int) -> str:
    """One paragraph."""
    pair, gap = numbers["on_curve"]["descent, program"], numbers["on_curve"]["descent, flow"]

    def told(values: dict[str, float]) -> str:
        return " and ".join(f"{values[name]:.2g}" for name in _NAMES)

    last, share = numbers["by_gamma"][-1], numbers["share_recovered"]
    flow = f"the flow from gamma = {last['gamma']:.1g} comes to"
    parts = []
    if share > 0:
        close = f"{numbers['share_close_where_recovered']:.0%} of it within {CLOSE:g}"
        where = f"where the program recovers the truth ({share:.0%} of the curve, {close})"
        parts.append(f"{told(pair['recovered'])} {where}; {flow} {told(last['recovered'])}")
    if share < 1:
        where = f"where the program does not recover the truth ({1 - share:.0%})"
        parts.append(f"{told(pair['not recovered'])} {where}; {flow} {told(last['not recovered'])}")
    return (
        f"Descent and convex program, relative difference in theta and s, median of {counted(trials, 'problem')}: on "
        f"the curve {told(pair['all'])}, off it (lambda at least {_FAR:g} times too large or too small) "
        f"{told(numbers['off_curve'])}. On the curve: {'. And '.join(parts)}. Descent and flow differ by at most "
        f"{told(gap['largest'])}. {numbers['converged']} of {numbers['descents']} descents came to a residual of "
        f"{TOLERANCE:g} of the largest |y|, in up to {numbers['most_steps']:,} steps; the largest residual left is "
        f"{numbers['largest_residual']:.2g}."
    )


def draw(trials: list[Trial], grid: Grid, gamma: float) -> Figure:
    """Two maps of the first problem above two panels along the curve."""
    figure, axes = new_figure(2, 2, (9, 7.5))
    first = trials[0]
    curve = weights_of(grid.alphas, gamma)
    for i, symbol in enumerate((r"\theta", "s")):
        upper, lower = axes[0, i], axes[1, i]
        colours = heat_map(upper, grid.weights, grid.alphas, first.apart[:, :, i], vmin=0, vmax=1)
        upper.plot(curve, grid.alphas, color="white", linewidth=2.5)
        label = r"$\alpha = -\log\gamma\,/\,2\lambda$"
        upper.plot(curve, grid.alphas, color=COLOURS[1], linewidth=1.5, linestyle="--", label=label)
        upper.set(
            xscale="log", yscale="log", xlabel=r"$\lambda$ of the convex program", ylabel=r"$\alpha$ of the descent",
            title=f"relative difference in ${symbol}$", xlim=grid.weights[[0, -1]], ylim=grid.alphas[[0, -1]],
        )  # fmt: skip
        upper.legend(loc="lower left")
        figure.colorbar(colours, ax=upper)
        for j, (pair, values) in enumerate(first.on_curve.items()):
            lower.plot(curve, values[:, i], color=COLOURS[j], marker=MARKERS[j], markersize=3, linewidth=1, label=pair)
        if len(first.by_gamma) > 1:
            small = gamma ** (2 ** (len(first.by_gamma) - 1))
            text = rf"flow from $\gamma$ = {small:.0e}, program"
            lower.plot(curve, first.by_gamma[-1, :, i], color=COLOURS[6], linestyle=":", label=text)
        found = first.recovered
        if found.any():
            lower.axvspan(
                curve[found].min(), curve.max(), color=COLOURS[2], alpha=0.1, label="program recovers the truth"
            )
        lower.set(
            xscale="log", yscale="log", xlabel=r"$\lambda$, with $\alpha$ on the curve", ylabel="relative difference",
            title=f"along the curve: ${symbol}$", ylim=(1e-9, 2),
        )  # fmt: skip
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure

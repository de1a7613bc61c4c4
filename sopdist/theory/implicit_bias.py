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

from .arguments import add_common_arguments, add_problem, leave, open_folder, positive
from .convex import ConvexProgram
from .descent import descend
from .figures import COLOURS, MARKERS, heat_map, new_figure
from .gradient_flow import alpha_of, follow_flow
from .problem import Array, Problem, check_sizes, draw_problem, relative_difference, relative_error
from .trials import generator_of, work_off

NAME = "implicit-bias"
ALPHAS, LAMBDAS = (4.0, 4000.0), (1e-4, 1.0)  # the paper's ranges
RECOVERED = 1e-3  # relative error up to which a solution counts as the truth
_FAR = 2.0  # off the curve: lambda at least so many times, or so many times less, than on it
_NAMES = ("theta", "s")


@dataclass(frozen=True)
class Grid:
    """How finely, and how exactly."""

    alphas: Array
    weights: Array  # the lambdas
    tolerance: float  # of the descent's residual
    gammas: int  # how many for the second figure, each the square of the one before


@dataclass(frozen=True)
class Trial:
    """What one problem gives. Last axis 2: theta and s."""

    apart: Array  # (A, L, 2): descent at alpha against the program at lambda
    on_curve: dict[str, Array]  # pair of solvers -> (A, 2), lambda being that of the curve
    recovered: Array  # (A,) whether the program finds the truth there
    residual: Array  # (A,) of the descent
    steps: Array  # (A,)
    by_gamma: Array  # (gammas, A, 2): flow against program on the curve, at gamma, gamma^2, gamma^4, ...


FULL = Grid(np.geomspace(*ALPHAS, 61), np.geomspace(*LAMBDAS, 81), 1e-6, 3)
QUICK = Grid(np.geomspace(*ALPHAS, 13), np.geomspace(*LAMBDAS, 17), 1e-5, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add_common_arguments(parser, trials="problems to draw; the maps show the first (default 4, with --quick 1)")
    add_problem(parser)
    parser.add_argument(
        "--gamma", type=positive, default=math.exp(-8), metavar="X", help="where u and v start (default e^-8)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw, solve, compare, write."""
    sizes = (args.samples, args.parameters, args.rank, args.wrong)
    check_sizes(*sizes)
    alpha_of(1.0, args.gamma)  # refuses what is not between 0 and 1
    open_folder(args.out)
    grid = QUICK if args.quick else FULL
    args.trials = args.trials or (1 if args.quick else 4)
    solve = partial(solve_trial, sizes=sizes, seed=args.seed, gamma=args.gamma, grid=grid)
    trials = work_off(solve, range(args.trials), args.jobs, title=NAME, unit="problem")
    numbers = summarise(trials, grid, args.gamma)
    rows = [
        {"alpha": float(alpha), "lambda": float(weight), "theta": float(cell[0]), "s": float(cell[1])}
        for alpha, line in zip(grid.alphas, trials[0].apart, strict=True)
        for weight, cell in zip(grid.weights, line, strict=True)
    ]
    leave(NAME, args, draw(trials, grid, args.gamma), rows, numbers, verdict(numbers, args))
    return 0


def solve_trial(trial: int, sizes: tuple[int, int, int, int], seed: int, gamma: float, grid: Grid) -> Trial:
    """All solvers on one problem."""
    problem = draw_problem(*sizes, generator_of(seed, trial))
    program = ConvexProgram(problem.samples, problem.rank)
    descent = descend(problem, grid.alphas, gamma, tolerance=grid.tolerance)
    by_weight = [program.solve(problem, weight) for weight in grid.weights]
    apart = [
        [_apart(c, s, optimum.c, optimum.s) for optimum in by_weight] for c, s in zip(descent.c, descent.s, strict=True)
    ]
    curve = [program.solve(problem, -math.log(gamma) / (2 * alpha)) for alpha in grid.alphas]
    flow = [follow_flow(problem, alpha, gamma) for alpha in grid.alphas]
    found = [(c, s) for c, s in zip(descent.c, descent.s, strict=True)]
    limits, optima = [(limit.c, limit.s) for limit in flow], [(optimum.c, optimum.s) for optimum in curve]
    pairs = {
        "descent, program": (found, optima), "flow, program": (limits, optima), "descent, flow": (found, limits),
    }  # fmt: skip
    on_curve = {
        pair: np.array([_apart(*one, *other) for one, other in zip(ones, others, strict=True)])
        for pair, (ones, others) in pairs.items()
    }
    return Trial(
        np.array(apart), on_curve,
        np.array([relative_error(optimum.c, problem.c) < RECOVERED for optimum in curve]),
        descent.residual, descent.steps,
        np.array([_flow_against(problem, curve, gamma ** (2**power), grid, gamma) for power in range(grid.gammas)]),
    )  # fmt: skip


def _flow_against(problem: Problem, curve: list[Any], gamma: float, grid: Grid, first_gamma: float) -> Array:
    """(A, 2): the flow from `gamma` against the same programs."""
    weights = -math.log(first_gamma) / (2 * grid.alphas)
    limits = [follow_flow(problem, alpha_of(float(weight), gamma), gamma) for weight in weights]
    return np.array([_apart(limit.c, limit.s, best.c, best.s) for limit, best in zip(limits, curve, strict=True)])


def _apart(c: Array, s: Array, other_c: Array, other_s: Array) -> tuple[float, float]:
    return relative_difference(c, other_c), relative_difference(s, other_s)


def summarise(trials: list[Trial], grid: Grid, gamma: float) -> dict[str, Any]:
    """Medians over all problems: on the curve, off it, where recovery is exact and where it is not."""
    far = np.abs(np.log(grid.weights / (-math.log(gamma) / (2 * grid.alphas[:, None])))) > math.log(_FAR)  # (A, L)
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
    by_gamma = np.concatenate([trial.by_gamma for trial in trials], axis=1)  # (gammas, trials A, 2)
    numbers["by_gamma"] = [
        {"gamma": gamma ** (2**power), "recovered": _by_name(values[exact]), "not recovered": _by_name(values[~exact])}
        for power, values in enumerate(by_gamma)
    ]
    numbers["largest_residual"] = float(max(trial.residual.max() for trial in trials))
    numbers["most_steps"] = int(max(trial.steps.max() for trial in trials))
    return numbers


def _by_name(values: Array) -> dict[str, float | None]:
    return {name: float(np.median(values[:, i])) if len(values) else None for i, name in enumerate(_NAMES)}


def verdict(numbers: dict[str, Any], args: argparse.Namespace) -> str:
    """One paragraph."""
    pair, gap = numbers["on_curve"]["descent, program"], numbers["on_curve"]["descent, flow"]

    def told(values: dict[str, float | None]) -> str:
        return " and ".join("nothing" if values[name] is None else f"{values[name]:.2g}" for name in _NAMES)

    last = numbers["by_gamma"][-1]
    return (
        f"Descent and convex program, relative difference in theta and s, median over {args.trials} problems: on the "
        f"curve {told(pair['all'])}, off it (lambda at least {_FAR:g} times too large or too small) "
        f"{told(numbers['off_curve'])}. On the curve it is {told(pair['recovered'])} where the program recovers the "
        f"truth ({numbers['share_recovered']:.0%} of the curve), {told(pair['not recovered'])} where it does not; the "
        f"flow from gamma = {last['gamma']:.1g} comes to {told(last['recovered'])}, and {told(last['not recovered'])}. "
        f"Descent and flow differ by at most {told(gap['largest'])}. The descent took up to {numbers['most_steps']:,} "
        f"steps; its largest residual is {numbers['largest_residual']:.1g} of the largest |y|."
    )


def draw(trials: list[Trial], grid: Grid, gamma: float) -> Figure:
    """Two maps of the first problem above two panels along the curve."""
    figure, axes = new_figure(2, 2, (9, 7.5))
    first = trials[0]
    curve = -math.log(gamma) / (2 * grid.alphas)
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

"""`sopdist theory implicit-bias`: gradient descent on (theta, u, v), its flow, and the convex program.

For one random problem, a map shows the difference between descent with alpha and the program with lambda, over a grid
of both. On the curve alpha = -log(gamma) / (2 lambda) they should agree. Three solvers are compared there: the descent,
its limit of small steps (an ordinary differential equation), and CVXPY.

The agreement for a gamma above 0 can be predicted: where the program has nu_i = lambda, the flow ends with
nu_i = lambda (1 + log|s_i| / (2 |log gamma|)). Where recovery is exact, theta does not depend on nu, and the difference
is tiny. Elsewhere it decreases only like 1 / |log gamma|; gamma is squared once or twice to show that.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..cli.units import pluralize
from ..processes import run_tasks
from .arguments import add_common_arguments, add_problem, create_folder, positive, write_results
from .convex import ConvexProgram
from .descent import TOLERANCE, descend
from .figures import COLOURS, MARKERS, new_figure, plot_boundary, plot_map
from .gradient_flow import alpha_for, integrate_flow, weights_for
from .problem import (
    RECOVERED,
    Array,
    Problem,
    ProblemError,
    check_sizes,
    random_problem,
    relative_difference,
    relative_error,
    trial_generator,
)

NAME = "implicit-bias"
ALPHAS, LAMBDAS = (4.0, 4000.0), (1e-4, 1.0)  # the paper's ranges
CLOSE = 1e-2  # relative difference below which two solvers agree
MIN_GAMMA = 1e-30  # gamma^4 is also used, and its square must not underflow
_FAR = 2.0  # off the curve: lambda is larger or smaller by at least this factor
_NAMES = ("theta", "s")
Solution = tuple[Array, Array]  # c (r,) and s (N,)


@dataclass(frozen=True)
class Grid:
    """The values of alpha, lambda and gamma."""

    alphas: Array
    weights: Array  # the lambdas
    gammas: int  # number of gammas, each the square of the one before


@dataclass(frozen=True)
class Trial:
    """The results of one problem. An axis of length 2: theta and s."""

    difference: Array  # (A, L, 2): descent at alpha against the program at lambda
    on_curve: dict[str, Array]  # pair of solvers -> (A, 2), for alpha and lambda on the curve
    recovered: Array  # (A,) whether the program recovers the ground truth there
    residual: Array  # (A,) of the descent
    converged: Array  # (A,) whether the residual is within the tolerance
    steps: Array  # (A,)
    by_gamma: Array  # (gammas, A, 2): flow against program on the curve, for gamma, gamma^2, gamma^4, ...


FULL = Grid(np.geomspace(*ALPHAS, 61), np.geomspace(*LAMBDAS, 81), 3)
QUICK = Grid(np.geomspace(*ALPHAS, 13), np.geomspace(*LAMBDAS, 17), 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist theory implicit-bias`."""
    add_common_arguments(parser, trials="random problems; the maps show the first (default 10, with --quick 1)")
    add_problem(parser)
    parser.add_argument(
        "--gamma", type=positive, default=math.exp(-8), metavar="X", help="initial value of u and v (default e^-8)"
    )


def run(args: argparse.Namespace) -> int:
    """Solve all problems with all solvers, write figure and numbers."""
    sizes = (args.samples, args.parameters, args.rank, args.wrong)
    check_sizes(*sizes)
    alpha_for(1.0, args.gamma)  # raises unless gamma is between 0 and 1
    if args.gamma < MIN_GAMMA:
        raise ProblemError(f"gamma = {args.gamma:g}: must be at least {MIN_GAMMA:g}")
    create_folder(args.out)
    grid = QUICK if args.quick else FULL
    args.trials = args.trials or (1 if args.quick else 10)
    solve = partial(solve_trial, sizes=sizes, seed=args.seed, gamma=args.gamma, grid=grid)
    trials = run_tasks(solve, range(args.trials), args.jobs, title=NAME, unit="problem")
    numbers = summarise(trials, grid, args.gamma)
    rows = [
        {"alpha": float(alpha), "lambda": float(weight), "theta": float(cell[0]), "s": float(cell[1])}
        for alpha, cells in zip(grid.alphas, trials[0].difference, strict=True)
        for weight, cell in zip(grid.weights, cells, strict=True)
    ]
    write_results(NAME, args, plot(trials, grid, args.gamma), rows, numbers, verdict(numbers, args.trials))
    return 0


def solve_trial(trial: int, sizes: tuple[int, int, int, int], seed: int, gamma: float, grid: Grid) -> Trial:
    """Run all solvers on one problem."""
    problem = random_problem(*sizes, trial_generator(seed, trial))
    program = ConvexProgram(problem.samples, problem.rank)
    descent = descend(problem, grid.alphas, gamma)
    descents = list(zip(descent.c, descent.s, strict=True))
    optima = [_solve(program, problem, weight) for weight in grid.weights]

    weights = weights_for(grid.alphas, gamma)
    curve = [_solve(program, problem, weight) for weight in weights]
    gammas = [gamma ** (2**power) for power in range(grid.gammas)]
    flows = [[_flow(problem, weight, small) for weight in weights] for small in gammas]
    return Trial(
        difference=np.array([[_difference(one, other) for other in optima] for one in descents]),
        on_curve={
            "descent, program": _differences(descents, curve),
            "flow, program": _differences(flows[0], curve),
            "descent, flow": _differences(descents, flows[0]),
        },
        recovered=np.array([relative_error(c, problem.c) < RECOVERED for c, _ in curve]),
        residual=descent.residual,
        converged=descent.converged,
        steps=descent.steps,
        by_gamma=np.array([_differences(flow, curve) for flow in flows]),
    )


def _solve(program: ConvexProgram, problem: Problem, weight: float) -> Solution:
    optimum = program.solve(problem, weight)
    return optimum.c, optimum.s


def _flow(problem: Problem, weight: float, gamma: float) -> Solution:
    limit = integrate_flow(problem, alpha_for(weight, gamma), gamma)
    return limit.c, limit.s


def _differences(ones: list[Solution], others: list[Solution]) -> Array:
    """(A, 2): relative differences of pairs of solutions."""
    return np.array([_difference(one, other) for one, other in zip(ones, others, strict=True)])


def _difference(one: Solution, other: Solution) -> tuple[float, float]:
    """Relative differences in theta and s."""
    return relative_difference(one[0], other[0]), relative_difference(one[1], other[1])


def summarise(trials: list[Trial], grid: Grid, gamma: float) -> dict[str, Any]:
    """Medians over all problems: on the curve, off it, where recovery is exact and where it is not."""
    far = np.abs(np.log(grid.weights / weights_for(grid.alphas, gamma)[:, None])) > math.log(_FAR)  # (A, L)
    exact = np.concatenate([trial.recovered for trial in trials])
    numbers: dict[str, Any] = {
        "on_curve": {}, "off_curve": _medians(np.concatenate([trial.difference[far] for trial in trials])),
        "share_recovered": float(exact.mean()),
    }  # fmt: skip
    for pair in trials[0].on_curve:
        values = np.concatenate([trial.on_curve[pair] for trial in trials])  # (trials A, 2)
        numbers["on_curve"][pair] = {
            "all": _medians(values), "recovered": _medians(values[exact]), "not recovered": _medians(values[~exact]),
            "largest": {name: float(values[:, i].max()) for i, name in enumerate(_NAMES)},
        }  # fmt: skip
    close = (np.concatenate([trial.on_curve["descent, program"] for trial in trials])[exact] < CLOSE).all(axis=1)
    numbers["share_close_where_recovered"] = float(close.mean()) if len(close) else None
    by_gamma = np.concatenate([trial.by_gamma for trial in trials], axis=1)  # (gammas, trials A, 2)
    numbers["by_gamma"] = [
        {"gamma": gamma ** (2**power), "recovered": _medians(values[exact]), "not recovered": _medians(values[~exact])}
        for power, values in enumerate(by_gamma)
    ]
    converged = np.concatenate([trial.converged for trial in trials])
    numbers["descents"], numbers["converged"] = len(converged), int(converged.sum())
    numbers["largest_residual"] = float(max(trial.residual.max() for trial in trials))
    numbers["most_steps"] = int(max(trial.steps.max() for trial in trials))
    return numbers


def _medians(values: Array) -> dict[str, float | None]:
    return {name: float(np.median(values[:, i])) if len(values) else None for i, name in enumerate(_NAMES)}


def verdict(numbers: dict[str, Any], trials: int) -> str:
    """The result in one paragraph."""
    pair, gap = numbers["on_curve"]["descent, program"], numbers["on_curve"]["descent, flow"]
    last, share = numbers["by_gamma"][-1], numbers["share_recovered"]

    def both(values: dict[str, float]) -> str:
        return " and ".join(f"{values[name]:.2g}" for name in _NAMES)

    def on_curve(key: str) -> str:
        flow = f"the flow from gamma = {last['gamma']:.1g} differs from the program by {both(last[key])}"
        return f"they differ by {both(pair[key])}, and {flow}"

    sentences = [
        "Median relative difference of theta and s between gradient descent and the convex program over "
        f"{pluralize(trials, 'problem')}: {both(pair['all'])} on the curve, {both(numbers['off_curve'])} off it "
        f"(lambda at least {_FAR:g} times too large or too small)."
    ]
    if share > 0:
        close = f"{numbers['share_close_where_recovered']:.0%} of it within {CLOSE:g}"
        where = f"Where the program recovers the ground truth ({share:.0%} of the curve, {close})"
        sentences.append(f"{where}, {on_curve('recovered')}.")
    if share < 1:
        sentences.append(f"Where it does not ({1 - share:.0%} of the curve), {on_curve('not recovered')}.")
    sentences += [
        f"Descent and flow differ by at most {both(gap['largest'])}.",
        f"{numbers['converged']} of {numbers['descents']} descents converged to a residual of {TOLERANCE:g} times the "
        f"largest |y|, in at most {numbers['most_steps']:,} steps; the largest remaining residual is "
        f"{numbers['largest_residual']:.2g}.",
    ]
    return " ".join(sentences)


def plot(trials: list[Trial], grid: Grid, gamma: float) -> Figure:
    """Two maps of the first problem above two panels along the curve."""
    figure, axes = new_figure(2, 2, (9, 7.5))
    first = trials[0]
    curve = weights_for(grid.alphas, gamma)
    for i, symbol in enumerate((r"\theta", "s")):
        upper, lower = axes[0, i], axes[1, i]
        plot_map(figure, upper, grid.weights, grid.alphas, first.difference[:, :, i])
        plot_boundary(upper, curve, grid.alphas, r"$\alpha = -\log\gamma\,/\,2\lambda$")
        upper.set(
            xscale="log", yscale="log", xlabel=r"$\lambda$ of the convex program", ylabel=r"$\alpha$ of the descent",
            title=f"relative difference in ${symbol}$", xlim=grid.weights[[0, -1]], ylim=grid.alphas[[0, -1]],
        )  # fmt: skip
        upper.legend(loc="lower left")
        for j, (pair, values) in enumerate(first.on_curve.items()):
            lower.plot(curve, values[:, i], color=COLOURS[j], marker=MARKERS[j], markersize=3, linewidth=1, label=pair)
        if len(first.by_gamma) > 1:
            small = gamma ** (2 ** (len(first.by_gamma) - 1))
            label = rf"flow from $\gamma$ = {small:.0e}, program"
            lower.plot(curve, first.by_gamma[-1, :, i], color=COLOURS[6], linestyle=":", label=label)
        if first.recovered.any():
            start, label = curve[first.recovered].min(), "program recovers the ground truth"
            lower.axvspan(start, curve.max(), color=COLOURS[2], alpha=0.1, label=label)
        lower.set(
            xscale="log", yscale="log", xlabel=r"$\lambda$, with $\alpha$ on the curve", ylabel="relative difference",
            title=f"along the curve: ${symbol}$", ylim=(1e-9, 2),
        )  # fmt: skip
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure

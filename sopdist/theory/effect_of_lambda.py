"""`sopdist theory lambda`: how well the convex program recovers theta and s as a function of lambda, k and r.

The paper's claim: recovery succeeds exactly when lambda is above a threshold that depends on k and r. N = 100, p = 150;
r = 20 with k = 10 ... 80, and k = 20 with r = 10 ... 80 (scaled with --samples). The figure shows means over the trials
and the interquartile range.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..cli.units import pluralize
from ..processes import run_tasks
from .arguments import add_common_arguments, add_sizes, create_folder, write_results
from .convex import ConvexProgram
from .figures import COLOURS, MARKERS, new_figure
from .problem import RECOVERED, Array, ProblemError, random_problem, relative_error, trial_generator

NAME = "lambda"
LAMBDAS = (1e-4, 1.0)
RANK, WRONG = 20, 20  # the fixed value while the other varies
VARIED = (10, 20, 40, 60, 80)
Setting = tuple[str, int, int]  # name of the size that varies, r, k
_FLOOR = 1e-10  # smaller errors are those of the solver


def settings(samples: int) -> list[Setting]:
    """The paper's settings, scaled from its 100 samples to `samples`."""
    scaled = [max(1, round(value * samples / 100)) for value in (RANK, WRONG, *VARIED)]
    rank, wrong, *varied = scaled
    varied = list(dict.fromkeys(varied))  # with few samples, values repeat
    return [("k", rank, value) for value in varied] + [("r", value, wrong) for value in varied]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist theory lambda`."""
    add_common_arguments(parser, trials="random problems per curve (default 10, with --quick 3)")
    add_sizes(parser)


def run(args: argparse.Namespace) -> int:
    """Solve all problems, write figure and numbers."""
    chosen = settings(args.samples)
    largest = max(rank for _, rank, _ in chosen)
    if args.parameters < largest:
        sizes = f"--samples {args.samples} --parameters {args.parameters}"
        raise ProblemError(f"{sizes}: the curves need a rank of up to {largest}, so at least as many parameters")
    create_folder(args.out)
    args.trials = args.trials or (3 if args.quick else 10)
    weights = np.geomspace(*LAMBDAS, 13 if args.quick else 41)
    solve = partial(
        solve_setting, sizes=(args.samples, args.parameters), seed=args.seed, trials=args.trials, weights=weights
    )
    slowest_first = sorted(chosen, key=lambda setting: -setting[1])
    solved = run_tasks(solve, slowest_first, args.jobs, title=NAME, unit="curve")
    errors = dict(zip(slowest_first, solved, strict=True))
    curves = [summarise(setting, errors[setting], weights) for setting in chosen]
    rows = [
        {"varies": curve["varies"], "r": curve["r"], "k": curve["k"], "lambda": float(weight)}
        | {f"{name}_{part}": curve[name][part][i] for name in ("theta", "s") for part in ("mean", "lower", "upper")}
        for curve in curves
        for i, weight in enumerate(weights)
    ]
    write_results(NAME, args, plot(curves, weights), rows, {"curves": curves}, verdict(curves, args.trials))
    return 0


def solve_setting(setting: Setting, sizes: tuple[int, int], seed: int, trials: int, weights: Array) -> Array:
    """(trials, len(weights), 2): the relative errors of theta and s."""
    _, rank, wrong = setting
    program = ConvexProgram(sizes[0], rank)
    errors = np.empty((trials, len(weights), 2))
    for trial in range(trials):
        problem = random_problem(*sizes, rank, wrong, trial_generator(seed, rank, wrong, trial))
        for i, weight in enumerate(weights):
            found = program.solve(problem, weight)
            errors[trial, i] = relative_error(found.c, problem.c), relative_error(found.s, problem.s)
    return errors


def summarise(setting: Setting, errors: Array, weights: Array) -> dict[str, Any]:
    """Means and quartiles over the trials, and the lambda from which both mean errors stay small."""
    varies, rank, wrong = setting
    small = (errors.mean(axis=0) < RECOVERED).all(axis=1)  # (L,)
    stays = np.logical_and.accumulate(small[::-1])[::-1]  # small here and for every larger lambda
    curve: dict[str, Any] = {
        "varies": varies, "r": rank, "k": wrong,
        "threshold": float(weights[stays.argmax()]) if stays.any() else None,
    }  # fmt: skip
    for i, name in enumerate(("theta", "s")):
        lower, upper = np.quantile(errors[:, :, i], (0.25, 0.75), axis=0)
        curve[name] = {"mean": errors[:, :, i].mean(axis=0).tolist(), "lower": lower.tolist(), "upper": upper.tolist()}
    return curve


def verdict(curves: list[dict[str, Any]], trials: int) -> str:
    """The result in one paragraph."""
    parts, decreases = [], []
    for varies, fixed in (("k", "r"), ("r", "k")):
        own = [curve for curve in curves if curve["varies"] == varies]
        listed = ", ".join(
            (f"{curve['threshold']:.2g}" if curve["threshold"] else "none") + f" at {varies} = {curve[varies]}"
            for curve in own
        )
        thresholds = [curve["threshold"] or math.inf for curve in own]
        if any(after < before for before, after in itertools.pairwise(thresholds)):
            decreases.append(varies)
        parts.append(f"for {fixed} = {own[0][fixed]}: {listed}")
    trend = f"decreases somewhere as {' and '.join(decreases)} grows" if decreases else "never decreases with k or r"
    return (
        f"Smallest lambda from which the mean relative errors of theta and s over {pluralize(trials, 'trial')} both "
        f"stay below {RECOVERED:g}: {'; '.join(parts)}. It {trend}."
    )


def plot(curves: list[dict[str, Any]], weights: Array) -> Figure:
    """Rows: the size that varies; columns: theta and s."""
    figure, axes = new_figure(2, 2, (9, 6.5))
    for row, (varies, fixed) in enumerate((("k", "r"), ("r", "k"))):
        own = [curve for curve in curves if curve["varies"] == varies]
        for column, (name, symbol) in enumerate((("theta", r"\theta"), ("s", "s"))):
            panel = axes[row, column]
            for i, curve in enumerate(own):
                mean, lower, upper = (np.maximum(curve[name][part], _FLOOR) for part in ("mean", "lower", "upper"))
                style = {"color": COLOURS[i], "marker": MARKERS[i], "markersize": 3, "linewidth": 1.2}
                panel.plot(weights, mean, label=f"{varies} = {curve[varies]}", **style)
                panel.fill_between(weights, lower, upper, color=COLOURS[i], alpha=0.15, linewidth=0)
            panel.axhline(RECOVERED, color="grey", linestyle=":", linewidth=1)
            panel.set(
                xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel=f"relative error of ${symbol}$",
                title=f"${symbol}$, {fixed} = {own[0][fixed]}", ylim=(_FLOOR, 1e3 if name == "s" else 10),
            )  # fmt: skip
            panel.legend(loc="lower left")
    return figure

"""`sopdist theory lambda`: how well the convex program recovers theta and s, against lambda; for several k, several r.

The paper's claim: recovery is right exactly when lambda is above a threshold, which depends on k and r. N = 100,
p = 150; r = 20 with k = 10 ... 80, and k = 20 with r = 10 ... 80 (with other --samples: as shares of them). Means over
the trials, with the range of the middle half of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .arguments import add_common_arguments, add_sizes, counted, leave, open_folder
from .convex import ConvexProgram
from .figures import COLOURS, MARKERS, new_figure
from .problem import Array, ProblemError, draw_problem, relative_error
from .trials import generator_of, work_off

NAME = "lambda"
LAMBDAS = (1e-4, 1.0)
RECOVERED = 1e-3
RANK, WRONG = 20, 20  # what stays while the other varies
VARIED = (10, 20, 40, 60, 80)
Setting = tuple[str, int, int]  # what varies, r, k
_FLOOR = 1e-10  # below that, errors are the solver's


def settings(samples: int) -> list[Setting]:
    """The paper's, as shares of the samples where they are not its 100."""
    scaled = [max(1, round(value * samples / 100)) for value in (RANK, WRONG, *VARIED)]
    rank, wrong, *varied = scaled
    varied = list(dict.fromkeys(varied))  # few samples bring the same number twice
    return [("k", rank, value) for value in varied] + [("r", value, wrong) for value in varied]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add_common_arguments(parser, trials="problems to draw for each curve (default 10, with --quick 3)")
    add_sizes(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, solve, write."""
    chosen = settings(args.samples)
    largest = max(rank for _, rank, _ in chosen)
    if args.parameters < largest:
        sizes = f"--samples {args.samples} --parameters {args.parameters}"
        raise ProblemError(f"{sizes}: the curves need a rank of up to {largest}, and so as many parameters")
    open_folder(args.out)
    args.trials = args.trials or (3 if args.quick else 10)
    weights = np.geomspace(*LAMBDAS, 13 if args.quick else 41)
    solve = partial(
        solve_setting, sizes=(args.samples, args.parameters), seed=args.seed, trials=args.trials, weights=weights
    )
    slowest_first = sorted(chosen, key=lambda setting: -setting[1])
    solved = work_off(solve, slowest_first, args.jobs, title=NAME, unit="curve")
    errors = dict(zip(slowest_first, solved, strict=True))
    curves = [summarise(setting, errors[setting], weights) for setting in chosen]
    rows = [
        {"varies": curve["varies"], "r": curve["r"], "k": curve["k"], "lambda": float(weight)}
        | {f"{name}_{part}": curve[name][part][i] for name in ("theta", "s") for part in ("mean", "lower", "upper")}
        for curve in curves
        for i, weight in enumerate(weights)
    ]
    leave(NAME, args, draw(curves, weights), rows, {"curves": curves}, verdict(curves, args.trials))
    return 0


def solve_setting(setting: Setting, sizes: tuple[int, int], seed: int, trials: int, weights: Array) -> Array:
    """(trials, len(weights), 2): the relative errors of theta and s."""
    _, rank, wrong = setting
    program = ConvexProgram(sizes[0], rank)
    errors = np.empty((trials, len(weights), 2))
    for trial in range(trials):
        problem = draw_problem(*sizes, rank, wrong, generator_of(seed, rank, wrong, trial))
        for i, weight in enumerate(weights):
            found = program.solve(problem, weight)
            errors[trial, i] = relative_error(found.c, problem.c), relative_error(found.s, problem.s)
    return errors


def summarise(setting: Setting, errors: Array, weights: Array) -> dict[str, Any]:
    """Means and quartiles over the trials, and from which lambda on both mean errors are small."""
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
    """One paragraph."""
    parts, falls = [], []
    for varies, fixed in (("k", "r"), ("r", "k")):
        own = [curve for curve in curves if curve["varies"] == varies]
        told = ", ".join(
            f"{varies} = {curve[varies]}: " + (f"{curve['threshold']:.2g}" if curve["threshold"] else "never")
            for curve in own
        )
        steps = [curve["threshold"] or math.inf for curve in own]
        falls += [varies for lower, higher in itertools.pairwise(steps) if higher < lower]
        parts.append(f"with {fixed} = {own[0][fixed]}: {told}")
    return (
        f"Mean relative errors of theta and s over {counted(trials, 'trial')} are both below {RECOVERED:g} from this "
        "lambda on: "
        + "; ".join(parts)
        + (f". It falls as these grow: {', '.join(falls)}." if falls else ". It does not fall as k or r grows.")
    )


def draw(curves: list[dict[str, Any]], weights: Array) -> Figure:
    """Rows: what varies; columns: theta and s."""
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

"""`sopdist theory phase`: for which k and r the convex program recovers theta and s, at one lambda.

N = 100, p = 150, lambda = 0.1; a trial counts if the relative error is below 1e-3. The region in which the paper
guarantees recovery, k^2 r < N / (4 mu(J)) with the measured mu, is drawn in; every trial that the proof covers (its
lambda above the proof's threshold, too) is checked.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .arguments import add_common_arguments, add_sizes, counted, leave, open_folder, positive
from .convex import ConvexProgram
from .figures import COLOURS, heat_map, new_figure
from .problem import Array, check_sizes, draw_problem, guarantee, relative_error
from .trials import generator_of, work_off

NAME = "phase"
RECOVERED = 1e-3


@dataclass(frozen=True)
class Row:
    """All k of one rank r."""

    rank: int
    theta: Array  # (K,) share of trials in which theta was recovered
    s: Array  # (K,)
    both: Array  # (K,)
    coherence: float  # mean over all trials
    guaranteed: int  # trials that the proof covers
    kept: int  # of these, the recovered ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its options."""
    add_common_arguments(parser, trials="problems to draw for each pair of k and r (default 20, with --quick 4)")
    add_sizes(parser)
    parser.add_argument(
        "--lambda", dest="weight", type=positive, default=0.1, metavar="X", help="of the convex program (default 0.1)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw, solve, write."""
    open_folder(args.out)
    args.trials = args.trials or (4 if args.quick else 20)
    most_rank = min(args.samples, args.parameters)
    wrong, ranks = (axis(most, 9 if args.quick else 21) for most in (args.samples, most_rank))
    check_sizes(args.samples, args.parameters, int(ranks[-1]), int(wrong[-1]))
    solve = partial(
        solve_row,
        sizes=(args.samples, args.parameters),
        wrong=wrong,
        weight=args.weight,
        seed=args.seed,
        trials=args.trials,
    )
    tasks = [int(rank) for rank in reversed(ranks)]  # the large ones take longest
    rows = work_off(solve, tasks, args.jobs, title=NAME, unit="rank")[::-1]
    cells = [
        {"r": row.rank, "k": int(k), "theta": float(row.theta[i]), "s": float(row.s[i]), "both": float(row.both[i])}
        for row in rows
        for i, k in enumerate(wrong)
    ]
    numbers = summarise(rows, wrong, args.samples)
    leave(NAME, args, draw(rows, wrong, args.samples), cells, numbers, verdict(numbers, args))
    return 0


def axis(most: int, count: int) -> Array:
    """About `count` whole numbers from 1 to `most`, evenly spaced."""
    return np.unique(np.linspace(0, most, count).round().clip(1).astype(int))


def solve_row(rank: int, sizes: tuple[int, int], wrong: Array, weight: float, seed: int, trials: int) -> Row:
    """All trials of all k at this rank."""
    program = ConvexProgram(sizes[0], rank)
    found = np.empty((len(wrong), trials, 2), dtype=bool)
    coherences, guaranteed, kept = [], 0, 0
    for i, k in enumerate(wrong):
        for trial in range(trials):
            problem = draw_problem(*sizes, rank, int(k), generator_of(seed, rank, int(k), trial))
            optimum = program.solve(problem, weight)
            errors = relative_error(optimum.c, problem.c), relative_error(optimum.s, problem.s)
            found[i, trial] = [error < RECOVERED for error in errors]
            promise = guarantee(problem)
            coherences.append(promise.coherence)
            if weight > promise.threshold:
                guaranteed += 1
                kept += bool(found[i, trial].all())
    theta, s = found.mean(axis=1).T
    return Row(rank, theta, s, found.all(axis=2).mean(axis=1), float(np.mean(coherences)), guaranteed, kept)


def summarise(rows: list[Row], wrong: Array, samples: int) -> dict[str, Any]:
    """Shares over the whole map, and where it turns."""
    both = np.array([row.both for row in rows])  # (R, K)
    bounds = np.array([samples / (4 * row.coherence) for row in rows])  # (R,)
    ranks = np.array([row.rank for row in rows])
    covered = wrong**2 * ranks[:, None] < bounds[:, None]  # (R, K)
    at_least_half = [int(wrong[row >= 0.5].max()) if (row >= 0.5).any() else 0 for row in both]
    return {
        "share_always": float((both == 1).mean()), "share_never": float((both == 0).mean()),
        "share_guaranteed": float(covered.mean()),
        "guaranteed_trials": sum(row.guaranteed for row in rows), "of_these_recovered": sum(row.kept for row in rows),
        "largest_k_recovered_in_half_of_the_trials": dict(zip(map(str, ranks), at_least_half, strict=True)),
        "coherence": {str(row.rank): row.coherence for row in rows},
    }  # fmt: skip


def verdict(numbers: dict[str, Any], args: argparse.Namespace) -> str:
    """One paragraph."""
    turns = numbers["largest_k_recovered_in_half_of_the_trials"]
    some = list(turns)[:: max(1, (len(turns) - 1) // 4)]
    edge = ", ".join(f"{turns[rank] or 'none'} at r = {rank}" for rank in some)
    covered = "No trial is covered by it with lambda above the proof's threshold."
    if numbers["guaranteed_trials"]:
        covered = f"Of {counted(numbers['guaranteed_trials'], 'trial')} that it covers, with lambda above the proof's "
        covered += f"threshold, {numbers['of_these_recovered']} recovered."
    return (
        f"At lambda = {args.weight:g}, N = {args.samples}, p = {args.parameters}, {counted(args.trials, 'trial')} a "
        f"cell: theta and s are recovered in every trial of {numbers['share_always']:.0%} of the cells, and in none of "
        f"{numbers['share_never']:.0%}. The largest k that is recovered in half of the trials is {edge}. The guarantee "
        f"k^2 r < N/(4 mu) covers {numbers['share_guaranteed']:.1%} of the cells. {covered}"
    )


def draw(rows: list[Row], wrong: Array, samples: int) -> Figure:
    """A map for theta and one for s."""
    figure, axes = new_figure(1, 2, (9, 4))
    ranks = np.array([row.rank for row in rows])
    edge = np.sqrt(samples / (4 * np.array([row.coherence for row in rows]) * ranks))  # the largest k, not rounded
    for panel, name, symbol in zip(axes[0], ("theta", "s"), (r"\theta", "s"), strict=True):
        colours = heat_map(panel, wrong, ranks, np.array([getattr(row, name) for row in rows]), vmin=0, vmax=1)
        panel.plot(edge, ranks, color="white", linewidth=2.5)
        panel.plot(
            edge,
            ranks,
            color=COLOURS[1],
            linewidth=1.5,
            linestyle="--",
            label=r"guaranteed left of it: $k^2 r < N/4\mu$",
        )
        panel.set(
            xlabel="k, wrong observations", ylabel="r, rank of J", title=f"share of trials that recover ${symbol}$",
            xlim=(0, wrong[-1]), ylim=(0, ranks[-1]),
        )  # fmt: skip
        panel.legend(loc="upper right")
        figure.colorbar(colours, ax=panel)
    return figure

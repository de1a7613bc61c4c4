"""`sopdist theory phase`: for which k and r the convex program recovers theta and s, for one lambda.

N = 100, p = 150, lambda = 0.1; theta or s counts as recovered if its relative error is below 1e-3. The figure shows the
region in which the paper guarantees recovery, k^2 r < N / (4 mu(J)), with the measured mu. The command also checks
every trial that the proof covers, that is, whose lambda is above the threshold of the proof as well.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..cli.units import pluralize
from ..processes import run_tasks
from .arguments import add_common_arguments, add_sizes, create_folder, positive, write_results
from .convex import ConvexProgram
from .figures import new_figure, plot_boundary, plot_map
from .problem import RECOVERED, Array, check_sizes, guarantee, random_problem, relative_error, trial_generator

NAME = "phase"


@dataclass(frozen=True)
class Row:
    """The results for one rank r and all k."""

    rank: int
    theta: Array  # (K,) fraction of trials in which theta was recovered
    s: Array  # (K,)
    both: Array  # (K,)
    coherence: float  # mean over all trials
    guaranteed: int  # trials that the proof covers
    guaranteed_recovered: int  # of these, the recovered ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist theory phase`."""
    add_common_arguments(parser, trials="random problems for each pair of k and r (default 20, with --quick 4)")
    add_sizes(parser)
    parser.add_argument(
        "--lambda", dest="weight", type=positive, default=0.1, metavar="X", help="of the convex program (default 0.1)"
    )


def run(args: argparse.Namespace) -> int:
    """Solve all problems, write figure and numbers."""
    create_folder(args.out)
    args.trials = args.trials or (4 if args.quick else 20)
    max_rank = min(args.samples, args.parameters)
    wrong, ranks = (axis(maximum, 9 if args.quick else 21) for maximum in (args.samples, max_rank))
    check_sizes(args.samples, args.parameters, int(ranks[-1]), int(wrong[-1]))
    sizes = (args.samples, args.parameters)
    solve = partial(solve_row, sizes=sizes, wrong=wrong, weight=args.weight, seed=args.seed, trials=args.trials)
    slowest_first = [int(rank) for rank in reversed(ranks)]
    rows = run_tasks(solve, slowest_first, args.jobs, title=NAME, unit="rank")[::-1]
    cells = [
        {"r": row.rank, "k": int(k), "theta": float(row.theta[i]), "s": float(row.s[i]), "both": float(row.both[i])}
        for row in rows
        for i, k in enumerate(wrong)
    ]
    numbers = summarise(rows, wrong, args.samples)
    write_results(NAME, args, plot(rows, wrong, args.samples), cells, numbers, verdict(numbers, args))
    return 0


def axis(maximum: int, count: int) -> Array:
    """About `count` evenly spaced integers from 1 to `maximum`."""
    return np.unique(np.linspace(0, maximum, count).round().clip(1).astype(int))


def solve_row(rank: int, sizes: tuple[int, int], wrong: Array, weight: float, seed: int, trials: int) -> Row:
    """All trials for all k at this rank."""
    program = ConvexProgram(sizes[0], rank)
    recovered = np.empty((len(wrong), trials, 2), dtype=bool)
    coherences, guaranteed, guaranteed_recovered = [], 0, 0
    for i, k in enumerate(wrong):
        for trial in range(trials):
            problem = random_problem(*sizes, rank, int(k), trial_generator(seed, rank, int(k), trial))
            optimum = program.solve(problem, weight)
            errors = relative_error(optimum.c, problem.c), relative_error(optimum.s, problem.s)
            recovered[i, trial] = [error < RECOVERED for error in errors]
            promise = guarantee(problem)
            coherences.append(promise.coherence)
            if weight > promise.threshold:
                guaranteed += 1
                guaranteed_recovered += bool(recovered[i, trial].all())
    theta, s = recovered.mean(axis=1).T
    both = recovered.all(axis=2).mean(axis=1)
    return Row(rank, theta, s, both, float(np.mean(coherences)), guaranteed, guaranteed_recovered)


def summarise(rows: list[Row], wrong: Array, samples: int) -> dict[str, Any]:
    """Fractions over the whole map, and the edge of the region of recovery."""
    both = np.array([row.both for row in rows])  # (R, K)
    bounds = np.array([samples / (4 * row.coherence) for row in rows])  # (R,)
    ranks = np.array([row.rank for row in rows])
    covered = wrong**2 * ranks[:, None] < bounds[:, None]  # (R, K)
    at_least_half = [int(wrong[row >= 0.5].max()) if (row >= 0.5).any() else 0 for row in both]
    return {
        "share_always": float((both == 1).mean()), "share_never": float((both == 0).mean()),
        "share_guaranteed": float(covered.mean()),
        "guaranteed_trials": sum(row.guaranteed for row in rows),
        "of_these_recovered": sum(row.guaranteed_recovered for row in rows),
        "largest_k_recovered_in_half_of_the_trials": dict(zip(map(str, ranks), at_least_half, strict=True)),
        "coherence": {str(row.rank): row.coherence for row in rows},
    }  # fmt: skip


def verdict(numbers: dict[str, Any], args: argparse.Namespace) -> str:
    """The result in one paragraph."""
    largest = numbers["largest_k_recovered_in_half_of_the_trials"]
    some = list(largest)[:: max(1, (len(largest) - 1) // 4)]
    edge = ", ".join(f"{largest[rank] or 'none'} at r = {rank}" for rank in some)
    covered = "It covers no trial with lambda above the threshold of the proof."
    if numbers["guaranteed_trials"]:
        trials = pluralize(numbers["guaranteed_trials"], "trial")
        covered = f"Of {trials} that it covers with lambda above the threshold of the proof, "
        covered += f"{numbers['of_these_recovered']} recovered theta and s."
    return (
        f"For lambda = {args.weight:g}, N = {args.samples}, p = {args.parameters} and "
        f"{pluralize(args.trials, 'trial')} per cell, theta and s are recovered in every trial of "
        f"{numbers['share_always']:.0%} of the cells, and in no trial of {numbers['share_never']:.0%}. The largest k "
        f"recovered in at least half of the trials is {edge}. The guarantee k^2 r < N/(4 mu) covers "
        f"{numbers['share_guaranteed']:.1%} of the cells. {covered}"
    )


def plot(rows: list[Row], wrong: Array, samples: int) -> Figure:
    """One map for theta and one for s."""
    figure, axes = new_figure(1, 2, (9, 4))
    ranks = np.array([row.rank for row in rows])
    edge = np.sqrt(samples / (4 * np.array([row.coherence for row in rows]) * ranks))  # the largest k, not rounded
    for panel, name, symbol in zip(axes[0], ("theta", "s"), (r"\theta", "s"), strict=True):
        plot_map(figure, panel, wrong, ranks, np.array([getattr(row, name) for row in rows]))
        plot_boundary(panel, edge, ranks, r"guaranteed on the left: $k^2 r < N/4\mu$")
        panel.set(
            xlabel="k, wrong observations", ylabel="r, rank of J", title=f"fraction of trials that recover ${symbol}$",
            xlim=(0, wrong[-1]), ylim=(0, ranks[-1]),
        )  # fmt: skip
        panel.legend(loc="upper right")
    return figure

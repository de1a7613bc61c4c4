"""`sopdist bench step`: what SOP adds to a training step on several ranks, beside the same step with cross-entropy.

Part 1, for few and for many classes: steps of a network under DDP, with cross-entropy, with SOP whose rows are sent a
step ahead, and with SOP whose rows are asked for when they are needed. They take turns on the same weights; a ratio is
one of turns that follow each other. Also how long a step stood still for the exchange, and how much of the exchange
went on while the network computed.
Part 2: all ranks with their parts of a batch, against one rank with the whole batch.
At the end, each target and whether it was met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..config import ConfigError
from ..data.commands.arguments import whole
from ..text_table import format_table
from .ranks import RankError, run_on_ranks
from .step_turns import AHEAD, ASKED, CE, TOGETHER, Sizes, StepTime, layout_of, measure
from .timing import environment, load_warning, write_json
from .turns import Ratio, paired_ratio
from .verdict import Verdict

FULL = Sizes("preact_resnet18", 16, 100_000, (10, 1000), seconds=75.0, seconds_alone=35.0, fewest=3)
QUICK = Sizes("small_conv", 16, 1000, (10, 1000), seconds=1.0, seconds_alone=0.5, fewest=2)
MOST_TIME, MOST_WAIT = 1.02, 0.02
FEWEST_ROUNDS, WIDEST = 12, 0.1  # for a verdict on times: rounds, and width of the interval in which their median lies

_TIMEOUT = 900.0  # seconds for the whole run, which takes a third of that on two busy cores

Turns = Sequence[Sequence[Sequence[float]]]  # rounds, steps, the fields of StepTime


@dataclass(frozen=True)
class Case:
    """What was found of one kind of step; seconds are medians, on the rank that took longest."""

    step: float
    ratio: Ratio  # to the step with cross-entropy
    cpu_ratio: Ratio  # the same in CPU time, on which a busy machine has less influence
    objective: float  # CPU time in the calls of the objective
    extra: float  # the same, more than with cross-entropy
    extra_share: float  # of the CPU time of a step with cross-entropy
    waited: float  # share of the steps that the exchange was waited for, on the rank that waited most
    waited_median: float  # the same of a step in the middle
    overlapped: float | None  # share of the exchange's travelling that was not waited for; None: nothing travelled


def find_cases(ranks: Sequence[Mapping[str, Turns]]) -> dict[str, Case]:
    """From the times of every rank to what they say of each kind of step."""
    names = (CE, AHEAD, ASKED)
    wholes, cpus, objectives = (
        {name: _by_round(ranks, name, field) for name in names} for field in ("whole", "cpu", "objective")
    )
    cases = {}
    for name in names:
        extra = median(own - plain for own, plain in zip(objectives[name], objectives[CE], strict=True))
        # Rows of a turn's first step had all the time that others' turns took: it says nothing of waiting.
        times = [[StepTime(*step) for turn in rank[name] for step in turn[1:]] for rank in ranks]
        shares = [sum(step.waited for step in steps) / sum(step.whole for step in steps) for steps in times]
        middles = [median(step.waited / step.whole for step in steps) for steps in times]
        travelled = sum(step.travelled for steps in times for step in steps)
        waited = sum(step.waited for steps in times for step in steps)
        cases[name] = Case(
            step=median(wholes[name]),
            ratio=paired_ratio(wholes[name], wholes[CE]),
            cpu_ratio=paired_ratio(cpus[name], cpus[CE]),
            objective=median(objectives[name]),
            extra=extra,
            extra_share=extra / median(cpus[CE]),
            waited=max(shares),
            waited_median=max(middles),
            overlapped=max(0.0, 1 - waited / travelled) if travelled else None,
        )
    return cases


def _by_round(ranks: Sequence[Mapping[str, Turns]], name: str, field: str) -> list[float]:
    """Mean seconds of a round's steps; of each step the rank that took longest counts."""
    place = StepTime._fields.index(field)
    rounds = zip(*(rank[name] for rank in ranks), strict=True)
    return [
        sum(max(step[place] for step in same) for same in zip(*turns, strict=True)) / len(turns[0]) for turns in rounds
    ]


def judge(cases: Mapping[int, Mapping[str, Case]], *, judged: bool) -> list[Verdict]:
    """Hold what was found against the targets; a quick run is too short to say anything."""
    verdicts = []
    for classes, case in cases.items():
        where, ahead = f"{classes:,} classes, {layout_of(classes)}", case[AHEAD]
        time = _judge_time(f"{where}: SOP step <= {MOST_TIME} x CE step", ahead)
        target = f"{where}: exchange waited for <= {MOST_WAIT:.0%} of the step"
        measured = f"{ahead.waited:.2%} (median {ahead.waited_median:.2%})"
        verdicts += [time, Verdict(target, measured, ahead.waited <= MOST_WAIT)]
    return verdicts if judged else [replace(verdict, met=None) for verdict in verdicts]


def _judge_time(target: str, case: Case) -> Verdict:
    """No verdict where too little was measured, or where another run could as well come out on the other side."""
    ratio = case.ratio
    measured = f"{ratio} in {ratio.rounds} rounds; its own calls add {case.extra_share:.2%} of CPU time"
    unclear = ratio.median_from <= MOST_TIME < ratio.median_to
    if unclear or ratio.rounds < FEWEST_ROUNDS or ratio.median_to - ratio.median_from > WIDEST:
        return Verdict(f"{target}: the machine is too busy to tell, {measured}", measured, None)
    return Verdict(target, measured, ratio.median <= MOST_TIME)


def _case_table(cases: Mapping[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        row = [name, f"{case.step * 1e3:.0f}", "", "", f"{case.objective * 1e3:.2f}", "", "", ""]
        if name != CE:
            row[2:4] = (f"{r.median:.3f} [{r.lower:.3f}, {r.upper:.3f}]" for r in (case.ratio, case.cpu_ratio))
            row[5] = f"{case.extra * 1e3:+.2f} ({case.extra_share:+.2%})"
        if case.overlapped is not None:
            row[6:] = f"{case.waited:.2%}", f"{case.overlapped:.0%}"
        rows.append(row)
    header = ["", "step, ms", "x CE [quartiles]", "CPU time x CE", "objective, CPU ms", "more than CE"]
    return format_table([*header, "waited", "overlapped"], rows)


def _alone(ranks: Sequence[Mapping[str, Any]], sizes: Sizes) -> dict[str, Any]:
    """Samples a second together and alone, and how many times faster together is than with the same threads alone."""
    turns: Sequence[Mapping[str, Sequence[float]]] = [rank["alone"] for rank in ranks]
    together = [max(seconds) for seconds in zip(*(rank[TOGETHER] for rank in turns), strict=True)]
    found: dict[str, Any] = {"together": {"samples_per_second": sizes.batch / median(together)}}
    for threads in sorted((name for name in turns[0] if name != TOGETHER), key=int):
        alone = turns[0][threads]
        rate, speedup = sizes.batch / median(alone), paired_ratio(alone, together)
        found[threads] = {"samples_per_second": rate, "speedup_together": asdict(speedup)}
    return found


def _show_alone(alone: Mapping[str, Any], ranks: int, threads: int, batch: int) -> None:
    def row(name: str, rate: float, speedup: Mapping[str, float] | None) -> list[str]:
        ratio = "" if speedup is None else "{median:.2f} [{lower:.2f}, {upper:.2f}]".format(**speedup)
        return [name, f"{rate:.1f}", ratio]

    rows = []
    for name, found in alone.items():
        label = f"1 rank x {batch}, {_threads(int(name))}" if name != "together" else (
            f"{ranks} ranks x {batch / ranks:g}, {_threads(threads)} each"
        )  # fmt: skip
        rows.append(row(label, found["samples_per_second"], found.get("speedup_together")))
    print("\nSOP steps of the same batch, on all ranks and on one")
    print(format_table(["", "samples/s", "all ranks are faster by [quartiles]"], rows))


def _threads(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench step`."""
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds on a small network")
    parser.add_argument("--ranks", type=whole(2), default=2, help="processes that train together (default: 2)")
    parser.add_argument("--network", help=f"any model.name for images of 32 pixels (default: {FULL.network})")
    parser.add_argument("--batch", type=whole(2), help=f"samples of a step, of all ranks (default: {FULL.batch})")
    parser.add_argument("--classes", type=whole(2), nargs="+", help="numbers of classes (default: 10 1000)")
    parser.add_argument("--samples", type=whole(2), help=f"rows of the noise table (default: {FULL.samples})")
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench_step.json"), help="results file (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the results file; 0 whether or not the targets are met, which is for a person to read."""
    given = {name: getattr(args, name) for name in ("network", "batch", "samples")}
    given["classes"] = tuple(dict.fromkeys(args.classes)) if args.classes else None
    sizes = replace(QUICK if args.quick else FULL, **{name: value for name, value in given.items() if value})
    if sizes.batch < args.ranks or sizes.samples < 2 * sizes.batch:
        raise ConfigError(
            f"--batch {sizes.batch}, --ranks {args.ranks}, --samples {sizes.samples}: a batch must have a sample for "
            "each rank, and there must be samples for two batches"
        )
    header = environment()
    if warning := load_warning(header):
        print(warning, flush=True)
    try:
        ranks = run_on_ranks(measure, sizes, args.ranks, timeout=_TIMEOUT)
    except RankError as error:
        print(f"sopdist: {error}", file=sys.stderr)
        return 1
    threads = ranks[0]["threads"]
    print(
        f"{sizes.network}, batch {sizes.batch} on {args.ranks} ranks ({ranks[0]['device']}, {_threads(threads)} each)"
    )
    cases = {classes: find_cases([rank["cases"][str(classes)] for rank in ranks]) for classes in sizes.classes}
    for classes, case in cases.items():
        print(f"\n{classes:,} classes, {layout_of(classes)}, {case[CE].ratio.rounds} rounds: medians")
        print(_case_table(case))
    alone = _alone(ranks, sizes)
    _show_alone(alone, args.ranks, threads, sizes.batch)
    verdicts = judge(cases, judged=not args.quick)
    print("", *verdicts, sep="\n")
    results = {
        "sizes": asdict(sizes) | {"ranks": args.ranks, "device": ranks[0]["device"], "threads_of_a_rank": threads},
        "steps": [
            {"classes": classes, "layout": layout_of(classes), **{name: asdict(found) for name, found in case.items()}}
            for classes, case in cases.items()
        ],
        "one_rank": alone,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    write_json(args.out, results, header)
    print(f"\nwritten: {args.out}")
    return 0

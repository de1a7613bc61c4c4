"""`sopdist bench step`: the cost that SOP adds to a training step on several ranks, against cross-entropy.

Part 1, for few and for many classes: training steps of a network under DDP, with cross-entropy, with SOP whose rows
        are sent one step ahead, and with SOP whose rows are sent on request. They take turns on the same weights, and
        ratios compare turns of the same round. Also how long the exchange blocked a step, and how much of it
        overlapped with computation.
Part 2: all ranks with their shares of a batch, against one rank with the full batch.

The output ends with each target and whether it was met.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ..cli.arguments import integer
from ..cli.tables import format_table
from ..cli.units import pluralize
from ..errors import ConfigError
from .ranks import run_on_ranks
from .results import Verdict, add_out, finish_bench, start_bench
from .step_turns import AHEAD, ALL_RANKS, CE, ON_REQUEST, Sizes, StepTime, layout_of, measure
from .timing import Ratio, paired_ratio

FULL = Sizes("preact_resnet18", 16, 100_000, (10, 1000), seconds=75.0, seconds_alone=35.0, min_rounds=3)
QUICK = Sizes("small_conv", 16, 1000, (10, 1000), seconds=1.0, seconds_alone=0.5, min_rounds=2)
MAX_TIME, MAX_BLOCKED = 1.02, 0.02
MIN_ROUNDS, MAX_WIDTH = 12, 0.1  # for a verdict on times: rounds, and width of the confidence interval of the median

_TIMEOUT = 900.0  # seconds for the run, which takes a third of that on two busy cores

Turns = Sequence[Sequence[Sequence[float]]]  # rounds, steps, the fields of StepTime


@dataclass(frozen=True)
class Case:
    """Result for one kind of step. Seconds are medians, on the slowest rank."""

    step: float
    ratio: Ratio  # to the step with cross-entropy
    cpu_ratio: Ratio  # the same in CPU time, which depends less on other load on the machine
    method: float  # CPU time in the calls of the method
    extra: float  # the same, minus that of cross-entropy
    extra_share: float  # as a fraction of the CPU time of a step with cross-entropy
    blocked: float  # fraction of the step time that the exchange blocked, on the rank that was blocked longest
    blocked_median: float  # the same fraction of the median step
    overlapped: float | None  # fraction of the exchange's time in flight that did not block; None without exchange


def find_cases(ranks: Sequence[Mapping[str, Turns]]) -> dict[str, Case]:
    """Results for each kind of step, from the turns of every rank."""
    names = (CE, AHEAD, ON_REQUEST)
    totals, cpus, methods = (
        {name: _by_round(ranks, name, field) for name in names} for field in ("total", "cpu", "method")
    )
    cases = {}
    for name in names:
        extra = median(own - plain for own, plain in zip(methods[name], methods[CE], strict=True))
        # The rows of a turn's first step were in flight during other turns: its waiting time means nothing.
        times = [[StepTime(*step) for turn in rank[name] for step in turn[1:]] for rank in ranks]
        shares = [sum(step.blocked for step in steps) / sum(step.total for step in steps) for steps in times]
        medians = [median(step.blocked / step.total for step in steps) for steps in times]
        in_flight = sum(step.in_flight for steps in times for step in steps)
        blocked = sum(step.blocked for steps in times for step in steps)
        cases[name] = Case(
            step=median(totals[name]),
            ratio=paired_ratio(totals[name], totals[CE]),
            cpu_ratio=paired_ratio(cpus[name], cpus[CE]),
            method=median(methods[name]),
            extra=extra,
            extra_share=extra / median(cpus[CE]),
            blocked=max(shares),
            blocked_median=max(medians),
            overlapped=max(0.0, 1 - blocked / in_flight) if in_flight else None,
        )
    return cases


def _by_round(ranks: Sequence[Mapping[str, Turns]], name: str, field: str) -> list[float]:
    """Mean seconds per step of each round; the slowest rank of each step counts."""
    column = StepTime._fields.index(field)
    rounds = zip(*(rank[name] for rank in ranks), strict=True)
    return [
        sum(max(step[column] for step in same) for same in zip(*turns, strict=True)) / len(turns[0]) for turns in rounds
    ]


def judge(cases: Mapping[int, Mapping[str, Case]], *, judged: bool) -> list[Verdict]:
    """Compare with the targets; a quick run is too short for a verdict."""
    verdicts = []
    for classes, case in cases.items():
        where, ahead = f"{classes:,} classes, {layout_of(classes)}", case[AHEAD]
        time = _judge_time(f"{where}: SOP step <= {MAX_TIME} x CE step", ahead)
        target = f"{where}: blocked by the exchange <= {MAX_BLOCKED:.0%} of the step"
        measured = f"{ahead.blocked:.2%} (median {ahead.blocked_median:.2%})"
        verdicts += [time, Verdict(target, measured, ahead.blocked <= MAX_BLOCKED)]
    return verdicts if judged else [replace(verdict, met=None) for verdict in verdicts]


def _judge_time(target: str, case: Case) -> Verdict:
    """No verdict after too few rounds, or if another run could decide differently."""
    ratio = case.ratio
    measured = f"{ratio} in {ratio.rounds} rounds; SOP's own calls add {case.extra_share:.2%} of CPU time"
    unclear = ratio.median_from <= MAX_TIME < ratio.median_to
    if unclear or ratio.rounds < MIN_ROUNDS or ratio.median_to - ratio.median_from > MAX_WIDTH:
        return Verdict(f"{target}: machine too busy to decide, {measured}", measured, None)
    return Verdict(target, measured, ratio.median <= MAX_TIME)


def _case_table(cases: Mapping[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        row = [name, f"{case.step * 1e3:.0f}", "", "", f"{case.method * 1e3:.2f}", "", "", ""]
        if name != CE:
            row[2:4] = (f"{r.median:.3f} [{r.lower:.3f}, {r.upper:.3f}]" for r in (case.ratio, case.cpu_ratio))
            row[5] = f"{case.extra * 1e3:+.2f} ({case.extra_share:+.2%})"
        if case.overlapped is not None:
            row[6:] = f"{case.blocked:.2%}", f"{case.overlapped:.0%}"
        rows.append(row)
    header = ["", "step, ms", "x CE [quartiles]", "CPU time x CE", "method, CPU ms", "extra over CE"]
    return format_table([*header, "blocked", "overlapped"], rows)


def _alone(ranks: Sequence[Mapping[str, Any]], sizes: Sizes) -> dict[str, Any]:
    """Samples/s of all ranks and of one rank alone, and the speedup of all ranks."""
    turns: Sequence[Mapping[str, Sequence[float]]] = [rank["alone"] for rank in ranks]
    together = [max(seconds) for seconds in zip(*(rank[ALL_RANKS] for rank in turns), strict=True)]
    found: dict[str, Any] = {ALL_RANKS: {"samples_per_second": sizes.batch / median(together)}}
    for threads in sorted((name for name in turns[0] if name != ALL_RANKS), key=int):
        alone = turns[0][threads]
        rate, speedup = sizes.batch / median(alone), paired_ratio(alone, together)
        found[threads] = {"samples_per_second": rate, "speedup_of_all_ranks": asdict(speedup)}
    return found


def _alone_table(alone: Mapping[str, Any], ranks: int, threads: int, batch: int) -> str:
    rows = []
    for name, found in alone.items():
        if name == ALL_RANKS:
            label = f"{ranks} ranks x {batch / ranks:g}, {pluralize(threads, 'thread')} each"
        else:
            label = f"1 rank x {batch}, {pluralize(int(name), 'thread')}"
        speedup = found.get("speedup_of_all_ranks")
        ratio = "" if speedup is None else "{median:.2f} [{lower:.2f}, {upper:.2f}]".format(**speedup)
        rows.append([label, f"{found['samples_per_second']:.1f}", ratio])
    return format_table(["", "samples/s", "speedup of all ranks [quartiles]"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench step`."""
    parser.add_argument("--quick", action="store_true", help="smoke test of a few seconds on a small network")
    parser.add_argument("--ranks", type=integer(2), default=2, help="processes that train together (default: 2)")
    parser.add_argument("--network", help=f"any model.name for images of 32 pixels (default: {FULL.network})")
    parser.add_argument("--batch", type=integer(2), help=f"global batch size (default: {FULL.batch})")
    parser.add_argument("--classes", type=integer(2), nargs="+", help="class counts (default: 10 1000)")
    parser.add_argument("--samples", type=integer(2), help=f"rows of the noise table (default: {FULL.samples})")
    add_out(parser, "step")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the results file. Returns 0 whether or not the targets are met."""
    given = {name: getattr(args, name) for name in ("network", "batch", "samples")}
    given["classes"] = tuple(dict.fromkeys(args.classes)) if args.classes else None
    sizes = replace(QUICK if args.quick else FULL, **{name: value for name, value in given.items() if value})
    if sizes.batch < args.ranks or sizes.samples < 2 * sizes.batch:
        raise ConfigError(
            f"--batch {sizes.batch}, --ranks {args.ranks}, --samples {sizes.samples}: a batch needs at least one "
            "sample per rank, and the table needs samples for two batches"
        )
    environment = start_bench()
    ranks = run_on_ranks(measure, sizes, args.ranks, timeout=_TIMEOUT)
    device, threads = ranks[0]["device"], ranks[0]["threads"]
    print(f"{sizes.network}, batch {sizes.batch} on {args.ranks} ranks ({device}, {pluralize(threads, 'thread')} each)")
    cases = {classes: find_cases([rank["cases"][str(classes)] for rank in ranks]) for classes in sizes.classes}
    for classes, case in cases.items():
        print(f"\n{classes:,} classes, {layout_of(classes)}, {case[CE].ratio.rounds} rounds: medians")
        print(_case_table(case))
    alone = _alone(ranks, sizes)
    print("\nSOP steps of the same batch, on all ranks and on one rank")
    print(_alone_table(alone, args.ranks, threads, sizes.batch))
    results = {
        "sizes": asdict(sizes) | {"ranks": args.ranks, "device": device, "threads_per_rank": threads},
        "steps": [
            {"classes": classes, "layout": layout_of(classes), **{name: asdict(found) for name, found in case.items()}}
            for classes, case in cases.items()
        ],
        "one_rank": alone,
    }
    finish_bench(args.out, environment, results, judge(cases, judged=not args.quick))
    return 0

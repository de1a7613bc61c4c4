"""`sopdist bench exchange`: the cost of sending rows of the noise table to the ranks that need them, and facts back.

Part 1: bytes per sample, computed and as sent, against sending dense rows both ways.
Part 2: time of each part of a step for several batch sizes, with rows sent one step ahead and with rows on request.
Part 3: how much of the exchange overlaps with the computation of a shorter or longer network.

The output ends with each target and whether it was met.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ..cli.arguments import integer
from ..cli.tables import format_table
from ..cli.units import pluralize
from ..noise.kernels.facts import FACT_WIRE_BYTES
from ..noise.rows import row_wire_bytes
from .exchange_turns import Cell, Mode, Sizes, StepTime, measure
from .ranks import run_on_ranks
from .results import Verdict, add_out, finish_bench, start_bench
from .step_turns import layout_of
from .timing import quartiles

CLASSES, BATCHES = (10, 100, 1000), (128, 256, 512, 1024)
COMPUTE, COMPUTES = 0.03, (0.003, 0.01, 0.03, 0.1)  # seconds per step of the network: in part 2, in part 3
MODES: tuple[Mode, Mode] = ("ahead", "on request")
MAX_BYTES = 1 / 40
INDEX_BYTES = 8  # per requested sample

Turns = Sequence[Sequence[Sequence[float]]]  # rounds, steps, the fields of StepTime

_PHASES = ("push", "rows", "facts", "update")
_TIMEOUT = 900.0  # seconds for the run


@dataclass(frozen=True)
class Found:
    """Result of one cell. Seconds are medians over the steps of all ranks, with their quartiles."""

    seconds: dict[str, tuple[float, float, float]]  # by phase: median, lower and upper quartile
    step: float
    blocked: float  # fraction of the step time, on the rank that was blocked longest
    overlapped: float | None  # fraction of the time in flight that did not block
    computed_bytes: int  # both ways, per sample whose row another rank owns
    sent_bytes: float  # the same, as sent


def part_two(classes: Sequence[int], batches: Sequence[int], compute: float) -> list[Cell]:
    """Cells for the batch sizes, in the layout with the smaller rows; also dense for the largest number of classes."""
    kinds = [(count, layout_of(count)) for count in classes]
    kinds += [] if kinds[-1][1] == "dense" else [(classes[-1], "dense")]
    return [Cell(count, layout, batch, compute, mode) for count, layout in kinds for batch in batches for mode in MODES]


def part_three(classes: int, batch: int, computes: Sequence[float]) -> list[Cell]:
    """Cells for networks of several step times."""
    return [Cell(classes, layout_of(classes), batch, compute, mode) for compute in computes for mode in MODES]


def computed_bytes(cell: Cell) -> int:
    """Bytes both ways, per sample whose row another rank owns."""
    request = INDEX_BYTES if cell.mode == "on request" else 0
    return request + row_wire_bytes(cell.layout, cell.classes) + FACT_WIRE_BYTES


def find(cell: Cell, ranks: Sequence[Turns]) -> Found:
    """Result of a cell, from its turns on every rank."""
    # The rows of a turn's first step were in flight during the turns of other cells: its waiting time means nothing.
    times = [[StepTime(*step) for turn in turns for step in turn[1:]] for turns in ranks]
    steps = [step for of_rank in times for step in of_rank]
    totals = [sum(step.total for step in of_rank) for of_rank in times]
    blocked = [sum(step.blocked for step in of_rank) for of_rank in times]
    in_flight = sum(step.in_flight for step in steps)
    foreign = cell.batch - cell.batch // len(ranks)  # samples of a rank's batch whose rows other ranks own
    return Found(
        seconds={name: quartiles([getattr(step, name) for step in steps]) for name in _PHASES},
        step=median(step.total for step in steps),
        blocked=max(seconds / total for seconds, total in zip(blocked, totals, strict=True)),
        overlapped=max(0.0, 1 - sum(blocked) / in_flight) if in_flight else None,
        computed_bytes=computed_bytes(cell),
        sent_bytes=sum(step.sent_bytes for step in steps) / len(steps) / foreign,
    )


def judge(found: Mapping[Cell, Found]) -> list[Verdict]:
    """Compare with the target. Bytes depend only on the number of classes, so a quick run is enough."""
    target = "bytes of rows and facts <= 1/40 of dense rows both ways, 1,000 classes, slots"
    sent = [
        one.sent_bytes for cell, one in found.items()
        if (cell.classes, cell.layout, cell.mode) == (1000, "slots", "ahead")
    ]  # fmt: skip
    if not sent:
        return [Verdict(target, "", None)]
    share = max(sent) / (2 * row_wire_bytes("dense", 1000))
    return [Verdict(target, f"1/{1 / share:.1f}", share <= MAX_BYTES)]


def _bytes_table(found: Mapping[Cell, Found]) -> str:
    rows = {}
    for cell, one in found.items():
        dense = 2 * row_wire_bytes("dense", cell.classes)
        ratio = f"1/{dense / one.sent_bytes:.1f}"
        name = _name(cell)
        rows[name] = [name, f"{one.computed_bytes}", f"{one.sent_bytes:.1f}", f"{dense}", ratio]
    return format_table(["", "computed", "sent", "dense rows both ways", "ratio"], list(rows.values()))


def _time_table(found: Mapping[Cell, Found], *, by_compute: bool) -> str:
    rows = []
    for cell, one in found.items():
        size = f"{cell.compute * 1e3:g} ms" if by_compute else f"{cell.batch}"
        phases = [f"{one.seconds[name][0] * 1e6:.0f}" for name in _PHASES]
        phases[0] = phases[0] if cell.mode == "ahead" else ""
        overlapped = "" if one.overlapped is None else f"{one.overlapped:.0%}"
        rows.append([_name(cell), size, *phases, f"{one.step * 1e3:.1f}", f"{one.blocked:.1%}", overlapped])
    second = "network" if by_compute else "batch"
    return format_table(["", second, *(f"{name}, us" for name in _PHASES), "step, ms", "blocked", "overlapped"], rows)


def _name(cell: Cell) -> str:
    return f"{cell.classes:,} classes, {cell.layout}, {cell.mode}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench exchange`."""
    parser.add_argument("--quick", action="store_true", help="smoke test of a few seconds on small batches")
    parser.add_argument("--ranks", type=integer(2), default=2, help="processes that exchange rows (default: 2)")
    add_out(parser, "exchange")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the results file. Returns 0 whether or not the targets are met."""
    batches = [batch // args.ranks * args.ranks for batch in ((4 * args.ranks,) if args.quick else BATCHES)]
    second = part_two(CLASSES, batches, 0.001 if args.quick else COMPUTE)
    third = part_three(CLASSES[-1], batches[len(batches) // 3], (0.002,) if args.quick else COMPUTES)
    cells = tuple(dict.fromkeys([*second, *third]))
    largest = max(cell.batch for cell in cells) * args.ranks
    sizes = Sizes(cells, samples=10 * largest, seconds=0.5 if args.quick else 120.0, min_rounds=2 if args.quick else 5)
    environment = start_bench()
    ranks = run_on_ranks(measure, sizes, args.ranks, timeout=_TIMEOUT)
    found = {cell: find(cell, [rank["turns"][i] for rank in ranks]) for i, cell in enumerate(cells)}
    print(f"{args.ranks} ranks ({ranks[0]['device']}), {pluralize(ranks[0]['threads'], 'thread')} per rank")
    print("\nbytes both ways, per sample whose row another rank owns")
    print(_bytes_table({cell: found[cell] for cell in second}))
    print(f"\none step around a network of {second[0].compute * 1e3:g} ms, by batch size per rank: medians")
    print(_time_table({cell: found[cell] for cell in second}, by_compute=False))
    print(f"\nthe same around shorter and longer networks, {third[0].batch} samples per rank")
    print(_time_table({cell: found[cell] for cell in third}, by_compute=True))
    results = {
        "ranks": args.ranks,
        "device": ranks[0]["device"],
        "threads_per_rank": ranks[0]["threads"],
        "cells": [{**asdict(cell), **asdict(one)} for cell, one in found.items()],
    }
    finish_bench(args.out, environment, results, judge(found))
    return 0

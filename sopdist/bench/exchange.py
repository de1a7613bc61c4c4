"""`sopdist bench exchange`: what it takes to send rows of the noise table to the ranks that need them, and facts back.

Part 1: bytes a sample, by arithmetic and as sent, beside dense rows there and back.
Part 2: time of each part of a step for several batch sizes, with rows sent a step ahead and with rows asked for.
Part 3: how much is hidden behind a network that computes for longer or shorter.
At the end, each target and whether it was met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from ..data.commands.arguments import whole
from ..noise.exchange import FACT_WIRE_BYTES, row_wire_bytes
from ..text_table import format_table
from .exchange_turns import Cell, Mode, Sizes, StepTime, measure
from .ranks import RankError, run_on_ranks
from .step_turns import layout_of
from .timing import environment, load_warning, write_json
from .verdict import Verdict

CLASSES, BATCHES = (10, 100, 1000), (128, 256, 512, 1024)
COMPUTE, COMPUTES = 0.03, (0.003, 0.01, 0.03, 0.1)  # seconds of a step of the network: for part 2, for part 3
MODES: tuple[Mode, Mode] = ("ahead", "asked")
MOST_BYTES = 1 / 40
INDEX_BYTES = 8  # of a sample that is asked for

Turns = Sequence[Sequence[Sequence[float]]]  # rounds, steps, the fields of StepTime

_PHASES = ("push", "rows", "facts", "update")
_TIMEOUT = 900.0  # seconds for the whole run


@dataclass(frozen=True)
class Found:
    """What was found of one cell. Seconds are medians over the steps of all ranks, with their quartiles."""

    seconds: dict[str, tuple[float, float, float]]  # of each phase: median and quartiles
    step: float
    waited: float  # share of the steps, on the rank that waited most
    overlapped: float | None  # share of the travelling that was not waited for
    computed_bytes: int  # there and back of a sample whose row another rank owns
    sent_bytes: float  # the same as it was sent


def part_two(classes: Sequence[int], batches: Sequence[int], compute: float) -> list[Cell]:
    """Cells for batch sizes, in the layout that has the smaller rows, and in dense rows for the most classes."""
    kinds = [(number, layout_of(number)) for number in classes]
    kinds += [] if kinds[-1][1] == "dense" else [(classes[-1], "dense")]
    return [
        Cell(number, layout, batch, compute, mode) for number, layout in kinds for batch in batches for mode in MODES
    ]


def part_three(classes: int, batch: int, computes: Sequence[float]) -> list[Cell]:
    """Cells for networks of several lengths."""
    return [Cell(classes, layout_of(classes), batch, compute, mode) for compute in computes for mode in MODES]


def computed_bytes(cell: Cell) -> int:
    """There and back of a sample whose row another rank owns."""
    asking = INDEX_BYTES if cell.mode == "asked" else 0
    return asking + row_wire_bytes(cell.layout, cell.classes) + FACT_WIRE_BYTES


def find(cell: Cell, ranks: Sequence[Turns]) -> Found:
    """From the turns of every rank to what they say of a cell."""
    # Rows of a turn's first step had all the time that others' turns took: it says nothing of waiting.
    times = [[StepTime(*step) for turn in turns for step in turn[1:]] for turns in ranks]
    together = [step for steps in times for step in steps]
    whole_seconds = [sum(step.whole for step in steps) for steps in times]
    waits = [sum(step.waited for step in steps) for steps in times]
    travelled = sum(step.travelled for step in together)
    foreign = cell.batch - cell.batch // len(ranks)  # samples of a rank's batch that other ranks own
    return Found(
        seconds={name: _spread([getattr(step, name) for step in together]) for name in _PHASES},
        step=median(step.whole for step in together),
        waited=max(wait / seconds for wait, seconds in zip(waits, whole_seconds, strict=True)),
        overlapped=max(0.0, 1 - sum(waits) / travelled) if travelled else None,
        computed_bytes=computed_bytes(cell),
        sent_bytes=sum(step.sent_bytes for step in together) / len(together) / foreign,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return middle, lower, upper


def judge(found: Mapping[Cell, Found]) -> list[Verdict]:
    """Bytes depend on nothing but the number of classes, so a quick run says as much as a long one."""
    target = "bytes of rows and facts <= 1/40 of dense rows both ways, 1,000 classes, slots"
    sent = [
        one.sent_bytes for cell, one in found.items()
        if (cell.classes, cell.layout, cell.mode) == (1000, "slots", "ahead")
    ]  # fmt: skip
    if not sent:
        return [Verdict(target, "", None)]
    share = max(sent) / (2 * row_wire_bytes("dense", 1000))
    return [Verdict(target, f"1/{1 / share:.1f}", share <= MOST_BYTES)]


def _bytes_table(found: Mapping[Cell, Found]) -> str:
    rows = {}
    for cell, one in found.items():
        dense = 2 * row_wire_bytes("dense", cell.classes)
        name = f"{cell.classes:,} classes, {cell.layout}, {cell.mode}"
        rows[name] = [
            name,
            f"{one.computed_bytes}",
            f"{one.sent_bytes:.1f}",
            f"{dense}",
            f"1/{dense / one.sent_bytes:.1f}",
        ]
    return format_table(["", "computed", "sent", "dense rows both ways", "share"], list(rows.values()))


def _time_table(found: Mapping[Cell, Found], *, by_compute: bool) -> str:
    rows = []
    for cell, one in found.items():
        size = f"{cell.compute * 1e3:g} ms" if by_compute else f"{cell.batch}"
        phases = [f"{one.seconds[name][0] * 1e6:.0f}" for name in _PHASES]
        phases[0] = "" if cell.mode == "asked" else phases[0]
        overlapped = "" if one.overlapped is None else f"{one.overlapped:.0%}"
        name = f"{cell.classes:,} classes, {cell.layout}, {cell.mode}"
        rows.append([name, size, *phases, f"{one.step * 1e3:.1f}", f"{one.waited:.1%}", overlapped])
    second = "network" if by_compute else "batch"
    return format_table(["", second, *(f"{name}, us" for name in _PHASES), "step, ms", "waited", "overlapped"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench exchange`."""
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds on small batches")
    parser.add_argument("--ranks", type=whole(2), default=2, help="processes that exchange rows (default: 2)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench_exchange.json"), help="results file (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the results file; 0 whether or not the targets are met, which is for a person to read."""
    batches = [batch // args.ranks * args.ranks for batch in ((4 * args.ranks,) if args.quick else BATCHES)]
    second = part_two(CLASSES, batches, 0.001 if args.quick else COMPUTE)
    third = part_three(CLASSES[-1], batches[len(batches) // 3], (0.002,) if args.quick else COMPUTES)
    cells = tuple(dict.fromkeys([*second, *third]))
    most = max(cell.batch for cell in cells) * args.ranks
    sizes = Sizes(cells, samples=10 * most, seconds=0.5 if args.quick else 120.0, fewest=2 if args.quick else 5)
    header = environment()
    if warning := load_warning(header):
        print(warning, flush=True)
    try:
        ranks = run_on_ranks(measure, sizes, args.ranks, timeout=_TIMEOUT)
    except RankError as error:
        print(f"sopdist: {error}", file=sys.stderr)
        return 1
    found = {cell: find(cell, [rank["turns"][place] for rank in ranks]) for place, cell in enumerate(cells)}
    print(f"{args.ranks} ranks ({ranks[0]['device']}), threads of each: {ranks[0]['threads']}")
    print("\nbytes there and back of a sample whose row another rank owns")
    print(_bytes_table({cell: found[cell] for cell in second}))
    print(f"\none step around a network of {second[0].compute * 1e3:g} ms, by samples of a rank: medians")
    print(_time_table({cell: found[cell] for cell in second}, by_compute=False))
    print(f"\nthe same around longer and shorter networks, {third[0].batch} samples of a rank")
    print(_time_table({cell: found[cell] for cell in third}, by_compute=True))
    verdicts = judge(found)
    print("", *verdicts, sep="\n")
    results = {
        "ranks": args.ranks,
        "device": ranks[0]["device"],
        "threads_of_a_rank": ranks[0]["threads"],
        "cells": [{**asdict(cell), **asdict(one)} for cell, one in found.items()],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    write_json(args.out, results, header)
    print(f"\nwritten: {args.out}")
    return 0

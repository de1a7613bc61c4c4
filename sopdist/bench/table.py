"""`sopdist bench table`: the cost of the noise table, against plain cross-entropy and two tables trained by autograd.

Part 1, for several N and K: each candidate computes the loss of given logits and updates the rows of the batch.
Part 2: the full loss, forward and backward, against cross-entropy.

The output ends with each target and whether it was met.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..cli.tables import format_table
from ..cli.units import format_bytes
from ..noise.rows import row_bytes
from .results import Verdict, add_out, finish_bench, start_bench
from .table_candidates import AUTHORS, CANDIDATES, CROSS_ENTROPY, OURS, SETTLED, Batch, Sizes, Step, draw_batches
from .timing import Timing, measure

LOSSES = ("slots, flow", SETTLED, "dense, flow")  # compared with cross-entropy in part 2
LOSS_FACTOR, LOSS_EXTRA = 1.5, 0.5e-3  # the target of part 2: this factor of cross-entropy, plus this many seconds
MIN_SPEEDUP, MAX_GROWTH, MAX_BYTES = 100, 1.5, 1 / 40


class Grid(NamedTuple):
    """Sizes of one run."""

    sweeps: dict[str, list[Sizes]]
    loss: Sizes
    repeats: int
    budget: float  # seconds per candidate and cell


FULL = Grid(
    sweeps={
        "against N": [Sizes(n, 50, 128) for n in (10_000, 100_000, 1_000_000)],
        "against K": [Sizes(20_000, k, 128) for k in (10, 100, 1000)],
    },
    loss=Sizes(100_000, 1000, 256),
    repeats=300,
    budget=15.0,
)
QUICK = Grid(
    sweeps={"against N": [Sizes(n, 10, 32) for n in (500, 2000)], "against K": [Sizes(1000, 40, 32)]},
    loss=Sizes(1000, 100, 32),
    repeats=6,
    budget=0.5,
)


@dataclass(frozen=True)
class Cell:
    """Time and bytes of each candidate at one size, and the reasons for skipped candidates."""

    sizes: Sizes
    timings: dict[str, Timing]
    nbytes: dict[str, int]
    skipped: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Seconds and bytes, for the results file."""
        found = {name: {**asdict(timing), "bytes": self.nbytes[name]} for name, timing in self.timings.items()}
        return {**self.sizes._asdict(), "candidates": found, "skipped": self.skipped}


def measure_cells(
    sweep: Sequence[Sizes], names: Sequence[str], grid: Grid, max_gib: float, *, title: str, backward: bool = False
) -> list[Cell]:
    """Time the candidates at all sizes in turns, so that sizes can be compared as fairly as candidates."""
    bind = _forward_backward if backward else _forward
    cells: list[Cell] = []
    calls: dict[tuple[Sizes, str], Callable[[], object]] = {}
    for sizes in tqdm(sweep, desc=f"{title}: setting up", unit="size", leave=False):
        cell = Cell(sizes, {}, {name: CANDIDATES[name].nbytes(sizes) for name in names}, {})
        batches = draw_batches(sizes, 2 * grid.repeats, requires_grad=backward)
        for name, need in cell.nbytes.items():
            if need > max_gib * 2**30:
                cell.skipped[name] = f"needs {need / 2**30:.2f} GiB, more than --max-gib {max_gib:g}"
                tqdm.write(f"{sizes}: skipped {name}: {cell.skipped[name]}")
            else:
                count = len(batches) // 20 + 1 if CANDIDATES[name].settled else len(batches)
                calls[sizes, name] = bind(CANDIDATES[name].build(sizes), batches[:count])
        cells.append(cell)
    timings = measure(calls, grid.repeats, budget=grid.budget, title=title)
    return [
        replace(cell, timings={name: timings[cell.sizes, name] for name in names if (cell.sizes, name) in timings})
        for cell in cells
    ]


def _forward(step: Step, batches: Sequence[Batch]) -> Callable[[], object]:
    endless = itertools.cycle(batches)
    return lambda: step(*next(endless))


def _forward_backward(step: Step, batches: Sequence[Batch]) -> Callable[[], object]:
    endless = itertools.cycle(batches)

    def call() -> None:
        logits, labels, index = next(endless)
        logits.grad = None
        step(logits, labels, index).backward()

    return call


def judge(cells: Mapping[Sizes, Cell], loss: Cell) -> list[Verdict]:
    """Compare with the targets, each at the sizes that it names."""
    share = row_bytes("slots", 1000) / row_bytes("dense", 1000)
    verdicts = [_judge_loss(name, loss) for name in LOSSES]
    verdicts.append(Verdict("bytes of slots <= 1/40 of dense at K=1,000", f"1/{1 / share:.1f}", share <= MAX_BYTES))
    first, *_, last = FULL.sweeps["against N"]
    small, large = cells.get(first), cells.get(last)
    for name in (*OURS, SETTLED):
        speedup = _ratio(large, AUTHORS, large, name)
        met = None if speedup is None else speedup >= MIN_SPEEDUP
        target = f"{name}: >= {MIN_SPEEDUP} x as fast as the {AUTHORS} at {last}"
        verdicts.append(Verdict(target, f"{speedup or 0:.0f} x", met))
    for name in OURS:
        growth = _ratio(large, name, small, name)
        met = None if growth is None else growth <= MAX_GROWTH
        target = f"{name}: time at {last} <= {MAX_GROWTH} x time at {first}"
        verdicts.append(Verdict(target, f"{growth or 0:.2f} x", met))
    return verdicts


def _judge_loss(name: str, loss: Cell) -> Verdict:
    target = f"{name}: loss forward + backward <= {LOSS_FACTOR} x cross-entropy + {LOSS_EXTRA * 1e3} ms at {FULL.loss}"
    if loss.sizes != FULL.loss or name not in loss.timings:
        return Verdict(target, "", None)
    plain, own = loss.timings[CROSS_ENTROPY].median, loss.timings[name].median
    limit = LOSS_FACTOR * plain + LOSS_EXTRA
    return Verdict(target, f"{own * 1e3:.2f} ms, limit {limit * 1e3:.2f} ms", own <= limit)


def _ratio(top: Cell | None, name: str, bottom: Cell | None, other: str) -> float | None:
    """Ratio of the medians of two candidates, if both were measured."""
    if top is None or bottom is None or name not in top.timings or other not in bottom.timings:
        return None
    return top.timings[name].median / bottom.timings[other].median


def _show_sweep(title: str, cells: Sequence[Cell]) -> None:
    def rows(text: Callable[[Cell, str], str]) -> list[list[str]]:
        return [[name, *(text(cell, name) for cell in cells)] for name in CANDIDATES]

    sizes = [str(cell.sizes) for cell in cells]
    times = rows(lambda cell, name: str(cell.timings.get(name, "skipped")))
    print(f"\nloss and table update of {cells[0].sizes.batch} samples {title}, ms: median [quartiles]")
    print(format_table(["", *sizes], times))
    print(f"\nmemory of the table {title}, including its gradient if that is dense")
    print(format_table(["", *sizes], rows(lambda cell, name: format_bytes(cell.nbytes[name]))))


def _show_loss(cell: Cell) -> None:
    plain = cell.timings[CROSS_ENTROPY].median
    rows = [
        [name, str(timing), f"{timing.median / plain:.2f}", f"{(timing.median - plain) * 1e3:.2f}"]
        for name, timing in cell.timings.items()
    ]
    print(f"\nloss forward + backward of {cell.sizes.batch} samples, {cell.sizes}, ms: median [quartiles]")
    print(format_table(["", "ms", "x cross-entropy", "extra ms"], rows))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench table`."""
    parser.add_argument("--quick", action="store_true", help="smoke test of a few seconds on small tables")
    add_out(parser, "table")
    parser.add_argument(
        "--max-gib",
        type=float,
        default=4.0,
        help="skip candidates whose table needs more memory than this (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, help="threads of PyTorch (default: its own choice); use 1 on shared cores"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the results file. Returns 0 whether or not the targets are met."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    grid, environment = QUICK if args.quick else FULL, start_bench()
    cells: dict[Sizes, Cell] = {}
    for title, sweep in grid.sweeps.items():
        found = measure_cells(sweep, list(CANDIDATES), grid, args.max_gib, title=title)
        cells.update((cell.sizes, cell) for cell in found)
    names = [*LOSSES, CROSS_ENTROPY]
    [loss] = measure_cells([grid.loss], names, grid, args.max_gib, title="full loss", backward=True)

    for title, sweep in grid.sweeps.items():
        _show_sweep(title, [cells[sizes] for sizes in sweep])
    _show_loss(loss)
    results = {"table": [cell.as_json() for cell in cells.values()], "loss": loss.as_json()}
    finish_bench(args.out, environment, results, judge(cells, loss))
    return 0

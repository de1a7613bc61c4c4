"""`sopdist bench table`: what the noise table costs, beside plain cross-entropy and two tables kept by autograd.

Part 1, against N and K: each candidate takes given logits, computes the loss and updates the rows of the batch.
Part 2: the whole loss, forward and backward, against cross-entropy. At the end, each target and whether it was met.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..noise.rows import row_bytes
from ..text_table import format_table
from .candidates import AUTHORS, CANDIDATES, CROSS_ENTROPY, OURS, SETTLED, Batch, Sizes, Step, draw_batches
from .timing import Timing, environment, load_warning, measure, write_json
from .verdict import Verdict

LOSSES = ("slots, flow", SETTLED, "dense, flow")  # what part 2 holds against cross-entropy
LOSS_FACTOR, LOSS_EXTRA = 1.5, 0.5e-3  # the target of part 2: that many times cross-entropy, and seconds on top
LEAST_SPEEDUP, MOST_GROWTH, MOST_BYTES = 100, 1.5, 1 / 40


class Grid(NamedTuple):
    """What one run measures."""

    sweeps: dict[str, list[Sizes]]
    loss: Sizes
    repeats: int
    budget: float  # seconds for all calls of one candidate in one cell


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
    """One measurement: time and bytes of each candidate, and why some were left out."""

    sizes: Sizes
    timings: dict[str, Timing]
    nbytes: dict[str, int]
    skipped: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """For the results file; seconds and bytes."""
        found = {name: {**asdict(timing), "bytes": self.nbytes[name]} for name, timing in self.timings.items()}
        return {**self.sizes._asdict(), "candidates": found, "skipped": self.skipped}


def measure_cells(
    sweep: Sequence[Sizes], names: Sequence[str], grid: Grid, max_gib: float, *, title: str, backward: bool = False
) -> list[Cell]:
    """Time these candidates at all these sizes by turns, so that sizes compare as fairly as candidates do."""
    bind = _whole_loss if backward else _forward
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
                few = len(batches) // 20 + 1 if CANDIDATES[name].settled else len(batches)
                calls[sizes, name] = bind(CANDIDATES[name].build(sizes), batches[:few])
        cells.append(cell)
    timings = measure(calls, grid.repeats, budget=grid.budget, title=title)
    return [
        replace(cell, timings={name: timings[cell.sizes, name] for name in names if (cell.sizes, name) in timings})
        for cell in cells
    ]


def _forward(step: Step, batches: Sequence[Batch]) -> Callable[[], object]:
    turns = itertools.cycle(batches)
    return lambda: step(*next(turns))


def _whole_loss(step: Step, batches: Sequence[Batch]) -> Callable[[], object]:
    turns = itertools.cycle(batches)

    def call() -> None:
        logits, labels, index = next(turns)
        logits.grad = None
        step(logits, labels, index).backward()

    return call


def judge(cells: Mapping[Sizes, Cell], loss: Cell) -> list[Verdict]:
    """Hold the measurements against the targets, each at the sizes that it names."""
    share = row_bytes("slots", 1000) / row_bytes("dense", 1000)
    verdicts = [_judge_loss(name, loss) for name in LOSSES]
    verdicts.append(Verdict("bytes of slots <= 1/40 of dense at K=1,000", f"1/{1 / share:.1f}", share <= MOST_BYTES))
    first, *_, last = FULL.sweeps["against N"]
    small, large = cells.get(first), cells.get(last)
    for name in (*OURS, SETTLED):
        speedup = _ratio(large, AUTHORS, large, name)
        met = None if speedup is None else speedup >= LEAST_SPEEDUP
        target = f"{name}: >= {LEAST_SPEEDUP} x as fast as the {AUTHORS} at {last}"
        verdicts.append(Verdict(target, f"{speedup or 0:.0f} x", met))
    for name in OURS:
        growth = _ratio(large, name, small, name)
        met = None if growth is None else growth <= MOST_GROWTH
        target = f"{name}: time at {last} <= {MOST_GROWTH} x that at {first}"
        verdicts.append(Verdict(target, f"{growth or 0:.2f} x", met))
    return verdicts


def _judge_loss(name: str, loss: Cell) -> Verdict:
    target = f"{name}: loss forward + backward <= {LOSS_FACTOR} x cross-entropy + {LOSS_EXTRA * 1e3} ms at {FULL.loss}"
    if loss.sizes != FULL.loss or name not in loss.timings:
        return Verdict(target, "", None)
    plain, own = loss.timings[CROSS_ENTROPY].median, loss.timings[name].median
    limit = LOSS_FACTOR * plain + LOSS_EXTRA
    return Verdict(target, f"{own * 1e3:.2f} ms, limit {limit * 1e3:.2f} ms", own <= limit)


def _ratio(over: Cell | None, name: str, under: Cell | None, other: str) -> float | None:
    """Median of one candidate over that of another, if both were measured."""
    if over is None or under is None or name not in over.timings or other not in under.timings:
        return None
    return over.timings[name].median / under.timings[other].median


def _show_sweep(title: str, cells: Sequence[Cell]) -> None:
    def rows(text: Callable[[Cell, str], str]) -> list[list[str]]:
        return [[name, *(text(cell, name) for cell in cells)] for name in CANDIDATES]

    sizes = [str(cell.sizes) for cell in cells]
    times = rows(lambda cell, name: str(cell.timings.get(name, "skipped")))
    print(f"\nloss and table update of {cells[0].sizes.batch} samples {title}, ms: median [quartiles]")
    print(format_table(["", *sizes], times))
    print(f"\ntable {title}, MiB, with its gradient where that is dense")
    print(format_table(["", *sizes], rows(lambda cell, name: f"{cell.nbytes[name] / 2**20:,.2f}")))


def _show_loss(cell: Cell) -> None:
    plain = cell.timings[CROSS_ENTROPY].median
    rows = []
    for name, timing in cell.timings.items():
        extra = (timing.median - plain) * 1e3
        rows.append([name, str(timing), f"{timing.median / plain:.2f}", f"{extra:.2f}"])
    print(f"\nloss forward + backward of {cell.sizes.batch} samples, {cell.sizes}, ms: median [quartiles]")
    print(format_table(["", "ms", "x cross-entropy", "extra ms"], rows))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sopdist bench table`."""
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds on small tables")
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench_table.json"), help="results file (default: %(default)s)"
    )
    parser.add_argument(
        "--max-gib",
        type=float,
        default=4.0,
        help="skip a candidate whose table needs more memory (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, help="torch's threads (default: its own choice); 1 where cores are shared"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the results file; 0 whether or not the targets are met, which is for a person to read."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    grid, header = QUICK if args.quick else FULL, environment()
    if warning := load_warning(header):
        print(warning)
    cells: dict[Sizes, Cell] = {}
    for title, sweep in grid.sweeps.items():
        found = measure_cells(sweep, list(CANDIDATES), grid, args.max_gib, title=title)
        cells.update((cell.sizes, cell) for cell in found)
    names = [*LOSSES, CROSS_ENTROPY]
    [loss] = measure_cells([grid.loss], names, grid, args.max_gib, title="whole loss", backward=True)

    for title, sweep in grid.sweeps.items():
        _show_sweep(title, [cells[sizes] for sizes in sweep])
    _show_loss(loss)
    verdicts = judge(cells, loss)
    print("", *verdicts, sep="\n")
    results = {
        "table": [cell.as_json() for cell in cells.values()],
        "loss": loss.as_json(),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    write_json(args.out, results, header)
    print(f"\nwritten: {args.out}")
    return 0

"""Measurements of `sopdist bench input`; input.py is the command."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from ..cli.tables import format_table
from ..cli.units import format_bytes
from ..data.settings import DataSettings
from ..data.stream import Stream
from .input_candidates import (
    CANDIDATES,
    DALI_READER,
    OURS_CPU,
    OURS_DALI,
    RAW_CPU,
    RAW_DALI,
    WEBDATASET,
    Batches,
    Setting,
)
from .input_plan import PlanFigures, plan_figures
from .photos import photo_jpegs, write_photo_shards
from .results import Verdict
from .timing import quartiles

_RECIPE = "imagenet"  # random resized crops of 224


class Sizes(NamedTuple):
    """Amount of work of one run."""

    images: int
    batch: int
    batches: int  # per turn
    rounds: int
    resume_step: int
    plan_samples: int


FULL = Sizes(images=1024, batch=64, batches=10, rounds=15, resume_step=10_000, plan_samples=14_000_000)
QUICK = Sizes(images=48, batch=8, batches=2, rounds=1, resume_step=100, plan_samples=200_000)


@dataclass(frozen=True)
class Rate:
    """Medians over the turns of a candidate, with the quartiles of the throughput."""

    images_per_second: float
    lower: float
    upper: float
    cpu_ms_per_image: float  # summed over its threads and processes


def measure_all(sizes: Sizes, cores: int) -> tuple[dict[str, Any], list[Verdict]]:
    """Measure and print all parts; returns the content of the results file and the verdicts."""
    with tempfile.TemporaryDirectory(prefix="sopdist-bench-") as folder:
        rates = _rates(Path(folder) / "photos", sizes, cores)
        print(_rate_table(rates), flush=True)
        first_batch = _seconds_to_first_batch(Path(folder) / "many", sizes)
    print("\nfirst batch " + ", ".join(f"from step {step:,}: {1e3 * s:.1f} ms" for step, s in first_batch.items()))
    plan = plan_figures(sizes.plan_samples)
    print(plan)
    results = {
        "rates": {name: asdict(rate) for name, rate in rates.items()},
        "first_batch_seconds": {str(step): seconds for step, seconds in first_batch.items()},
        "plan": asdict(plan),
    }
    return results, _verdicts(rates, first_batch, plan)


def _rates(folder: Path, sizes: Sizes, cores: int) -> dict[str, Rate]:
    folder.mkdir()
    jpegs = photo_jpegs(sizes.images)
    write_photo_shards(folder, jpegs, "jpg", per_shard=max(1, sizes.images // 16))
    setting = Setting(folder, _RECIPE, sizes.batch, cores, jpegs)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
    with ExitStack() as stack:
        batches: dict[str, Batches] = {}
        for name, open_candidate in CANDIDATES.items():
            batches[name] = stack.enter_context(closing(_generator(open_candidate(setting))))
            next(batches[name])
        order, shuffle = list(CANDIDATES), random.Random(0).shuffle
        for _ in tqdm(range(sizes.rounds), desc="throughput", unit="round", leave=False):
            shuffle(order)
            for name in order:
                turns[name].append(_turn(batches[name], sizes))
    return {name: _rate(values) for name, values in turns.items()}


def _generator(batches: Batches) -> Any:
    """Wrap an iterator in a generator, so that closing it also closes everything that it opened."""
    yield from batches


def _turn(batches: Batches, sizes: Sizes) -> tuple[float, float]:
    """Images/s and CPU milliseconds per image, over a turn that starts with nothing prefetched."""
    for _ in range(6):  # more than any candidate prefetches
        next(batches)
    start, cpu = time.perf_counter(), _cpu_seconds()
    for _ in range(sizes.batches):
        next(batches)
    images = sizes.batches * sizes.batch
    return images / (time.perf_counter() - start), (_cpu_seconds() - cpu) / images * 1e3


def _cpu_seconds() -> float:
    """CPU time of this process and its workers."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _rate(turns: list[tuple[float, float]]) -> Rate:
    return Rate(*quartiles([speed for speed, _ in turns]), median(cpu for _, cpu in turns))


def _rate_table(rates: dict[str, Rate]) -> str:
    rows = [
        [name, f"{rate.images_per_second:.0f} [{rate.lower:.0f}, {rate.upper:.0f}]", f"{rate.cpu_ms_per_image:.2f}"]
        for name, rate in rates.items()
    ]
    return format_table(["", "images/s [quartiles]", "CPU ms/image"], rows)


def _seconds_to_first_batch(folder: Path, sizes: Sizes) -> dict[int, float]:
    """Median time to the first batch of an epoch that starts at step 0, and far into the epoch."""
    folder.mkdir()
    batch, shard = 4, 1000
    copies = -(-(sizes.resume_step + 1000) * batch // shard)
    write_photo_shards(folder, photo_jpegs(1)[:1] * shard, "jpg", per_shard=shard, copies=copies)
    settings = DataSettings(str(folder), _RECIPE, backend="cpu")
    seconds: dict[int, list[float]] = {0: [], sizes.resume_step: []}
    with Stream(settings, batch) as stream:
        for epoch, step in enumerate([*seconds] * 7):
            start = time.perf_counter()
            with closing(_generator(stream.epoch(epoch, start=step))) as batches:
                next(batches)
            seconds[step].append(time.perf_counter() - start)
    return {step: median(values) for step, values in seconds.items()}


def _verdicts(rates: dict[str, Rate], first_batch: dict[int, float], plan: PlanFigures) -> list[Verdict]:
    def at_least(name: str, share: float, of: str) -> Verdict:
        ratio = rates[name].images_per_second / rates[of].images_per_second
        return Verdict(f"{name} >= {share} x {of}", f"{ratio:.2f}", ratio >= share)

    at_start, *later = first_batch.values()
    slowdown = max(later) / at_start
    return [
        at_least(OURS_DALI, 0.95, DALI_READER),
        at_least(OURS_CPU, 1.5, WEBDATASET),
        at_least(OURS_CPU, 0.8, RAW_CPU),
        at_least(OURS_DALI, 0.8, RAW_DALI),
        at_least(OURS_DALI, 0.8, RAW_CPU),
        Verdict("first batch of a resume <= 1.5 x that of a start", f"{slowdown:.2f} x", slowdown <= 1.5),
        Verdict("plan in < 2 s", f"{plan.seconds:.2f} s", plan.seconds < 2),
        Verdict("plan in < 1 GB", format_bytes(plan.peak_bytes), plan.peak_bytes < 1e9),
    ]

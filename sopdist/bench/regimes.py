"""`sopdist bench regimes`: is a method ever worse than cross-entropy, however the network learns? On real data.

Trains each method in each regime (a network and a schedule: quick, slow, brief, from few samples, with augmentation, on
pretrained features) with each kind of wrong labels. Prints, as Markdown, the accuracy on clean test labels after the
last epoch, the difference to cross-entropy, and what SOP says about the labels. No setting is chosen on test labels:
`elr-tuned` is ELR with the settings that are best on noisy validation labels. Results are saved after each run, and a
command that is started again continues.

methods:
  ce, gce              cross-entropy; generalised cross-entropy
  elr, elr-tuned       early-learning regularisation with published settings, and tuned in every regime
  sop-always           SOP whose table acts from the first visit
  sop-auto             SOP that waits for the onset of memorisation

noise: clean; sym-R (resampled), asym-R (confused classes), inst-R (images that a weak network confuses), R in percent
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev

from ..cli.arguments import integer
from ..cli.output import cannot_write, progress_bar
from ..cli.tables import markdown
from ..cores import usable_cores
from ..errors import DataError
from ..processes import results_of
from .fashion_mnist import names_from
from .fashion_mnist_data import DEFAULT_DATA
from .regimes_data import INSTALL, features, has_feature_network
from .regimes_figure import plot_results
from .regimes_training import METHODS, REGIMES, TUNED, Result, Task, run_task
from .results import Verdict, add_out, finish_bench, start_bench

ELR_TUNED = "elr-tuned"
SHOWN = ("ce", "gce", "elr", ELR_TUNED, "sop-always", "sop-auto")
QUICK = {
    "quick": ("clean", "sym-40", "asym-40"), "small": ("sym-40",), "slow": ("clean", "inst-40"),
    "features": ("sym-40",), "digits": ("clean", "sym-40"),
}  # fmt: skip
QUICK_METHODS = ("ce", "elr", "sop-always", "sop-auto")
_LARGEST_REGRET, _RATE_ERROR, _CLEAN_FLAGS, _PRECISION = 0.005, 0.05, 0.05, 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench regimes`."""
    parser.epilog = """\
examples:
  sopdist bench regimes --quick                                a few minutes
  sopdist bench regimes                                        everything
  sopdist bench regimes --regimes slow,quick --methods ce,sop-auto --seeds 3"""
    add = parser.add_argument
    add("--quick", action="store_true", help="few regimes, four methods, one seed")
    add("--regimes", type=names_from(tuple(REGIMES)), metavar="A,B", help="regimes (default all)")
    add("--methods", type=names_from(SHOWN), metavar="A,B", help="methods (default all)")
    add("--seeds", type=integer(1), metavar="N", help="number of seeds: 0 to N-1 (default 2, with --quick 1)")
    add("--jobs", type=integer(1), default=usable_cores(), metavar="N", help="processes (default %(default)s)")
    add("--epochs", type=integer(1), metavar="N", help="instead of those of each regime")
    add("--samples", type=integer(100), metavar="N", help="instead of those of each regime")
    where = "folder of the four idx .gz files of Fashion-MNIST (default %(default)s)"
    add("--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help=where)
    add("--figures", type=Path, metavar="DIR", help="also write regimes.png and onset.png; needs 'sopdist[theory]'")
    add_out(parser, "regimes")


def run(args: argparse.Namespace) -> int:
    """Run everything that is not done yet, then print the tables."""
    environment = start_bench()
    with cannot_write(args.out):
        args.out.parent.mkdir(parents=True, exist_ok=True)
    tasks = plan(args)
    log = args.out.with_suffix(".jsonl")
    done = read_log(log, args)
    open_tasks = [task for task in tasks if _key(task) not in done]
    if len(open_tasks) < len(tasks):
        print(f"{len(tasks) - len(open_tasks)} of {len(tasks)} runs are in {log} already; remove it to start again")
    if any(REGIMES[task.regime].data == "features" for task in open_tasks):
        features(args.data, args.out.parent)  # once, before several processes want it
    with progress_bar(total=len(open_tasks), desc="regimes", unit="run") as bar:
        for result in results_of(run_task, open_tasks, args.jobs):
            done[_key(result)] = result
            with cannot_write(log), log.open("a") as file:
                file.write(json.dumps(asdict(result) | _settings(args)) + "\n")
            bar.update()
    results = choose_tuned([done[_key(task)] for task in tasks])
    print(report(results))
    if args.figures is not None:
        plot_results(results, args.figures)
    about = {"runs": [asdict(result) for result in results], **_settings(args)}
    finish_bench(args.out, environment, about, verdicts(results))
    return 0


def plan(args: argparse.Namespace) -> list[Task]:
    """All runs, the longest first."""
    names = args.regimes or list(QUICK if args.quick else REGIMES)
    if not has_feature_network() and "features" in names:
        if args.regimes:
            raise DataError(f"the regime features needs an ImageNet network: {INSTALL}")
        names = [name for name in names if name != "features"]
        print(f"the regime features is left out, because its ImageNet network is not installed: {INSTALL}")
    methods = args.methods or list(QUICK_METHODS if args.quick else SHOWN)
    trained = [name for name in methods if name in METHODS]
    if ELR_TUNED in methods:
        trained += [name for name in (*TUNED, "elr") if name not in trained]
    seeds = args.seeds or (1 if args.quick else 2)
    tasks = [
        Task(name, noise, method, seed, args.data, args.out.parent, args.epochs, args.samples)
        for name in names
        for noise in (QUICK.get(name, ()) if args.quick and not args.regimes else REGIMES[name].noises)
        for method in trained
        for seed in range(seeds)
    ]
    size = {"conv": 8.0, "conv-plain": 8.0, "pairs": 2.5}
    return sorted(tasks, key=lambda task: -size.get(task.regime, 1.0) * REGIMES[task.regime].samples)


def _settings(args: argparse.Namespace) -> dict[str, int | None]:
    return {"epochs": args.epochs, "samples": args.samples}


def _key(run: Task | Result) -> tuple[str, str, str, int]:
    return run.regime, run.noise, run.method, run.seed


def read_log(path: Path, args: argparse.Namespace) -> dict[tuple[str, str, str, int], Result]:
    """The results of an earlier start with the same --epochs and --samples. An incomplete last line is ignored."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            settings = {name: values.pop(name) for name in _settings(args)}
            if settings == _settings(args):
                result = Result(**values)
                found[_key(result)] = result
        except (ValueError, KeyError, TypeError):
            continue
    return found


def choose_tuned(results: Sequence[Result]) -> list[Result]:
    """Replace ELR's runs with different settings by those that are best on noisy validation, in each regime."""
    kept = [result for result in results if result.method not in TUNED]
    candidates = (*TUNED, "elr")
    tuned = [result for result in results if result.method in candidates]
    for cell in dict.fromkeys(result.cell for result in tuned if result.method in TUNED):
        by_method = {
            name: runs
            for name in candidates
            if (runs := [result for result in tuned if result.cell == cell and result.method == name])
        }
        best = max(by_method, key=lambda name: mean(result.validation for result in by_method[name]))
        kept += [Result(**{**asdict(result), "method": ELR_TUNED}) for result in by_method[best]]
    return kept


def error_of_mean(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for a single value, which has none."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _select(results: Sequence[Result], cell: tuple[str, str], method: str) -> list[Result]:
    return sorted((r for r in results if r.cell == cell and r.method == method), key=lambda r: r.seed)


def differences(results: Sequence[Result], cell: tuple[str, str], method: str, base: str) -> list[float]:
    """Test accuracy minus that of `base`, seed by seed."""
    ours, theirs = _select(results, cell, method), _select(results, cell, base)
    return [a.test - b.test for a, b in zip(ours, theirs, strict=False)]


def report(results: Sequence[Result]) -> str:
    """All tables, in Markdown."""
    cells = sorted({result.cell for result in results}, key=lambda cell: (list(REGIMES).index(cell[0]), cell[1]))
    methods = [name for name in SHOWN if any(result.method == name for result in results)]

    def accuracy(cell: tuple[str, str], method: str) -> str:
        found = [100 * result.test for result in _select(results, cell, method)]
        if not found:
            return ""
        return f"{mean(found):.1f}" + (f" ± {error_of_mean(found):.1f}" if len(found) > 1 else "")

    rows = [[*cell, *(accuracy(cell, method) for method in methods)] for cell in cells]
    averages = [mean(result.test for result in results if result.method == method) for method in methods]
    rows.append(["mean", "", *(f"{100 * value:.1f}" for value in averages)])
    title = "Test accuracy after the last epoch in percent, mean ± standard error:"
    parts = [title, markdown(["", "noise", *methods], rows)]
    if "ce" in methods and len(methods) > 1:
        others = [name for name in methods if name != "ce"]

        def regret(cell: tuple[str, str], method: str) -> str:
            found = differences(results, cell, method, "ce")
            return f"{100 * mean(found):+.1f}" if found else ""

        rows = [[*cell, *(regret(cell, method) for method in others)] for cell in cells]
        parts += ["Difference to cross-entropy in points:", markdown(["", "noise", *others], rows)]
    sops = [name for name in methods if name.startswith("sop")]
    if sops:
        header = ["", "noise", "method", "onset after epoch", "wrong", "noise_rate()", "interval", "flagged",
                  "flag precision", "provisional", "AUROC"]  # fmt: skip
        rows = [row for cell in cells for name in sops if (row := _label_row(_select(results, cell, name)))]
        parts += ["What SOP says about the labels, means over the seeds:", markdown(header, rows)]
    return "\n\n".join(parts)


def _label_row(runs: Sequence[Result]) -> list[str]:
    if not runs:
        return []

    def average(name: str, digits: int = 2) -> str:
        values = [getattr(run, name) for run in runs if getattr(run, name) is not None]
        return f"{mean(values):.{digits}f}" if values else ""

    onsets = ", ".join("never" if run.onset is None else str(run.onset) for run in runs)
    interval = f"{average('low')} to {average('high')}"
    provisional = "yes" if all(run.provisional for run in runs) else "some" if any(r.provisional for r in runs) else ""
    first = runs[0]
    estimate = [average("wrong"), average("rate"), interval]
    return [*first.cell, first.method, onsets, *estimate, average("flagged"), average("flag_precision"), provisional,
            average("auroc", 3)]  # fmt: skip


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Whether SOP is never materially worse than cross-entropy, better than ELR on average, and knows its limits."""
    methods = {result.method for result in results}
    found = []
    cells = list(dict.fromkeys(result.cell for result in results))
    if {"ce", "sop-auto"} <= methods:
        worst, where = 0.0, "nowhere worse"
        for cell in cells:
            gaps = differences(results, cell, "sop-auto", "ce")
            loss = -mean(gaps) - 2 * error_of_mean(gaps)
            if loss > worst:
                worst, where = loss, f"{100 * loss:.1f} points ({' '.join(cell)})"
        target = "sop-auto: at most 0.5 points below cross-entropy in every regime, within two standard errors"
        found.append(Verdict(target, where, worst <= _LARGEST_REGRET))
    if {"elr", "sop-auto"} <= methods:
        gap = mean(value for cell in cells for value in differences(results, cell, "sop-auto", "elr"))
        target = "sop-auto: at least 1 point above published ELR on average"
        found.append(Verdict(target, f"{100 * gap:+.1f}", gap >= 0.01))
    return found + _verdicts_about_labels([result for result in results if result.method == "sop-auto"])


def _verdicts_about_labels(runs: Sequence[Result]) -> list[Verdict]:
    found = []
    clean, noisy = ([run for run in runs if (run.wrong == 0) == kind] for kind in (True, False))
    for what, some in (("", runs), (" on clean labels", clean)):
        if some:
            error = mean(abs((run.rate or 0.0) - run.wrong) for run in some)
            found.append(Verdict(f"noise_rate(): mean error{what} at most 0.05", f"{error:.3f}", error <= _RATE_ERROR))
    if clean:
        most = max(run.flagged or 0.0 for run in clean)
        target = "at most 5% of clean labels are flagged, in every run"
        found.append(Verdict(target, f"at most {most:.1%}", most <= _CLEAN_FLAGS))
    firm = [run.flag_precision for run in noisy if not run.provisional and run.flag_precision is not None]
    if firm:
        target = "flags are correct in 70% of the cases, in every run whose flags are not provisional"
        found.append(Verdict(target, f"at least {min(firm):.1%} in {len(firm)} runs", min(firm) >= _PRECISION))
    return found

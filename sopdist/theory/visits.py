"""`sopdist theory flow`: one label of a real noise table over its visits, for each update rule.

The network contradicts the label for a while, then agrees with it, then contradicts it again. v^2 of the class that it
predicts instead starts at 1e-16. It should grow to 1 and flag the label, shrink while the network agrees, and be able
to grow again. The rules: `flow` with several `visits`; Euler steps of several sizes with the paper's projection; the
same steps with the clamp of the authors' code. All of them run `sopdist.SOP`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ..cli.output import progress_bar
from ..cli.units import pluralize
from ..noise import SOP
from .arguments import add_common_arguments, create_folder, write_results
from .figures import COLOURS, MARKERS, new_figure
from .problem import Array

NAME = "flow"
LABEL, PREDICTED, CLASSES = 0, 1, 10  # the label, and the class that the network predicts instead
VISITS = (2, 4, 8)  # settings of `flow`
GAINS = (0.5, 1.0, 1.5, 2.5)  # 4 step = 4 alpha tau: the relative growth of a small v per visit with Euler steps
ACTIVE = 0.5  # a label counts as flagged if v^2 is at least this
_FLOOR = 1e-17


@dataclass(frozen=True)
class Rule:
    """An update rule of the table."""

    family: str
    text: str  # its setting, as shown
    options: dict[str, Any]  # of SOP


@dataclass(frozen=True)
class Trace:
    """v^2 over the visits, (visits + 1, trials)."""

    rule: Rule
    squares: Array


FAMILIES = {
    "flow": "`flow`: the exact solution over a visit",
    "euler": "Euler steps, projected (`paper`)",
    "clamp": "Euler steps, clamped (`official`)",
}
RULES = [
    *(Rule("flow", f"visits = {visits}", {"visits": visits}) for visits in VISITS),
    *(Rule("euler", f"4 step = {gain:g}", {"variant": "paper", "alpha_u": gain / 4, "alpha_v": gain / 4, "tau": 1.0})
      for gain in GAINS),
    *(Rule("clamp", f"4 step = {gain:g}", {"variant": "official", "lr_u": gain / 4, "lr_v": gain / 4, "batch_size": 1})
      for gain in GAINS),
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist theory flow`."""
    add_common_arguments(parser, trials="labels with different initial values; the first is the thick line (default 5)")


def run(args: argparse.Namespace) -> int:
    """Simulate all rules, write figure and numbers."""
    create_folder(args.out)
    args.trials = args.trials or 5
    phases = (50, 15, 20) if args.quick else (50, 25, 35)  # contradicts, agrees, contradicts again
    traces = []
    for rule in progress_bar(iterable=RULES, desc=NAME, unit="rule"):
        traces.append(Trace(rule, simulate(rule, phases, args.trials, args.seed)))
    rows = [
        {"rule": trace.rule.family, "setting": trace.rule.text, "label": label, "visit": number, "v^2": float(value)}
        for trace in traces
        for label, values in enumerate(trace.squares.T)
        for number, value in enumerate(values)
    ]
    numbers = {"phases": phases, "rules": [summarise(trace, phases) for trace in traces]}
    write_results(NAME, args, plot(traces, phases), rows, numbers, verdict(numbers, args.trials))
    return 0


def simulate(rule: Rule, phases: tuple[int, ...], trials: int, seed: int) -> Array:
    """(sum(phases) + 1, trials): v^2 of the class PREDICTED, before the first visit and after each visit."""
    sop = SOP(num_samples=trials, num_classes=CLASSES, seed=seed, onset="always", **rule.options)
    index, labels = torch.arange(trials), torch.full((trials,), LABEL)
    squares = [_squares(sop, index)]
    for number, length in enumerate(phases):
        logits = torch.zeros(trials, CLASSES)
        logits[:, LABEL if number % 2 else PREDICTED] = 10.0
        for _ in range(length):
            sop(logits, labels, index)
            squares.append(_squares(sop, index))
    return np.array(squares)


def _squares(sop: SOP, index: torch.Tensor) -> Array:
    return np.asarray(sop.table.dense_v(index)[:, PREDICTED].double().square())


def summarise(trace: Trace, phases: tuple[int, ...]) -> dict[str, Any]:
    """The median number of visits until a label is flagged, and the later course of the first label.

    "lost": v is 0 and cannot grow again. "stuck": v did not shrink while the network agreed with the label.
    """
    squares = trace.squares[:, 0]
    contradicted, agreed = phases[0], phases[0] + phases[1]
    until = (trace.squares[: contradicted + 1] >= ACTIVE).argmax(axis=0)  # (trials,); 0: never active
    again = squares[agreed:] >= ACTIVE
    return {
        "rule": trace.rule.family, "setting": trace.rule.text,
        "visits_until_active": float(np.median(until)) if until.all() else None,
        "v2_when_contradicted": float(squares[contradicted]), "v2_when_agreed": float(squares[agreed]),
        "v2_at_the_end": float(squares[-1]),
        "visits_until_active_again": int(again.argmax()) if again.any() else None,
        "lost": bool(squares[agreed] == 0), "stuck": bool(squares[agreed] >= ACTIVE),
    }  # fmt: skip


def verdict(numbers: dict[str, Any], trials: int) -> str:
    """The result in one paragraph."""
    parts = []
    for family in FAMILIES:
        results = []
        for rule in (rule for rule in numbers["rules"] if rule["rule"] == family):
            first = rule["visits_until_active"]
            end = f"down to {rule['v2_when_agreed']:.1g}"
            if rule["lost"]:
                end = "then 0 forever"
            elif rule["stuck"]:
                end = f"stuck at {rule['v2_when_agreed']:.2g}"
            results.append(f"{rule['setting']}: " + (f"{first:g} visits, {end}" if first else "never"))
        parts.append(f"{family} ({'; '.join(results)})")
    return (
        f"Visits with steady disagreement until v^2 >= {ACTIVE:g} (median of {pluralize(trials, 'label')}), and v^2 of "
        f"the first label after {numbers['phases'][1]} visits in which the network agrees with it: "
        f"{', '.join(parts)}."
    )


def plot(traces: list[Trace], phases: tuple[int, ...]) -> Figure:
    """One column per family: v^2 on a logarithmic scale above, on a linear scale below."""
    figure, axes = new_figure(2, len(FAMILIES), (11, 6))
    for column, (family, title) in enumerate(FAMILIES.items()):
        for row, panel in enumerate(axes[:, column]):
            panel.axvspan(phases[0], phases[0] + phases[1], color="grey", alpha=0.15, linewidth=0)
            for i, trace in enumerate(trace for trace in traces if trace.rule.family == family):
                style = {"color": COLOURS[i], "linewidth": 1.2, "marker": MARKERS[i], "markersize": 3, "markevery": 10}
                values = np.maximum(trace.squares, _FLOOR) if row == 0 else trace.squares
                panel.plot(values[:, 1:], color=COLOURS[i], linewidth=0.4, alpha=0.4)
                panel.plot(values[:, 0], label=trace.rule.text, **style)
            panel.set(xlabel="visits", ylabel=r"$v^2$ of the contradicting class")
            if row == 0:
                panel.set(yscale="log", ylim=(_FLOOR, 20), title=title.replace("`", ""))
                panel.legend(loc="lower right")
                panel.text(phases[0] + phases[1] / 2, 3, "agrees", ha="center", fontsize=7)
            else:
                panel.set(ylim=(-0.05, 2.2 if family == "clamp" else 1.15))
    return figure

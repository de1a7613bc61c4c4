"""`sopdist theory flow`: one label of a real noise table over its visits, by each rule of updating it.

The network contradicts the label for a while, changes its mind, and contradicts it again. v^2 of the class that it
says instead starts at 1e-16, should grow to 1 and explain the label away, should shrink when the network comes round,
and should be able to grow again. Side by side: `flow` with several `visits`; Euler steps of several sizes with the
paper's projection; the same steps with the clamp of the authors' code. All of them are `sopdist.SOP` itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ..data.commands.output import progress_bar
from ..noise import SOP
from .arguments import add_common_arguments, counted, leave, open_folder
from .figures import COLOURS, MARKERS, new_figure
from .problem import Array

NAME = "flow"
LABEL, SAID, CLASSES = 0, 1, 10  # the label, and what the network says instead
VISITS = (2, 4, 8)  # of `flow`
GAINS = (0.5, 1.0, 1.5, 2.5)  # 4 step = 4 alpha tau: by which share a small v grows in a visit of an Euler step
ACTIVE = 0.5  # v^2 from which on a label counts as explained away
_FLOOR = 1e-17


@dataclass(frozen=True)
class Rule:
    """A way of updating the table."""

    family: str
    text: str  # for people
    options: dict[str, Any]  # for SOP


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
    """Declare its options."""
    add_common_arguments(parser, trials="labels, each with an initial value of its own; the first is drawn (default 5)")


def run(args: argparse.Namespace) -> int:
    """Visit, write."""
    open_folder(args.out)
    args.trials = args.trials or 5
    phases = (50, 15, 20) if args.quick else (50, 25, 35)  # contradicts, agrees, contradicts again
    traces = []
    for rule in progress_bar(iterable=RULES, desc=NAME, unit="rule"):
        traces.append(Trace(rule, visit(rule, phases, args.trials, args.seed)))
    rows = [
        {"rule": trace.rule.family, "setting": trace.rule.text, "label": label, "visit": number, "v^2": float(value)}
        for trace in traces
        for label, values in enumerate(trace.squares.T)
        for number, value in enumerate(values)
    ]
    numbers = {"phases": phases, "rules": [summarise(trace, phases) for trace in traces]}
    leave(NAME, args, draw(traces, phases), rows, numbers, verdict(numbers, args.trials))
    return 0


def visit(rule: Rule, phases: tuple[int, ...], trials: int, seed: int) -> Array:
    """(sum(phases) + 1, trials): v^2 of the class SAID, before and after each visit of `trials` labels."""
    sop = SOP(num_samples=trials, num_classes=CLASSES, seed=seed, **rule.options)
    index, labels = torch.arange(trials), torch.full((trials,), LABEL)
    squares = [_squares(sop, index)]
    for number, length in enumerate(phases):
        logits = torch.zeros(trials, CLASSES)
        logits[:, LABEL if number % 2 else SAID] = 10.0
        for _ in range(length):
            sop(logits, labels, index)
            squares.append(_squares(sop, index))
    return np.array(squares)


def _squares(sop: SOP, index: torch.Tensor) -> Array:
    return np.asarray(sop.table.dense_v(index)[:, SAID].double().square())


def summarise(trace: Trace, phases: tuple[int, ...]) -> dict[str, Any]:
    """How long labels took to be explained away, the median; and what became of the first.

    Lost is a v that is 0: nothing can make it grow again. Stuck is one that did not shrink while the network agreed.
    """
    squares = trace.squares[:, 0]
    contradicted, agreed = phases[0], phases[0] + phases[1]
    until = (trace.squares[: contradicted + 1] >= ACTIVE).argmax(axis=0)  # (trials,); 0: never
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
    """One paragraph."""
    parts = []
    for family in FAMILIES:
        told = []
        for rule in (rule for rule in numbers["rules"] if rule["rule"] == family):
            first = rule["visits_until_active"]
            end = f"down to {rule['v2_when_agreed']:.1g}"
            if rule["lost"]:
                end = "then 0 for ever"
            elif rule["stuck"]:
                end = f"stuck at {rule['v2_when_agreed']:.2g}"
            told.append(f"{rule['setting']}: " + (f"{first:g} visits, {end}" if first else "never"))
        parts.append(f"{family} ({'; '.join(told)})")
    return (
        f"Visits of steady disagreement until v^2 >= {ACTIVE:g} (median of {counted(trials, 'label')}), and where v^2 "
        f"of the first label is {numbers['phases'][1]} visits after the network has changed its mind: "
        f"{', '.join(parts)}."
    )


def draw(traces: list[Trace], phases: tuple[int, ...]) -> Figure:
    """A panel for each family, on a logarithmic scale above and a linear one below."""
    figure, axes = new_figure(2, len(FAMILIES), (11, 6))
    for column, (family, title) in enumerate(FAMILIES.items()):
        for row, panel in enumerate(axes[:, column]):
            panel.axvspan(phases[0], phases[0] + phases[1], color="grey", alpha=0.15, linewidth=0)
            for i, trace in enumerate(trace for trace in traces if trace.rule.family == family):
                style = {"color": COLOURS[i], "linewidth": 1.2, "marker": MARKERS[i], "markersize": 3, "markevery": 10}
                values = np.maximum(trace.squares, _FLOOR) if row == 0 else trace.squares
                panel.plot(values[:, 1:], color=COLOURS[i], linewidth=0.4, alpha=0.4)
                panel.plot(values[:, 0], label=trace.rule.text, **style)
            panel.set(xlabel="visits", ylabel=r"$v^2$ of the class the network says")
            if row == 0:
                panel.set(yscale="log", ylim=(_FLOOR, 20), title=title.replace("`", ""))
                panel.legend(loc="lower right")
                panel.text(phases[0] + phases[1] / 2, 3, "agrees", ha="center", fontsize=7)
            else:
                panel.set(ylim=(-0.05, 2.2 if family == "clamp" else 1.15))
    return figure

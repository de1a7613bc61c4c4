"""Update rules of u and v, which set how fast a row learns: as user settings, and as coefficients for the kernels.

For each entry, h says whether the network contradicts the label there: for v_k, h = 1 where k is the predicted class;
for u, h = 1 where the predicted class is not the label. q is the square of the entry.

    flow      dq/dt = 8 q (h - q), solved exactly over one visit of length T / 8 with T = ln(1e16) / visits:
                  h = 1:  q <- q / (q + (1 - q) e^-T)          logit(q) grows by T
                  h = 0:  q <- q / (1 + T q)                   1/q grows by T
    paper     v <- clip(v + 4 alpha_v tau v (h - v^2), -1, 1)
              u <- clip(u + 2 alpha_u tau u pull,      -1, 1)  pull = 1/w_y - 1/S, so dl_CE/du = -2 u pull
    official  v <- v + 4 lr_v/B v (h - v^2)                    an entry stops once its square exceeds 1
              u <- u + 2 lr_u/B u (pull - 2 (1 - h + u^2 - 1))

Before the onset of memorisation (`onset`), u and v only count votes, by the margin |p_y - the largest other p|:

    votes     v_k <- v_k + h margin            u <- u + (1 - h) margin

The initial values are about 1e-8, so logit(q) of an entry must grow by ln(1e16) = 36.8 before q reaches 1/2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from .counter import INITIAL_STD
from .onset import Setting, earliest

Rule = Literal["flow", "paper", "official", "votes"]
RULES: tuple[Rule, ...] = (
    "flow",
    "paper",
    "official",
    "votes",
)  # compiled kernels get the position of a rule in this tuple

_SMALLEST_FLOAT32 = 2.0**-126
_LOGIT_TO_ACTIVE = -2 * math.log(INITIAL_STD)  # from q = 1e-16 to q = 1/2


class Step(NamedTuple):
    """A rule as the row kernels need it: its name, and one coefficient each for v and u."""

    rule: Rule
    v: float  # flow: T            paper, official: 4 x step of v
    u: float  # flow: exp(-T)      paper, official: 2 x step of u


VOTES = Step("votes", 0.0, 0.0)

# Within these bounds an entry whose class was never predicted keeps its bits, in every variant.
_FEWEST_VISITS, _LARGEST_RATE = 0.01, 1e6


def _check_rate(name: str, value: float, low: float = 0.0, high: float = _LARGEST_RATE) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value!r}")


@dataclass(frozen=True)
class Flow:
    """The default. `visits`: visits of steady disagreement until a label is absorbed by the noise term."""

    visits: float = 4.0

    def __post_init__(self) -> None:
        _check_rate("visits", self.visits, _FEWEST_VISITS, 1e12)

    def step(self) -> Step:
        """Return the coefficients for the row kernels."""
        time = _LOGIT_TO_ACTIVE / self.visits
        return Step("flow", time, max(math.exp(-time), _SMALLEST_FLOAT32))  # never 0, so that q = 0 is not 0 / 0

    def visits_to_activate(self) -> float:
        """Visits of steady disagreement until v^2 = 1/2, starting from one standard deviation of the initial values."""
        return self.visits


class _Euler(ABC):
    """Base of the two rules that take Euler steps."""

    @abstractmethod
    def step(self) -> Step:
        """Return the coefficients for the row kernels."""

    def visits_to_activate(self) -> float:
        """Visits of steady disagreement until v^2 = 1/2, at the current rates."""
        return _euler_visits(self.step().v)


@dataclass(frozen=True)
class Paper(_Euler):
    """The paper's projected steps: `alpha_u`, `alpha_v` times `tau`, the network's current learning rate."""

    alpha_u: float = 10.0
    alpha_v: float = 10.0
    tau: float = 0.02

    def __post_init__(self) -> None:
        for name in ("alpha_u", "alpha_v", "tau"):
            _check_rate(name, getattr(self, name))

    def step(self) -> Step:
        """Return the coefficients for the row kernels."""
        return Step("paper", 4 * self.alpha_v * self.tau, 2 * self.alpha_u * self.tau)


@dataclass(frozen=True)
class Official(_Euler):
    """The steps of the authors' published code: absolute rates, divided by the batch size they were tuned for."""

    lr_u: float = 1.0
    lr_v: float = 10.0
    batch_size: int = 128

    def __post_init__(self) -> None:
        for name in ("lr_u", "lr_v"):
            _check_rate(name, getattr(self, name))
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size must be an integer >= 1, got {self.batch_size!r}")

    def step(self) -> Step:
        """Return the coefficients for the row kernels."""
        return Step("official", 4 * self.lr_v / self.batch_size, 2 * self.lr_u / self.batch_size)


Rates = Flow | Paper | Official
VARIANTS: dict[str, type[Flow] | type[Paper] | type[Official]] = {"flow": Flow, "paper": Paper, "official": Official}


def default_onset(variant: str) -> Setting:
    """The paper's own steps act from the first visit."""
    return "auto" if variant == "flow" else "always"


def forecast(rates: Rates, onset: Setting, epochs: float) -> Forecast:
    """When the table acts, for a run of this many epochs."""
    waits = onset != "always"
    return Forecast(earliest(onset) if waits else rates.visits_to_activate(), epochs, rates, waits=waits)


def make_rates(variant: str, given: dict[str, Any]) -> Rates:
    """Build the chosen rule from the given settings. A setting of another rule is an error."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(map(repr, VARIANTS))}, got {variant!r}")
    rule = VARIANTS[variant]
    allowed = [field.name for field in fields(rule)]
    for name in given:
        if name not in allowed:
            owner = next(other for other, rates in VARIANTS.items() if name in {field.name for field in fields(rates)})
            raise ValueError(f"{name} belongs to variant={owner!r}; variant={variant!r} takes {', '.join(allowed)}")
    return rule(**given)


def _euler_visits(gain: float) -> float:
    """Steps of v <- v + gain v (1 - v^2) from 1e-8 until v^2 >= 1/2."""
    if gain == 0:
        return math.inf
    if gain < 1e-3:  # one step then equals the flow over T = 2 gain, to four digits
        return _LOGIT_TO_ACTIVE / (2 * gain)
    v, visits = INITIAL_STD, 0
    while v * v < 0.5:
        v += gain * v * (1 - v * v)
        visits += 1
    return float(visits)


@dataclass(frozen=True)
class Forecast:
    """Visits until a label that the network keeps contradicting is flagged, compared with the planned epochs."""

    visits: float
    epochs: float
    rates: Rates
    waits: bool = False  # for the onset: `visits` is then the first epoch in which the table can act

    @property
    def activates(self) -> bool:
        """Whether the table acts within the planned epochs, at one visit per epoch."""
        return self.visits <= self.epochs

    def __str__(self) -> str:
        visits = "never" if math.isinf(self.visits) else f"after about {self.visits:,.4g} visits"
        plan = f"{self.epochs:g} epochs of one visit each are planned"
        if self.waits:
            return self._of_the_onset(plan)
        if isinstance(self.rates, Paper):
            visits += f" at the current tau = {self.rates.tau:g}"
        if self.activates:
            return f"a steadily contradicted label is absorbed by the noise term {visits}; {plan}"
        flow = isinstance(self.rates, Flow)
        advice = "Lower `visits`, or train longer." if flow else "Raise the rates, or use variant='flow'."
        return (
            f"the noise table cannot act: a steadily contradicted label is absorbed by the noise term {visits}, "
            f"but {plan}. "
            f"Training will behave like plain cross-entropy. {advice}"
        )

    def _of_the_onset(self, plan: str) -> str:
        if math.isinf(self.visits):
            return "the noise table never acts (onset='never'): training is plain cross-entropy"
        if self.activates:
            return f"the noise table waits for the onset, and acts in epoch {self.visits:g} at the earliest; {plan}"
        return (
            f"the noise table cannot act: it waits for the onset, and acts in epoch {self.visits:g} at the earliest, "
            f"but {plan}. Training will be plain cross-entropy. Train longer."
        )


class InactiveTableWarning(UserWarning):
    """The chosen rates are too low for the noise table to have an effect within the planned epochs."""

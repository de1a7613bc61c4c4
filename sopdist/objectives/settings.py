"""The `objective` section of a config: what the network is trained to minimise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import ConfigError
from ..noise.rows import DEFAULT_SLOTS


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss, and the noise table behind it."""

    name: Literal["sop", "ce"] = "sop"  # sop: Sparse Over-Parameterization; ce: plain cross-entropy
    consistency: float = 0.0  # SOP+: weight of the agreement of two views; > 0 doubles the work of the network
    balance: float = 0.0  # SOP+: weight of the balance between the classes
    variant: Literal["flow", "paper", "official"] = "flow"  # how a visit moves u and v
    visits: float | None = None  # flow: visits of steady disagreement after which a label is explained away; null: 4
    alpha_u: float | None = None  # paper: step of u in units of the learning rate; null: 10
    alpha_v: float | None = None  # paper: step of v in units of the learning rate; null: 10
    lr_u: float | None = None  # official: step of u; null: 1
    lr_v: float | None = None  # official: step of v; null: 10
    lr_batch: int | None = None  # official: the batch size for which the steps were chosen; null: 128
    eps: float | None = None  # where the prediction is clipped; null: 1e-4, or 0.1 / classes where that is less
    layout: Literal["auto", "dense", "slots"] = "auto"  # of the table; auto: dense up to 256 MiB, else slots
    slots: int = DEFAULT_SLOTS  # entries that a row holds in the layout slots
    ahead: bool = True  # send a step's rows while the step before computes; false is for measurements

    def __post_init__(self) -> None:
        if self.name == "ce" and (self.consistency or self.balance):
            raise ConfigError("objective.name = 'ce': consistency and balance are terms of sop; set them to 0")
        for name in ("consistency", "balance"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"objective.{name} = {getattr(self, name)}: must be at least 0")

"""The sections of a config that belong to training. A comment beside a field is its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..config import ConfigError


@dataclass(frozen=True)
class RunSettings:
    """Which run this is."""

    name: str = ""  # its folder's name; empty: the name of the config
    folder: str = "runs"  # where runs are kept
    seed: int = 0  # of weights, order, augmentation and the noise table

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"run.seed = {self.seed}: must be from 0 to 2^63 - 1")
        if self.name != self.name.strip("/. ") or "/" in self.name:
            raise ConfigError(f"run.name = {self.name!r}: must be a plain name; run.folder says where")


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer, and its learning rate over time."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.02  # the learning rate after the warm-up
    momentum: float = 0.9  # sgd
    nesterov: bool = False  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adamw
    weight_decay: float = 5e-4
    schedule: Literal["constant", "multistep", "cosine"] = "cosine"  # cosine: to final_lr, step by step
    milestones: tuple[float, ...] = ()  # multistep: after how many epochs the rate is multiplied by gamma
    gamma: float = 0.1  # multistep
    final_lr: float = 0.0  # cosine
    warmup_epochs: float = 0.0  # over so many epochs the rate rises linearly to what the schedule says

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "gamma", "final_lr", "warmup_epochs"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"optim.{name} = {getattr(self, name)}: must be a number of at least 0")
        if self.milestones and self.schedule != "multistep":
            raise ConfigError(f"optim.milestones: belong to schedule multistep, not {self.schedule}")
        if self.schedule == "multistep" and not self.milestones:
            raise ConfigError("optim.milestones: must be set for schedule multistep, e.g. [40, 80]")
        if any(late <= early for early, late in zip((0.0, *self.milestones), self.milestones, strict=False)):
            raise ConfigError(f"optim.milestones = {list(self.milestones)}: must be positive and ascending")
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise ConfigError("optim.nesterov: needs sgd with momentum > 0")


@dataclass(frozen=True)
class TrainSettings:
    """How long, and in which portions."""

    epochs: int  # passes over the training split
    batch: int  # samples of an optimizer step, over all ranks: the result does not depend on their number
    accumulate: int = 1  # a rank computes its part of the batch in so many pieces, to save memory
    clip: float = 0.0  # largest norm of the gradient; 0: not clipped
    max_steps: int = 0  # stop after so many optimizer steps; 0: when the epochs are over
    max_nonfinite_steps: int = 3  # stop, with a dump, after more than so many steps in a row whose loss is not finite

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1), ("batch", 1), ("accumulate", 1), ("clip", 0), ("max_steps", 0), ("max_nonfinite_steps", 0),
        ):  # fmt: skip
            if not getattr(self, name) >= least:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class EngineSettings:
    """How the network is spread over ranks, and in which arithmetic it runs."""

    kind: Literal["auto", "single", "ddp", "deepspeed"] = "auto"  # auto: ddp, or single if there is one rank
    zero: Literal[0, 1, 2, 3] = 0  # deepspeed: what is partitioned; 1 optimizer, 2 and gradients, 3 and weights
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # bf16, fp16: autocast; fp16 needs a GPU, and scales the loss
    compile: bool = False  # torch.compile the network: slow to start, faster afterwards
    channels_last: bool = True  # memory format of convolutions
    sync_batchnorm: bool = False  # batch statistics over all ranks; needs GPUs
    threads: int = 0  # CPU threads of a rank; 0: the cores that it may use, shared among the ranks of the node
    timeout: float = 1800.0  # seconds after which a collective that does not finish is an error

    def __post_init__(self) -> None:
        if self.zero and self.kind != "deepspeed":
            raise ConfigError(f"engine.zero = {self.zero}: needs engine.kind = deepspeed, which is {self.kind}")
        if self.threads < 0:
            raise ConfigError(f"engine.threads = {self.threads}: must be at least 0")
        if not self.timeout > 0:
            raise ConfigError(f"engine.timeout = {self.timeout}: must be more than 0")


@dataclass(frozen=True)
class EvaluateSettings:
    """On what, and how often, the network is evaluated."""

    splits: dict[str, str] = field(default_factory=dict)  # name: split of data.root, or the path or URL of another one
    labels: str = "given"  # label set of these splits
    every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    best: str = ""  # the name in splits by whose top-1 the best network is kept; empty: val, if there is one
    batch: int = 0  # samples at a time, over all ranks; 0: train.batch

    def __post_init__(self) -> None:
        if self.every < 1 or self.batch < 0:
            raise ConfigError(f"evaluate.every = {self.every}, evaluate.batch = {self.batch}: must be at least 1 and 0")


@dataclass(frozen=True)
class CheckpointSettings:
    """What is kept of a run to go on from."""

    every: int = 1  # epochs between checkpoints, at their ends; 0: none there, not even at the end of the run
    steps: int = 0  # and every so many optimizer steps; 0: not
    minutes: float = 30.0  # and after so many minutes without one; 0: not
    keep: int = 2  # the newest so many are kept, and the one of the best network
    async_: bool = True  # write in the background; off: training stands still meanwhile, which needs less memory

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("steps", 0), ("minutes", 0), ("keep", 1)):
            if not least <= getattr(self, name) < float("inf"):
                raise ConfigError(f"checkpoint.{name} = {getattr(self, name)}: must be at least {least}, and finite")


@dataclass(frozen=True)
class LogSettings:
    """What is written down, and where."""

    every: int = 50  # steps between lines of metrics.jsonl
    wandb: Literal["auto", "online", "offline", "off"] = "auto"  # auto: online if logged in to W&B, else offline
    project: str = "sopdist"  # of W&B
    wandb_timeout: float = 30.0  # seconds that W&B may take to begin and to end; after that the run goes on without it
    suspects: int = 10_000  # samples in suspects.csv, the list of labels that are most likely wrong
    clean: str = "clean"  # label set of the truth, if the split has it: noise detection is scored against it

    def __post_init__(self) -> None:
        if self.every < 1 or self.suspects < 0:
            raise ConfigError(f"log.every = {self.every}, log.suspects = {self.suspects}: must be at least 1 and 0")
        if not 0 < self.wandb_timeout < float("inf"):
            raise ConfigError(f"log.wandb_timeout = {self.wandb_timeout}: must be more than 0, and not infinite")

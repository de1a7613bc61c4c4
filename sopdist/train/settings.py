"""The config sections of training. The comment next to a field is its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError


@dataclass(frozen=True)
class RunSettings:
    """Name, folder and seed of the run."""

    name: str = ""  # name of its folder; empty: the name of the config
    folder: str = "runs"  # parent folder of all runs
    seed: int = 0  # seed of weights, sample order, augmentation and the noise table

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"run.seed = {self.seed}: must be from 0 to 2^63 - 1")
        if self.name != self.name.strip("/. ") or "/" in self.name:
            raise ConfigError(f"run.name = {self.name!r}: must be a plain name; set the parent folder with run.folder")


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer and the learning-rate schedule."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.02  # learning rate after warm-up
    momentum: float = 0.9  # sgd
    nesterov: bool = False  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adamw
    weight_decay: float = 5e-4
    schedule: Literal["constant", "multistep", "cosine", "restarts", "linear"] = "cosine"  # of the learning rate
    milestones: tuple[float, ...] = ()  # multistep: epochs after which the rate is multiplied by gamma
    gamma: float = 0.1  # multistep
    final_lr: float = 0.0  # cosine, restarts, linear: the rate at the end
    period: float = 10.0  # restarts: epochs after which the cosine starts again
    decay_from: float = 0.0  # linear: epochs at the full rate, before it falls to final_lr at the end of the run
    late_beta1: float | None = None  # adamw with linear: the first of betas from decay_from on; null: unchanged
    warmup_epochs: float = 0.0  # epochs over which the rate rises linearly to that of the schedule

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "gamma", "final_lr", "warmup_epochs", "decay_from"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"optim.{name} = {getattr(self, name)}: must be finite and at least 0")
        if self.milestones and self.schedule != "multistep":
            raise ConfigError(f"optim.milestones: needs optim.schedule = multistep, but it is {self.schedule}")
        if self.schedule == "multistep" and not self.milestones:
            raise ConfigError("optim.milestones: must be set for optim.schedule = multistep, e.g. [40, 80]")
        if any(late <= early for early, late in zip((0.0, *self.milestones), self.milestones, strict=False)):
            raise ConfigError(f"optim.milestones = {list(self.milestones)}: must be positive and increasing")
        if not 0 < self.period < float("inf"):
            raise ConfigError(f"optim.period = {self.period}: must be finite and more than 0")
        if self.late_beta1 is not None and (self.name != "adamw" or self.schedule != "linear"):
            raise ConfigError("optim.late_beta1: needs optim.name = adamw and optim.schedule = linear")
        if self.late_beta1 is not None and not 0 <= self.late_beta1 < 1:
            raise ConfigError(f"optim.late_beta1 = {self.late_beta1}: must be at least 0 and less than 1")
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise ConfigError("optim.nesterov: needs sgd with momentum > 0")


@dataclass(frozen=True)
class TrainSettings:
    """Length of the run, and batch size."""

    epochs: int  # passes over the training split
    batch: int  # samples per optimizer step over all ranks; results do not depend on the number of ranks
    accumulate: int = 1  # micro-batches per optimizer step on each rank; more need less memory
    clip: float = 0.0  # maximum gradient norm; 0: no clipping
    ema: float = 0.0  # decay of a moving average of the weights, evaluated and saved too, e.g. 0.999; 0: none
    max_steps: int = 0  # stop after this many optimizer steps; 0: after all epochs
    max_nonfinite_steps: int = 3  # stop, with a dump, after more non-finite losses in a row than this

    def __post_init__(self) -> None:
        for name, minimum in (
            ("epochs", 1), ("batch", 1), ("accumulate", 1), ("clip", 0), ("max_steps", 0), ("max_nonfinite_steps", 0),
        ):  # fmt: skip
            if not getattr(self, name) >= minimum:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: must be at least {minimum}")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"train.ema = {self.ema}: must be at least 0 and less than 1")


@dataclass(frozen=True)
class EngineSettings:
    """How the network is distributed over ranks, and its precision."""

    kind: Literal["auto", "single", "ddp", "deepspeed"] = "auto"  # auto: ddp, or single on one rank
    zero: Literal[0, 1, 2, 3] = 0  # deepspeed: ZeRO stage; 1 partitions optimizer state, 2 gradients too, 3 weights too
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # bf16, fp16: autocast; fp16 needs a GPU and uses loss scaling
    compile: bool = False  # torch.compile the network: slower to start, then faster
    channels_last: bool = True  # memory format of convolutions
    sync_batchnorm: bool = False  # batch statistics over all ranks; needs GPUs
    threads: int = 0  # CPU threads per rank; 0: the available cores, divided by the ranks on the node
    timeout: float = 1800.0  # seconds after which an unfinished collective raises an error

    def __post_init__(self) -> None:
        if self.zero and self.kind != "deepspeed":
            raise ConfigError(f"engine.zero = {self.zero}: needs engine.kind = deepspeed, but it is {self.kind}")
        if self.threads < 0:
            raise ConfigError(f"engine.threads = {self.threads}: must be at least 0")
        if not self.timeout > 0:
            raise ConfigError(f"engine.timeout = {self.timeout}: must be more than 0")


@dataclass(frozen=True)
class EvaluateSettings:
    """Evaluation splits, and how often they are evaluated."""

    splits: dict[str, str] = field(default_factory=dict)  # name: split of data.root, or path or URL of another split
    labels: str = "given"  # label set of these splits
    label_sets: dict[str, str] = field(default_factory=dict)  # name: label set, for splits with another one than that
    every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    best: str = ""  # split whose top-1 selects the best network; empty: val, if it exists
    batch: int = 0  # samples per step over all ranks; 0: train.batch

    def __post_init__(self) -> None:
        if self.every < 1 or self.batch < 0:
            raise ConfigError(f"evaluate.every = {self.every}, evaluate.batch = {self.batch}: must be at least 1 and 0")
        for name in self.label_sets:
            if name not in self.splits:
                known = ", ".join(self.splits) or "none"
                raise ConfigError(f"evaluate.label_sets.{name}: not one of evaluate.splits, which are {known}")

    def labels_of(self, name: str) -> str:
        """The label set of a split."""
        return self.label_sets.get(name, self.labels)


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are saved, and how many are kept."""

    every: int = 1  # epochs between checkpoints; 0: none at the end of an epoch, nor at the end of the run
    steps: int = 0  # optimizer steps between additional checkpoints; 0: none
    minutes: float = 30.0  # save another if the last one is this many minutes old; 0: never
    keep: int = 2  # number of newest checkpoints to keep, besides that of the best network
    async_: bool = True  # write in the background; off: saving blocks training, but needs less memory

    def __post_init__(self) -> None:
        for name, minimum in (("every", 0), ("steps", 0), ("minutes", 0), ("keep", 1)):
            if not minimum <= getattr(self, name) < float("inf"):
                raise ConfigError(f"checkpoint.{name} = {getattr(self, name)}: must be finite and at least {minimum}")


@dataclass(frozen=True)
class LogSettings:
    """Metrics, W&B and the list of suspects."""

    every: int = 50  # steps between training lines of metrics.jsonl
    wandb: Literal["auto", "online", "offline", "off"] = "auto"  # auto: online if logged in to W&B, else offline
    project: str = "sopdist"  # project in W&B
    wandb_timeout: float = 30.0  # seconds W&B may take to start or finish; then the run continues without it
    suspects: int = 10_000  # samples in suspects.csv, those whose labels are most likely wrong
    clean: str = "clean"  # label set with the clean labels, if the split has one: noise detection is scored against it

    def __post_init__(self) -> None:
        if self.every < 1 or self.suspects < 0:
            raise ConfigError(f"log.every = {self.every}, log.suspects = {self.suspects}: must be at least 1 and 0")
        if not 0 < self.wandb_timeout < float("inf"):
            raise ConfigError(f"log.wandb_timeout = {self.wandb_timeout}: must be finite and more than 0")

"""The config of a run: every section in one place, and where configs are found by name.

A section lives beside the code that it configures; this file only puts them together and checks what two sections must
agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..config import ConfigError
from ..data.augment.recipes import find_recipe
from ..data.settings import DataSettings
from ..models.settings import ModelSettings
from ..objectives.settings import ObjectiveSettings
from .settings import (
    CheckpointSettings,
    EngineSettings,
    EvaluateSettings,
    LogSettings,
    OptimSettings,
    RunSettings,
    TrainSettings,
)

CONFIGS = Path(__file__).parents[2] / "configs"  # of the repository


@dataclass(frozen=True)
class Config:
    """Everything about a run."""

    run: RunSettings
    data: DataSettings
    model: ModelSettings
    objective: ObjectiveSettings
    optim: OptimSettings
    train: TrainSettings
    engine: EngineSettings
    evaluate: EvaluateSettings
    checkpoint: CheckpointSettings
    log: LogSettings

    def __post_init__(self) -> None:
        best = self.evaluate.best
        if best and best not in self.evaluate.splits:
            known = ", ".join(self.evaluate.splits) or "none"
            raise ConfigError(f"evaluate.best = {best!r}: not one of evaluate.splits, which are {known}")
        find_recipe(self.data.recipe)
        if self.objective.balance and self.train.accumulate > 1:
            raise ConfigError(
                "objective.balance: compares the mean prediction of the whole batch, which train.accumulate > 1 takes "
                "apart; set one of them to its default"
            )


def find_config(name: str) -> Path:
    """A config by path, or by name in `configs/` of the current folder or the repository; `.yaml` may be left out."""
    names = [name] if name.endswith((".yaml", ".yml")) else [name, f"{name}.yaml"]
    for folder in (Path(), Path("configs"), CONFIGS):
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    known = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    raise ConfigError(f"--cfg {name}: no such file, and no such name in configs/; there is {', '.join(known)}")


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a run from a name or path and `key=value` overrides, checked."""
    path = find_config(name)
    loaded = config.load_config(Config, path, overrides)
    if not loaded.run.name:
        loaded = config.changed(loaded, "run.name", path.stem)
    return loaded

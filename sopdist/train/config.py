"""The config of a run: all its sections, and where configs are found by name.

Each section is declared next to the code that it configures. This file combines them, and checks settings that must
agree across sections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from .. import config
from ..config import OneOf
from ..data.augment.recipes import find_recipe
from ..data.settings import DataSettings
from ..errors import ConfigError
from ..methods import DEFAULT, MethodSettings, make_method, settings_of_methods
from ..models.settings import ModelSettings
from .settings import (
    CheckpointSettings,
    EngineSettings,
    EvaluateSettings,
    LogSettings,
    OptimSettings,
    RunSettings,
    TrainSettings,
)


def _configs_folder() -> Path:
    """Return the folder of the configs that come with sopdist.

    A wheel has them inside the package. In a checkout they are in the top-level folder `configs/`.
    """
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


CONFIGS = _configs_folder()

_OLD, _NEW = "objective", "method"  # the old name of the section `method`, and the current one
_OLD_EMA, _NEW_EMA = "method.ema", "train.ema"  # of SOP
_logger = logging.getLogger("sopdist.train")

Note = Callable[[str], object]


@dataclass(frozen=True)
class Config:
    """Everything about a run."""

    run: RunSettings
    data: DataSettings
    model: ModelSettings
    method: Annotated[MethodSettings, OneOf(settings_of_methods, DEFAULT)]
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
        method = make_method(self.method)
        setting = method.full_weights_setting()
        average = f"train.ema = {self.train.ema}" if self.train.ema else ""
        wants = f"method.{setting} = {getattr(self.method, setting)}" if setting else average
        if wants and self.engine.zero == 3:
            raise ConfigError(
                f"{wants}: needs full weights on every rank and cannot be combined with engine.zero = 3; "
                "use engine.zero = 2 or less"
            )
        setting = method.full_batch_setting()
        if setting and self.train.accumulate > 1:
            raise ConfigError(
                f"method.{setting} = {getattr(self.method, setting)}: needs the full batch in one pass and cannot be "
                "combined with train.accumulate > 1; use train.accumulate = 1"
            )


def find_config(name: str) -> Path:
    """A config by path, or by name in `configs/` of the current folder or the repository; `.yaml` may be left out."""
    names = [name] if name.endswith((".yaml", ".yml")) else [name, f"{name}.yaml"]
    for folder in (Path(), Path("configs"), CONFIGS):
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    known = [*sorted(path.stem for path in CONFIGS.glob("*.yaml")), "and those in configs/baselines/"]
    raise ConfigError(f"--cfg {name}: no such file, and no such name in configs/, which has {', '.join(known)}")


def load(name: str, overrides: Sequence[str] = (), note: Note = _logger.warning) -> Config:
    """The config of a run from a name or path and `key=value` overrides, checked.

    `note` is called with a message about what users should change in files of older versions.
    """
    path = find_config(name)
    loaded = read_config(path, overrides, note)
    if not loaded.run.name:
        loaded = config.changed(loaded, "run.name", path.stem)
    return loaded


def read_config(path: Path, overrides: Sequence[str] = (), note: Note = _logger.warning) -> Config:
    """A config from a file, which may be of an older version, and `key=value` overrides."""
    current = [_current_key(override, note) for override in overrides]

    def upgraded(tree: dict[Any, Any]) -> dict[Any, Any]:
        if _OLD in tree:
            note(f"{path}: the section `{_OLD}:` has been renamed to `{_NEW}:`; please update the file")
        if _has_old_ema(tree):
            note(f"{path}: `{_OLD_EMA}` has moved to `{_NEW_EMA}`; please update the file")
        names = [override.partition("=")[2] for override in current if override.startswith(f"{_NEW}.name=")]
        tree = upgrade(tree, names)
        section = tree.get(_NEW)
        if (names[-1] if names else section.get("name", DEFAULT) if isinstance(section, dict) else DEFAULT) == DEFAULT:
            for position, override in enumerate(current):  # applied after this
                if override.startswith(f"{_OLD_EMA}="):
                    note(f"{override}: `{_OLD_EMA}` has moved to `{_NEW_EMA}`")
                    current[position] = _NEW_EMA + override.removeprefix(_OLD_EMA)
        return tree

    return config.load_config(Config, path, current, upgraded)


def upgrade(tree: dict[Any, Any], names: Sequence[str] = ()) -> dict[Any, Any]:
    """The tree of a config with current names. `names`: what overrides set `method.name` to; the last one counts.

    `objective`, the old name of a section, becomes `method`; keys of another method, which it accepted and ignored, are
    dropped. `method.ema` of SOP becomes `train.ema`.
    """
    if _OLD in tree:
        tree = _with_renamed_section(tree, names)
    if not _has_old_ema(tree):
        return tree
    kept = {key: value for key, value in tree[_NEW].items() if key != "ema"}
    return {**tree, _NEW: kept, "train": {"ema": tree[_NEW]["ema"], **(tree.get("train") or {})}}


def _has_old_ema(tree: dict[Any, Any]) -> bool:
    """Whether the config is of a version in which SOP averaged weights itself. ELR+ still does."""
    section = tree.get(_NEW)
    return isinstance(section, dict) and section.get("name", DEFAULT) == DEFAULT and "ema" in section


def _with_renamed_section(tree: dict[Any, Any], names: Sequence[str]) -> dict[Any, Any]:
    if _NEW in tree:
        raise ConfigError(f"{_OLD}: and {_NEW}: are the same section; keep {_NEW}:")
    section = tree[_OLD]
    if isinstance(section, dict):
        keys = {name: config.keys_of(kind) for name, kind in settings_of_methods().items()}
        own = keys.get(names[-1] if names else section.get("name", DEFAULT), set())
        foreign = set().union(*keys.values()) - own
        section = {key: value for key, value in section.items() if key not in foreign}
    return {_NEW if key == _OLD else key: section if key == _OLD else value for key, value in tree.items()}


def _current_key(override: str, note: Note) -> str:
    if not override.startswith(f"{_OLD}."):
        return override
    note(f"{override}: `{_OLD}.*` has been renamed to `{_NEW}.*`")
    return _NEW + override.removeprefix(_OLD)

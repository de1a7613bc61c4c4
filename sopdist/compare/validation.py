"""The label set of the validation split that may choose a method: as noisy as the training labels.

Clean labels must not choose a method, because anyone who has them would train on them. Unless the config names a label
set for the validation split (evaluate.label_sets), runs are evaluated there with the noise of their training labels,
which is created if it does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..data.settings import DataSettings
from ..data.store import LocalStore
from ..train.config import Config
from ..train.evaluate import data_of_split
from .label_sets import TrainingLabels, create_label_set, facts_of, noise_of_recipe, open_split_store


@dataclass(frozen=True)
class Validation:
    """A label set of the validation split, for runs on one training label set."""

    split: str  # as in evaluate.splits
    labels: str
    noise: tuple[str, ...] = ()  # how to create it: arguments of `sopdist labels noise`; empty: it exists

    def data(self, config: Config) -> DataSettings:
        """The data settings of the split."""
        return data_of_split(config.data, config.evaluate.splits[self.split])

    def create(self, config: Config) -> None:
        """Create the label set, if it does not exist."""
        if self.noise:
            create_label_set(self.data(config), self.noise, f"evaluate.splits.{self.split}, label set {self.labels}")


def choose_validation(config: Config, split: str, training: TrainingLabels) -> Validation:
    """The label set on which runs with these training labels are validated. Creates nothing."""
    usual = Validation(split, config.evaluate.labels_of(split))
    if split in config.evaluate.label_sets or training.name == usual.labels:
        return usual
    store = open_split_store(usual.data(config))
    try:
        existing = store.list_labels()
    finally:
        store.close()
    if training.name in existing:
        return Validation(split, training.name)
    recipe = {} if training.noise else facts_of(config.data, training.name).recipe
    noise = training.noise or noise_of_recipe(recipe, training.name, existing)
    return Validation(split, training.name, noise) if noise and isinstance(store, LocalStore) else usual

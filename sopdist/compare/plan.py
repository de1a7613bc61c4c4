"""From the request of a user to a list of runs, checked before the first one starts.

A comparison is every entry x every label set x every seed. All runs share the data, the evaluation splits and the
overrides of the command line; entries may differ in everything else, and the table lists what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import yaml

from ..cli.commands.plan import look_up, make_plan
from ..config import changed
from ..data.labels import GIVEN
from ..errors import ConfigError, DataError, UserError
from ..methods import Setup, make_method
from ..train.config import Config, find_config, load
from ..train.evaluate import data_of_split
from .entries import Entry, check_overrides, parse_entries
from .label_sets import TrainingLabels, facts_of, find_label_sets, open_split_store
from .validation import Validation, choose_validation

RUNS, LOGS = "runs", "logs"  # folders of a comparison
_TEST, _VAL = "test", "val"  # the usual names of evaluation splits
_MAX_TABLE_BYTES = 1 << 28  # of the sample tables that are created only to check a method's settings
_SHARED = ("data.root", "data.split", "evaluate.splits", "evaluate.labels", "evaluate.label_sets")  # of all entries


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    config: str  # path or name
    methods: str
    seeds: tuple[int, ...]
    noise: tuple[str, ...]  # label sets by name, or noise such as sym-0.4; empty: the label set of the config
    overrides: tuple[str, ...]
    test: str  # split; empty: chosen by `find_test_split`
    out: Path


@dataclass(frozen=True)
class Costs:
    """What `sopdist plan` knows about an entry."""

    bytes_per_sample: int  # of its sample tables
    epochs: int
    outlook: str  # empty, or why the method cannot work in so few epochs


@dataclass(frozen=True)
class Run:
    """One training run."""

    entry: Entry
    labels: str
    seed: int
    folder: Path
    log: Path
    arguments: tuple[str, ...]  # of `sopdist train --cfg`: a config and overrides
    epochs: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name


@dataclass(frozen=True)
class Comparison:
    """A checked request."""

    request: Request
    entries: tuple[Entry, ...]
    configs: Mapping[Entry, Config]  # as resolved, before a label set and a seed are chosen
    costs: Mapping[Entry, Costs]
    label_sets: tuple[TrainingLabels, ...]
    test: str  # split whose accuracy is compared
    validations: Mapping[str, Validation]  # for each label set, what may choose a method; empty: there is no such split
    config_method: str  # the method of the config of the comparison

    @property
    def out(self) -> Path:
        """The folder of the comparison."""
        return self.request.out

    @property
    def config(self) -> Config:
        """The config of the first entry: data and evaluation are the same for all."""
        return self.configs[self.entries[0]]

    def runs(self) -> list[Run]:
        """All runs. The first seed of every entry comes first, so that a first table is available early."""
        runs = product(self.label_sets, self.request.seeds, self.entries)
        return [self._run(entry, labels.name, seed) for labels, seed, entry in runs]

    def _run(self, entry: Entry, labels: str, seed: int) -> Run:
        name = f"{entry.name}-{labels}-seed{seed}"
        path, *overrides = _arguments(entry, self.request, self.config_method)
        values = {"data.labels": labels, "run.folder": str(self.out / RUNS), "run.name": name}
        overrides += [f"run.seed={seed}", *(_override(key, value) for key, value in values.items())]
        validation, evaluate = self.validations.get(labels), self.config.evaluate
        if validation is not None and validation.labels != evaluate.labels_of(validation.split):
            label_sets = {**evaluate.label_sets, validation.split: validation.labels}
            overrides.append(f"evaluate.label_sets={yaml.safe_dump(label_sets, default_flow_style=True).strip()}")
        folder, log = self.out / RUNS / name, self.out / LOGS / f"{name}.log"
        return Run(entry, labels, seed, folder, log, (path, *overrides), self.costs[entry].epochs)


def make_comparison(request: Request) -> Comparison:
    """Check everything that can be checked without training. Writes nothing.

    Raises ConfigError, which lists the mistakes of all entries, or DataError.
    """
    check_overrides(request.overrides, "")
    for override in request.overrides:
        if override.startswith(("method.", "method=", "objective.", "objective=")):
            raise ConfigError(f"{override}: write settings after the name of their method, as in --methods NAME:q=0.5")
        if override.startswith("data.labels=") and request.noise:
            raise ConfigError(f"{override}: cannot be combined with --noise; add the label set to --noise")
    entries = parse_entries(request.methods)
    base = load(request.config, request.overrides)
    _check_splits(base)
    configs, costs, mistakes = dict[Entry, Config](), dict[Entry, Costs](), list[str]()
    for entry in entries:
        try:
            configs[entry] = _load(entry, request, base.method.name)
            _check_shared(configs[entry], configs.get(entries[0], base))
            costs[entry] = _costs(configs[entry])
        except UserError as error:
            mistakes.append(f"--methods {entry.text}: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    first = configs[entries[0]]
    label_sets = find_label_sets(
        request.noise or (base.data.labels,), first.data, "--noise" if request.noise else "data.labels"
    )
    test = find_test_split(first, request.test)
    split = find_validation_split(first, test)
    validations = {labels.name: choose_validation(first, split, labels) for labels in label_sets if split}
    comparison = Comparison(request, entries, configs, costs, label_sets, test, validations, base.method.name)
    _check_names(comparison.runs())
    return comparison


def find_test_split(config: Config, wanted: str) -> str:
    """The split whose accuracy is compared: as wanted, or `test`, or the only one that is not used for validation."""
    splits = config.evaluate.splits
    if wanted:
        if wanted not in splits:
            raise ConfigError(f"--test {wanted}: not one of evaluate.splits, which are {', '.join(splits) or 'none'}")
        return wanted
    others = [name for name in splits if name not in (config.evaluate.best, _VAL)]
    if _TEST in splits or len(others) == 1:
        return _TEST if _TEST in splits else others[0]
    known = ", ".join(splits) or "none"
    raise ConfigError(f"which of evaluate.splits is the test split? They are {known}; choose one with --test")


def find_validation_split(config: Config, test: str) -> str:
    """The split that selects the best network of a run; empty if there is none, or if it is the test split."""
    name = config.evaluate.best or _VAL
    return name if name in config.evaluate.splits and name != test else ""


def _arguments(entry: Entry, request: Request, config_method: str) -> list[str]:
    """Config and overrides of an entry. Its own settings come last, and win."""
    # A method other than the config's does not inherit its section, because it does not have those keys.
    own_section = entry.config or entry.method == config_method
    section = [] if own_section else [f"method={{name: {entry.method}}}"]
    return [str(find_config(entry.config or request.config)), *section, *request.overrides, *entry.overrides]


def _override(key: str, value: str) -> str:
    """`key=value`, quoted if YAML would not read the value as this string."""
    plain = yaml.safe_load(value) == value
    return f"{key}={value}" if plain else f"{key}={yaml.safe_dump(value, default_style=chr(34)).strip()}"


def _load(entry: Entry, request: Request, config_method: str) -> Config:
    path, *overrides = _arguments(entry, request, config_method)
    config = load(path, overrides, note=lambda _: None)  # notes on old files are shown once, for the config itself
    if config.method.name != entry.method:
        raise ConfigError(f"{path}: its method is {config.method.name}, not {entry.method}")
    return config


def _check_splits(config: Config) -> None:
    """DataError if a split or label set that every run is evaluated on is missing, or has other classes."""
    store = open_split_store(config.data)
    try:
        classes = len(store.manifest().classes)
    finally:
        store.close()
    for name, split in config.evaluate.splits.items():
        data = data_of_split(config.data, split)
        found = facts_of(data, config.evaluate.labels_of(name))
        if found.classes != classes:
            raise DataError(f"evaluate.splits.{name}: {data.location} has {found.classes} classes, not {classes}")


def _check_shared(config: Config, first: Config) -> None:
    for key in _SHARED:
        section, name = key.split(".")
        ours, theirs = (getattr(getattr(some, section), name) for some in (config, first))
        if ours != theirs:
            raise ConfigError(
                f"{key} = {ours!r}: must be the same for all methods, but was {theirs!r} before; write {key}=... at "
                "the end of the command to set it for all"
            )


def _costs(config: Config) -> Costs:
    """What `sopdist plan` computes on one rank. It also finds mistakes in the network and the method."""
    config = changed(config, "data.labels", GIVEN)  # its own label set may not exist yet
    found = look_up(config, None, None)
    plan = make_plan(config, found, 1)
    if sum(table["nbytes"] for table in plan["tables"]) <= _MAX_TABLE_BYTES:
        _try_start(config, found.data.samples, found.data.classes)
    outlook = plan["outlook"]
    text = "" if outlook is None or outlook["works"] else outlook["text"]
    return Costs(sum(table["row_bytes"] for table in plan["tables"]), config.train.epochs, text)


def _try_start(config: Config, samples: int, classes: int) -> None:
    """Let the method check its settings against the data, as at the start of a run. The labels do not matter."""
    labels = np.arange(samples) % classes
    train, device = config.train, torch.device("cpu")
    setup = Setup(samples, classes, train.epochs, train.batch, labels, seed=0, device=device, group=None)
    try:
        make_method(config.method).start(setup)
    except UserError:
        raise
    except Exception:
        return  # not the user's mistake: the method may need more of the trainer than there is here


def _check_names(runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two runs would be called {name}; write one of the methods differently")

"""The label sets that a comparison trains on. `sopdist labels noise` creates missing ones such as sym-0.4."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..cli.arguments import Parser, fraction
from ..cli.commands import labels as labels_command
from ..data.labelling.noise import measured_rate
from ..data.labels import CLEAN
from ..data.remote.opening import open_store
from ..data.settings import DataSettings
from ..data.store import LocalStore, Store
from ..errors import ConfigError, DataError

_FORM = re.compile(r"(?P<kind>[a-z]+)-(?P<rate>[0-9.]+)(?:-seed(?P<seed>\d+))?")
_KINDS = {short: kind for kind, short in labels_command.KINDS.items()} | {kind: kind for kind in labels_command.KINDS}


@dataclass(frozen=True)
class TrainingLabels:
    """A label set of the training split."""

    name: str
    noise: tuple[str, ...] = ()  # how to create it: arguments of `sopdist labels noise`; empty: it exists


@dataclass(frozen=True)
class Facts:
    """What is known about a label set of a split."""

    sha256: str
    wrong: float | None  # fraction of labels that differ from `clean`, where both are known; None: no clean labels
    recipe: Mapping[str, Any]  # how it was made
    classes: int


def open_split_store(data: DataSettings) -> Store:
    """The manifest and the label sets of a split, which may be remote."""
    return open_store(data.location, Path(data.cache) if data.cache else None, data.cache_bytes or None)


def find_label_sets(texts: Sequence[str], data: DataSettings, where: str) -> tuple[TrainingLabels, ...]:
    """The label sets with these names: existing ones, or ones to create by kind and rate. Creates nothing.

    `where` is the option or key that names them.
    """
    store = open_split_store(data)
    try:
        existing = store.list_labels()
        found = tuple(_find(text, existing, store, f"{where} {text}") for text in texts)
    finally:
        store.close()
    names = [labels.name for labels in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where} {','.join(texts)}: the label set {name} is there twice")
    return found


def _find(text: str, existing: Sequence[str], store: Store, where: str) -> TrainingLabels:
    if text in existing:
        return TrainingLabels(text)
    form = _FORM.fullmatch(text)
    kind = _KINDS.get(form["kind"]) if form else None
    if form is None or kind is None:
        raise DataError(
            f"{where}: {store.root} has no such label set (it has {', '.join(existing) or 'none'}), and the name is "
            f"not of the form KIND-RATE, such as sym-0.4, where KIND is one of "
            f"{', '.join(dict.fromkeys(labels_command.KINDS.values()))}"
        )
    try:
        rate = fraction(form["rate"])
    except ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None
    seed = int(form["seed"] or 0)
    name = f"{labels_command.KINDS[kind]}-{rate:.12g}-seed{seed}"
    if name in existing:
        return TrainingLabels(name)
    if not isinstance(store, LocalStore):
        raise DataError(f"{where}: {store.root} is remote; create the label set {name} where it was uploaded from")
    return TrainingLabels(name, (kind, "--rate", form["rate"], "--seed", str(seed), "--name", name))


def create_label_set(data: DataSettings, noise: Sequence[str], where: str) -> None:
    """Run `sopdist labels noise` in this process; its output goes to stderr. `where` starts error messages."""

    class Strict(Parser):
        """Raises errors instead of exiting."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(
                f"{where}: {message}; create the label set with `sopdist labels noise {data.location} {noise[0]} ...`, "
                "and give its name"
            )

    parser = Strict(prog="sopdist labels")
    labels_command.add_arguments(parser)
    with redirect_stdout(sys.stderr):
        labels_command.run(parser.parse_args(["noise", data.location, *noise]))


def noise_of_recipe(recipe: Mapping[str, Any], name: str, existing: Sequence[str]) -> tuple[str, ...]:
    """The arguments of `sopdist labels noise` that create the same noise for another split; empty if impossible.

    `existing`: label sets of the other split.
    """
    kind, rate = recipe.get("kind"), recipe.get("rate")
    if kind not in labels_command.KINDS or rate is None:
        return ()
    noise = [kind, "--rate", str(rate), "--seed", str(recipe["seed"]), "--name", name]
    if recipe.get("from") in existing:
        noise += ["--from", recipe["from"]]
    if "pairs" in recipe:
        noise += ["--pairs", ",".join(f"{source}:{target}" for source, target in recipe["pairs"])]
    return tuple(noise)


def facts_of(data: DataSettings, name: str) -> Facts:
    """Read a label set, and compare it with the clean labels if there are any."""
    store = open_split_store(data)
    try:
        manifest = store.manifest()
        found = store.labels(manifest, name)
        clean = store.labels(manifest, CLEAN) if CLEAN in store.list_labels() else None
    finally:
        store.close()
    wrong = None if clean is None else measured_rate(clean.labels, found.labels)
    return Facts(found.sha256, wrong, found.recipe, len(manifest.classes))

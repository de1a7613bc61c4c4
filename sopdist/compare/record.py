"""`compare.json`: what a folder compares. A command that is started again there must ask for the same, or for more."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..cli.output import cannot_write, write_json
from ..config import to_tree
from ..errors import ConfigError, DataError
from ..train.config import Config
from ..train.record.run_folder import shown
from .label_sets import facts_of, open_split_store
from .plan import Comparison

RECORD = "compare.json"
FORMAT = 1
_LOCK = ".lock"

# Keys that are not part of the record: chosen by the comparison itself, or without effect on the results.
_CHOSEN = ("run.", "data.labels")
_HARMLESS = (
    "data.root", "data.threads", "data.prefetch", "data.device", "data.cache", "data.cache_bytes", "engine.threads",
    "engine.timeout", "checkpoint.", "log.",
)  # fmt: skip


def settings_of(config: Config) -> dict[str, Any]:
    """All settings of an entry that matter, as `section.key: value`, without secrets."""
    flat = _flat(shown(to_tree(config)))
    return {key: value for key, value in flat.items() if not key.startswith((*_CHOSEN, *_HARMLESS))}


def check_record(comparison: Comparison, *, part: bool = False) -> None:
    """ConfigError if the folder compares something else. Writes nothing.

    `part`: the comparison may be only a part of what the folder compares: a task may be older than an addition.
    """
    path = comparison.out / RECORD
    if not path.exists():
        return
    try:
        recorded = json.loads(path.read_text())
        known = recorded["format"]
        problems = _differences(recorded, _content(comparison), part=part) if known == FORMAT else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the record of a comparison: {error!r}; choose another --out") from None
    if known != FORMAT:
        raise DataError(f"{path}: format {known!r}, this version reads format {FORMAT}; choose another --out")
    if problems:
        differences = "\n  ".join(problems)
        raise ConfigError(
            f"{comparison.out} holds another comparison:\n  {differences}\n"
            "repeat its options, or choose another --out; methods, seeds and noise may be added, but not removed"
        )


def write_record(comparison: Comparison, *, part: bool = False) -> None:
    """Write what is compared, unless it is only a part of what the record says. The label sets must exist."""
    if not part or not (comparison.out / RECORD).exists():
        write_json(comparison.out / RECORD, _content(comparison))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder, and make other processes that set it up at the same time wait."""
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("a")
    with file:
        with suppress(OSError):  # some network drives do not support locks
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _content(comparison: Comparison) -> dict[str, Any]:
    data = comparison.config.data
    store = open_split_store(data)
    try:
        shards = store.manifest().digest
        existing = store.list_labels()
    finally:
        store.close()
    names = [labels.name for labels in comparison.label_sets]
    return {
        "format": FORMAT,
        "sopdist": __version__,
        "config": comparison.request.config,
        "test": comparison.test,
        "shards": shards,
        "label_sets": {name: facts_of(data, name).sha256 if name in existing else None for name in names},
        "validation": {name: validation.labels for name, validation in comparison.validations.items()},
        "seeds": list(comparison.request.seeds),
        "methods": {
            entry.name: {"text": entry.text, "settings": settings_of(config)}
            for entry, config in comparison.configs.items()
        },
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], *, part: bool) -> list[str]:
    """What differs, apart from additions. Ignores settings that only one side has: they are of another version."""
    problems = [f"the test split was {before['test']}, is {now['test']}"] if before["test"] != now["test"] else []
    if before["shards"] != now["shards"]:
        problems.append("the training split has other shards")
    for what in ("methods", "label_sets", "seeds"):
        gone = [str(name) for name in before[what] if name not in now[what] and not part]
        problems += [f"{what.replace('_', ' ')} removed: {', '.join(gone)}"] if gone else []
    for name, sha256 in before["label_sets"].items():
        if now["label_sets"].get(name) not in (None, sha256):  # None: it does not exist, and is created again
            problems.append(f"label set {name} has changed")
    for name, labels in before["validation"].items():
        if now["validation"].get(name, labels) != labels:
            problems.append(f"the validation labels for {name} were {labels}, are {now['validation'][name]}")
    changes: dict[str, list[str]] = {}
    for name, method in before["methods"].items():
        old, new = method["settings"], now["methods"].get(name, {"settings": {}})["settings"]
        for key in old.keys() & new.keys():
            if old[key] != new[key]:
                changes.setdefault(f"{key} = {new[key]}, was {old[key]}", []).append(method["text"])
    everywhere = set(before["methods"]) & set(now["methods"])
    for change in sorted(changes):
        of = "" if len(changes[change]) == len(everywhere) else f" ({', '.join(changes[change])})"
        problems.append(change + of)
    return problems


def _flat(tree: Any, where: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    if not isinstance(tree, dict):
        return {where: tree}
    inside = (_flat(value, f"{where}.{key}" if where else str(key)) for key, value in tree.items())
    return {key: value for part in inside for key, value in part.items()}

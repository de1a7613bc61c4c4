"""The fingerprint of a run: what must be the same to resume from a checkpoint exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ...data import plan
from ...data.stream import Stream
from ...errors import ConfigError, DataError
from ...methods import Method, make_method
from ..config import Config

# What may be changed deliberately, with `--allow-change`, and what that means. Methods add their own.
_CHANGES = {
    "labels": "sample tables keep what they have learned about the old labels",
    "method.name": "sample tables that are not in the checkpoint start from scratch",
    "optim.name": "the new optimizer starts without momentum",
}
EPOCH = "steps per epoch"  # maps a step to its epoch; if epochs are balanced, it depends on the labels
_OLD_KEYS = {"steps of an epoch": EPOCH, "objective.name": "method.name", "objective.variant": "method.variant"}


def fingerprint_of(config: Config, stream: Stream, method: Method) -> dict[str, Any]:
    """The fingerprint of the current run. Reads all labels."""
    labels = np.ascontiguousarray(stream.labels.labels)
    return {
        "samples": len(stream.split),
        "classes": len(stream.split.manifest.classes),
        "shards": stream.split.manifest.digest,
        "labels": hashlib.sha256(labels.tobytes()).hexdigest(),
        "plan version": plan.VERSION,
        EPOCH: stream.steps,
        "run.seed": config.run.seed,
        "train.batch": config.train.batch,
        "model.name": config.model.name,
        "method.name": method.name,
        "optim.name": config.optim.name,
        **{f"data.{key}": getattr(config.data, key) for key in ("balanced_per_epoch", "lanes", "block")},
        **{f"method.{key}": value for key, value in method.fingerprint().items()},
    }


def saved_fingerprint(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint from a checkpoint, which may be an older one, with current keys."""
    return {_OLD_KEYS.get(key, key): value for key, value in saved.items()}


def allowed_changes(config: Config) -> dict[str, str]:
    """The changes that `--allow-change` accepts for this config, and what each one means."""
    own = make_method(config.method).resumable_changes
    return _CHANGES | {f"method.{key}": meaning for key, meaning in own.items()}


def check_allowed(config: Config, keys: Collection[str]) -> None:
    """ConfigError if `--allow-change` names something that cannot be changed."""
    known = allowed_changes(config)
    for key in keys:
        if key not in known:
            raise ConfigError(f"--allow-change {key}: must be one of {', '.join(known)}")


def compare(
    where: object,
    saved: Mapping[str, Any],
    here: Mapping[str, Any],
    allow: Collection[str],
    changes: Mapping[str, str],
    label_sets: tuple[str, str] = ("", ""),
) -> list[str]:
    """The differences that `allow` permits; DataError, with both sides, if anything else differs.

    `changes` says which could be permitted, and what each means. `label_sets` are the names of the saved and of the
    current label set: a digest alone means nothing to users.
    """
    refused, allowed = [], []
    for key in here:
        if saved.get(key) == here[key]:
            continue
        if key == EPOCH and key not in saved:
            continue  # older checkpoints do not have it
        own_of_method = key.startswith("method.") and key != "method.name"
        if own_of_method and saved.get("method.name") != here["method.name"]:
            continue  # implied by the name
        there, now = _short(saved.get(key)), _short(here[key])
        if key == "labels":
            there, now = f"{label_sets[0]} {there}".strip(), f"{label_sets[1]} {now}".strip()
        text = f"{key}: {there} in the checkpoint, {now} in this run"
        if key in allow:
            allowed.append(text)
        elif key in changes:
            refused.append(f"{text} (use --allow-change {key} to resume anyway: {changes[key]})")
        else:
            refused.append(text)
    if refused:
        differences = "\n  ".join(refused)
        raise DataError(f"{where}: belongs to another run:\n  {differences}\nstart a new run with a different run.name")
    return allowed


def _short(value: Any) -> Any:
    """A digest by its first characters, which are enough to tell two of them apart."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else value

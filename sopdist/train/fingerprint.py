"""The fingerprint of a run: what must be the same for a checkpoint to go on as if nothing had happened."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..config import ConfigError
from ..data import plan
from ..data.errors import DataError
from .session import Session

# What may be changed by somebody who knows what it means, and what it means.
ALLOWED = {
    "labels": "rows of the noise table keep what they have learned of the old labels",
    "objective.name": "a noise table that is not in the checkpoint begins anew",
    "objective.variant": "rows of the noise table go on by the new rule from where they are",
    "optim.name": "the new optimizer begins without a memory",
}
EPOCH = "steps of an epoch"  # by which a step is one of an epoch; if epochs are balanced, the labels decide on it
_CONVERTED = ("objective.layout",)  # of no consequence: the table is converted


def fingerprint(session: Session) -> dict[str, Any]:
    """Of the run at hand. Made once: it reads all labels."""
    if not session.fingerprint:
        session.fingerprint = _fingerprint(session)
    return session.fingerprint


def _fingerprint(session: Session) -> dict[str, Any]:
    config, stream = session.config, session.stream
    labels = np.ascontiguousarray(stream.labels.labels)
    found = {
        "samples": len(stream.split),
        "classes": len(stream.split.manifest.classes),
        "shards": stream.split.manifest.digest,
        "labels": hashlib.sha256(labels.tobytes()).hexdigest(),
        "plan version": plan.VERSION,
        EPOCH: stream.steps,
        "run.seed": config.run.seed,
        "train.batch": config.train.batch,
        "model.name": config.model.name,
        "objective.name": config.objective.name,
        "optim.name": config.optim.name,
        **{f"data.{key}": getattr(config.data, key) for key in ("balanced_per_epoch", "lanes", "block")},
    }
    if session.objective.sop is not None:
        found |= {"objective.variant": config.objective.variant, "objective.layout": session.objective.sop.table.layout}
    return found


def _short(value: Any) -> Any:
    """A digest by its beginning, which is enough to tell two of them apart."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else value


def check_allowed(keys: Collection[str]) -> None:
    """What `--allow-change` names."""
    for key in keys:
        if key not in ALLOWED:
            raise ConfigError(f"--allow-change {key}: can only be of {', '.join(ALLOWED)}")


def compare(
    where: object,
    saved: Mapping[str, Any],
    here: Mapping[str, Any],
    allow: Collection[str],
    label_sets: tuple[str, str] = ("", ""),
) -> list[str]:
    """What differs and is allowed to; DataError, with both sides, if anything differs that is not.

    `label_sets` are the names of those there and here: a digest alone tells a person nothing.
    """
    refused, allowed = [], []
    for key in here:
        if saved.get(key) == here[key] or key in _CONVERTED:
            continue
        if key == EPOCH and key not in saved:
            continue  # older checkpoints do not say it
        if key == "objective.variant" and saved.get("objective.name") != here["objective.name"]:
            continue  # that there was none says the name already
        there, now = _short(saved.get(key)), _short(here[key])
        if key == "labels":
            there, now = f"{label_sets[0]} {there}".strip(), f"{label_sets[1]} {now}".strip()
        text = f"{key}: {there} there, {now} here"
        if key in allow:
            allowed.append(text)
        elif key in ALLOWED:
            refused.append(f"{text} (--allow-change {key} goes on nevertheless: {ALLOWED[key]})")
        else:
            refused.append(text)
    if refused:
        raise DataError(
            f"{where}: is of another run:\n  " + "\n  ".join(refused) + "\nstart a new one with another run.name"
        )
    return allowed

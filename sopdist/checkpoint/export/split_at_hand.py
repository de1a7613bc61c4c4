"""The split that a checkpoint was trained on, if it is at hand: names of classes and labels, which no checkpoint holds.

Found by the run's config, or named by the user; in both cases it must be the same one, by its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.errors import DataError
from ...data.labels import Labels, read_labels
from ...data.manifest import Manifest, read_manifest
from ...data.remote.transfer import PIPE
from ...data.settings import DataSettings


@dataclass(frozen=True)
class SplitAtHand:
    """What is known of the split."""

    label_names: tuple[str, ...] | None = None
    labels: Labels | None = None  # (N,)
    label_set: str = ""
    missing: str = ""  # why something is not known


def find_split(
    fingerprint: Mapping[str, Any], data: DataSettings, folder: Path | None = None, label_set: str | None = None
) -> SplitAtHand:
    """Look where the user says, and insist; or else where the run's config says, and do without.

    Labels that are not those of the training are taken only if the user names their set.
    """
    if folder is not None:
        return _read(folder, fingerprint, label_set or data.labels, check=label_set is None)
    if data.location.startswith(PIPE) or "://" in data.location:
        return SplitAtHand(missing="the data are not on this machine")
    try:
        return _read(Path(data.location), fingerprint, label_set or data.labels, check=label_set is None)
    except DataError as error:
        if label_set is not None:  # the user has asked for it
            raise
        return SplitAtHand(missing=str(error))


def _read(folder: Path, fingerprint: Mapping[str, Any], label_set: str, *, check: bool) -> SplitAtHand:
    manifest = read_manifest(folder)
    _compare(folder, manifest, fingerprint)
    labels = read_labels(folder, manifest, label_set).labels
    digest = hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()
    if check and digest != fingerprint.get("labels", digest):
        raise DataError(
            f"{folder}: the label set {label_set!r} is not what it was during training; --labels {label_set} takes it "
            "as it is now"
        )
    return SplitAtHand(manifest.classes, labels, label_set)


def _compare(folder: Path, manifest: Manifest, fingerprint: Mapping[str, Any]) -> None:
    here = {"samples": manifest.samples, "classes": len(manifest.classes), "shards": manifest.digest}
    for key, value in here.items():
        if fingerprint.get(key, value) != value:
            raise DataError(
                f"{folder}: is not the split that the checkpoint was trained on: {key}: {fingerprint[key]} there, "
                f"{value} here; name the right one with --data"
            )

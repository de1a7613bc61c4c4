"""Class names and labels from the split that a checkpoint was trained on; checkpoints do not contain them.

The split is found through the run's config or given by the user. In both cases its digest must match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.labels import Labels, read_labels
from ..data.manifest import Manifest, read_manifest
from ..data.remote.transfer import PIPE
from ..data.settings import DataSettings
from ..errors import DataError


@dataclass(frozen=True)
class TrainingSplit:
    """What is known about the training split."""

    label_names: tuple[str, ...] | None = None
    labels: Labels | None = None  # (N,)
    label_set: str = ""
    missing: str = ""  # why names and labels are not available


def find_training_split(
    fingerprint: Mapping[str, Any], data: DataSettings, folder: Path | None = None, label_set: str | None = None
) -> TrainingSplit:
    """Read the split in `folder`, or else the one named by the run's config.

    A bad `folder` is a DataError; a split that the config names may be missing. Labels that differ from those used in
    training are accepted only if the user names the label set.
    """
    if folder is not None:
        return _read(folder, fingerprint, label_set or data.labels, check=label_set is None)
    if data.location.startswith(PIPE) or "://" in data.location:
        return TrainingSplit(missing="the data is not on this machine")
    try:
        return _read(Path(data.location), fingerprint, label_set or data.labels, check=label_set is None)
    except DataError as error:
        if label_set is not None:  # the user asked for it
            raise
        return TrainingSplit(missing=str(error))


def _read(folder: Path, fingerprint: Mapping[str, Any], label_set: str, *, check: bool) -> TrainingSplit:
    manifest = read_manifest(folder)
    _compare(folder, manifest, fingerprint)
    labels = read_labels(folder, manifest, label_set).labels
    digest = hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()
    if check and digest != fingerprint.get("labels", digest):
        raise DataError(
            f"{folder}: the label set {label_set!r} has changed since training; --labels {label_set} uses it as it is "
            "now"
        )
    return TrainingSplit(manifest.classes, labels, label_set)


def _compare(folder: Path, manifest: Manifest, fingerprint: Mapping[str, Any]) -> None:
    found = {"samples": manifest.samples, "classes": len(manifest.classes), "shards": manifest.digest}
    for key, value in found.items():
        if fingerprint.get(key, value) != value:
            raise DataError(
                f"{folder}: is not the split that the checkpoint was trained on: it has {key} = {value}, "
                f"the checkpoint has {fingerprint[key]}; name the right split with --data"
            )

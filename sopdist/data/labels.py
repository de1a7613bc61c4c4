"""Label sets: `labels/NAME.npy`, N integers in index order, and `labels/NAME.json`, a description with their origin.

Images are written once; label sets are overlays on them. `given` holds the labels that came with the data set, `clean`
the clean labels where they are known (-1 elsewhere). Others are synthetic noise, human relabellings, or labels proposed
by a run.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import write_atomic_group
from .manifest import Manifest

FORMAT = 1
GIVEN = "given"
CLEAN = "clean"
UNKNOWN = -1
FOLDER = "labels"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

Labels = NDArray[np.int32]


@dataclass(frozen=True)
class LabelSet:
    """One labelling of all samples."""

    name: str
    labels: Labels  # (N,) in [0, K), or UNKNOWN
    recipe: dict[str, Any]  # how the labels were made
    sha256: str  # of the .npy file


def write_labels(folder: Path, manifest: Manifest, name: str, labels: NDArray[Any], recipe: dict[str, Any]) -> LabelSet:
    """Check `labels` and write them as label set `name` of the split in `folder`, replacing an existing one."""
    check_name(name)
    labels = check_labels(labels, manifest, f"label set {name!r}")
    buffer = io.BytesIO()
    np.save(buffer, labels, allow_pickle=False)
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    about = {
        "format": FORMAT,
        "name": name,
        "samples": len(labels),
        "classes": len(manifest.classes),
        "unknown": int((labels == UNKNOWN).sum()),
        "sha256": sha256,
        "recipe": recipe,
    }
    (folder / FOLDER).mkdir(exist_ok=True)
    array_path, about_path = _paths(folder, name)
    # An interrupt leaves the old set, the new one, or an array without a description, which is refused when read. It
    # never leaves an array with the description of another one.
    write_atomic_group([(array_path, buffer.getvalue()), (about_path, (json.dumps(about, indent=1) + "\n").encode())])
    return LabelSet(name, labels, recipe, sha256)


def read_labels(folder: Path, manifest: Manifest, name: str) -> LabelSet:
    """Read label set `name` of the split in `folder`, and check it against the manifest and its own checksum."""
    check_name(name)
    array_path, about_path = _paths(folder, name)
    if not array_path.exists() and not about_path.exists():
        known = ", ".join(list_labels(folder)) or "none"
        raise DataError(f"{folder}: no label set {name!r}; available: {known}")
    try:
        about, content = json.loads(about_path.read_bytes()), array_path.read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{about_path}: label set {name!r} is incomplete or damaged ({error}); write it again"
        ) from None
    return parse_labels(about, content, manifest, name, str(array_path))


def parse_labels(about: Any, content: bytes, manifest: Manifest, name: str, where: str) -> LabelSet:
    """Check a label set's two files; `where` names them in errors."""
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise DataError(f"{where}: label set format {found!r}, this version reads format {FORMAT}; write it again")
    sha256 = hashlib.sha256(content).hexdigest()
    if about.get("sha256") != sha256:
        raise DataError(f"{where}: does not match the checksum in its .json; write the label set again")
    labels = read_array(content, where)
    recipe = about.get("recipe")
    labels = check_labels(labels, manifest, where)
    return LabelSet(name, labels, recipe if isinstance(recipe, dict) else {}, sha256)


def read_array(content: bytes, where: str) -> NDArray[Any]:
    """Parse a .npy file. The size in its header is checked before memory is allocated."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = read_header[version](file)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
            raise ValueError(f"{dtype} of shape {shape} in {len(content)} bytes")
        return np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # NumPy's header parser raises nearly anything
        raise DataError(f"{where}: not a NumPy array of numbers ({error})") from None


def list_labels(folder: Path) -> list[str]:
    """Names of the label sets of the split in `folder`."""
    return sorted(path.stem for path in (folder / FOLDER).glob("*.npy"))


def check_name(name: str) -> None:
    """Check the name of a label set, which becomes a file name."""
    if not _NAME.fullmatch(name):
        raise DataError(f"label set name {name!r}: use letters, digits and . _ + - (at most 100, no path)")


def check_labels(labels: NDArray[Any], manifest: Manifest, where: str) -> Labels:
    """Check for one integer per sample, each a class index or UNKNOWN; returns them as int32."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{where}: {labels.dtype} of shape {labels.shape}, expected {manifest.samples} integers")
    if len(labels) != manifest.samples:
        raise DataError(f"{where}: {len(labels)} labels for {manifest.samples} samples")
    classes = len(manifest.classes)
    # Compare before any conversion: unsigned numbers beyond int64 could wrap.
    wrong = np.flatnonzero((labels < UNKNOWN) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: label {labels[wrong[0]]} at index {wrong[0]} ({len(wrong)} such labels); "
            f"must be from 0 to {classes - 1}, or {UNKNOWN} for unknown"
        )
    return labels.astype(np.int32)


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / FOLDER / f"{name}.npy", folder / FOLDER / f"{name}.json"

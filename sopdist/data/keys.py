"""Sample keys: the path of an image in the source, made safe as the name of a tar member.

WebDataset and DALI split a member's name at the first dot of its last component, index lines separate fields by spaces,
and tools that unpack a tar trust its names. So every byte outside `A-Z a-z 0-9 _ - ~ /` is written as %XX, as in a URL.
This is unambiguous, readable for ordinary names, and works for names that are not UTF-8.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from urllib.parse import quote

from ..errors import DataError

_MAX_LENGTH = 1000


def key_of(path: str, keep_extension: bool = False) -> str:
    """`images/a.b/c d.jpg` -> `images/a%2Eb/c%20d`; refuses absolute paths and `..`."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise DataError(f"{path!r}: not a plain relative path, so it cannot be a key (no leading /, no //, no ..)")
    stem = path if keep_extension else posixpath.splitext(path)[0]
    key = quote(os.fsencode(stem), safe="/").replace(".", "%2E")
    if len(key) > _MAX_LENGTH:
        raise DataError(f"{path[:80]!r}...: {len(key)} characters, too long for a key (at most {_MAX_LENGTH})")
    return key


def keys_of(paths: Sequence[str]) -> list[str]:
    """One key per path. If both `a.jpg` and `a.png` exist, they keep their extensions. A duplicate path is an error."""
    keys = [key_of(path) for path in paths]
    samples_of: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        samples_of.setdefault(key, []).append(i)
    for samples in samples_of.values():
        if len(samples) > 1:
            for i in samples:
                keys[i] = key_of(paths[i], keep_extension=True)
            _refuse_duplicates(paths, samples)
    if len(set(keys)) != len(keys):  # `a.jpg`, `a.png`, and a file whose name looks like `a%2Ejpg`
        raise DataError("two different paths give the same key; rename one of the files that have % in their names")
    return keys


def _refuse_duplicates(paths: Sequence[str], samples: list[int]) -> None:
    seen: dict[str, int] = {}
    for i in samples:
        first = seen.setdefault(paths[i], i)
        if first != i:
            raise DataError(f"{paths[i]!r}: duplicate key, samples {first} and {i} of the source have this path")

"""A sample's key: its path in the source, made safe as the name of a tar member.

WebDataset and DALI cut a member's name at the first dot of its last part, an index line separates its fields by blanks,
and whoever unpacks a tar trusts its names. So every byte outside of `A-Z a-z 0-9 _ - ~ /` is written as %XX, as in a
URL. That is unambiguous, readable for ordinary names, and holds for names that are not UTF-8.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from urllib.parse import quote

from .errors import DataError

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
    """A key for each path. `a.jpg` and `a.png` side by side keep their extensions; the same path twice is an error."""
    keys = [key_of(path) for path in paths]
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    for shared in places.values():
        if len(shared) > 1:
            for place in shared:
                keys[place] = key_of(paths[place], keep_extension=True)
            _refuse_equal(paths, shared)
    if len(set(keys)) != len(keys):  # `a.jpg`, `a.png` and a file that is itself called `a%2Ejpg`-like
        raise DataError("two different paths lead to the same key; rename one of the files that have % in their names")
    return keys


def _refuse_equal(paths: Sequence[str], places: list[int]) -> None:
    seen: dict[str, int] = {}
    for place in places:
        other = seen.setdefault(paths[place], place)
        if other != place:
            raise DataError(
                f"{paths[place]!r}: duplicate key, samples {other} and {place} of the source have this path"
            )

"""From what a user writes as the address of a split to the store that serves it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..store import LocalStore, Store
from .cache import Cache
from .store import RemoteStore
from .transfer import PIPE

MOST_BY_DEFAULT = 100 << 30


def open_store(root: str | Path, cache: Path | None = None, limit_bytes: int | None = None) -> Store:
    """The store of a split: a local folder, or a URL or `pipe:COMMAND` behind a cache.

    The cache is `~/.cache/sopdist` (or in $XDG_CACHE_HOME) unless told otherwise. Its limit is 100 GiB unless told
    otherwise, but not more than half of what the disk has left.
    """
    if not isinstance(root, str) or not (root.startswith(PIPE) or "://" in root):
        return LocalStore(Path(root))
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sopdist"
    return RemoteStore(root, cache, limit_bytes or _default_limit(cache))


def _default_limit(cache: Path) -> int:
    there = Cache(cache, MOST_BY_DEFAULT)
    with there.changing():  # what is cached already does not count as taken, or the limit would shrink run by run
        cached = sum(entry.bytes for entry in there.survey().values())
    return min(MOST_BY_DEFAULT, (shutil.disk_usage(cache).free + cached) // 2)

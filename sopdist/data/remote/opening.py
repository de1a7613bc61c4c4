"""Opens the store of a split, given its path or URL."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..store import LocalStore, Store
from .cache import Cache
from .store import RemoteStore
from .transfer import PIPE

DEFAULT_LIMIT = 100 << 30


def open_store(root: str | Path, cache: Path | None = None, limit_bytes: int | None = None) -> Store:
    """Open the store of a split: a local folder, or a URL or `pipe:COMMAND` with a cache.

    The default cache folder is `~/.cache/sopdist` (or `$XDG_CACHE_HOME/sopdist`). The default limit is 100 GiB, but at
    most half of the free disk space.
    """
    if not isinstance(root, str) or not (root.startswith(PIPE) or "://" in root):
        return LocalStore(Path(root))
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sopdist"
    return RemoteStore(root, cache, limit_bytes or _default_limit(cache))


def _default_limit(cache: Path) -> int:
    existing = Cache(cache, DEFAULT_LIMIT)
    with existing.locked():  # count cached files as free space, or the limit would shrink from run to run
        cached = sum(entry.bytes for entry in existing.scan().values())
    return min(DEFAULT_LIMIT, (shutil.disk_usage(cache).free + cached) // 2)

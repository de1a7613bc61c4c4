"""The `data` section of a config: which split, how it is read, and how it is shown."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from .augment.recipes import Recipe
from .errors import DataError
from .headers import MAX_PIXELS
from .labels import GIVEN
from .plan import BLOCK, LANES
from .remote.transfer import PIPE

Backend = Literal["auto", "cpu", "dali"]


@dataclass(frozen=True)
class DataSettings:
    """Everything about reading a split that a user may choose. Names in errors are `data.NAME`."""

    root: str  # the split's folder, or a URL: https://, s3:// and whatever fsspec knows, or pipe:COMMAND with {} in it
    recipe: str | Recipe  # crop, flip and normalisation: a name of augment/recipes.py, or one of your own
    split: str = ""  # folder inside of root, where root holds several splits, as `sopdist prepare` writes them
    labels: str = GIVEN  # label set
    backend: Backend = "auto"  # decoder; auto: dali if there is a GPU, else cpu, which is faster on CPUs
    device: int | None = None  # number of the GPU that decodes (dali only); none: decode on the CPU
    threads: int = 0  # that read and decode; 0: as many as this process may use cores
    prefetch: int = 3  # batches decoded ahead
    lanes: int = LANES  # of the plan: from how many places at once an epoch is read
    block: int = BLOCK  # of the plan: among how many shards a lane shuffles
    balanced_per_epoch: int = 0  # draw so many samples an epoch, evenly over the classes; 0: all samples
    max_bad_fraction: float = 0.01  # of an epoch's samples that may be unreadable before the run stops
    max_pixels: int = MAX_PIXELS  # an image with more is not decoded
    cache: str = ""  # folder for shards of a remote split; empty: the user's cache folder
    cache_bytes: int = 0  # how much it may hold; 0: 100 GiB, but no more than half of the free disk

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise DataError(f"data.backend = {self.backend!r}: allowed is {', '.join(get_args(Backend))}")
        for name, least in (("threads", 0), ("prefetch", 1), ("lanes", 1), ("block", 1), ("balanced_per_epoch", 0)):
            if getattr(self, name) < least:
                raise DataError(f"data.{name} = {getattr(self, name)}: must be at least {least}")
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise DataError(f"data.max_bad_fraction = {self.max_bad_fraction}: must be in [0, 1]")

    @property
    def location(self) -> str:
        """Where the split is: the root, and in it the folder of the split."""
        if not self.split:
            return self.root
        if self.root.startswith(PIPE):
            return self.root.replace("{}", f"{self.split}/{{}}")
        return f"{self.root.rstrip('/')}/{self.split}"

    def usable_threads(self) -> int:
        """`threads`, or the number of cores that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))

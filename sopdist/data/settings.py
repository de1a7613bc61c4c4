"""The `data` section of a config: which split to read, how to read it, and how to augment it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..cores import usable_cores
from ..errors import DataError
from .augment.recipes import Recipe
from .headers import MAX_PIXELS
from .labels import GIVEN
from .plan import BLOCK, LANES
from .remote.transfer import PIPE

Backend = Literal["auto", "cpu", "dali"]


@dataclass(frozen=True)
class DataSettings:
    """The training data and how it is read. Error messages refer to a field as `data.NAME`."""

    root: str  # folder of the split, or a URL (https://, s3:// or any fsspec scheme), or pipe:COMMAND with {} in it
    recipe: str | Recipe  # crop, flip and normalisation: a name from augment/recipes.py, or a recipe of your own
    split: str = ""  # subfolder of root, if root holds several splits, as written by `sopdist prepare`
    labels: str = GIVEN  # label set
    backend: Backend = "auto"  # decoder; auto: dali if there is a GPU, otherwise cpu, which is faster on CPUs
    device: int | None = None  # index of the GPU that decodes (dali only); null: decode on the CPU
    threads: int = 0  # threads that read and decode; 0: one per core available to this process
    prefetch: int = 3  # batches decoded ahead
    lanes: int = LANES  # lanes of the plan: streams of shards that are read in parallel
    block: int = BLOCK  # block of the plan: shards of a lane that are shuffled together
    balanced_per_epoch: int = 0  # samples drawn per epoch, balanced over the classes; 0: all samples, unbalanced
    max_bad_fraction: float = 0.01  # fraction of an epoch's samples that may be unreadable before the run stops
    max_pixels: int = MAX_PIXELS  # images with more pixels are not decoded
    cache: str = ""  # cache folder for shards of a remote split; empty: the user's cache folder
    cache_bytes: int = 0  # size limit of the cache; 0: 100 GiB, but at most half of the free disk space

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise DataError(f"data.backend = {self.backend!r}: must be one of {', '.join(get_args(Backend))}")
        for name, minimum in (("threads", 0), ("prefetch", 1), ("lanes", 1), ("block", 1), ("balanced_per_epoch", 0)):
            if getattr(self, name) < minimum:
                raise DataError(f"data.{name} = {getattr(self, name)}: must be at least {minimum}")
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise DataError(f"data.max_bad_fraction = {self.max_bad_fraction}: must be in [0, 1]")

    @property
    def location(self) -> str:
        """The path or URL of the split: `root`, plus the subfolder `split` if it is set."""
        if not self.split:
            return self.root
        if self.root.startswith(PIPE):
            return self.root.replace("{}", f"{self.split}/{{}}")
        return f"{self.root.rstrip('/')}/{self.split}"

    def usable_threads(self) -> int:
        """`threads`, or the number of cores available to this process."""
        return self.threads or usable_cores()

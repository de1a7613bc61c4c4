"""How tests break a run: the command line of a small one, waiting for the right moment, damaged shards."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.launchers import Started

RUN = "broken"


def arguments(digits: Path, folder: Path, *more: str, kind: str = "ddp") -> list[str]:
    """The config `demo`, in few threads and without W&B; its run is `folder / RUN`."""
    return [
        "--cfg", "demo", f"data.root={digits}", f"run.folder={folder}", f"run.name={RUN}", f"engine.kind={kind}",
        "engine.threads=1", "data.threads=1", "log.wandb=off", *more,
    ]  # fmt: skip


def wait_for(what: Callable[[], bool], started: Started, timeout: float = 120.0) -> None:
    """Until it is so; AssertionError, with what was printed, if the run ends before or time is up."""
    until = time.monotonic() + timeout
    while not what():
        if time.monotonic() > until or started.ended():
            raise AssertionError(f"did not come\n{started.wait(0.1).told}")
        time.sleep(0.01)


def has_lines(folder: Path, kind: str, count: int = 3) -> bool:
    """Whether a run has written down so many lines of a kind."""
    path = folder / RUN / "metrics.jsonl"
    return path.exists() and path.read_text().count(f'"kind": "{kind}"') >= count


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RUN / "summary.json").read_text())
    return found


def damage_image(split: Path, index: int) -> str:
    """Overwrite the image of a sample of the first shard, all else stays as it is; the sample's key."""
    shard = split / "shard-000000.tar"
    with tarfile.open(shard) as tar:
        images = [member for member in tar if not member.name.endswith(".json")]
    with shard.open("r+b") as file:
        file.seek(images[index].offset_data)
        file.write(b"\0" * images[index].size)
    return images[index].name.rpartition(".")[0]

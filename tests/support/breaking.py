"""Break a run: the command line of a small run, waiting for the right moment, damaged shards."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.launchers import Started

RUN = "broken"


def arguments(digits: Path, folder: Path, *more: str, kind: str = "ddp") -> list[str]:
    """The config `demo` with few threads and without W&B; the run folder is `folder / RUN`."""
    return [
        "--cfg", "demo", f"data.root={digits}", f"run.folder={folder}", f"run.name={RUN}", f"engine.kind={kind}",
        "engine.threads=1", "data.threads=1", "log.wandb=off", *more,
    ]  # fmt: skip


def wait_for(condition: Callable[[], bool], started: Started, timeout: float = 120.0) -> None:
    """Wait until the condition holds; raise AssertionError with the output if the run ends first or time is up."""
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > until or started.ended():
            raise AssertionError(f"the condition did not become true\n{started.wait(0.1).output}")
        time.sleep(0.01)


def has_lines(folder: Path, kind: str, count: int = 3) -> bool:
    """Whether a run has logged this many lines of a kind."""
    path = folder / RUN / "metrics.jsonl"
    return path.exists() and path.read_text().count(f'"kind": "{kind}"') >= count


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RUN / "summary.json").read_text())
    return found


def damage_image(split: Path, index: int) -> str:
    """Overwrite the image of a sample of the first shard in place, and return the sample's key."""
    shard = split / "shard-000000.tar"
    with tarfile.open(shard) as tar:
        images = [member for member in tar if not member.name.endswith(".json")]
    with shard.open("r+b") as file:
        file.seek(images[index].offset_data)
        file.write(b"\0" * images[index].size)
    return images[index].name.rpartition(".")[0]

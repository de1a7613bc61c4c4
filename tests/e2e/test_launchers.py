"""Every launcher starts the same training, and the run folder is complete."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from safetensors.torch import load_file

from sopdist.checkpoint import verify_checkpoint
from sopdist.cli import main
from sopdist.config import key_of, load_config
from sopdist.errors import ConfigError
from sopdist.methods import settings_of_methods
from sopdist.train import config as configs
from sopdist.train.config import CONFIGS, Config, find_config
from tests.support.launchers import ONE_PROCESS, run
from tests.support.plain_loop import STEPS, overrides, train_plain_loop
from tests.support.records import lines_of, losses_of, newest_checkpoint, table_in

FILES = {
    ".lock",
    "config.yaml", "metrics.jsonl", "summary.json", "summary.csv", "suspects.csv", "checkpoints",
    "network-best.safetensors", "network-last.safetensors",
}  # fmt: skip
SECONDS = 180  # starting is slow on a busy machine


@pytest.fixture(scope="module")
def losses(digits: Path) -> list[float]:
    """The losses of the plain loop."""
    return train_plain_loop(digits).losses


def check(launcher: str, ranks: int, engine: str, digits: Path, folder: Path, losses: list[float]) -> None:
    """Train, and check every file of the run folder."""
    keys = [*overrides(digits), "run.name=run", "evaluate.every=1", "evaluate.best=test", "checkpoint.every=1"]
    keys += ["engine.kind=deepspeed"] if engine.startswith("deepspeed") else []
    ended = run(launcher, ["--cfg", "demo", *keys], folder, ranks, SECONDS)
    assert ended.code == 0, ended.output
    made = folder / "runs" / "run"
    assert {path.name for path in made.iterdir()} == FILES
    assert losses_of(made) == pytest.approx(losses, rel=1e-5)

    assert load_config(Config, made / "config.yaml") == configs.load("demo", keys)
    summary = json.loads((made / "summary.json").read_text())
    assert (summary["finished"], summary["exit"], summary["steps"]) == (True, "finished", STEPS)
    assert (summary["ranks"], summary["engine"]) == (ranks, engine)
    evals = lines_of(made, "eval")
    with (made / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [line["step"] for line in evals] == [int(row["step"]) for row in rows] == [24, 48, STEPS]
    assert [line["test/top1"] for line in evals] == [float(row["test/top1"]) for row in rows]
    assert all(line["test/samples"] == 359 for line in evals)
    assert f"{Path('runs/run')} is finished" in ended.out

    checkpoint = newest_checkpoint(made)
    assert checkpoint.name == f"step-{STEPS:08d}"
    fragments = {f"rank-{rank}-of-{ranks}.safetensors" for rank in range(ranks)}
    assert {path.name for path in checkpoint.iterdir()} == fragments | {"checkpoint.json", "complete"}
    assert len(table_in(checkpoint)["u"]) == 1438
    last, saved = load_file(made / "network-last.safetensors"), verify_checkpoint(checkpoint).network()
    assert last.keys() == saved.keys()
    assert all((last[name] == saved[name]).all() for name in last)


def test_srun_starts_two_ranks(digits: Path, tmp_path: Path, losses: list[float]) -> None:
    check("srun", 2, "ddp", digits, tmp_path, losses)


def test_sopdist_train_is_one_process(digits: Path, tmp_path: Path, losses: list[float]) -> None:
    check("sopdist", 1, "single", digits, tmp_path, losses)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks", "engine"),
    [
        ("deepspeed", 2, "deepspeed, ZeRO 0"),
        ("torchrun", 2, "ddp"),
        ("torchrun", 1, "single"),
        ("accelerate", 2, "ddp"),
        ("accelerate", 2, "deepspeed, ZeRO 0"),
        ("srun", 2, "deepspeed, ZeRO 0"),
        (ONE_PROCESS[0], 1, "single"),
    ],
)
def test_every_launcher_starts_the_same_training(
    digits: Path, tmp_path: Path, losses: list[float], launcher: str, ranks: int, engine: str
) -> None:
    check(launcher, ranks, engine, digits, tmp_path, losses)


def keys_of(kind: Any, where: str = "") -> Iterator[str]:
    """Every key of a config and its sections, with those of every method."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = f"{where}{key_of(field)}"
        if name == "method":
            yield "method.name"
            for settings in settings_of_methods().values():
                yield from (key for key in keys_of(settings, "method.") if key != "method.name")
            continue
        yield from keys_of(hints[field.name], f"{name}.") if dataclasses.is_dataclass(hints[field.name]) else [name]


def test_help_config_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.partition(":")[0] for line in lines if line and line[0] not in "# "]
    assert listed == list(keys_of(Config))
    assert len(listed) > 50


def test_configs_are_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("demo") == find_config("demo.yaml") == CONFIGS / "demo.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("")
    assert find_config("demo") == Path("configs/demo.yaml")  # the user's own config comes first
    (tmp_path / "mine.yml").write_text("")
    assert find_config("mine.yml") == Path("mine.yml")
    with pytest.raises(ConfigError, match=r"--cfg dmeo: no such file, and no such name in configs/, which has .*demo"):
        find_config("dmeo")

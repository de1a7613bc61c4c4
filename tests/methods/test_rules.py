"""The rules for every method: exact resume, and the same training on any number of ranks and with every engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sopdist.checkpoint import complete_checkpoints, open_checkpoint
from sopdist.methods import METHODS
from sopdist.train.record.metrics_file import read_lines
from sopdist.train.run import run_config
from tests.support.every_method import CONFIG, EVERY_METHOD, REFUSED, SAMPLES
from tests.support.grey_images import write_images
from tests.support.launching import launch
from tests.support.pair_method import PairMethod

STEPS = 7  # per epoch
EVERY = pytest.mark.parametrize("method", EVERY_METHOD)


def write_workspace(folder: Path) -> None:
    write_images(folder / "shards" / "train", SAMPLES)
    write_images(folder / "shards" / "val", 30)
    (folder / "every.yaml").write_text(CONFIG)
    (folder / "runs").mkdir()


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]


def evaluations(run: Path) -> list[float]:
    return [line["val/top1"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]


def assert_same_end(one: Path, other: Path) -> None:
    a, b = (open_checkpoint(complete_checkpoints(run)[-1]) for run in (one, other))
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.read(name).nan_to_num(7.0), b.read(name).nan_to_num(7.0)), name


@EVERY
@pytest.mark.parametrize("stop", [10, 2 * STEPS], ids=["in the middle of an epoch", "between epochs"])
def test_every_method_resumes_exactly(method: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(METHODS, "pair", PairMethod)
    overrides = [*EVERY_METHOD[method], "train.epochs=3"]
    assert run_config("every.yaml", ["run.name=whole", *overrides]) == 0
    assert run_config("every.yaml", ["run.name=cut", *overrides, f"train.max_steps={stop}"]) == 0
    assert run_config("every.yaml", ["run.name=cut", *overrides], resume="auto") == 0
    assert losses(tmp_path / "runs" / "cut") == losses(tmp_path / "runs" / "whole")
    assert_same_end(tmp_path / "runs" / "whole", tmp_path / "runs" / "cut")


# -- ranks and engines -------------------------------------------------------------------------------------------------

Trained = Callable[[str, str], Path]  # the run of a method, by the name of the launch
ENGINES = {
    "on-2": ("torchrun", 2, ()),
    "on-3": ("torchrun", 3, ()),
    "zero-0": ("deepspeed", 2, ("engine.kind=deepspeed", "engine.zero=0")),
    "zero-1": ("deepspeed", 2, ("engine.kind=deepspeed", "engine.zero=1")),
    "zero-2": ("deepspeed", 2, ("engine.kind=deepspeed", "engine.zero=2")),
    "zero-3": ("deepspeed", 2, ("engine.kind=deepspeed", "engine.zero=3")),
}
REFUSE_ZERO_3 = {"elr_plus", "averaged-weights"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains all methods once per launch, when it is first asked for."""
    folder = tmp_path_factory.mktemp("every")
    write_workspace(folder)
    done: set[str] = set()

    def start(name: str, launcher: str, ranks: int, *words: str) -> None:
        where = [str(folder / "every.yaml"), str(folder / "runs"), name, f"data.root={folder / 'shards'}", *words]
        ended = launch(launcher, "tests.support.every_method", where, ranks, timeout=600)
        assert ended.returncode == 0, ended.stderr[-3000:]

    def run_of(method: str, name: str) -> Path:
        if name not in done:
            if name == "on-1":
                start(name, "python", 1)
            elif name == "resumed":
                start(name, "torchrun", 3, "train.max_steps=10")
                start(name, "torchrun", 2, "--resume")
            else:
                launcher, ranks, words = ENGINES[name]
                start(name, launcher, ranks, *words)
            done.add(name)
        return folder / "runs" / f"{method}-{name}"

    return run_of


@pytest.mark.long
@EVERY
@pytest.mark.parametrize("name", [*ENGINES, "resumed"])
def test_every_method_trains_in_the_same_way_with_any_ranks_and_engine(
    name: str, method: str, trained: Trained
) -> None:
    """The losses of every step and the rows of all tables are those of one rank, also after a resume on other ranks."""
    run = trained(method, name)
    if name == "zero-3" and method in REFUSE_ZERO_3:
        assert "cannot be combined with engine.zero = 3" in json.loads((run.parent / REFUSED).read_text())[method]
        return
    one = trained(method, "on-1")
    assert len(losses(one)) > 2 * STEPS
    torch.testing.assert_close(losses(run), losses(one), rtol=1e-5, atol=1e-5)
    assert evaluations(run)[-1] == pytest.approx(evaluations(one)[-1], abs=1 / 30 + 1e-9), "one of 30 may flip"
    expected, found = (open_checkpoint(complete_checkpoints(each)[-1]) for each in (one, run))
    assert found.table_names == expected.table_names
    for table in found.table_names:
        rows, wanted = found.table(table), expected.table(table)
        for column in wanted.keys() - {"meta"}:
            if column in ("visits", "predicted"):
                assert torch.equal(rows[column], wanted[column]), column
            else:
                torch.testing.assert_close(
                    rows[column], wanted[column], rtol=1e-3, atol=1e-3, equal_nan=True, msg=f"{table}: {column}"
                )

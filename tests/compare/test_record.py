"""A folder holds one comparison: it may grow, but not become another one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sopdist.data.labels import write_labels
from sopdist.data.manifest import read_manifest
from tests.compare.conftest import CONFIG, SAMPLES, compare

START = ("--methods", "ce,gce:q=0.5", "--seeds", "2", "--noise", "wrong")


@pytest.fixture
def started(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert compare(*START, "--list") == 0
    capsys.readouterr()
    return workspace


@pytest.mark.parametrize(
    "arguments",
    [
        START,
        ("--methods", "gce:q=0.5,sop,ce", "--seeds", "0,1,9", "--noise", "given,wrong"),
        (*START, "data.threads=2", "log.every=7", "checkpoint.keep=9"),
    ],
)
@pytest.mark.usefixtures("started")
def test_the_same_or_more_may_be_compared(arguments: tuple[str, ...]) -> None:
    assert compare(*arguments, "--list") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "ce", "--seeds", "2", "--noise", "wrong"), "methods removed: gce-q-0.5"),
        (("--methods", "ce,gce:q=0.5", "--seeds", "1", "--noise", "wrong"), "seeds removed: 1"),
        (("--methods", "ce,gce:q=0.5", "--seeds", "2", "--noise", "given"), "label sets removed: wrong"),
        ((*START, "train.epochs=3"), "train.epochs = 3, was 2\n"),
        ((*START, "--test", "val"), "the test split was test, is val"),
    ],
)
def test_another_comparison_is_refused(
    arguments: tuple[str, ...], message: str, started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (started / "out" / "compare.json").read_bytes()
    for mode in ("--list", "--dry-run", "--table"):
        assert compare(*arguments, mode) == 2
        error = capsys.readouterr().err
        assert "out holds another comparison" in error
        assert message in error
    assert (started / "out" / "compare.json").read_bytes() == before


def test_labels_and_configs_that_were_changed_are_noticed(started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (started / "tiny.yaml").write_text(CONFIG.replace("lr: 0.05", "lr: 0.06"))
    assert compare(*START, "--list") == 2
    assert "optim.lr = 0.06, was 0.05\n" in capsys.readouterr().err
    (started / "tiny.yaml").write_text(CONFIG)
    split = started / "shards" / "train"
    write_labels(split, read_manifest(split), "wrong", np.zeros(SAMPLES, int), {})
    assert compare(*START, "--list") == 2
    assert "label set wrong has changed" in capsys.readouterr().err


def test_a_file_that_is_no_record_is_refused(started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (("{", "not the record of a comparison"), (json.dumps({"format": 9}), "format 9, this")):
        (started / "out" / "compare.json").write_text(content)
        assert compare(*START, "--list") == 1
        assert message in capsys.readouterr().err


def test_a_task_that_was_submitted_before_an_addition_still_finds_its_run(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--methods", "ce,sop,gce:q=0.5", "--seeds", "3", "--noise", "wrong", "--list") == 0
    record = (started / "out" / "compare.json").read_bytes()
    capsys.readouterr()
    assert compare(*START, "--task", "1", "--dry-run") == 0
    assert "run.name=gce-q-0.5-wrong-seed0" in capsys.readouterr().out
    assert compare(*START, "train.epochs=3", "--task", "1", "--dry-run") == 2
    assert (started / "out" / "compare.json").read_bytes() == record

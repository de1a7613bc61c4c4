"""The numbers of the table, compared with figures computed from the files of the runs by other means."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sopdist.checkpoint.tensor_file import read_tensors
from sopdist.compare import running
from sopdist.data import DataSettings, Stream
from sopdist.models.small_conv import make
from tests.compare.conftest import compare, train_here, write_workspace
from tests.support.grey_images import CLASSES
from tests.support.label_sets import labels

METHODS = ("gce:q=0.5", "ce", "sl", "sop")  # cross-entropy is not the first
NAMES = {"gce:q=0.5": "gce-q-0.5"}  # of runs, where it is not the method
LABELS, SEEDS = ("wrong", "sym-0.4-seed0"), (0, 1, 2)
ARGUMENTS = ("--methods", ",".join(METHODS), "--noise", "wrong,sym-0.4")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished comparison of four methods, three seeds and two label sets; its folder."""
    folder = write_workspace(tmp_path_factory.mktemp("compared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(running, "train_process", train_here)
        assert compare(*ARGUMENTS) == 0
        yield folder / "out"


def lines_of(out: Path, method: str, noise: str, seed: int, kind: str) -> list[dict[str, Any]]:
    path = out / "runs" / f"{NAMES.get(method, method)}-{noise}-seed{seed}" / "metrics.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def rows_of(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    with (out / "table.csv").open() as file:
        return {(row["label_set"], row["method"]): row for row in csv.DictReader(file)}


def assert_mean(row: dict[str, Any], name: str, values: list[float]) -> None:
    """Against NumPy."""
    assert float(row[name]) == pytest.approx(np.mean(values), rel=1e-12)
    assert float(row[f"{name}_error"]) == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), rel=1e-9)


def test_accuracies_and_paired_differences_are_those_of_the_runs(compared: Path) -> None:
    rows = rows_of(compared)
    assert list(rows) == [(noise, method) for noise in LABELS for method in METHODS]
    for (noise, method), row in rows.items():
        curves = [[line["test/top1"] for line in lines_of(compared, method, noise, s, "eval")] for s in SEEDS]
        firsts = [lines_of(compared, METHODS[0], noise, seed, "eval")[-1]["test/top1"] for seed in SEEDS]
        assert_mean(row, "test", [curve[-1] for curve in curves])
        assert_mean(row, "best", [max(curve) for curve in curves])
        assert (row["seeds"], row["seeds_planned"]) == ("3", "3")
        if method == METHODS[0]:
            assert row["difference"] == row["difference_error"] == ""
        else:
            assert_mean(row, "difference", [curve[-1] - first for curve, first in zip(curves, firsts, strict=True)])
    assert len({row["test"] for row in rows.values()}) > 4, "the methods differ"


def test_time_is_that_of_the_training_lines_relative_to_cross_entropy(compared: Path) -> None:
    def median(method: str, noise: str) -> float:
        lines = [lines_of(compared, method, noise, seed, "train") for seed in SEEDS]
        return sorted(sum(x["samples"] / x["samples_per_second"] for x in of_run) for of_run in lines)[1]

    for (noise, method), row in rows_of(compared).items():
        assert float(row["seconds"]) == pytest.approx(median(method, noise))
        assert float(row["relative_time"]) == pytest.approx(median(method, noise) / median("ce", noise))


def test_memory_and_what_is_said_about_labels_come_from_methods_that_have_them(compared: Path) -> None:
    for (noise, method), row in rows_of(compared).items():
        if method == "sop":
            lines = [lines_of(compared, method, noise, seed, "noise")[-1] for seed in SEEDS]
            assert_mean(row, "auroc", [line["auroc"] for line in lines])
            assert_mean(row, "rate", [line["rate"] for line in lines])
            assert int(row["bytes_per_sample"]) == 4 * len(CLASSES) + 20  # a dense row, see docs/methods.md
        else:
            assert (row["auroc"], row["rate"], row["bytes_per_sample"]) == ("", "", "0")


def test_noisy_validation_labels_choose_the_winner(compared: Path) -> None:
    """The accuracy of the last network on the noisy labels of `val`."""
    split = compared.parent / "shards" / "val"
    rows = rows_of(compared)
    for noise in LABELS:
        noisy = torch.tensor(labels(split, noise))
        means = {}
        for method in METHODS:
            accuracies = []
            for seed in SEEDS:
                folder = compared / "runs" / f"{NAMES.get(method, method)}-{noise}-seed{seed}"
                network = make(1, 8, len(CLASSES))
                network.load_state_dict(read_tensors(folder / "network-last.safetensors"))
                network.eval()
                with Stream(DataSettings(str(split), "digits", backend="cpu"), 40, train=False) as stream:
                    (batch,) = stream.epoch()
                right = network(batch.images).argmax(1) == noisy[batch.index]
                accuracies.append(float(right.double().mean()))
            assert_mean(rows[noise, method], "validation", accuracies)
            means[method] = float(np.mean(accuracies))
        winners = {method for method in METHODS if rows[noise, method]["winner"] == "True"}
        assert winners == {method for method in METHODS if means[method] == max(means.values())}


def test_the_markdown_and_the_json_agree_with_the_csv(compared: Path) -> None:
    text = (compared / "table.md").read_text()
    found = json.loads((compared / "results.json").read_text())
    for (noise, method), row in rows_of(compared).items():
        shown = f"{100 * float(row['test']):.2f} ± {100 * float(row['test_error']):.2f}"
        part = text.split(f"label set {noise}")[1]
        line = next(line for line in part.splitlines() if line.startswith(f"| {method} "))
        assert shown in line
        (of_labels,) = (entry for entry in found["label_sets"] if entry["label_set"] == noise)
        (of_method,) = (entry for entry in of_labels["methods"] if entry["method"] == method)
        assert of_method["test"] == float(row["test"])
        for seed, run in zip(SEEDS, of_method["runs"], strict=True):
            assert run["test"] == [line["test/top1"] for line in lines_of(compared, method, noise, seed, "eval")]
    assert "not selectable" in text
    assert re.search(r"Winner by noisy validation: .*val, label set sym-0.4-seed0 \(\d+\.\d% wrong\)", text)
    assert "relative to ce" in text
    assert "NOT EQUAL" not in text
    for name in ("curves.png", "curves.svg"):
        assert (compared / name).stat().st_size > 5000


def test_a_second_start_trains_nothing_and_gives_the_same_table(
    compared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("trained again")

    monkeypatch.setattr(running, "train_process", refuse)
    before = {name: (compared / name).read_bytes() for name in ("table.csv", "table.md", "results.json", "curves.svg")}
    assert compare(*ARGUMENTS) == 0
    assert "24 runs of 24 are finished already" in capsys.readouterr().err
    assert {name: (compared / name).read_bytes() for name in before} == before


def test_array_tasks_and_table_give_the_same_table_as_the_full_command(
    workspace: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--methods", "ce,sop", "--seeds", "2")
    assert compare(*arguments) == 0
    (workspace / "out").rename(workspace / "full")
    trained.clear()
    capsys.readouterr()
    assert compare(*arguments, "--list") == 0
    count = int(capsys.readouterr().out)
    for number in reversed(range(count)):
        assert compare(*arguments, "--task", str(number)) == 0
        assert not (workspace / "out" / "table.csv").exists()
    assert len(trained) == len(set(trained)) == count == 4
    assert compare(*arguments, "--table") == 0
    timed = {"seconds", "relative_time"}
    tables = [
        {key: {name: value for name, value in row.items() if name not in timed} for key, row in rows_of(out).items()}
        for out in (workspace / "out", workspace / "full")
    ]
    assert tables[0] == tables[1]
    assert len(trained) == count, "collecting trains nothing"


def test_clean_validation_labels_choose_nothing(workspace: Path, trained: list[str]) -> None:
    for suffix in (".npy", ".json"):
        (workspace / "shards" / "val" / "labels" / f"wrong{suffix}").unlink()
    assert compare("--methods", "ce,gce", "--seeds", "1") == 0
    text = (workspace / "out" / "table.md").read_text()
    assert "No winner: the labels of val, label set given (0.0% wrong) are clean" in text
    assert "a single seed has no standard error" in text
    assert len(trained) == 2


@pytest.mark.usefixtures("trained")
def test_wrong_test_labels_are_mentioned(workspace: Path) -> None:
    assert compare("--methods", "ce,gce", "--seeds", "1", "evaluate.labels=wrong") == 0
    text = (workspace / "out" / "table.md").read_text()
    assert re.search(r"label set wrong, \d+\.\d% of them WRONG: accuracies are too low", text)


@pytest.mark.usefixtures("compared")
def test_without_matplotlib_there_is_a_table_but_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "sopdist.theory.figures", raising=False)
    assert compare(*ARGUMENTS, "--table") == 0
    printed = capsys.readouterr()
    assert "24 of 24 runs finished" in printed.out
    assert "no figure: curves need matplotlib: pip install 'sopdist[theory]'" in printed.err

"""A checkpoint goes on only in the run that it is of. What may be changed must be named, and then really goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sopdist.checkpoint import open_checkpoint
from sopdist.config import ConfigError
from sopdist.data.errors import DataError
from sopdist.data.labels import write_labels
from sopdist.data.manifest import read_manifest
from sopdist.train.fingerprint import ALLOWED, EPOCH, check_allowed, compare
from sopdist.train.running import run_config
from tests.e2e.records import lines_of, newest_checkpoint
from tests.train.grey_images import write_images

STEPS = 4  # an epoch
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
objective: {visits: 1.5}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 2, batch: 9}
engine: {threads: 1}
log: {every: 1, wandb: 'off'}
"""
PLAIN = ("objective.name=ce", "objective.visits=null")
ADAM = ("optim.name=adamw", "optim.lr=0.001")
PAPER = ("objective.variant=paper", "objective.visits=null")

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a config, and two runs of an epoch: `sop`, with a noise table, and `ce`, without."""
    folder = tmp_path_factory.mktemp("runs")
    write_images(folder / "shards" / "train", 30)
    (folder / "small.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_config("small.yaml", ["run.name=sop", f"train.max_steps={STEPS}"]) == 0
        assert run_config("small.yaml", ["run.name=ce", f"train.max_steps={STEPS}", *PLAIN]) == 0
    return folder


@pytest.fixture
def go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Go on from the checkpoint of a run in a new one; the new run's folder."""

    def start(run: str, name: str, *overrides: str, allow: tuple[str, ...] = (), code: int = 0) -> Path:
        monkeypatch.chdir(place)
        begun = str(newest_checkpoint(place / "runs" / run))
        found = run_config("small.yaml", [f"run.name={name}", *overrides], resume=begun, allow_change=allow)
        assert found == code
        return place / "runs" / name

    return start


def saved_fingerprint(place: Path) -> dict[str, Any]:
    return open_checkpoint(newest_checkpoint(place / "runs" / "sop")).fingerprint


def test_it_tells_apart_what_must_be_the_same(place: Path) -> None:
    assert saved_fingerprint(place).keys() == {
        "samples", "classes", "shards", "labels", "plan version", EPOCH, "run.seed", "train.batch", "model.name",
        "objective.name", "objective.variant", "objective.layout", "optim.name",
        "data.balanced_per_epoch", "data.lanes", "data.block",
    }  # fmt: skip


def shown(saved: dict[str, Any], key: str) -> str:
    """A value as it is told: of digests the beginning."""
    return f"{saved[key][:12]}..." if key in ("shards", "labels") else str(saved[key])


def test_every_key_is_refused_with_both_sides_named_but_the_layout_which_is_converted(place: Path) -> None:
    saved = saved_fingerprint(place)
    assert compare("x", saved, saved, ()) == []
    for key in saved:
        here = saved | {key: "another"}
        if key == "objective.layout":
            assert compare("x", saved, here, ()) == []
            continue
        with pytest.raises(DataError) as caught:
            compare("x", saved, here, ())
        told = str(caught.value)
        assert told.startswith("x: is of another run:")
        assert f"{key}: {shown(saved, key)} there, another here" in told
        assert (f"--allow-change {key} goes on nevertheless" in told) == (key in ALLOWED)
        without = {name: value for name, value in saved.items() if name != key}
        if key == EPOCH:  # older checkpoints do not say it
            assert compare("x", without, saved, ()) == []
            continue
        with pytest.raises(DataError, match=f"{key}: None there"):
            compare("x", without, saved, ())


def test_other_labels_are_refused_with_the_names_of_both_label_sets(
    place: Path, go_on: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on("sop", "other-labels", "data.labels=given", code=1)
    digest = shown(saved_fingerprint(place), "labels")
    assert f"labels: wrong {digest} there, given " in capsys.readouterr().err


@pytest.mark.parametrize("key", ALLOWED)
def test_what_is_allowed_is_told_and_nothing_else_is_let_through_with_it(place: Path, key: str) -> None:
    saved = saved_fingerprint(place)
    here = saved | {key: "another"}
    assert compare("x", saved, here, [key]) == [f"{key}: {shown(saved, key)} there, another here"]
    with pytest.raises(DataError, match=r"run\.seed"):
        compare("x", saved, here | {"run.seed": 99}, [key])
    others = [other for other in ALLOWED if other != key]
    if key != "objective.name":
        with pytest.raises(DataError, match=f"{key}: .* there, another here"):
            compare("x", saved, here, others)


def test_all_that_differs_is_named_at_once(place: Path) -> None:
    saved = saved_fingerprint(place)
    with pytest.raises(DataError) as caught:
        compare("x", saved, dict.fromkeys(saved, "another"), ())
    assert all(f"  {key}: " in str(caught.value) for key in saved if not key.startswith("objective."))


@pytest.mark.parametrize("key", ["run.seed", "samples", "objective.layout", "", "label", "LABELS"])
def test_other_keys_cannot_be_allowed(place: Path, key: str, capsys: pytest.CaptureFixture[str], go_on: Train) -> None:
    with pytest.raises(ConfigError, match=f"--allow-change {key}: can only be of labels, objective.name"):
        check_allowed([key])
    go_on("sop", "unknown-key", allow=("labels", key), code=2)
    told = capsys.readouterr().err
    assert f"--allow-change {key}: can only be of labels" in told
    assert not (place / "runs" / "unknown-key").exists()


CHANGES = {
    "labels": ("sop", ("data.labels=given",), ("labels",)),
    "a table less": ("sop", PLAIN, ("objective.name",)),
    "a table more": ("ce", (), ("objective.name",)),
    "variant": ("sop", PAPER, ("objective.variant",)),
    "optimizer": ("sop", ADAM, ("optim.name",)),
    "labels and optimizer": ("sop", ("data.labels=given", *ADAM), ("labels", "optim.name")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_unless_it_is_allowed_and_then_the_run_goes_on(
    go_on: Train, change: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, overrides, keys = CHANGES[change]
    name = change.replace(" ", "-")
    folder = go_on(run, name, *overrides, code=1)
    told = capsys.readouterr().err
    assert all(f"(--allow-change {key} goes on nevertheless" in told for key in keys)
    assert not (folder / "metrics.jsonl").exists()
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        go_on(run, name, *overrides, allow=keys)
    assert "goes on, as allowed, with " + keys[0] in caplog.text
    assert [line["step"] for line in lines_of(folder)] == list(range(STEPS + 1, 2 * STEPS + 1))
    assert all(0 < line["loss"] < 20 for line in lines_of(folder))


def test_a_change_of_labels_or_variant_keeps_the_rows_and_a_new_table_begins_anew(go_on: Train, place: Path) -> None:
    """One step on: rows of samples that this step did not see are as they were."""
    one_more = f"train.max_steps={STEPS + 1}"
    before = open_checkpoint(newest_checkpoint(place / "runs" / "sop")).noise()
    for name, (run, overrides, keys) in {"kept-l": CHANGES["labels"], "kept-v": CHANGES["variant"]}.items():
        now = open_checkpoint(newest_checkpoint(go_on(run, name, *overrides, one_more, allow=keys))).noise()
        unseen = now["visits"] == before["visits"]
        assert unseen.sum() == 30 - 9
        assert torch.equal(now["u"][unseen], before["u"][unseen])
        assert before["visits"].min() == 1
    run, overrides, keys = CHANGES["a table more"]
    anew = open_checkpoint(newest_checkpoint(go_on(run, "anew", *overrides, one_more, allow=keys))).noise()
    assert sorted(set(anew["visits"].tolist())) == [0, 1]
    assert int((anew["visits"] == 1).sum()) == 9


def test_other_labels_that_make_epochs_of_another_length_are_refused_even_if_labels_may_change(
    go_on: Train, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balanced epoch has no more samples of a class than there are labels of it."""
    monkeypatch.chdir(place)
    manifest = read_manifest(place / "shards" / "train")
    write_labels(place / "shards" / "train", manifest, "one-class", [0] * 30, {})
    balanced = (*PLAIN, f"data.balanced_per_epoch={10 * len(manifest.classes)}")
    assert run_config("small.yaml", ["run.name=even", *balanced, "train.max_steps=2"]) == 0
    go_on("even", "uneven", *balanced, "data.labels=one-class", allow=("labels",), code=1)
    assert f"{EPOCH}: 4 there, 2 here" in capsys.readouterr().err


def test_a_new_optimizer_begins_without_a_memory(go_on: Train) -> None:
    run, overrides, keys = CHANGES["optimizer"]
    folder = go_on(run, "adam", *overrides, f"train.max_steps={STEPS + 1}", allow=keys)
    optimizer = open_checkpoint(newest_checkpoint(folder)).section("optimizer/")
    assert {name.rpartition("/")[2] for name in optimizer} == {"exp_avg", "exp_avg_sq", "step"}
    assert {int(value) for name, value in optimizer.items() if name.endswith("/step")} == {1}


def test_what_is_allowed_but_does_not_differ_changes_nothing(go_on: Train, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        plain = go_on("sop", "plain")
        allowed = go_on("sop", "allowed", allow=tuple(ALLOWED))
    assert "as allowed" not in caplog.text
    assert [line["loss"] for line in lines_of(plain)] == [line["loss"] for line in lines_of(allowed)]

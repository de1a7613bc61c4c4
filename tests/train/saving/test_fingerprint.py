"""A checkpoint resumes only the run that it belongs to. Changes must be allowed by name, and then the run resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sopdist.checkpoint import open_checkpoint
from sopdist.data.labels import write_labels
from sopdist.data.manifest import read_manifest
from sopdist.errors import ConfigError, DataError
from sopdist.train import config as configs
from sopdist.train.config import Config
from sopdist.train.run import run_config
from sopdist.train.saving.fingerprint import EPOCH, allowed_changes, check_allowed, compare, saved_fingerprint
from tests.support.grey_images import write_images
from tests.support.records import lines_of, newest_checkpoint

STEPS = 4  # an epoch
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
method: {visits: 1.5}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 2, batch: 9}
engine: {threads: 1}
log: {every: 1, wandb: 'off'}
"""
PLAIN = ("method={name: ce}",)
ADAM = ("optim.name=adamw", "optim.lr=0.001")
PAPER = ("method.variant=paper", "method.visits=null")

CHANGEABLE = ("labels", "method.name", "optim.name", "method.variant")  # of SOP
MEANINGS = {key: f"what changes with {key}" for key in CHANGEABLE}

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


def saved_in(place: Path) -> dict[str, Any]:
    return open_checkpoint(newest_checkpoint(place / "runs" / "sop")).fingerprint


def test_it_tells_apart_what_must_be_the_same(place: Path) -> None:
    assert saved_in(place).keys() == {
        "samples", "classes", "shards", "labels", "plan version", EPOCH, "run.seed", "train.batch", "model.name",
        "method.name", "method.variant", "optim.name",
        "data.balanced_per_epoch", "data.lanes", "data.block",
    }  # fmt: skip


def load_config(place: Path, *overrides: str) -> Config:
    return configs.load(str(place / "small.yaml"), overrides)


def test_a_method_adds_the_changes_that_it_allows_and_each_has_a_meaning(place: Path) -> None:
    sop, ce = allowed_changes(load_config(place)), allowed_changes(load_config(place, *PLAIN))
    assert tuple(sop) == CHANGEABLE
    assert tuple(ce) == CHANGEABLE[:3]
    assert all(sop.values())


def test_keys_of_older_checkpoints_are_those_of_today(place: Path) -> None:
    saved = saved_in(place)
    old_names = {EPOCH: "steps of an epoch", "method.name": "objective.name", "method.variant": "objective.variant"}
    older = {old_names.get(key, key): value for key, value in saved.items()}
    assert older != saved
    assert saved_fingerprint(older) == saved


def shown(saved: dict[str, Any], key: str) -> str:
    """A value as it is shown: digests are shortened."""
    return f"{saved[key][:12]}..." if key in ("shards", "labels") else str(saved[key])


def test_every_key_is_refused_with_both_sides_named_but_the_layout_which_is_converted(place: Path) -> None:
    saved = saved_in(place)
    assert compare("x", saved, saved, (), MEANINGS) == []
    older = saved | {"method.layout": "slots"}  # checkpoints had it; the layout is converted
    assert compare("x", older, saved, (), MEANINGS) == []
    for key in saved:
        here = saved | {key: "another"}
        with pytest.raises(DataError) as caught:
            compare("x", saved, here, (), MEANINGS)
        told = str(caught.value)
        assert told.startswith("x: belongs to another run:")
        assert f"{key}: {shown(saved, key)} there, another here" in told
        assert (f"--allow-change {key} resumes nevertheless: what changes with {key})" in told) == (key in CHANGEABLE)
        without = {name: value for name, value in saved.items() if name != key}
        if key == EPOCH:  # older checkpoints do not say it
            assert compare("x", without, saved, (), MEANINGS) == []
            continue
        with pytest.raises(DataError, match=f"{key}: None there"):
            compare("x", without, saved, (), MEANINGS)


def test_other_labels_are_refused_with_the_names_of_both_label_sets(
    place: Path, go_on: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on("sop", "other-labels", "data.labels=given", code=1)
    digest = shown(saved_in(place), "labels")
    assert f"labels: wrong {digest} there, given " in capsys.readouterr().err


@pytest.mark.parametrize("key", CHANGEABLE)
def test_what_is_allowed_is_told_and_nothing_else_is_let_through_with_it(place: Path, key: str) -> None:
    saved = saved_in(place)
    here = saved | {key: "another"}
    assert compare("x", saved, here, [key], MEANINGS) == [f"{key}: {shown(saved, key)} there, another here"]
    with pytest.raises(DataError, match=r"run\.seed"):
        compare("x", saved, here | {"run.seed": 99}, [key], MEANINGS)
    others = [other for other in CHANGEABLE if other != key]
    if key != "method.name":
        with pytest.raises(DataError, match=f"{key}: .* there, another here"):
            compare("x", saved, here, others, MEANINGS)


def test_all_that_differs_is_named_at_once(place: Path) -> None:
    saved = saved_in(place)
    with pytest.raises(DataError) as caught:
        compare("x", saved, dict.fromkeys(saved, "another"), (), MEANINGS)
    assert all(f"  {key}: " in str(caught.value) for key in saved if not key.startswith("method."))


@pytest.mark.parametrize("key", ["run.seed", "samples", "method.layout", "", "label", "LABELS"])
def test_other_keys_cannot_be_allowed(place: Path, key: str, capsys: pytest.CaptureFixture[str], go_on: Train) -> None:
    with pytest.raises(ConfigError, match=f"--allow-change {key}: must be one of labels, method.name"):
        check_allowed(load_config(place), [key])
    go_on("sop", "unknown-key", allow=("labels", key), code=2)
    told = capsys.readouterr().err
    assert f"--allow-change {key}: must be one of labels" in told
    assert not (place / "runs" / "unknown-key").exists()


CHANGES = {
    "labels": ("sop", ("data.labels=given",), ("labels",)),
    "a table less": ("sop", PLAIN, ("method.name",)),
    "a table more": ("ce", (), ("method.name",)),
    "variant": ("sop", PAPER, ("method.variant",)),
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
    assert all(f"(--allow-change {key} resumes nevertheless" in told for key in keys)
    assert not (folder / "metrics.jsonl").exists()
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        go_on(run, name, *overrides, allow=keys)
    assert "resumes, as allowed, with " + keys[0] in caplog.text
    assert [line["step"] for line in lines_of(folder)] == list(range(STEPS + 1, 2 * STEPS + 1))
    assert all(0 < line["loss"] < 20 for line in lines_of(folder))


def test_a_change_of_labels_or_variant_keeps_the_rows_and_a_new_table_begins_anew(go_on: Train, place: Path) -> None:
    """One step on: rows of samples that this step did not see are as they were."""
    one_more = f"train.max_steps={STEPS + 1}"
    before = open_checkpoint(newest_checkpoint(place / "runs" / "sop")).table("noise")
    for name, (run, overrides, keys) in {"kept-l": CHANGES["labels"], "kept-v": CHANGES["variant"]}.items():
        now = open_checkpoint(newest_checkpoint(go_on(run, name, *overrides, one_more, allow=keys))).table("noise")
        unseen = now["visits"] == before["visits"]
        assert unseen.sum() == 30 - 9
        assert torch.equal(now["u"][unseen], before["u"][unseen])
        assert before["visits"].min() == 1
    run, overrides, keys = CHANGES["a table more"]
    anew = open_checkpoint(newest_checkpoint(go_on(run, "anew", *overrides, one_more, allow=keys))).table("noise")
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
        allowed = go_on("sop", "allowed", allow=CHANGEABLE)
    assert "as allowed" not in caplog.text
    assert [line["loss"] for line in lines_of(plain)] == [line["loss"] for line in lines_of(allowed)]

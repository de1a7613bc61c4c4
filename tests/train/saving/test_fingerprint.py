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

STEPS = 4  # per epoch
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
method: {visits: 1.5, onset: always}
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
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def resume(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Resume from the checkpoint of a run in a new run, and return the new run's folder."""

    def start(run: str, name: str, *overrides: str, allow: tuple[str, ...] = (), code: int = 0) -> Path:
        monkeypatch.chdir(workspace)
        resume_from = str(newest_checkpoint(workspace / "runs" / run))
        found = run_config("small.yaml", [f"run.name={name}", *overrides], resume=resume_from, allow_change=allow)
        assert found == code
        return workspace / "runs" / name

    return start


def saved_in(workspace: Path) -> dict[str, Any]:
    return open_checkpoint(newest_checkpoint(workspace / "runs" / "sop")).fingerprint


def test_the_fingerprint_has_every_key_that_must_not_change(workspace: Path) -> None:
    assert saved_in(workspace).keys() == {
        "samples", "classes", "shards", "labels", "plan version", EPOCH, "run.seed", "train.batch", "model.name",
        "method.name", "method.variant", "optim.name",
        "data.balanced_per_epoch", "data.lanes", "data.block",
    }  # fmt: skip


def load_config(workspace: Path, *overrides: str) -> Config:
    return configs.load(str(workspace / "small.yaml"), overrides)


def test_a_method_adds_the_changes_that_it_allows_and_each_is_explained(workspace: Path) -> None:
    sop, ce = allowed_changes(load_config(workspace)), allowed_changes(load_config(workspace, *PLAIN))
    assert tuple(sop) == CHANGEABLE
    assert tuple(ce) == CHANGEABLE[:3]
    assert all(sop.values())


def test_keys_of_older_checkpoints_get_their_new_names(workspace: Path) -> None:
    saved = saved_in(workspace)
    old_names = {EPOCH: "steps of an epoch", "method.name": "objective.name", "method.variant": "objective.variant"}
    older = {old_names.get(key, key): value for key, value in saved.items()}
    assert older != saved
    assert saved_fingerprint(older) == saved


def shown(saved: dict[str, Any], key: str) -> str:
    """A value as messages show it: digests are shortened."""
    return f"{saved[key][:12]}..." if key in ("shards", "labels") else str(saved[key])


def test_a_change_of_any_key_but_the_layout_is_refused_with_both_values(workspace: Path) -> None:
    saved = saved_in(workspace)
    assert compare("x", saved, saved, (), MEANINGS) == []
    older = saved | {"method.layout": "slots"}  # a key of older checkpoints; the layout is converted
    assert compare("x", older, saved, (), MEANINGS) == []
    for key in saved:
        here = saved | {key: "another"}
        with pytest.raises(DataError) as caught:
            compare("x", saved, here, (), MEANINGS)
        error = str(caught.value)
        assert error.startswith("x: belongs to another run:")
        assert f"{key}: {shown(saved, key)} in the checkpoint, another in this run" in error
        assert (f"use --allow-change {key} to resume anyway: what changes with {key})" in error) == (key in CHANGEABLE)
        without = {name: value for name, value in saved.items() if name != key}
        if key == EPOCH:  # older checkpoints do not have it
            assert compare("x", without, saved, (), MEANINGS) == []
            continue
        with pytest.raises(DataError, match=f"{key}: None in the checkpoint"):
            compare("x", without, saved, (), MEANINGS)


def test_other_labels_are_refused_with_the_names_of_both_label_sets(
    workspace: Path, resume: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    resume("sop", "other-labels", "data.labels=given", code=1)
    digest = shown(saved_in(workspace), "labels")
    assert f"labels: wrong {digest} in the checkpoint, given " in capsys.readouterr().err


@pytest.mark.parametrize("key", CHANGEABLE)
def test_an_allowed_change_is_reported_and_does_not_allow_others(workspace: Path, key: str) -> None:
    saved = saved_in(workspace)
    here = saved | {key: "another"}
    assert compare("x", saved, here, [key], MEANINGS) == [
        f"{key}: {shown(saved, key)} in the checkpoint, another in this run"
    ]
    with pytest.raises(DataError, match=r"run\.seed"):
        compare("x", saved, here | {"run.seed": 99}, [key], MEANINGS)
    others = [other for other in CHANGEABLE if other != key]
    if key != "method.name":
        with pytest.raises(DataError, match=f"{key}: .* in the checkpoint, another in this run"):
            compare("x", saved, here, others, MEANINGS)


def test_all_differences_are_reported_at_once(workspace: Path) -> None:
    saved = saved_in(workspace)
    with pytest.raises(DataError) as caught:
        compare("x", saved, dict.fromkeys(saved, "another"), (), MEANINGS)
    assert all(f"  {key}: " in str(caught.value) for key in saved if not key.startswith("method."))


@pytest.mark.parametrize("key", ["run.seed", "samples", "method.layout", "", "label", "LABELS"])
def test_other_keys_cannot_be_allowed(
    workspace: Path, key: str, capsys: pytest.CaptureFixture[str], resume: Train
) -> None:
    with pytest.raises(ConfigError, match=f"--allow-change {key}: must be one of labels, method.name"):
        check_allowed(load_config(workspace), [key])
    resume("sop", "unknown-key", allow=("labels", key), code=2)
    stderr = capsys.readouterr().err
    assert f"--allow-change {key}: must be one of labels" in stderr
    assert not (workspace / "runs" / "unknown-key").exists()


CHANGES = {
    "labels": ("sop", ("data.labels=given",), ("labels",)),
    "table removed": ("sop", PLAIN, ("method.name",)),
    "table added": ("ce", (), ("method.name",)),
    "variant": ("sop", PAPER, ("method.variant",)),
    "optimizer": ("sop", ADAM, ("optim.name",)),
    "labels and optimizer": ("sop", ("data.labels=given", *ADAM), ("labels", "optim.name")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_unless_it_is_allowed_and_then_the_run_resumes(
    resume: Train, change: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, overrides, keys = CHANGES[change]
    name = change.replace(" ", "-")
    folder = resume(run, name, *overrides, code=1)
    stderr = capsys.readouterr().err
    assert all(f"(use --allow-change {key} to resume anyway: " in stderr for key in keys)
    assert not (folder / "metrics.jsonl").exists()
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        resume(run, name, *overrides, allow=keys)
    assert "resuming with these allowed changes: " + keys[0] in caplog.text
    assert [line["step"] for line in lines_of(folder)] == list(range(STEPS + 1, 2 * STEPS + 1))
    assert all(0 < line["loss"] < 20 for line in lines_of(folder))


def test_a_change_of_labels_or_variant_keeps_the_rows_and_a_new_table_starts_from_scratch(
    resume: Train, workspace: Path
) -> None:
    """After one more step, the rows of samples that were not in it are unchanged."""
    one_more = f"train.max_steps={STEPS + 1}"
    before = open_checkpoint(newest_checkpoint(workspace / "runs" / "sop")).table("noise")
    for name, (run, overrides, keys) in {"kept-l": CHANGES["labels"], "kept-v": CHANGES["variant"]}.items():
        now = open_checkpoint(newest_checkpoint(resume(run, name, *overrides, one_more, allow=keys))).table("noise")
        unseen = now["visits"] == before["visits"]
        assert unseen.sum() == 30 - 9
        assert torch.equal(now["u"][unseen], before["u"][unseen])
        assert before["visits"].min() == 1
    run, overrides, keys = CHANGES["table added"]
    new = open_checkpoint(newest_checkpoint(resume(run, "new-table", *overrides, one_more, allow=keys))).table("noise")
    assert sorted(set(new["visits"].tolist())) == [0, 1]
    assert int((new["visits"] == 1).sum()) == 9


def test_labels_that_change_the_length_of_an_epoch_are_refused_even_if_labels_may_change(
    resume: Train, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balanced epoch has no more samples of a class than there are labels of it."""
    monkeypatch.chdir(workspace)
    manifest = read_manifest(workspace / "shards" / "train")
    write_labels(workspace / "shards" / "train", manifest, "one-class", [0] * 30, {})
    balanced = (*PLAIN, f"data.balanced_per_epoch={10 * len(manifest.classes)}")
    assert run_config("small.yaml", ["run.name=even", *balanced, "train.max_steps=2"]) == 0
    resume("even", "uneven", *balanced, "data.labels=one-class", allow=("labels",), code=1)
    assert f"{EPOCH}: 4 in the checkpoint, 2 in this run" in capsys.readouterr().err


def test_a_new_optimizer_starts_without_state(resume: Train) -> None:
    run, overrides, keys = CHANGES["optimizer"]
    folder = resume(run, "adam", *overrides, f"train.max_steps={STEPS + 1}", allow=keys)
    optimizer = open_checkpoint(newest_checkpoint(folder)).section("optimizer/")
    assert {name.rpartition("/")[2] for name in optimizer} == {"exp_avg", "exp_avg_sq", "step"}
    assert {int(value) for name, value in optimizer.items() if name.endswith("/step")} == {1}


def test_allowing_changes_that_do_not_occur_has_no_effect(resume: Train, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        plain = resume("sop", "plain")
        allowed = resume("sop", "allowed", allow=CHANGEABLE)
    assert "allowed changes" not in caplog.text
    assert [line["loss"] for line in lines_of(plain)] == [line["loss"] for line in lines_of(allowed)]

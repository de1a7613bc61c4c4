"""Samples that cannot be used, and data at the limits of what is possible, for every method in each of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sopdist.data.batch import Batch
from sopdist.errors import ConfigError
from sopdist.methods import METHODS, Setup, make_method
from sopdist.train.run import run_config
from tests.support.grey_images import write_images
from tests.support.method_driver import CPU, Driver, Taken

SAMPLES, CLASSES = 12, 3
LABELS = [index % CLASSES for index in range(SAMPLES)]
BAD = [2, 5, 9]

# The settings of a stage, and the epoch that is tested; those before it are trained.
STAGES: dict[str, tuple[dict[str, Any], int]] = {name: ({"name": name}, 0) for name in METHODS} | {
    "SOP that acts": ({"name": "sop", "onset": "always"}, 1),
    "SOP+": ({"name": "sop", "onset": "always", "consistency": 0.9, "balance": 0.1}, 1),
    "SOP+ with mixup": ({"name": "sop", "onset": "always", "mixup": 0.7}, 1),
    "truncated GCE": ({"name": "gce", "truncate": 0.2, "prune_from": 1}, 1),
    "forward, corrected": ({"name": "forward", "first_epochs": 1}, 1),
    "Co-teaching that forgets": ({"name": "coteaching", "ramp": 1, "forget": 0.3}, 1),
    "Co-teaching that forgets nearly all": ({"name": "coteaching", "ramp": 1, "forget": 0.95}, 1),
    "Co-teaching+ among disagreements": ({"name": "coteaching_plus", "ramp": 1, "warmup": 1, "forget": 0.3}, 1),
    "ELR, compact": ({"name": "elr", "layout": "float16"}, 1),
    "ELR+ with sharpened labels": ({"name": "elr_plus", "sharpen_labels": True}, 1),
    "ELR+ without mixup": ({"name": "elr_plus", "mixup_alpha": 0.0}, 1),
    "DivideMix with penalty": ({"name": "dividemix", "penalty": True}, 0),
    "DivideMix, divided": ({"name": "dividemix", "warmup": 1}, 2),
    "DivideMix, labelled only": ({"name": "dividemix", "warmup": 1, "unlabelled_weight": 0.0}, 1),
    "CORES2, sieving": ({"name": "cores2", "warmup": 0, "ramp_end": 1, "sieve_from": 0}, 1),
    "CORES2*, second stage": ({"name": "cores2_star", "sieve_epochs": 1}, 1),
}


def begun(stage: str, labels: Sequence[int] = LABELS, classes: int = CLASSES) -> tuple[Driver, Batch]:
    """A driver in this stage, and a batch of it."""
    settings, epoch = STAGES[stage]
    driver = Driver(METHODS[settings["name"]].Settings(**settings), labels, classes, seed=1)
    with torch.no_grad():
        for parameter in driver.network.parameters():
            parameter.mul_(6)  # predictions that differ
    for earlier in range(epoch):
        driver.step(driver.batch_of_parts(driver.begin(earlier)), lr=0.05)
    return driver, driver.batch_of_parts(driver.begin(epoch))


def tables_of(driver: Driver) -> dict[str, Tensor]:
    """All columns of all tables: (samples, ...)."""
    return {
        f"{table}/{column}": value
        for table in driver.method.tables()
        for column, value in driver.table(table).items()
        if len(value) == driver.samples and column != "meta"
    }


def direction(driver: Driver) -> Tensor:
    """The gradient of the network up to a factor: what it is divided by differs between methods."""
    gradients = [each.grad.flatten() for each in driver.network.parameters() if each.grad is not None]
    flat = torch.cat(gradients).double() if gradients else torch.zeros(1, dtype=torch.float64)
    return flat / flat.norm().clamp_min(1e-30)


def without(batch: Batch, samples: Sequence[int]) -> Batch:
    """These samples have weight 0."""
    return replace(batch, weight=batch.weight.where(~torch.isin(batch.index, torch.tensor(samples)), 0))


def assert_nothing_from(driver: Driver, taken: Taken, samples: Sequence[int]) -> None:
    """No output that any of these samples had a part in has a gradient."""
    features = [view * driver.samples + sample for sample in samples for view in range(driver.views)]
    for inputs, output in zip(taken.inputs, taken.outputs, strict=True):
        if output.grad is not None:
            touched = torch.cat([images[:, features].any(1) for images in inputs])
            touched = touched.repeat(len(output) // len(touched))
            assert torch.isfinite(output.grad).all()
            assert not output.grad[touched].any()


def test_every_method_has_a_stage() -> None:
    assert {settings["name"] for settings, _ in STAGES.values()} == METHODS.keys()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("unreadable", [False, True], ids=["weight 1", "weight 0"])
def test_samples_that_are_not_finite_leave_no_trace(stage: str, value: float, unreadable: bool) -> None:
    """The step is that of a batch in which they have weight 0 and are finite."""
    driver, batch = begun(stage)
    before = tables_of(driver)
    driver.nonfinite = dict.fromkeys(BAD, value)
    taken = driver.step(without(batch, BAD) if unreadable else batch)
    assert math.isfinite(taken.loss)
    assert_nothing_from(driver, taken, BAD)
    assert not taken.output.finite[torch.isin(batch.index, torch.tensor(BAD))].any()

    other, same = begun(stage)
    reference = other.step(without(same, BAD))
    assert_nothing_from(other, reference, BAD)
    torch.testing.assert_close(direction(driver), direction(other), rtol=1e-4, atol=1e-5)
    for name, expected in tables_of(other).items():
        found = tables_of(driver)[name]
        assert torch.equal(found[BAD].nan_to_num(), before[name][BAD].nan_to_num()), name
        torch.testing.assert_close(found, expected, equal_nan=True, msg=name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["not finite", "unreadable"])
def test_a_batch_without_any_usable_sample_changes_nothing(stage: str, how: str) -> None:
    driver, batch = begun(stage)
    before, everyone = tables_of(driver), list(range(SAMPLES))
    if how == "not finite":
        driver.nonfinite = dict.fromkeys(everyone, math.nan)
    taken = driver.step(batch if how == "not finite" else without(batch, everyone))
    assert math.isfinite(taken.loss)
    assert_nothing_from(driver, taken, everyone)
    after = tables_of(driver)
    assert all(torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items())
    state = driver.method.state_dict().items()
    assert all(torch.isfinite(value).all() for name, value in state if name != "holdout_loss")
    driver.nonfinite = {}
    assert math.isfinite(driver.step(batch).loss), "the next step is a normal one"


@pytest.mark.parametrize("stage", STAGES)
def test_padding_repeats_a_sample_but_does_not_visit_it_again(stage: str) -> None:
    driver, batch = begun(stage)
    once = driver.step(batch)
    other, _ = begun(stage)
    repeated = replace(
        batch,
        images=torch.cat([batch.images, batch.images[:3]]),
        labels=torch.cat([batch.labels, batch.labels[:3]]),
        index=torch.cat([batch.index, batch.index[:3]]),
        weight=torch.cat([batch.weight, torch.zeros(3)]),
        other_views=tuple(torch.cat([view, view[:3]]) for view in batch.other_views),
        part=None if batch.part is None else torch.cat([batch.part, batch.part[:3]]),
    )
    twice = other.step(repeated)
    for name, value in tables_of(driver).items():
        torch.testing.assert_close(tables_of(other)[name], value, equal_nan=True, msg=name)
    settings = STAGES[stage][0]
    mixes = settings["name"] in ("mixup", "elr_plus") or "DivideMix, " in stage or "mixup" in settings
    if not mixes:  # pairs would be others
        assert twice.loss == pytest.approx(once.loss, rel=1e-5)
        torch.testing.assert_close(direction(other), direction(driver), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("labels", "classes"),
    [([0, 1] * 6, 2), ([0, 1] * 6, 4), ([1] * 12, 2), ([0, -1, 1, 0] * 3, 2)],
    ids=["two classes", "classes without samples", "only one class occurs", "unknown labels"],
)
def test_few_classes_and_classes_without_samples(stage: str, labels: list[int], classes: int) -> None:
    driver, batch = begun(stage, labels, classes)
    for _ in range(3):
        taken = driver.step(batch, lr=0.1)
        assert math.isfinite(taken.loss)
        assert all(torch.isfinite(parameter).all() for parameter in driver.network.parameters())
    assert_nothing_from(driver, taken, [index for index, label in enumerate(labels) if label < 0])
    found = driver.method.readout(torch.tensor(labels))
    if found is not None:
        unknown = np.array(labels) < 0
        judges = getattr(driver.method, "forget", 1) > 0  # Co-teaching says nothing while it leaves nothing out
        assert found.visited[~unknown].any() == judges
        assert not found.flags[unknown].any()
        assert not np.isnan(found.scores).any()
        assert (found.proposed[found.flags] < classes).all()


@pytest.mark.parametrize("stage", STAGES)
def test_extreme_logits_have_finite_losses_and_gradients(stage: str) -> None:
    """p_y underflows."""
    driver, batch = begun(stage)
    with torch.no_grad():
        for parameter in driver.network.parameters():
            parameter.mul_(200)
    for _ in range(2):
        taken = driver.step(batch)
        assert math.isfinite(taken.loss)
        gradients = [output.grad for output in taken.outputs if output.grad is not None]
        assert gradients
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9])
def test_the_columns_of_all_parts_fit_the_layout_that_was_announced(name: str, batch: int) -> None:
    """The stream and the engine are built for this layout before the run."""
    first = {"dividemix": {"warmup": 1}, "cores2_star": {"sieve_epochs": 1}}.get(name, {})
    driver = Driver(METHODS[name].Settings(name=name, **first), LABELS, CLASSES, batch=batch)
    if name == "cores2_star" and batch == 1:
        with pytest.raises(ConfigError, match=r"train\.batch = 1"):
            driver.method.batch_layout(batch)
        return
    layout = driver.method.batch_layout(batch)
    for epoch in range(3):
        parts = driver.begin(epoch)
        columns = [part.columns or batch for part in parts if part.samples is None or len(part.samples)]
        assert layout.leading <= columns[0]
        assert sum(columns) <= layout.widest
        driver.step(driver.batch(range(SAMPLES), part=[0] * SAMPLES if len(parts) > 1 else None))


@pytest.mark.parametrize("name", METHODS)
def test_state_that_is_saved_before_any_step_can_be_loaded(name: str) -> None:
    settings = METHODS[name].Settings(name=name)
    setup = Setup(SAMPLES, CLASSES, 10, 4, np.array(LABELS), 0, CPU, None)
    one, other = make_method(settings), make_method(settings)
    one.start(setup)
    other.start(setup)
    other.load_state_dict({key: value.clone() for key, value in one.state_dict().items()})
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(other.state_dict()[key], value) for key, value in one.state_dict().items())


@pytest.mark.parametrize("stage", ["truncated GCE", "forward, corrected"])
def test_a_holdout_that_cannot_be_read_still_yields_a_network(stage: str) -> None:
    """The first one; nothing says which is best."""
    settings, epoch = STAGES[stage]
    driver = Driver(METHODS[settings["name"]].Settings(**settings), LABELS, CLASSES)
    (part,) = driver.begin(0)
    assert part.samples is not None
    driver.trainer.unreadable = set(range(SAMPLES)) - set(part.samples.tolist())
    assert driver.trainer.unreadable
    for later in range(1, epoch + 2):
        taken = driver.step(driver.batch_of_parts(driver.begin(later)))
        assert math.isfinite(taken.loss)


def test_samples_on_which_a_network_is_not_finite_are_not_divided() -> None:
    driver, _ = begun("dividemix")
    driver.nonfinite = dict.fromkeys(BAD, math.nan)
    parts = driver.begin(1)
    found = np.concatenate([part.samples for part in parts if part.samples is not None])
    assert set(found.tolist()) == set(range(SAMPLES)) - set(BAD)
    driver.nonfinite = dict.fromkeys(range(SAMPLES), math.nan)
    assert driver.begin(2), "a network that diverged: the guard of the trainer decides what happens"


CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: mlp}
optim: {lr: 0.05}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
checkpoint: {every: 0}
log: {every: 1, wandb: 'off'}
"""


@pytest.mark.parametrize("method", ["name: forward, first_epochs: 1", "name: gce, truncate: 0.5, prune_from: 1"])
def test_a_split_too_small_for_a_holdout_trains_nevertheless(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of four samples is none."""
    write_images(tmp_path / "shards" / "train", 4)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert run_config("tiny.yaml", [f"method={{{method}}}"]) == 0

"""The stream: each sample exactly once per epoch, with the same images on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sopdist.data.augment.policy import Policy
from sopdist.data.augment.recipes import RECIPES
from sopdist.data.labels import write_labels
from sopdist.data.parts import Part
from tests.support.pictures import picture
from tests.support.small_splits import write_split
from tests.support.streams import BACKENDS, BATCH, SAMPLES, by_sample, equal, open_stream, pictures


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["imagenet", "webvision", "cifar10"])
def test_each_sample_once_with_the_same_bits_on_any_number_of_ranks(folder: Path, backend: str, recipe: str) -> None:
    alone: dict[int, tuple[Tensor, ...]] = {}
    for world_size in (1, 2, 3, 4):
        batches = []
        for rank in range(world_size):
            with open_stream(
                folder, backend, recipe, rank=rank, world_size=world_size, views=(None, Policy())
            ) as stream:
                batches += list(stream.epoch(3))
        found = by_sample(batches)
        assert sorted(found) == list(range(SAMPLES))
        alone = alone or found
        assert equal(found, alone), world_size


@pytest.mark.parametrize("backend", BACKENDS)
def test_resuming_at_any_step_yields_the_same_batches(folder: Path, backend: str) -> None:
    with open_stream(folder, backend, views=(None, Policy())) as stream:
        complete = list(stream.epoch(2))
        assert len(complete) == 5
        for start in range(len(complete) + 1):
            with open_stream(folder, backend, views=(None, Policy())) as later:
                rest = list(later.epoch(2, start))
            assert len(rest) == len(complete) - start
            for found, expected in zip(rest, complete[start:], strict=True):
                assert torch.equal(found.index, expected.index)
                assert torch.equal(found.weight, expected.weight)
                assert torch.equal(found.labels, expected.labels)
                for view, wanted in zip(
                    (found.images, *found.other_views), (expected.images, *expected.other_views), strict=True
                ):
                    assert torch.equal(view, wanted)


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("train", [True, False])
def test_both_backends_produce_the_same_crops_up_to_one_level(folder: Path, recipe: str, train: bool) -> None:
    found = []
    for backend in BACKENDS:
        with open_stream(folder, backend, recipe, train=train, views=(None, Policy(layers=0, cutout=0))) as stream:
            found.append(by_sample(list(stream.epoch(0))))
    cpu, dali = found
    assert cpu.keys() == dali.keys() == set(range(SAMPLES))
    level = 1 / (255 * torch.tensor(RECIPES[recipe].std)).view(3, 1, 1)
    level = level[:1] if RECIPES[recipe].grey else level
    for index in cpu:
        for by_cpu, by_dali in zip(cpu[index][:-1], dali[index][:-1], strict=True):
            assert ((by_cpu - by_dali).abs() / level).max() <= 1.01, index


def test_epochs_seeds_and_views_differ(folder: Path) -> None:
    with open_stream(folder, views=(None, Policy(layers=0, cutout=0))) as stream, open_stream(folder, seed=2) as other:
        first, second = (by_sample(list(stream.epoch(epoch))) for epoch in (0, 1))
        reseeded = by_sample(list(other.epoch(0)))
    different = lambda a, b: sum(not torch.equal(x, y) for x, y in zip(a, b, strict=True)) / len(a)  # noqa: E731
    images = {name: [value[0] for _, value in sorted(found.items())] for name, found in
              (("first", first), ("second", second), ("reseeded", reseeded))}  # fmt: skip
    assert different(images["first"], images["second"]) > 0.9
    assert different(images["first"], images["reseeded"]) > 0.9
    assert different(images["first"], [value[1] for _, value in sorted(first.items())]) > 0.9


def test_padding_repeats_samples_of_the_same_batch_with_weight_0(folder: Path) -> None:
    with open_stream(folder) as stream:
        last = list(stream.epoch(0))[-1]
        assert len(last) == BATCH
        assert int(last.weight.sum()) == SAMPLES % BATCH
        counting = set(last.index[last.weight > 0].tolist())
        assert set(last.index.tolist()) == counting


def test_a_split_smaller_than_the_batch_is_one_step(tmp_path: Path) -> None:
    write_split(tmp_path / "train", pictures()[:3], per_shard=2)
    for world_size in (1, 2, 4):
        found = []
        for rank in range(world_size):
            with open_stream(tmp_path / "train", rank=rank, world_size=world_size) as stream:
                found += list(stream.epoch(0))
        assert [len(batch) for batch in found] == [BATCH // world_size] * world_size
        assert sorted(by_sample(found)) == [0, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_uses_the_centre_crop_of_each_sample_in_index_order(folder: Path, backend: str) -> None:
    with open_stream(folder, backend, "clothing1m", train=False) as stream:
        batches = list(stream.epoch())
        again = list(stream.epoch())
    assert torch.cat([batch.index[batch.weight > 0] for batch in batches]).tolist() == list(range(SAMPLES))
    assert all(torch.equal(a.images, b.images) for a, b in zip(batches, again, strict=True))
    image = picture(3, 200, 150)  # sample 3: 150 * 224 / 256 = 131 pixels from the centre
    x, y = (200 - 131) // 2, (150 - 131) // 2
    pixels = image.crop((x, y, x + 131, y + 131)).resize((224, 224), Image.Resampling.BILINEAR)
    recipe = RECIPES["clothing1m"]
    expected = (np.asarray(pixels) / 255 - recipe.mean) / recipe.std
    found = batches[0].images[3].permute(1, 2, 0).numpy()
    assert np.abs(found - expected).mean() < 0.05, "up to JPEG compression and the edges"


def test_batches_are_float32_in_channels_last_with_the_labels_of_the_label_set(folder: Path) -> None:
    with open_stream(folder) as stream:
        batch = next(iter(stream.epoch(0)))
    assert batch.images.shape == (BATCH, 3, 224, 224)
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch.labels, batch.index % 3)
    moved = batch.to("cpu")
    assert torch.equal(moved.images, batch.images)
    assert moved.other_views == ()


def test_grey_recipes_have_one_channel(folder: Path) -> None:
    with open_stream(folder, recipe="fashion-mnist", views=(None, Policy())) as stream:
        batch = next(iter(stream.epoch(0)))
    assert batch.images.shape == (BATCH, 1, 28, 28)
    assert [view.shape for view in batch.other_views] == [(BATCH, 1, 28, 28)]


def test_the_number_of_steps_is_known_in_advance(folder: Path) -> None:
    for options in ({}, {"train": False}, {"balanced_per_epoch": 30}, {"balanced_per_epoch": 3000}):
        with open_stream(folder, **options) as stream:
            assert stream.steps == stream.plan(0).steps == len(list(stream.epoch(1)))


def test_a_user_defined_recipe_and_the_short_imports(folder: Path) -> None:
    from sopdist.data import DataSettings, Recipe, Stream

    recipe = Recipe(48, "window", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), resize=56)
    with Stream(DataSettings(str(folder), recipe), global_batch=8) as stream:
        assert next(iter(stream.epoch(0))).images.shape == (8, 3, 48, 48)


def test_balanced_epochs_take_the_same_number_of_each_class(folder: Path) -> None:
    with open_stream(folder, balanced_per_epoch=30) as stream:
        epochs = [by_sample(list(stream.epoch(epoch))) for epoch in range(2)]
    for found in epochs:
        assert np.bincount([int(value[-1]) for value in found.values()]).tolist() == [10, 10, 10]
    assert epochs[0].keys() != epochs[1].keys()


def test_samples_without_a_label_have_weight_0(tmp_path: Path) -> None:
    manifest = write_split(tmp_path / "train", pictures(), per_shard=9)
    partial = np.where(np.arange(SAMPLES) < 20, np.arange(SAMPLES) % 3, -1)
    write_labels(tmp_path / "train", manifest, "partial", partial, {})
    with open_stream(tmp_path / "train", labels="partial") as stream:
        batches = list(stream.epoch(0))
    assert sorted(by_sample(batches)) == list(range(20))
    assert all((batch.labels >= 0).all() for batch in batches), "they are valid indices for a loss"


def test_the_limit_of_unreadable_samples_does_not_shrink_with_a_part_of_the_samples(folder: Path) -> None:
    with open_stream(folder, max_bad_fraction=0.1) as stream:
        few = stream.plan(0, (Part(np.arange(3)),))
        assert stream.allowed_bad(few) == stream.allowed_bad(stream.plan(0)) == int(0.1 * len(stream.split))

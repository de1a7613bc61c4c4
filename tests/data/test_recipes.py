"""The boxes of recipes, and the random numbers behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.data.augment.draws import GEOMETRY, POLICY, uniforms
from sopdist.data.augment.recipes import RECIPES, find_recipe
from sopdist.errors import DataError
from sopdist.philox import philox

lengths = st.integers(1, 5000)


@pytest.mark.parametrize("name", RECIPES)
@given(lengths, lengths, st.lists(st.floats(0, 1, exclude_max=True), min_size=23, max_size=23))
def test_boxes_lie_within_the_image_or_its_padding(name: str, width: int, height: int, draws: list[float]) -> None:
    recipe = RECIPES[name]
    sides = np.array([width]), np.array([height])
    boxes, _ = recipe.training_boxes(*sides, np.array([draws]))
    for x, y, box_width, box_height in (boxes[0].tolist(), recipe.evaluation_boxes(*sides)[0].tolist()):
        assert box_width >= 1
        assert box_height >= 1
        assert -recipe.padding <= x <= width - box_width + recipe.padding
        assert -recipe.padding <= y <= height - box_height + recipe.padding


def test_clothing1m_crops_224_of_256_of_the_short_side() -> None:
    recipe = RECIPES["clothing1m"]
    assert recipe.evaluation_boxes(np.array([256, 600]), np.array([300, 400])).tolist() == [
        [16, 38, 224, 224],
        [125, 25, 350, 350],
    ]
    draws = uniforms(0, 0, np.arange(4000), 0)
    boxes, mirror = recipe.training_boxes(np.full(4000, 256), np.full(4000, 256), draws)
    assert set(boxes[:, 0]) == set(boxes[:, 1]) == set(range(33)), "every position, both ends included"
    assert 0.45 < mirror.mean() < 0.55


def test_cifar_is_shifted_by_up_to_four_pixels_and_unchanged_in_evaluation() -> None:
    recipe, sides = RECIPES["cifar10"], (np.full(4000, 32), np.full(4000, 32))
    boxes, _ = recipe.training_boxes(*sides, uniforms(0, 0, np.arange(4000), 0))
    assert set(boxes[:, 0]) == set(boxes[:, 1]) == set(range(-4, 5))
    assert (boxes[:, 2:] == 32).all()
    assert (recipe.evaluation_boxes(*sides) == [0, 0, 32, 32]).all()


def test_a_random_area_is_uniform_among_those_that_fit() -> None:
    """The oracle draws for one image at a time until a box fits."""
    recipe, count = RECIPES["imagenet"], 20_000
    width, height = 2000, 1200
    boxes, _ = recipe.training_boxes(np.full(count, width), np.full(count, height), uniforms(0, 0, np.arange(count), 0))
    draw = np.random.default_rng(0)
    expected: list[tuple[float, float]] = []
    while len(expected) < count:
        area = draw.uniform(0.08, 1) * width * height
        aspect = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
        if (area * aspect) ** 0.5 <= width and (area / aspect) ** 0.5 <= height:
            expected.append(((area * aspect) ** 0.5, (area / aspect) ** 0.5))
    for ours, theirs in zip(boxes[:, 2:].T, np.array(expected).T, strict=True):
        quantiles = np.linspace(0.02, 0.98, 25)
        difference = np.quantile(ours, quantiles) - np.quantile(theirs, quantiles)
        assert np.abs(difference).max() < 0.02 * max(width, height)


def test_if_no_draw_fits_the_largest_box_of_an_allowed_aspect_ratio_is_used() -> None:
    boxes, _ = RECIPES["imagenet"].training_boxes(np.array([4000, 30]), np.array([30, 4000]), np.full((2, 23), 0.99))
    assert boxes[:, 2:].tolist() == [[40, 30], [30, 40]]


def test_an_unknown_recipe_is_an_error_that_lists_the_available_ones() -> None:
    with pytest.raises(DataError, match=r"'cifra10'.*cifar10, cifar100, clothing1m"):
        find_recipe("cifra10")


def test_the_draws_of_a_sample_do_not_depend_on_the_rest_of_the_batch() -> None:
    index = np.array([5, 2**40, 7, 0])
    together = uniforms(3, 4, index, 1)
    for position, sample in enumerate(index):
        assert np.array_equal(uniforms(3, 4, np.array([sample]), 1)[0], together[position])


def test_no_two_purposes_share_random_numbers() -> None:
    index = np.arange(50)
    draws = [
        uniforms(seed, epoch, index, view, which)
        for seed in (0, 1)
        for epoch in (0, 1, 17)
        for view in (0, 1)
        for which in (GEOMETRY, POLICY)
    ]
    values = np.concatenate([draw.reshape(-1) for draw in draws])
    assert len(np.unique(values)) > 0.999 * len(values)  # 32 bits: a few may coincide by chance
    assert 0 <= values.min() < values.max() < 1


def test_the_draws_are_philox_words_of_the_documented_counter() -> None:
    """A saved run resumes with these draws, so they must never change silently."""
    import torch

    words = philox(9, *(torch.tensor([word]) for word in (1, 77, 0, 2 + 4 * (1 + 4 * 6))))
    assert uniforms(9, 6, np.array([77]), 1)[0, 4:8].tolist() == [int(word) / 2**32 for word in words]


@pytest.mark.parametrize(("epoch", "view"), [(-1, 0), (2**28, 0), (0, 4), (0, -1)])
def test_epochs_and_views_that_would_share_counters_with_others_are_refused(epoch: int, view: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        uniforms(0, epoch, np.arange(3), view)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": "centre"}, "crop = 'centre'"),
        ({"size": 0}, "size = 0"),
        ({"std": (0.1, 0.0, 0.1)}, "std ="),
        ({"resize": 100}, "resize = 100: must be at least size = 224"),
        ({"area": (0.0, 1.0)}, "area ="),
        ({"aspect": (2.0, 1.0)}, "aspect ="),
    ],
)
def test_a_user_defined_recipe_is_checked(changes: dict[str, Any], message: str) -> None:
    assert find_recipe(replace(RECIPES["imagenet"], size=64, resize=72)).size == 64
    with pytest.raises(DataError, match=message):
        replace(RECIPES["imagenet"], **changes)

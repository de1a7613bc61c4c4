"""The strong view against Pillow, image by image; and that it is a pure function of its draws."""

from __future__ import annotations

import platform
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from sopdist.data.augment import policy as policy_module
from sopdist.data.augment.policy import MAX_LAYERS, OPERATIONS, POLICY_DRAWS, Policy, apply_policy

FILL = (10, 128, 250)
JUST_BELOW_ONE = 1.0 - 2.0**-53
BLENDS = {"contrast", "brightness", "color", "sharpness"}
# On other processors Pillow's compiler may fuse the multiplication and the addition of a blend.
BLEND_TOLERANCE = 0 if platform.machine() in ("x86_64", "AMD64") else 1


def pillow(name: str, pixels: np.ndarray, amount: float, fill: tuple[int, int, int] = FILL) -> np.ndarray:
    """The oracle: one operation on one image (H, W, 3)."""
    image = Image.fromarray(pixels)
    width, height = image.size
    how: dict[str, Any] = {"resample": Image.Resampling.NEAREST, "fillcolor": fill}

    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, **how)

    results = {
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "posterize": lambda: ImageOps.posterize(image, 4 - int(abs(amount) * 4)),
        "solarize": lambda: ImageOps.solarize(image, 256 - int(abs(amount) * 256)),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + 0.9 * amount),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + 0.9 * amount),
        "color": lambda: ImageEnhance.Color(image).enhance(1 + 0.9 * amount),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * amount),
        "rotate": lambda: image.rotate(30 * amount, **how),
        "shear_x": lambda: affine(1, 0.3 * amount, 0, 0, 1, 0),
        "shear_y": lambda: affine(1, 0, 0, 0.3 * amount, 1, 0),
        "translate_x": lambda: affine(1, 0, int(10 / 32 * width * amount), 0, 1, 0),
        "translate_y": lambda: affine(1, 0, 0, 0, 1, int(10 / 32 * height * amount)),
    }
    return np.asarray(results[name]())


def covered(pixels: np.ndarray, x: float, y: float, side: int, fill: tuple[int, int, int] = FILL) -> np.ndarray:
    """The oracle for Cutout."""
    height, width, _ = pixels.shape
    left, top = int(x * width) - side // 2, int(y * height) - side // 2
    out = pixels.copy()
    out[max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = fill
    return out


def pictures(height: int, width: int) -> list[np.ndarray]:
    """Images of all kinds: noise, few levels, a narrow range, ramps, constants, one different pixel."""
    rng = np.random.default_rng(height * 1000 + width)
    size = (height, width, 3)
    ramp = np.linspace(0, 255, height * width * 3).reshape(size)
    odd = np.full(size, 100)
    odd[height // 2, width // 2] = (0, 101, 255)
    made = [
        rng.integers(0, 256, size),
        rng.integers(0, 2, size) * 255,
        rng.integers(97, 119, size),
        np.minimum(rng.exponential(12.0, size), 255),
        255 - np.minimum(rng.exponential(3.0, size), 255),
        ramp,
        ramp[::-1, :, ::-1] * [0.2, 1.0, 0.7],
        odd,
        np.full(size, 0),
        np.full(size, 255),
        np.full(size, 77),
        np.broadcast_to([3, 200, 90], size),
    ]
    return [image.astype(np.uint8) for image in made]


def draws_for(name: str, magnitude: float, sign: int) -> list[float]:
    row = [0.0] * POLICY_DRAWS
    row[2:6] = [(OPERATIONS.index(name) + 0.5) / len(OPERATIONS), 0.0, magnitude, 0.25 if sign < 0 else 0.75]
    return row


def random_batch(batch: int, height: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8, generator=generator)
    images[::3] //= 3  # so that autocontrast has something to do
    return images, torch.rand(batch, POLICY_DRAWS, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("size", [(32, 32), (1, 1), (2, 2), (3, 3), (8, 8), (1, 9), (17, 40), (61, 20), (120, 160)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_bit_identical_to_pillow(name: str, size: tuple[int, int]) -> None:
    magnitudes = [0.0, 1e-9, 0.1, 0.25, 1 / 3, 0.5, 0.618, 0.75, 0.9, 0.97, JUST_BELOW_ONE]
    cases = [(image, m, sign) for image in pictures(*size) for m in magnitudes for sign in (-1, 1)]
    images = torch.from_numpy(np.stack([image for image, _, _ in cases]))
    draws = torch.tensor([draws_for(name, m, sign) for _, m, sign in cases], dtype=torch.float64)
    got = apply_policy(images, draws, Policy(layers=1, probability=1.0, cutout=0.0, fill=FILL)).numpy()
    expected = np.stack([pillow(name, image, sign * m) for image, m, sign in cases])
    difference = np.abs(got.astype(int) - expected.astype(int)).max()
    assert difference <= (BLEND_TOLERANCE if name in BLENDS else 0)


@given(
    seed=st.integers(0, 2**32),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    layers=st.integers(0, MAX_LAYERS),
    probability=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    magnitude=st.sampled_from([0.0, 0.3, 1.0]),
    cutout=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
@settings(max_examples=60)
def test_a_policy_equals_the_operations_of_pillow_in_sequence(
    seed: int, height: int, width: int, layers: int, probability: float, magnitude: float, cutout: float
) -> None:
    images, draws = random_batch(12, height, width, seed)
    policy = Policy(layers, probability, magnitude, cutout, FILL)
    got = apply_policy(images, draws, policy).numpy()
    for sample, (image, row) in enumerate(zip(images.numpy(), draws.tolist(), strict=True)):
        for which, whether, size, sign in (row[2 + 4 * i : 6 + 4 * i] for i in range(layers)):
            amount = size * magnitude * (-1 if sign < 0.5 else 1)
            if whether < probability:
                image = pillow(OPERATIONS[int(which * len(OPERATIONS))], image, amount)
        image = covered(image, row[0], row[1], int(cutout * min(height, width) + 0.5))
        # The next operation can turn a difference of one level into any difference.
        if BLEND_TOLERANCE == 0:
            np.testing.assert_array_equal(got[sample], image)


@given(st.floats(0, 1, exclude_max=True), st.sampled_from(sorted(OPERATIONS)), st.booleans())
def test_any_magnitude_is_bit_identical_to_pillow(magnitude: float, name: str, plus: bool) -> None:
    image = pictures(24, 31)[0]
    sign = 1 if plus else -1
    draws = torch.tensor([draws_for(name, magnitude, sign)], dtype=torch.float64)
    got = apply_policy(torch.from_numpy(image)[None], draws, Policy(1, 1.0, 1.0, 0.0, FILL))[0].numpy()
    difference = np.abs(got.astype(int) - pillow(name, image, sign * magnitude).astype(int)).max()
    assert difference <= (BLEND_TOLERANCE if name in BLENDS else 0)


def test_autocontrast_rounds_like_pillow_for_any_range() -> None:
    ranges = [(low, high) for low in range(0, 256, 6) for high in range(low, 256)]
    levels = np.array([np.linspace(low, high, 12).round() for low, high in ranges], dtype=np.uint8)  # (ranges, 12)
    images = np.repeat(levels, 3, axis=1).reshape(-1, 3, 4, 3)
    draws = torch.tensor([draws_for("autocontrast", 0.0, 1)] * len(images), dtype=torch.float64)
    got = apply_policy(torch.from_numpy(images), draws, Policy(1, 1.0, 1.0, 0.0)).numpy()
    np.testing.assert_array_equal(got, np.stack([pillow("autocontrast", image, 0.0) for image in images]))


@pytest.mark.parametrize("size", [(32, 32), (9, 23)])
def test_a_sample_does_not_depend_on_the_rest_of_its_batch(size: tuple[int, int]) -> None:
    images, draws = random_batch(150, *size)
    policy = Policy(probability=1.0, fill=FILL)
    together = apply_policy(images, draws, policy)
    alone = torch.cat([apply_policy(images[i : i + 1], draws[i : i + 1], policy) for i in range(len(images))])
    assert torch.equal(together, alone)


def test_permuting_the_batch_permutes_the_result() -> None:
    images, draws = random_batch(150, 16, 16)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
    policy = Policy(layers=3, fill=FILL)
    assert torch.equal(apply_policy(images[order], draws[order], policy), apply_policy(images, draws, policy)[order])


def test_the_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    images, draws = random_batch(33, 20, 12)
    expected = apply_policy(images, draws, Policy())
    for chunk in (1, 5 * 20 * 12 * 3):
        monkeypatch.setattr(policy_module, "_CHUNK", chunk)
        assert torch.equal(apply_policy(images, draws, Policy()), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draws_device", ["cpu", "cuda"])
def test_a_gpu_is_bit_identical_to_the_cpu(draws_device: str) -> None:
    images, draws = random_batch(512, 33, 47)
    policy = Policy(layers=4, probability=1.0, fill=FILL)
    on_gpu = apply_policy(images.cuda(), draws.to(draws_device), policy)
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), apply_policy(images, draws, policy))


def test_each_operation_is_equally_likely() -> None:
    image = pictures(32, 32)[6]
    shares = len(OPERATIONS)
    assert shares == 14
    for i, name in enumerate(OPERATIONS):
        rows = torch.tensor([draws_for(name, 0.6, 1)] * 2, dtype=torch.float64)
        rows[:, 2] = torch.tensor([i / shares + 1e-12, (i + 1) / shares - 1e-12], dtype=torch.float64)
        got = apply_policy(torch.from_numpy(image).expand(2, -1, -1, -1), rows, Policy(1, 1.0, 1.0, 0.0, FILL))
        assert torch.equal(got[0], got[1])
        for other in OPERATIONS:  # the expected one, and no other
            difference = np.abs(got[0].numpy().astype(int) - pillow(other, image, 0.6).astype(int)).max()
            assert (difference <= BLEND_TOLERANCE) == (other == name)


def test_operations_are_applied_with_the_given_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, POLICY_DRAWS, dtype=torch.float64, generator=generator)
    draws[:, 2] = (OPERATIONS.index("invert") + 0.5) / len(OPERATIONS)
    images = torch.zeros(4000, 1, 1, 3, dtype=torch.uint8)
    for probability in (0.0, 0.3, 0.5, 1.0):
        inverted = apply_policy(images, draws, Policy(1, probability, cutout=0.0)).eq(255).all(-1).flatten()
        assert torch.equal(inverted, draws[:, 3] < probability)
        assert abs(inverted.double().mean().item() - probability) < 0.03


@pytest.mark.parametrize("end", [0.0, JUST_BELOW_ONE])
def test_draws_at_both_ends_of_the_range_are_valid(end: float) -> None:
    images, _ = random_batch(3, 10, 13)
    draws = torch.full((3, POLICY_DRAWS), end, dtype=torch.float64)
    got = apply_policy(images, draws, Policy(MAX_LAYERS, 1.0, 1.0, 0.5, FILL)).numpy()
    name, amount = (OPERATIONS[0], 0.0) if end == 0.0 else (OPERATIONS[-1], end)
    for image, result in zip(images.numpy(), got, strict=True):
        for _ in range(MAX_LAYERS):
            image = pillow(name, image, amount)
        np.testing.assert_array_equal(result, covered(image, end, end, 5))


@pytest.mark.parametrize(("height", "width", "cutout", "side"), [(32, 32, 0.5, 16), (8, 14, 0.5, 4), (9, 7, 0.4, 3)])
def test_cutout_covers_a_square_around_any_pixel(height: int, width: int, cutout: float, side: int) -> None:
    positions = [((x + 0.5) / width, (y + 0.5) / height) for y in range(height) for x in range(width)]
    draws = torch.zeros(len(positions), POLICY_DRAWS, dtype=torch.float64)
    draws[:, :2] = torch.tensor(positions, dtype=torch.float64)
    image = np.zeros((height, width, 3), dtype=np.uint8)
    images = torch.from_numpy(image).expand(len(positions), -1, -1, -1)
    got = apply_policy(images, draws, Policy(layers=0, cutout=cutout, fill=FILL)).numpy()
    for result, (x, y) in zip(got, positions, strict=True):
        np.testing.assert_array_equal(result, covered(image, x, y, side))
    areas = (got == FILL).all(-1).sum((1, 2))
    assert areas.max() == side * side
    assert areas.min() == (side // 2) * (side // 2) if side % 2 == 0 else areas.min() >= (side // 2) ** 2
    # A pixel in the middle is covered by exactly the side * side squares whose centres are close enough.
    assert (got == FILL).all(-1).sum(0)[height // 2, width // 2] == side * side


def test_the_meaning_of_a_column_does_not_depend_on_the_policy() -> None:
    assert POLICY_DRAWS == 18
    images, draws = random_batch(64, 12, 12)
    changed = draws.clone()
    changed[:, 2 + 4 * 2 :] = 0.5  # the draws of layers that the policy does not have
    assert torch.equal(apply_policy(images, changed, Policy(layers=2)), apply_policy(images, draws, Policy(layers=2)))
    assert not torch.equal(
        apply_policy(images, changed, Policy(layers=3)), apply_policy(images, draws, Policy(layers=3))
    )


def test_the_meaning_of_a_seed_is_frozen() -> None:
    """If this fails, runs no longer get the same images as before: the order of operations or some bits changed."""
    image = (torch.arange(200 * 24 * 20 * 3) * 2654435761 % 2**32 >> 24).to(torch.uint8).view(200, 24, 20, 3)
    draws = (torch.arange(200 * POLICY_DRAWS) * 40503 % 65521).to(torch.float64).view(200, POLICY_DRAWS) / 65521
    got = apply_policy(image, draws, Policy(layers=4, probability=0.9))
    assert zlib.crc32(got.numpy().tobytes()) == 2923733864


def test_the_input_is_unchanged_and_the_output_is_a_new_tensor() -> None:
    images, draws = random_batch(40, 8, 8)
    before, draws_before = images.clone(), draws.clone()
    for policy in (Policy(probability=1.0), Policy(layers=0, cutout=0.0)):
        got = apply_policy(images, draws, policy)
        got.zero_()
        assert torch.equal(images, before)
        assert torch.equal(draws, draws_before)


def test_without_layers_and_cutout_nothing_changes() -> None:
    images, draws = random_batch(5, 8, 8)
    assert torch.equal(apply_policy(images, draws, Policy(layers=0, cutout=0.0)), images)
    assert torch.equal(apply_policy(images, draws, Policy(probability=0.0, cutout=0.0)), images)


def test_an_empty_batch_stays_empty() -> None:
    images, draws = random_batch(0, 8, 8)
    assert apply_policy(images, draws, Policy()).shape == (0, 8, 8, 3)


def test_memory_layout_does_not_matter() -> None:
    images, draws = random_batch(20, 8, 6)
    planes = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert not planes.is_contiguous()
    assert torch.equal(apply_policy(planes, draws, Policy()), apply_policy(images, draws, Policy()))


def test_invalid_images_and_draws_are_refused() -> None:
    images, draws = random_batch(4, 8, 8)
    for wrong in (images.float(), images[0], images[..., :2], images.permute(0, 3, 1, 2)):
        with pytest.raises(ValueError, match=r"images must be uint8 \(B, H, W, 3\)"):
            apply_policy(wrong, draws, Policy())
    with pytest.raises(ValueError, match=r"float32 \(4, 8, 8, 3\)"):
        apply_policy(images.float(), draws, Policy())
    for shape in ((4, 0, 8, 3), (4, 8, 0, 3), (0, 1, 20000, 3)):
        with pytest.raises(ValueError, match="images must have sides from 1 to 16384"):
            apply_policy(torch.empty(shape, dtype=torch.uint8), draws[: shape[0]], Policy())
    for wrong in (draws.float(), draws[:3], draws[:, :10], draws[0]):
        with pytest.raises(ValueError, match=r"draws must be float64 \(4, 18\)"):
            apply_policy(images, wrong, Policy())
    for value in (-1e-9, 1.0, float("nan")):
        outside = draws.clone()
        outside[2, 5] = value
        with pytest.raises(ValueError, match=r"draws must be in \[0, 1\)"):
            apply_policy(images, outside, Policy())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", -1),
        ("layers", 5),
        ("probability", 1.1),
        ("probability", float("nan")),
        ("magnitude", -0.1),
        ("magnitude", 2.0),
        ("cutout", 1.5),
        ("fill", (0, 0)),
        ("fill", (0, 0, 256)),
        ("fill", (0.5, 0.5, 0.5)),
    ],
)
def test_an_invalid_policy_is_refused_with_the_name_of_the_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"policy\.{key} = "):
        Policy(**{key: value})

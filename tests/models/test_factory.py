"""The built-in networks: they compute the documented function, and the caller's seed determines the weights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sopdist.bench.fashion_mnist import make_network
from sopdist.bench.fashion_mnist_data import generator
from sopdist.errors import ConfigError
from sopdist.models.factory import BUILTIN_MODELS
from sopdist.models.settings import ModelSettings
from tests.support.networks import count_parameters, make

torch.set_num_threads(1)


@pytest.mark.parametrize("name", BUILTIN_MODELS)
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 100), (1, 8, 2)])
def test_images_of_any_shape_become_logits_and_the_seed_determines_the_weights(
    name: str, channels: int, size: int, classes: int
) -> None:
    images = torch.randn(3, channels, size, size)
    networks = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        networks.append(make(name, channels=channels, size=size, classes=classes).eval())
    one, same, other = (network(images) for network in networks)
    assert one.shape == (3, classes)
    assert one.dtype == torch.float32
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_mlp_is_the_network_of_the_benchmark() -> None:
    seed, images = 3, torch.randn(7, 1, 28, 28)
    expected = make_network(seed)
    torch.manual_seed(generator(seed, "weights").initial_seed())
    network = make("mlp", channels=1, size=28)
    assert torch.equal(network(images), expected(images.flatten(1)))
    assert torch.equal(network.eval()(images), expected.eval()(images.flatten(1))), "also with the running statistics"


def test_in_small_conv_a_sample_does_not_depend_on_its_batch() -> None:
    """Any split of a batch over ranks gives the same logits, and gradients with the same sum."""
    network, images = make("small_conv", channels=1, size=8), torch.randn(6, 1, 8, 8)
    labels = torch.arange(6)

    def gradients(part: slice) -> list[Tensor]:
        network.zero_grad()
        F.cross_entropy(network(images[part]), labels[part], reduction="sum").backward()
        return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]

    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone)
    full, parts = gradients(slice(6)), [gradients(part) for part in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert len(full) == len(list(network.parameters()))
    for together, *separate in zip(full, *parts, strict=True):
        torch.testing.assert_close(together, sum(separate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "ten", "hundred"), [
    ("resnet34", 21_282_122, 21_328_292),
    ("preact_resnet18", 11_171_274, 11_217_444),
])  # fmt: skip
def test_the_paper_s_networks_have_the_known_number_of_parameters(name: str, ten: int, hundred: int) -> None:
    assert count_parameters(make(name)) == ten
    assert count_parameters(make(name, classes=100)) == hundred


def test_the_blocks_of_resnet34_are_those_of_timm() -> None:
    """timm's model has a different stem, for photographs; after the stem the two must agree."""
    network, by_timm = make("resnet34").eval(), make("timm:resnet34", size=224).eval()
    assert isinstance(by_timm.layer1, nn.Module)
    stages = [by_timm.layer1, by_timm.layer2, by_timm.layer3, by_timm.layer4]
    state = [value for stage in stages for value in stage.state_dict().values()]
    blocks = network.get_submodule("blocks")
    blocks.load_state_dict(dict(zip(blocks.state_dict(), state, strict=True)))
    x = torch.randn(2, 64, 16, 16)
    y = x
    for stage in stages:
        y = stage(y)
    assert y.shape == (2, 512, 2, 2)
    torch.testing.assert_close(blocks(x), y)


def preact_resnet18_by_formula(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network as formulas in terms of its weights."""

    def convolved(name: str, value: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(value, weight, stride=stride, padding=weight.shape[-1] // 2)

    def activated(name: str, value: Tensor) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return ((value - mean) / (variance + 1e-5).sqrt() * scale + shift).clamp(min=0)

    x = activated("stem.1", convolved("stem.0", x))
    for i in range(8):
        block, stride = f"blocks.{i}", 2 if i in (2, 4, 6) else 1
        a = activated(f"{block}.norm1", x)
        y = convolved(f"{block}.conv1", a, stride)
        y = convolved(f"{block}.conv2", activated(f"{block}.norm2", y))
        x = y + (a if stride == 1 else convolved(f"{block}.shortcut", a, stride))
    return x.mean((2, 3)) @ state["classifier.weight"].T + state["classifier.bias"]


def test_preact_resnet18_equals_its_formulas() -> None:
    network, images = make("preact_resnet18"), torch.randn(4, 3, 32, 32)
    network(images)  # changes the running statistics from their initial values
    state = network.state_dict()
    torch.testing.assert_close(network.eval()(images), preact_resnet18_by_formula(state, images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "size", "message"),
    [
        ("resnet34", {}, 224, r"model\.name = 'resnet34': designed for images of 32 pixels.*timm:resnet34"),
        ("preact_resnet18", {}, 65, r"at most 64, but data\.recipe makes them 65"),
        ("mlp", {"pretrained": True}, 32, r"model\.pretrained: there are no pretrained weights of mlp.*model\.weights"),
        ("small_conv", {"drop_rate": 0.5}, 32, r"model\.drop_rate = 0\.5: small_conv has no dropout"),
    ],
)
def test_unsupported_options_of_built_in_networks_are_errors(
    name: str, settings: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, size=size, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, r"model\.name: must name a network"),
        ({"name": "a", "pretrained": True, "weights": "b.pth"}, r"model\.weights = 'b\.pth': cannot be set together"),
        ({"name": "a", "drop_rate": 1.0}, r"model\.drop_rate = 1\.0: must be at least 0 and less than 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSettings(**settings)


def test_reading_a_config_and_building_a_built_in_network_does_not_import_timm() -> None:
    code = (
        "import sys, sopdist.train.config\n"
        "assert 'sopdist.models.factory' not in sys.modules\n"
        "from sopdist.models import make_model\n"
        "from sopdist.models.settings import ModelSettings\n"
        "make_model(ModelSettings('mlp'), channels=1, size=8, classes=10)\n"
        "assert not {'timm', 'torchvision', 'safetensors', 'sopdist.models.resnet34'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

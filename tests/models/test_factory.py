"""Our networks: they compute what they claim to, from weights that the caller's seed decides."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from noisy_fashion_mnist import generator, make_network
from torch import Tensor, nn
from torch.nn import functional as F

from sopdist.config import ConfigError
from sopdist.models.factory import OURS
from sopdist.models.settings import ModelSettings

from .networks import make, parameters

torch.set_num_threads(1)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 10), (3, 32, 100), (1, 8, 2)])
def test_images_of_any_kind_become_logits_and_the_seed_decides_the_weights(
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
    theirs = make_network(seed)
    torch.manual_seed(generator(seed, "weights").initial_seed())
    ours = make("mlp", channels=1, size=28)
    assert torch.equal(ours(images), theirs(images.flatten(1)))
    assert torch.equal(ours.eval()(images), theirs.eval()(images.flatten(1))), "also with the running statistics"


def test_a_sample_of_small_conv_does_not_feel_its_batch() -> None:
    """So any cut of a batch over ranks gives the same logits, and gradients that add up to the same sum."""
    network, images = make("small_conv", channels=1, size=8), torch.randn(6, 1, 8, 8)
    labels = torch.arange(6)

    def gradients(of: slice) -> list[Tensor]:
        network.zero_grad()
        F.cross_entropy(network(images[of]), labels[of], reduction="sum").backward()
        return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]

    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone)
    whole, parts = gradients(slice(6)), [gradients(part) for part in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert len(whole) == len(list(network.parameters()))
    for together, *apart in zip(whole, *parts, strict=True):
        torch.testing.assert_close(together, sum(apart), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "ten", "hundred"), [
    ("resnet34", 21_282_122, 21_328_292),
    ("preact_resnet18", 11_171_274, 11_217_444),
])  # fmt: skip
def test_the_paper_s_networks_have_the_known_number_of_parameters(name: str, ten: int, hundred: int) -> None:
    assert parameters(make(name)) == ten
    assert parameters(make(name, classes=100)) == hundred


def test_the_blocks_of_resnet34_are_those_of_timm() -> None:
    """Theirs begins otherwise, for photographs; behind the stem the two must agree."""
    ours, theirs = make("resnet34").eval(), make("timm:resnet34", size=224).eval()
    assert isinstance(theirs.layer1, nn.Module)
    stages = [theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4]
    state = [value for stage in stages for value in stage.state_dict().values()]
    blocks = ours.get_submodule("blocks")
    blocks.load_state_dict(dict(zip(blocks.state_dict(), state, strict=True)))
    x = torch.randn(2, 64, 16, 16)
    y = x
    for stage in stages:
        y = stage(y)
    assert y.shape == (2, 512, 2, 2)
    torch.testing.assert_close(blocks(x), y)


def preact_resnet18_written_out(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network as formulas of its weights."""

    def convolved(name: str, value: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(value, weight, stride=stride, padding=weight.shape[-1] // 2)

    def activated(name: str, value: Tensor) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return ((value - mean) / (variance + 1e-5).sqrt() * scale + shift).clamp(min=0)

    x = activated("stem.1", convolved("stem.0", x))
    for number in range(8):
        block, stride = f"blocks.{number}", 2 if number in (2, 4, 6) else 1
        a = activated(f"{block}.norm1", x)
        y = convolved(f"{block}.conv1", a, stride)
        y = convolved(f"{block}.conv2", activated(f"{block}.norm2", y))
        x = y + (a if stride == 1 else convolved(f"{block}.shortcut", a, stride))
    return x.mean((2, 3)) @ state["classifier.weight"].T + state["classifier.bias"]


def test_preact_resnet18_computes_its_formulas() -> None:
    network, images = make("preact_resnet18"), torch.randn(4, 3, 32, 32)
    network(images)  # so that the running statistics are not those of the beginning
    state = network.state_dict()
    torch.testing.assert_close(network.eval()(images), preact_resnet18_written_out(state, images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "size", "message"),
    [
        ("resnet34", {}, 224, r"model\.name = 'resnet34': made for images of 32 pixels.*timm:resnet34"),
        ("preact_resnet18", {}, 65, r"up to 64, but data\.recipe makes them 65"),
        ("mlp", {"pretrained": True}, 32, r"model\.pretrained: there are no published weights of mlp.*model\.weights"),
        ("small_conv", {"drop_rate": 0.5}, 32, r"model\.drop_rate = 0\.5: small_conv has no dropout"),
    ],
)
def test_what_our_networks_cannot_do_is_said(name: str, settings: dict[str, Any], size: int, message: str) -> None:
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


def test_reading_a_config_and_making_one_of_ours_needs_no_timm() -> None:
    code = (
        "import sys, sopdist.train.config\n"
        "assert 'sopdist.models.factory' not in sys.modules\n"
        "from sopdist.models import make_model\n"
        "from sopdist.models.settings import ModelSettings\n"
        "make_model(ModelSettings('mlp'), channels=1, size=8, classes=10)\n"
        "assert not {'timm', 'torchvision', 'safetensors', 'sopdist.models.resnet34'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""An exported network gives the same logits in timm, sopdist.models and ONNX Runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from sopdist.data.augment.recipes import RECIPES, Recipe
from sopdist.errors import DataError
from sopdist.export.network import describe, write_network
from sopdist.export.onnx import write_onnx
from sopdist.models import load_exported, make_model
from sopdist.models.exported import Exported, read_exported
from sopdist.models.settings import ModelSettings

torch.set_num_threads(1)
NAMES = ("cat", "dog", "bär", "owl", "eel")
PHOTOS = Recipe(64, "area", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), resize=72)
GREY = RECIPES["digits"]


def make(name: str, recipe: Recipe, **settings: Any) -> tuple[nn.Module, Exported]:
    """A network with weights and batch statistics as after training, and its description."""
    torch.manual_seed(3)
    model = ModelSettings(name, **settings)
    network = make_model(model, channels=1 if recipe.grey else 3, size=recipe.size, classes=len(NAMES))
    exported = replace(describe(model, recipe, len(NAMES), NAMES), step=12, epoch=1.5)
    for norm in (module for module in network.modules() if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d)):
        norm.momentum = None  # cumulative mean: no influence of the initial values, so that logits depend on the images
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    with torch.no_grad():
        for seed in range(3):
            network.train()(images(exported, 6, seed))
    return network.eval(), exported


def images(exported: Exported, count: int = 3, seed: int = 100) -> torch.Tensor:
    return torch.randn(
        count, exported.channels, exported.size, exported.size, generator=torch.Generator().manual_seed(seed)
    )


def create_with_timm(folder: Path) -> nn.Module:
    import timm

    network: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return network.eval()


def pretrained_cfg(network: Any) -> dict[str, Any]:
    """timm's description of the network's weights."""
    known: dict[str, Any] = network.pretrained_cfg
    return known


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mlp", GREY),
        ("small_conv", GREY),
        ("preact_resnet18", RECIPES["cifar10"]),
        ("resnet34", RECIPES["cifar10"]),
        ("timm:resnet10t", PHOTOS),
        ("vit_tiny_patch16_224.augreg_in21k", PHOTOS),
    ],
)
def test_sopdist_models_loads_an_exported_network_bit_for_bit(tmp_path: Path, name: str, recipe: Recipe) -> None:
    network, exported = make(name, recipe)
    written = write_network(tmp_path, network, exported)
    assert {path.name for path in written} == {path.name for path in tmp_path.iterdir()}
    loaded = load_exported(tmp_path)
    assert not loaded.training
    with torch.inference_mode():
        assert torch.equal(loaded(images(exported)), network(images(exported)))
    found = read_exported(tmp_path)
    assert found == exported
    assert found.label_names == list(NAMES)
    assert (found.step, found.epoch) == (12, 1.5)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("resnet10t", PHOTOS),
        ("timm:resnet10t", GREY),  # one channel
        ("vit_tiny_patch16_224", PHOTOS),  # at another image size than published
        ("deit_tiny_distilled_patch16_224", PHOTOS),  # two classifiers
        ("efficientnet_b0.ra_in1k", PHOTOS),
    ],
)
def test_timm_loads_an_exported_network_bit_for_bit(tmp_path: Path, name: str, recipe: Recipe) -> None:
    network, exported = make(name, recipe)
    write_network(tmp_path, network, exported)
    loaded = create_with_timm(tmp_path)
    with torch.inference_mode():
        assert torch.equal(loaded(images(exported)), network(images(exported)))


def test_timm_finds_the_preprocessing_and_the_class_names(tmp_path: Path) -> None:
    network, exported = make("resnet10t", PHOTOS, drop_rate=0.25)
    write_network(tmp_path, network, exported)
    loaded = create_with_timm(tmp_path)
    import timm

    shown = timm.data.resolve_data_config(model=loaded)
    assert tuple(shown["input_size"]) == (3, 64, 64)
    assert (tuple(shown["mean"]), tuple(shown["std"])) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert (shown["interpolation"], shown["crop_mode"]) == ("bilinear", "center")
    assert int(64 / shown["crop_pct"]) == 72  # the size to which timm resizes the short side
    assert list(pretrained_cfg(loaded)["label_names"]) == list(NAMES)
    assert loaded.drop_rate == 0.25
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["global_pool"] == "avg"
    assert (config["architecture"], config["num_classes"]) == ("resnet10t", 5)


def test_the_config_says_nothing_about_timm_s_published_weights(tmp_path: Path) -> None:
    """Their URL, test size, licence and label offset belong to other weights."""
    network, exported = make("resnet10t", PHOTOS)
    pretrained_cfg(network).update({"label_offset": 1, "test_input_size": (3, 288, 288), "license": "mit", "tag": "x"})
    write_network(tmp_path, network, exported)
    pretrained = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    unwanted = {"url", "hf_hub_id", "label_offset", "test_input_size", "test_crop_pct", "license", "tag"}
    assert not unwanted & pretrained.keys()
    with torch.inference_mode():
        assert torch.equal(create_with_timm(tmp_path)(images(exported)), network(images(exported)))


def test_an_image_that_is_resized_without_cropping_has_crop_mode_squash(tmp_path: Path) -> None:
    network, exported = make("resnet10t", RECIPES["cifar10"])
    write_network(tmp_path, network, exported)
    pretrained = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert (pretrained["crop_mode"], pretrained["crop_pct"]) == ("squash", 1.0)


def test_a_network_from_a_hub_is_named_by_its_architecture(tmp_path: Path) -> None:
    """So that loading it needs no hub."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "out").mkdir()
    network, exported = make("resnet10t", PHOTOS)
    write_network(tmp_path / "hub", network, exported)
    again, described = make(f"local-dir:{tmp_path / 'hub'}", PHOTOS)
    assert described.name == "timm:resnet10t"
    write_network(tmp_path / "out", again, described)
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    with torch.inference_mode():
        assert torch.equal(load_exported(tmp_path / "out")(images(described)), again(images(described)))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mlp", GREY),
        ("small_conv", GREY),
        ("preact_resnet18", RECIPES["cifar10"]),
        ("resnet10t", PHOTOS),
        ("vit_tiny_patch16_224", PHOTOS),
    ],
)
def test_onnx_runtime_gives_torch_s_logits_for_any_batch_size(tmp_path: Path, name: str, recipe: Recipe) -> None:
    network, exported = make(name, recipe)
    assert write_onnx(tmp_path, network, exported) == [tmp_path / "model.onnx"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for count in (1, 2, 5):
        given = images(exported, count)
        (logits,) = session.run(["logits"], {"images": given.numpy()})
        with torch.inference_mode():
            wanted = network(given).numpy()
        assert logits.shape == (count, len(NAMES))
        assert np.abs(logits - wanted).max() < 1e-5
    assert wanted.std(axis=0).min() > 1e-2  # the logits depend on the images


def test_an_onnx_file_describes_its_input_and_reveals_nothing_about_the_machine(tmp_path: Path) -> None:
    network, exported = make("resnet10t", PHOTOS)
    write_onnx(tmp_path, network, exported)
    metadata = onnxruntime.InferenceSession(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(metadata["mean"]) == [0.4, 0.5, 0.6]
    assert json.loads(metadata["std"]) == [0.2, 0.3, 0.4]
    assert json.loads(metadata["label_names"]) == list(NAMES)
    assert (metadata["size"], metadata["resize"], metadata["name"], metadata["step"]) == (
        "64",
        "72",
        "timm:resnet10t",
        "12",
    )
    assert "divided by std" in metadata["images"]
    content = (tmp_path / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert str(Path.home()).encode() not in content


def test_weights_that_are_too_large_for_one_onnx_file_go_to_a_second_one(tmp_path: Path) -> None:
    network, exported = make("small_conv", GREY)
    written = write_onnx(tmp_path, network, exported, limit=1000)
    assert [path.name for path in written] == ["model.onnx.data", "model.onnx"]
    assert written[0].stat().st_size > 200_000 > written[1].stat().st_size
    (logits,) = onnxruntime.InferenceSession(written[1]).run(["logits"], {"images": images(exported).numpy()})
    with torch.inference_mode():
        assert np.abs(logits - network(images(exported)).numpy()).max() < 1e-5
    assert write_onnx(tmp_path, network, exported) == [tmp_path / "model.onnx"]
    assert not written[0].exists()  # it is not used any more


def test_exporting_does_not_change_the_network(tmp_path: Path) -> None:
    network, exported = make("mlp", GREY)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    write_onnx(tmp_path, network, exported)
    write_network(tmp_path, network, exported)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_loading_one_of_our_networks_needs_neither_the_checkpoint_code_nor_timm(tmp_path: Path) -> None:
    network, exported = make("small_conv", GREY)
    write_network(tmp_path, network, exported)
    program = (
        "import sys; sys.modules['timm'] = None\n"
        "from sopdist.models import load_exported\n"
        f"print(sum(p.numel() for p in load_exported({str(tmp_path)!r}).parameters()))\n"
        "assert not [name for name in sys.modules if name.startswith(('sopdist.checkpoint', 'sopdist.train'))]"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == str(sum(p.numel() for p in network.parameters())), ended.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9, "version": "7.1"}, r"config\.json: format = 9: this sopdist reads 1; use sopdist 7\.1"),
        ({"name": "timm:hf-hub:someone/something"}, r"name = 'timm:hf-hub:someone/something': must be one of mlp"),
        ({"name": "../mlp"}, r"name = '\.\./mlp': must be one of mlp"),
        ({"classes": 6}, r"label_names: must have 6 entries, found 5"),
        ({"classes": 6, "label_names": None}, r"model\.safetensors: not the weights of small_conv with 6 classes"),
        ({"mean": [0.1, 0.2, 0.3]}, r"mean, std: must have 1 entries"),
        ({"size": 0}, r"size = 0"),
        ({"channels": "one"}, r"config\.json: sopdist\.channels = 'one': expected integer"),
        ({"colour": True}, r"config\.json: sopdist\.colour: no such key"),
    ],
)
def test_a_bad_config_is_refused_by_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    network, exported = make("small_conv", GREY)
    write_network(tmp_path, network, exported)
    tree = json.loads((tmp_path / "config.json").read_text())
    tree["sopdist"] |= change
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=message):
        load_exported(tmp_path)


def test_a_folder_that_is_not_an_export_or_is_damaged_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: cannot be read: .*No such file"):
        load_exported(tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    with pytest.raises(DataError, match=r"config\.json: was not written by `sopdist checkpoint export`"):
        load_exported(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: cannot be read"):
        load_exported(tmp_path)
    network, exported = make("small_conv", GREY)
    write_network(tmp_path, network, exported)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"model\.safetensors: cannot be read"):
        load_exported(tmp_path)

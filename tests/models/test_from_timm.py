"""timm models: by name, and with a helpful error if the name, timm or the pretrained weights are missing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sopdist.errors import ConfigError
from tests.support.networks import count_parameters, make

torch.set_num_threads(1)
MAKE_RESNET18 = (
    "from sopdist.models import make_model\n"
    "from sopdist.models.settings import ModelSettings\n"
    "make_model(ModelSettings('resnet18', pretrained=True), channels=3, size=32, classes=10)\n"
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process, without earlier imports and definitions."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(("name", "count"), [("resnet50", 25_557_032), ("inception_resnet_v2", 55_843_464)])
def test_the_paper_s_networks_for_photographs_come_from_timm(name: str, count: int) -> None:
    network = make(name, size=227, classes=1000)
    assert count_parameters(network) == count
    assert network.eval()(torch.randn(1, 3, 227, 227)).shape == (1, 1000)


def test_channels_classes_and_dropout_are_passed_to_timm() -> None:
    network = make("resnet10t", channels=1, classes=7, drop_rate=0.25)
    assert network.eval()(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert network.drop_rate == 0.25


def test_a_transformer_is_built_for_the_size_of_the_images() -> None:
    """It has one position embedding per patch: 14 x 14 at 224 pixels, 2 x 2 at 32."""
    for name in ("vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k"):
        assert make(name).eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnte50", r"model\.name = 'resnte50': no built-in or timm model .* did you mean resnet50"),
        ("smallconv", r"did you mean small_conv"),
        ("timm:mlp", r"model\.name = 'timm:mlp': no built-in or timm model"),
        ("qqqqqq", r"built-in models: mlp, small_conv, cnn9, resnet34, preact_resnet18"),
        ("resnet50.nowhere", r"model\.name = 'resnet50\.nowhere': timm cannot build it .*\(.*nowhere"),
        ("nowhere:resnet50", r"model\.name = 'nowhere:resnet50': timm cannot build it"),
    ],
)
def test_an_unknown_name_is_an_error_that_suggests_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name)


def test_without_timm_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    with pytest.raises(ConfigError) as error:
        make("resnet50")
    assert "model.name = 'resnet50': not a built-in model (mlp, small_conv, cnn9, resnet34, preact_resnet18)" in str(
        error.value
    )
    assert "and timm cannot be imported (ModuleNotFoundError: " in str(error.value)
    assert str(error.value).endswith("pip install 'sopdist[timm]'")


def test_offline_pretrained_weights_are_an_error_that_names_the_keys(tmp_path: Path) -> None:
    result = run(MAKE_RESNET18, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "model.pretrained: cannot load the pretrained weights of resnet18 (" in last
    assert "set model.weights to the file, or set model.pretrained=false" in last


def test_pretrained_weights_are_loaded_with_a_classifier_of_the_split_s_classes(tmp_path: Path) -> None:
    """From a local folder in timm's format, because the hub is not available."""
    published = make("resnet10t", classes=7)
    import timm

    timm.models.save_for_hf(published, tmp_path, safe_serialization=True)
    network = make(f"local-dir:{tmp_path}", classes=3, pretrained=True)
    saved, loaded = published.state_dict(), network.state_dict()
    assert loaded["fc.weight"].shape == (3, 512)
    same = [name for name in saved if saved[name].shape == loaded[name].shape]
    assert set(saved) - set(same) == {"fc.weight", "fc.bias"}
    assert all(torch.equal(saved[name], loaded[name]) for name in same)


def test_both_classifiers_of_a_distilled_network_are_reinitialised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights.pth"
    name = "deit_tiny_distilled_patch16_224"
    torch.save(make(name, classes=5).state_dict(), path)
    with caplog.at_level(logging.INFO, "sopdist.models"):
        make(name, classes=3, weights=str(path))
    assert [f"the last layer, {head}, has shape (5, 192)" in caplog.text for head in ("head", "head_dist")] == [
        True,
        True,
    ]


# -- torchvision with a torch that it was not compiled for -----------------------------------------------------------

IMPORT = (
    "from sopdist.models import torchvision_import as t\nt.import_torchvision()\nt.import_torchvision()\n"
    "import torchvision\nprint('defined', len(t._defined))\n"
)


def test_operators_are_defined_only_if_torchvision_cannot_be_imported_without_them() -> None:
    plain = run("import torchvision")
    guarded = run(IMPORT + "import timm\nfrom torchvision.transforms import Compose\n")
    assert guarded.returncode == 0, guarded.stderr
    assert guarded.stdout.strip() == ("defined 0" if plain.returncode == 0 else "defined 1")


@pytest.mark.parametrize(
    ("content", "defined"),
    [
        ("", 0),
        ("import torch\ntorch.library.register_fake('torchvision::nms')(lambda dets, scores, threshold: dets)\n", 1),
    ],
)
def test_a_working_torchvision_is_left_unchanged(tmp_path: Path, content: str, defined: int) -> None:
    (tmp_path / "torchvision.py").write_text(content)
    result = run(IMPORT, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"defined {defined}"


def test_other_import_errors_of_torchvision_are_reported(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('made for another torch')\n")
    result = run(MAKE_RESNET18, PYTHONPATH=str(tmp_path))
    assert "timm cannot be imported (RuntimeError: made for another torch)" in result.stderr.splitlines()[-1]

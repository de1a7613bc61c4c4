"""Weights from a local file: everything matches, or only the classifier is not loaded, or an error names the rest."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sopdist.errors import ConfigError
from tests.support.networks import make

State = dict[str, Tensor]


def state_of(classes: int = 10, size: int = 8) -> State:
    return dict(make("mlp", channels=1, size=size, classes=classes).state_dict())


def load(path: Path, classes: int = 10) -> State:
    return make("mlp", channels=1, size=8, classes=classes, weights=str(path)).state_dict()


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "w.safetensors": save_file,
    "w.pth": torch.save,
    "w.pt": lambda state, path: torch.save({"epoch": 3, "state_dict": state}, path),
    "of-a-wrapper.pth": lambda state, path: torch.save({f"module.{name}": state[name] for name in state}, path),
    "of-a-script.pth": lambda state, path: torch.save({"model": state, "lr": 0.1}, path),
}


@pytest.mark.parametrize("file", WRITERS)
def test_saved_weights_are_loaded(tmp_path: Path, file: str) -> None:
    state = state_of()
    WRITERS[file](state, tmp_path / file)
    loaded = load(tmp_path / file)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("file", ["w.safetensors", "w.pth"])
def test_a_classifier_with_other_classes_is_not_loaded_and_that_is_logged(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(classes=1000)
    WRITERS[file](state, tmp_path / file)
    torch.manual_seed(4)
    fresh = state_of(classes=10)
    torch.manual_seed(4)
    with caplog.at_level(logging.INFO, "sopdist.models"):
        loaded = load(tmp_path / file, classes=10)
    for name in loaded:
        expected = fresh if name.startswith("classifier.") else state
        assert torch.equal(loaded[name], expected[name]), name
    (record,) = caplog.records
    assert f"model.weights = {str(tmp_path / file)!r}: the last layer, classifier, has shape (1000, 256)" in (
        record.getMessage()
    )


def test_a_file_without_a_classifier_is_loaded_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value for name, value in state_of().items() if not name.startswith("classifier.")}
    torch.save(state, tmp_path / "w.pth")
    with caplog.at_level(logging.INFO, "sopdist.models"):
        loaded = load(tmp_path / "w.pth")
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert "has no classifier, the last layer: not loaded" in caplog.text


def test_a_file_without_the_counters_of_batchnorm_is_loaded(tmp_path: Path) -> None:
    state = {name: value for name, value in state_of().items() if not name.endswith("num_batches_tracked")}
    assert len(state) == len(state_of()) - 2
    torch.save(state, tmp_path / "w.pth")
    assert torch.equal(load(tmp_path / "w.pth")["hidden1.weight"], state["hidden1.weight"])


def renamed(state: State) -> State:
    return {name.replace("hidden", "layer"): value for name, value in state.items()}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (renamed, ["2 missing in the file: hidden1.weight, hidden2.weight", "2 unknown to the network: layer1.weight"]),
        (lambda state: {**state, "extra": torch.zeros(1)}, ["1 unknown to the network: extra"]),
        (
            lambda _: state_of(size=9),
            ["1 with another shape: hidden1.weight (256, 81) in the file, (256, 64) in the network"],
        ),
        (lambda state: {f"x.{name}": state[name] for name in state}, ["10 missing in the file: ", ", ...; 14 unknown"]),
    ],
)
def test_weights_that_do_not_match_are_named(
    tmp_path: Path, change: Callable[[State], State], parts: list[str]
) -> None:
    torch.save(change(state_of()), tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"model\.weights = .*w\.pth': not the weights of this network") as error:
        load(tmp_path / "w.pth")
    for part in parts:
        assert part in str(error.value)


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_file_that_would_run_code_is_refused_and_the_code_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))):
        write({"a": Malicious(f"touch {trace}")}, tmp_path / "w.pth")
        with pytest.raises(ConfigError, match=r"w\.pth': damaged, or contains more than tensors .* could run code"):
            load(tmp_path / "w.pth")
    assert not trace.exists()


@pytest.mark.parametrize("file", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("left", [0, 5, 1000])
def test_a_truncated_file_is_an_error(tmp_path: Path, file: str, left: int) -> None:
    WRITERS[file](state_of(), tmp_path / file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:left])
    with pytest.raises(ConfigError, match=rf"model\.weights = .*{file}': (cannot be read|damaged)"):
        load(tmp_path / file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "contains no named weights"),
        ({}, "contains no named weights"),
        ({"lr": 0.1}, "'lr' is not a tensor"),
        ({3: torch.zeros(2)}, "3 is not a tensor"),
    ],
)
def test_a_file_that_contains_something_else_is_an_error(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "w.pth")


def test_a_missing_file_and_an_unsupported_format_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"w\.pth': no such file"):
        load(tmp_path / "w.pth")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"w\.onnx': weights are read from \.safetensors and \.pth, \.pt files"):
        load(tmp_path / "w.onnx")

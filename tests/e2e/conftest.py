"""Shards for runs: the digits with wrong labels, prepared as a user does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sopdist.cli import main


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,438 training and 359 test images of 8 x 8, with the label set sym-0.4-seed0: data.root of the config demo."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    assert main(["prepare", "digits", "--out", str(folder)]) == 0
    assert main(["labels", "noise", str(folder / "train"), "symmetric", "--rate", "0.4"]) == 0
    return folder

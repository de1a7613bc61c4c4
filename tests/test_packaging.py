"""A wheel has everything that sopdist needs outside the repository: all modules, the C kernels and the configs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sopdist.noise.kernels import native_kernels
from tests.support.launching import REPOSITORY

SOURCES = ("sopdist", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")
NAMES = sorted(
    path.relative_to(REPOSITORY / "configs").with_suffix("").as_posix()
    for path in (REPOSITORY / "configs").rglob("*.yaml")
)
LOAD_ALL = """
import sys
from sopdist.train.config import find_config, load
for name in sys.argv[1:]:
    print(find_config(name), load(name).run.name)
"""
Python = Callable[..., str]


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree, built without network from a copy, because setuptools writes into its source."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        source, copy = REPOSITORY / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, copy)
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("wheel", *options, "--wheel-dir", folder, folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path) -> Python:
    """Run Python in an empty folder, with the installed wheel instead of the repository; return what it prints."""
    installed, empty = wheel.parent / "installed", wheel.parent / "empty"
    pip("install", "--no-deps", "--no-index", "--target", installed, wheel)
    empty.mkdir()

    def run(*arguments: str) -> str:
        environ = os.environ | {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, cwd=empty, env=environ, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_a_wheel_has_every_module_and_config_and_the_kernels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        found = [name for name in file.namelist() if not name.startswith("sopdist-")]
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "sopdist").rglob("*.py")}
    configs = {f"sopdist/configs/{name}.yaml" for name in NAMES}
    assert {name for name in found if name.endswith(".py")} == modules
    assert {name for name in found if name.endswith(".yaml")} == configs
    assert "sopdist/py.typed" in found
    assert all(name.startswith("sopdist/") for name in found), "nothing else is installed"
    if native_kernels.is_built():  # there is a C compiler
        assert len([name for name in found if name.endswith(".so")]) == 2


def test_an_installed_package_finds_every_config_by_name(python: Python) -> None:
    found = [line.split() for line in python("-c", LOAD_ALL, *NAMES).splitlines()]
    assert [name for _, name in found] == [name.rpartition("/")[2] for name in NAMES], "of the run"
    for (path, _), name in zip(found, NAMES, strict=True):
        assert path.endswith(f"installed/sopdist/configs/{name}.yaml")


def test_an_installed_package_plans_a_run_and_describes_its_config(python: Python) -> None:
    plan = python(
        "-m", "sopdist", "plan", "--cfg", "webvision", "--world-size", "2", "--samples", "66000", "--classes", "50"
    )
    assert "66,000" in plan
    assert "data.root: " in python("-m", "sopdist", "train", "--help-config")


def test_an_installed_package_trains_with_a_config_by_name(python: Python) -> None:
    python("-m", "sopdist", "prepare", "digits", "--out", "shards/digits")
    python("-m", "sopdist", "labels", "noise", "shards/digits/train", "symmetric", "--rate", "0.4")
    assert "runs/demo is finished" in python("-m", "sopdist", "train", "--cfg", "demo", "train.max_steps=3")

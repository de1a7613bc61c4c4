"""pyproject.toml, environment.yml, requirements.lock and the installed packages agree."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="needs tomllib of Python 3.11")
ROOT = Path(__file__).parent.parent


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for line in [*project["dependencies"], *(line for extra in extras for line in extra)]]


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_environment_yml_lists_what_pyproject_declares() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip[-1] == "-e ."
    assert {str(Requirement(line)) for line in pip[:-1]} == {str(requirement) for requirement in declared()}
    assert len(pip) - 1 == len({str(requirement) for requirement in declared()})
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"python{python}" in environment["dependencies"]


def test_every_declared_package_is_locked_within_its_range() -> None:
    for requirement in declared():
        assert requirement.specifier.contains(locked()[canonicalize_name(requirement.name)]), requirement


def test_installed_versions_are_the_locked_ones() -> None:
    """Otherwise a green run would not say anything about the lock."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the lock is for Python 3.11")
    for name, version in locked().items():
        installed = re.sub(r"\+.*", "", importlib.metadata.version(name))
        assert installed == version, name


def test_make_env_installs_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r"-e '\.\[([a-z,]+)\]'", (ROOT / "Makefile").read_text())
    assert sorted(installed.split(",")) == sorted(extras)

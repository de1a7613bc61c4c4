"""Packages of the wheel: `sopdist`, and the configs of the repository as `sopdist.configs`.

Everything else is in pyproject.toml, which can find packages or map one to another folder, but not both.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["sopdist", "sopdist.*"]), "sopdist.configs"],
    package_dir={"sopdist.configs": "configs"},
)

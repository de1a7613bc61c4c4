"""Packages that only some exports need."""

from __future__ import annotations

import importlib

from ...data.errors import DataError


def need(*packages: str, what: str) -> None:
    """Import them, or say how to get them."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise DataError(
                f"--what {what}: needs {package}, which cannot be imported ({error}): pip install 'sopdist[export]'"
            ) from None

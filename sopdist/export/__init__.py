"""Export for use elsewhere: networks for timm, `sopdist.models` and ONNX, noise tables as Parquet.

Works on tensors and their meaning; does not know where they were loaded from.
"""

from __future__ import annotations

import importlib

from ..errors import DataError


def require_packages(*packages: str, what: str) -> None:
    """Import optional packages; DataError says how to install them if that fails."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise DataError(
                f"--what {what}: needs {package}, which cannot be imported ({error}): pip install 'sopdist[export]'"
            ) from None

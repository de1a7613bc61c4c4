"""sopdist: train image classifiers on noisy labels, and find out which labels are wrong."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

__all__ = ["SOP", "__version__"]
__version__ = version("sopdist")

if TYPE_CHECKING:
    from .noise import SOP
else:

    def __getattr__(name: str) -> object:
        """Import SOP on first use: it needs torch, which most commands do not."""
        if name not in ("SOP", "noise"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        noise = import_module(".noise", __name__)
        return noise if name == "noise" else noise.SOP

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

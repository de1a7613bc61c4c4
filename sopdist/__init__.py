"""sopdist: train image classifiers on wrong labels, and find out which labels are wrong."""

from importlib.metadata import version

from .noise import SOP

__all__ = ["SOP", "__version__"]
__version__ = version("sopdist")

"""The noise table and the loss that learns it; usable in any PyTorch loop, without the rest of sopdist."""

from .rates import Flow, Forecast, InactiveTableWarning, Official, Paper
from .rows import NoiseTable
from .sop import SOP

__all__ = ["SOP", "Flow", "Forecast", "InactiveTableWarning", "NoiseTable", "Official", "Paper"]

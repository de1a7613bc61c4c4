"""The SOP loss and its noise table. Usable in any PyTorch training loop, without the rest of sopdist."""

from .rates import Flow, Forecast, InactiveTableWarning, Official, Paper
from .rows import NoiseTable
from .sop import SOP

__all__ = ["SOP", "Flow", "Forecast", "InactiveTableWarning", "NoiseTable", "Official", "Paper"]

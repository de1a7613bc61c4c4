"""Checkpoints as files: how they are written by all ranks at once, found, checked and read. Knows no training.

saved = open_checkpoint(Path("runs/demo/checkpoints/step-00000690"))
saved.step, saved.network(), saved.noise()
"""

from .folder import complete_checkpoints, verify_checkpoint
from .saved import Saved, open_checkpoint

__all__ = ["Saved", "complete_checkpoints", "open_checkpoint", "verify_checkpoint"]

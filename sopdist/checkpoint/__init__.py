"""Checkpoints as files: written by all ranks at once, found, checked and read. Does not know about training.

saved = open_checkpoint(Path("runs/demo/checkpoints/step-00000690"))
saved.step, saved.network(), saved.table("noise")
"""

from .checkpoint import Checkpoint, open_checkpoint
from .folder import complete_checkpoints, verify_checkpoint

__all__ = ["Checkpoint", "complete_checkpoints", "open_checkpoint", "verify_checkpoint"]

"""Checkpoints of a run: when and what is saved, resuming, and whether a checkpoint belongs to this run."""

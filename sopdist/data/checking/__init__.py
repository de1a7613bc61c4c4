"""Checks and summaries of a split, for `sopdist verify` and `sopdist inspect`."""

"""Decoding: two backends, `cpu` and `dali`, that produce the same crops."""

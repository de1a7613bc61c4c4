"""Splits at a remote address, behind a cache on a local disk."""

"""What is raised when data is not as it should be."""

from __future__ import annotations


class DataError(Exception):
    """Wrong data, or a wish that the data cannot fulfil. The message is for a person: what, where, what to do."""


class ImageError(DataError):
    """An image that cannot be used. The message is the reason; whoever knows the shard and the key adds them."""


class StoreError(DataError):
    """A shard cannot be had: a file, the network or the server fails. No sample is to blame, so none is skipped.

    The run stops, and can be resumed.
    """


class ShardError(StoreError):
    """A shard's file is missing, or not the one that the manifest means."""

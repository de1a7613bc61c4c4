"""Errors that users can fix. Any module may import this one; it imports nothing.

The message says what is wrong, where, and what to do. Any other exception is a bug.
"""

from __future__ import annotations


class UserError(Exception):
    """Invalid input from a user; commands print its message without a traceback."""


class ConfigError(UserError):
    """An invalid config. The message names the key, the value and what is allowed."""


class DataError(UserError):
    """Invalid data or files, or a request that the data cannot fulfil."""


class ImageError(DataError):
    """An image that cannot be used. The message is the reason; the caller adds the shard and the key."""


class StoreError(DataError):
    """A shard cannot be read: a file, the network or the server fails.

    The samples are not at fault, so none is skipped. The run stops, and can be resumed.
    """


class ShardError(StoreError):
    """A file of a shard is missing, or does not match the manifest."""

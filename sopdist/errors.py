"""What is raised when a person has to do something about it. Imported by everybody, imports nobody.

The message is for a person: what is wrong, where, and what to do. Anything else that is raised is a bug.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what a user gave us; commands print its message without a traceback."""


class ConfigError(UserError):
    """A wrong config. The message names the key, the value and what is allowed."""


class DataError(UserError):
    """Wrong data or files, or a request that the data cannot fulfil."""


class ImageError(DataError):
    """An image that cannot be used. The message is the reason; whoever knows the shard and the key adds them."""


class StoreError(DataError):
    """A shard cannot be read: a file, the network or the server fails. No sample is to blame, so none is skipped.

    The run stops, and can be resumed.
    """


class ShardError(StoreError):
    """A shard's file is missing, or not the one that the manifest means."""

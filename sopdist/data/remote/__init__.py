"""Remote splits, read through a cache on a local disk."""

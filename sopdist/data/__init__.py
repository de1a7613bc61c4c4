"""Data: from images on disk to shards, label sets, the plan of an epoch, and batches."""

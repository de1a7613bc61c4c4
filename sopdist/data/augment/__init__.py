"""Augmentation: crops, the strong view, and the random numbers behind both."""

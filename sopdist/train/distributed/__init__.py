"""Ranks: launch environment, communication, stop requests, and detection of dead ranks. Independent of training."""

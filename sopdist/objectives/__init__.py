"""Objectives: what the network is trained to minimise, one file each, one interface (`base.py`)."""

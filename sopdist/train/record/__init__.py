"""The records of a run: its folder, metrics, W&B, and the list of suspects."""

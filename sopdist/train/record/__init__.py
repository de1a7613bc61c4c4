"""What a run writes down: its folder, metrics, W&B, and the list of suspects."""

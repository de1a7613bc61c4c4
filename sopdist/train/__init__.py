"""Training: the only part that knows data, noise table and network at once."""

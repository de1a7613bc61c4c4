"""From encoded images to pixels: two backends, `cpu` and `dali`, that cut the same crops."""

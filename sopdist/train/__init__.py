"""Training: the only package that brings data, method and network together."""

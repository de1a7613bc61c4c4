"""Benchmarks behind `sopdist bench`. Each one measures sopdist and a baseline in the same run."""

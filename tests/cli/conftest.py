"""Fixtures with a trained run for the tests in this folder."""

from tests.support.trained_run import run_copy, sopdist, workspace

__all__ = ["run_copy", "sopdist", "workspace"]

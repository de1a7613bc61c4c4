"""docs/theory.md quotes the verdicts of its figures."""

import json
from pathlib import Path

import pytest

from sopdist.cli import THEORY

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "theory.md").read_text()


@pytest.mark.parametrize("name", list(THEORY))
def test_the_docs_quote_the_verdict_of_each_figure(name: str) -> None:
    found = json.loads((DOCS / "figures" / f"{name}.json").read_text())
    assert found["settings"]["quick"] is False
    assert found["settings"]["seed"] == 0
    assert found["verdict"] in " ".join(TEXT.replace("\n> ", "\n").split())
    assert f"(figures/{name}.png)" in TEXT
    for suffix in (".png", ".svg", ".csv"):
        assert (DOCS / "figures" / f"{name}{suffix}").exists()

"""The list of suspects, read back as a spreadsheet would."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from sopdist.methods import Readout
from sopdist.train.record.suspects import write_suspects


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_suspects_are_sorted_by_score_and_samples_never_visited_are_omitted(tmp_path: Path) -> None:
    scores = np.array([0.5, -np.inf, 3.0, 3.0, 0.1], np.float32)
    flags = np.array([False, False, True, False, False])
    given, proposed = np.array([0, 1, 1, 0, 2]), np.array([0, 1, 2, 0, 2])
    readout = Readout(scores, flags, proposed, np.isfinite(scores))
    write_suspects(tmp_path / "all.csv", readout, given, ("cat", "a, dog", "owl"), 100)
    found = rows_of(tmp_path / "all.csv")
    assert [int(row["index"]) for row in found] == [2, 3, 0, 4]  # ties are sorted by index
    assert found[0] == {
        "index": "2", "score": "3", "given": "1", "proposed": "2", "flagged": "1",
        "given_name": "a, dog", "proposed_name": "owl",
    }  # fmt: skip
    write_suspects(tmp_path / "two.csv", readout, given, ("cat", "a, dog", "owl"), 2)
    assert [int(row["index"]) for row in rows_of(tmp_path / "two.csv")] == [2, 3]

"""metrics.jsonl: complete lines of valid JSON, in spite of crashes and full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist.errors import DataError
from sopdist.train.record.metrics_file import MetricsFile, plain, read_lines
from tests.data.test_prepare_again import can_mount


def line(step: int, kind: str = "train", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": 0, **more}


def test_each_line_is_in_the_file_as_soon_as_it_is_added(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    for step in range(3):
        file.add(line(step))
        assert [json.loads(text)["step"] for text in file.path.read_text().splitlines()] == list(range(step + 1))


def test_values_that_json_lacks_become_null_or_plain_numbers(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    odd = {"a": float("nan"), "b": np.float32("inf"), "c": torch.tensor(2.5), "d": np.array([1, 2]), "e": Path("x")}
    file.add(line(1, **odd, f={"g": (True, None, np.int64(3), -np.inf)}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (record,) = (json.loads(text, parse_constant=refuse) for text in file.path.read_text().splitlines())
    assert [record[key] for key in "abcde"] == [None, None, 2.5, [1, 2], "x"]
    assert record["f"] == {"g": [True, None, 3, None]}


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=10,
)


@given(_JSON)
def test_any_value_survives_the_round_trip_through_json(value: Any) -> None:
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 200))
def test_a_crash_in_the_middle_of_a_line_costs_that_line_only(steps: list[int], torn: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        lines = [json.dumps(line(step, note="x" * step)) + "\n" for step in steps]
        text = "".join(lines)
        path.write_text(text[:torn])
        MetricsFile(path).add(line(99))
        survivors = [step for step, end in zip(steps, np.cumsum([len(w) for w in lines]), strict=True) if end <= torn]
        assert [record["step"] for record in read_lines(path)] == [*survivors, 99]
        assert path.read_text().count("\n") == len(survivors) + 1


def test_a_torn_line_longer_than_a_block_is_removed_too(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + '{"kind": "' + "x" * 200_000)
    MetricsFile(path)
    assert path.read_text() == json.dumps(line(1)) + "\n"
    path.write_text("x" * 200_000)
    MetricsFile(path)
    assert path.read_text() == ""


def test_a_rewound_file_equals_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted, interrupted = MetricsFile(tmp_path / "a"), MetricsFile(tmp_path / "b")
    for step in range(1, 11):
        uninterrupted.add(line(step, loss=1 / step, name="ä"))
    for step in range(1, 8):
        interrupted.add(line(step, loss=1 / step, name="ä"))
    with interrupted.path.open("a") as file:
        file.write('{"kind": "train", "st')
    resumed = MetricsFile(interrupted.path)
    resumed.rewind(5)
    for step in range(6, 11):
        resumed.add(line(step, loss=1 / step, name="ä"))
    assert resumed.path.read_bytes() == uninterrupted.path.read_bytes()


def test_lines_that_are_not_metrics_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '\n[1]\n{"step": 3}\nnonsense\n' + json.dumps(line(4)) + '\n{"kind": "a", "epoch": 1, "step": null}\n'
    )
    assert list(read_lines(path)) == [line(4)]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/m.jsonl: cannot be written: No such file or directory"):
        MetricsFile(tmp_path / "nowhere" / "m.jsonl")


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small file system")
def test_a_disk_that_fills_up_costs_one_warning_and_no_lines(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code = """
import logging, os, json
from pathlib import Path
from sopdist.train.record.metrics_file import MetricsFile, read_lines
logging.basicConfig(format="warned: %(message)s")
path = Path("run/m.jsonl")
file = MetricsFile(path)
file.add({"kind": "train", "epoch": 0, "step": 0})
filler = open("run/filler", "wb", buffering=0)
try:
    while True: filler.write(bytes(4096))
except OSError: pass
os.truncate("run/filler", os.path.getsize("run/filler") - 4096)  # half a line fits
for step in range(1, 6): file.add({"kind": "train", "epoch": 0, "step": step, "note": "x" * 9000})
content = path.read_bytes()
print("while full:", [r["step"] for r in read_lines(path)], content.endswith(b"\\n"))
os.unlink("run/filler"); filler.close()
file.add({"kind": "train", "epoch": 0, "step": 6})
print("afterwards:", [json.loads(line)["step"] for line in path.read_text().splitlines()])
"""
    script = 'mount -t tmpfs -o size=100k tmpfs run && "$@" 2>&1'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
    failed, recovered, *printed = sorted(result.stdout.splitlines(), key=lambda text: not text.startswith("warned"))
    assert failed == "warned: run/m.jsonl: cannot be written: No space left on device; the run continues and will retry"
    assert recovered == "warned: run/m.jsonl: can be written again"
    assert printed == ["while full: [0] True", "afterwards: [0, 1, 2, 3, 4, 5, 6]"]

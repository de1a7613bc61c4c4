"""metrics.jsonl: whole lines, valid JSON, through crashes and full disks."""

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


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    for step in range(3):
        file.add(line(step))
        assert [json.loads(text)["step"] for text in file.path.read_text().splitlines()] == list(range(step + 1))


def test_what_json_does_not_have_becomes_null_or_a_plain_number(tmp_path: Path) -> None:
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
def test_anything_survives_the_way_through_the_file(value: Any) -> None:
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 200))
def test_a_crash_in_the_middle_of_a_line_costs_that_line_only(steps: list[int], torn: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        whole = [json.dumps(line(step, note="x" * step)) + "\n" for step in steps]
        text = "".join(whole)
        path.write_text(text[:torn])
        MetricsFile(path).add(line(99))
        survivors = [step for step, end in zip(steps, np.cumsum([len(w) for w in whole]), strict=True) if end <= torn]
        assert [record["step"] for record in read_lines(path)] == [*survivors, 99]
        assert path.read_text().count("\n") == len(survivors) + 1


def test_a_torn_line_longer_than_a_block_is_cut_as_well(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + '{"kind": "' + "x" * 200_000)
    MetricsFile(path)
    assert path.read_text() == json.dumps(line(1)) + "\n"
    path.write_text("x" * 200_000)
    MetricsFile(path)
    assert path.read_text() == ""


def test_a_rewound_file_equals_that_of_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    through, resumed = MetricsFile(tmp_path / "a"), MetricsFile(tmp_path / "b")
    for step in range(1, 11):
        through.add(line(step, loss=1 / step, name="ä"))
    for step in range(1, 8):
        resumed.add(line(step, loss=1 / step, name="ä"))
    with resumed.path.open("a") as file:
        file.write('{"kind": "train", "st')
    again = MetricsFile(resumed.path)
    again.rewind(5)
    for step in range(6, 11):
        again.add(line(step, loss=1 / step, name="ä"))
    assert again.path.read_bytes() == through.path.read_bytes()


def test_lines_that_are_not_a_runs_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '\n[1]\n{"step": 3}\nnonsense\n' + json.dumps(line(4)) + '\n{"kind": "a", "epoch": 1, "step": null}\n'
    )
    assert list(read_lines(path)) == [line(4)]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/m.jsonl: cannot be written: No such file or directory"):
        MetricsFile(tmp_path / "nowhere" / "m.jsonl")


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small file system")
def test_a_disk_that_fills_up_costs_one_warning_and_no_line_once_there_is_space_again(tmp_path: Path) -> None:
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
os.truncate("run/filler", os.path.getsize("run/filler") - 4096)  # a line fits half
for step in range(1, 6): file.add({"kind": "train", "epoch": 0, "step": step, "note": "x" * 9000})
whole = path.read_bytes()
print("while full:", [r["step"] for r in read_lines(path)], whole.endswith(b"\\n"))
os.unlink("run/filler"); filler.close()
file.add({"kind": "train", "epoch": 0, "step": 6})
print("afterwards:", [json.loads(line)["step"] for line in path.read_text().splitlines()])
"""
    script = 'mount -t tmpfs -o size=100k tmpfs run && "$@" 2>&1'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
    full, again, *printed = sorted(result.stdout.splitlines(), key=lambda text: not text.startswith("warned"))
    assert full == "warned: run/m.jsonl: CANNOT BE WRITTEN: No space left on device; the run continues and will retry"
    assert again == "warned: run/m.jsonl: can be written again"
    assert printed == ["while full: [0] True", "afterwards: [0, 1, 2, 3, 4, 5, 6]"]

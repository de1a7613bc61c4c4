"""`sopdist bench step`: real ranks train at tiny sizes, and results follow from the measured times."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.bench.ranks import RankError, run_on_ranks
from sopdist.bench.step import Case, find_cases, judge
from sopdist.bench.step_turns import AHEAD, ALL_RANKS, CE, ON_REQUEST, StepTime, layout_of
from sopdist.bench.timing import Ratio, paired_ratio, take_turns
from sopdist.cli import main
from sopdist.train.distributed.world import World


def test_a_quick_run_writes_its_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "step.json"
    small = ["--quick", "--network", "mlp", "--batch", "6", "--samples", "100", "--classes", "3", "200"]
    assert main(["bench", "step", *small, "--out", str(out)]) == 0
    found = json.loads(out.read_text())

    assert found["environment"].keys() >= {"torch", "sopdist", "cpu_count", "load", "date"}
    assert found["sizes"]["batch"] == 6
    assert [(step["classes"], step["layout"]) for step in found["steps"]] == [(3, "dense"), (200, "slots")]
    for step in found["steps"]:
        assert step.keys() == {"classes", "layout", CE, AHEAD, ON_REQUEST}
        assert step[CE]["ratio"]["median"] == 1
        assert step[CE]["overlapped"] is None, "cross-entropy exchanges nothing"
        for name in (AHEAD, ON_REQUEST):
            assert step[name]["ratio"]["rounds"] >= 2
            assert 0 < step[name]["ratio"]["lower"] <= step[name]["ratio"]["upper"]
            assert 0 <= step[name]["blocked"] < 1
            assert 0 <= step[name]["overlapped"] <= 1
            assert step[name]["step"] > 0
    threads = found["sizes"]["threads_per_rank"]
    assert found["one_rank"].keys() == {ALL_RANKS, str(threads), str(2 * threads)}
    assert all(way["samples_per_second"] > 0 for way in found["one_rank"].values())
    assert len(found["verdicts"]) == 4
    assert all(verdict["met"] is None for verdict in found["verdicts"]), "too short to judge"

    printed = capsys.readouterr().out
    for text in (CE, AHEAD, ON_REQUEST, "2 ranks x 3", "1 rank x 6", str(out)):
        assert text in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "2", "--ranks", "3"], "--batch 2"),
        (["--batch", "16", "--samples", "20"], "--samples 20"),
        (["--network", "no_such_network"], "no_such_network"),
    ],
)
def test_impossible_sizes_are_refused_with_a_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.json"
    assert main(["bench", "step", "--quick", *arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def _steps(*totals: float, blocked: float = 0.0, in_flight: float = 0.0) -> list[StepTime]:
    return [StepTime(total, total / 2, total / 10, blocked, in_flight) for total in totals]


def test_the_slowest_rank_counts_and_ratios_compare_turns_of_the_same_round() -> None:
    # Round 2 is ten times slower for all, which does not change its ratios.
    fast: dict[str, Any] = {
        CE: [_steps(1, 1), _steps(10, 10)],
        AHEAD: [_steps(1, 1.2, blocked=0.3, in_flight=0.6), _steps(10, 12, blocked=0.3, in_flight=0.6)],
        ON_REQUEST: [_steps(1, 1), _steps(10, 10)],
    }
    slow: dict[str, Any] = {
        CE: [_steps(2, 2), _steps(20, 20)],
        AHEAD: [_steps(2, 2.2, blocked=1.1, in_flight=1.0), _steps(20, 22, blocked=1.1, in_flight=1.0)],
        ON_REQUEST: [_steps(4, 4), _steps(40, 40)],
    }
    cases = find_cases([fast, slow])
    assert cases[CE].step == pytest.approx((2 + 20) / 2)
    assert cases[AHEAD].ratio.median == pytest.approx(1.05)
    assert cases[AHEAD].cpu_ratio.median == pytest.approx(1.05)
    assert cases[ON_REQUEST].ratio.median == pytest.approx(2)
    assert cases[AHEAD].extra == pytest.approx((0.01 + 0.1) / 2), "a tenth of 2.1 - 2 and of 21 - 20"
    assert cases[AHEAD].extra_share == pytest.approx(0.055 / 5.5), "of half of (2 + 20) / 2 seconds"
    # Second steps only: 2 x 1.1 of 2.2 + 22 on the slow rank; 2.8 of 3.2 seconds in flight were blocked.
    assert cases[AHEAD].blocked == pytest.approx(2.2 / 24.2)
    assert cases[AHEAD].blocked_median == pytest.approx((1.1 / 2.2 + 1.1 / 22) / 2)
    assert cases[AHEAD].overlapped == pytest.approx(1 - 2.8 / 3.2)
    assert cases[CE].overlapped is None


def _case(ratio: float, spread: float, blocked: float, rounds: int = 30) -> dict[str, Case]:
    ratios = Ratio(ratio, ratio, ratio, ratio - spread, ratio + spread, rounds)
    return {AHEAD: Case(1.0, ratios, ratios, 0.0, 0.0, 0.0, blocked, blocked, 1.0)}


def test_verdicts_follow_from_the_measurements() -> None:
    def met(case: dict[str, Case], *, judged: bool = True) -> list[bool | None]:
        return [verdict.met for verdict in judge({10: case}, judged=judged)]

    assert met(_case(1.01, 0.005, 0.01)) == [True, True]
    assert met(_case(1.05, 0.005, 0.03)) == [False, False]
    assert met(_case(1.01, 0.05, 0.01)) == [None, True], "another run might miss it"
    assert met(_case(1.01, 0.005, 0.01, rounds=4)) == [None, True], "four rounds prove nothing"
    assert met(_case(0.7, 0.2, 0.01)) == [None, True], "a machine on which SOP seems to save time is too noisy"
    assert met(_case(1.01, 0.005, 0.01), judged=False) == [None, None]
    noisy = str(judge({10: _case(1.01, 0.05, 0.01)}, judged=True)[0])
    assert "too busy to decide" in noisy
    assert "0.960 to 1.060" in noisy


def test_the_layout_with_smaller_rows_is_measured() -> None:
    assert [layout_of(classes) for classes in (2, 10, 100, 1000)] == ["dense", "dense", "slots", "slots"]


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=30))
def test_a_paired_ratio_lies_among_its_rounds(pairs: list[tuple[float, float]]) -> None:
    over, under = zip(*pairs, strict=True)
    ratio = paired_ratio(over, under)
    smallest, largest = min(a / b for a, b in pairs), max(a / b for a, b in pairs)
    bounds = [smallest, ratio.lower, ratio.median, ratio.upper, largest]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(bounds))
    assert smallest <= ratio.median_from * (1 + 1e-9)
    assert ratio.median_from <= ratio.median_to <= largest * (1 + 1e-9)
    assert ratio.rounds == len(pairs)


def test_more_rounds_narrow_the_median() -> None:
    few, many = ([1.0, 1.1, 0.9, 1.05, 0.95] * repeats for repeats in (1, 20))
    widths = [ratio.median_to - ratio.median_from for ratio in (paired_ratio(x, [1.0] * len(x)) for x in (few, many))]
    assert widths[1] < widths[0] / 2


def _turns(world: World, seconds: float) -> dict[str, list[int]]:
    calls: list[str] = []

    def turn(name: str) -> int:
        time.sleep(0.001 * world.rank)  # ranks with different clocks must still stop after the same round
        calls.append(name)
        return len(calls)

    candidates = {name: (lambda name=name: turn(name)) for name in ("a", "b")}
    return take_turns(world, candidates, seconds=seconds, min_rounds=3, title="turns")


def test_ranks_take_the_same_turns_and_skip_the_first_round() -> None:
    first, second = run_on_ranks(_turns, 0.1, 2, timeout=100)
    assert first == second
    assert len(first["a"]) == len(first["b"]) >= 3
    assert sorted(first["a"] + first["b"]) == list(range(3, 2 * len(first["a"]) + 3)), "all turns from the third on"


def _die(world: World, how: str) -> None:
    if world.rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and how == "raise":
        raise ZeroDivisionError("no such number")
    if how == "hang":
        time.sleep(1000)
    world.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "rank 1 of 2 failed.*SIGKILL"),
        ("raise", "(?s)rank 1 of 2 failed.*no such number"),
        ("hang", "did not finish within 5 s"),
    ],
)
def test_a_failing_rank_stops_the_benchmark_with_a_message(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_on_ranks(_die, how, 2, timeout=5.0 if how == "hang" else 100.0)

"""Simulated visits of one label: the update rules against their formulas."""

import math

import numpy as np
import pytest

from sopdist.theory.visits import RULES, Rule, Trace, simulate, summarise

PHASES = (50, 15, 20)


def rule(family: str, text: str) -> Rule:
    return next(rule for rule in RULES if (rule.family, rule.text) == (family, text))


@pytest.mark.parametrize("visits", [2, 4, 8])
def test_flow_is_the_solution_of_its_differential_equation(visits: int) -> None:
    """dq/dt = 8 q (h - q) over the time of a visit, T / 8 with T = ln(1e16) / visits: many small steps in float64."""
    squares = simulate(rule("flow", f"visits = {visits}"), PHASES, 1, seed=3)[:, 0]
    span, steps = math.log(1e16) / visits, 20_000
    q = squares[0]
    for number, contradicted in enumerate([True] * 10 + [False] * 5):
        row = number + 1 if contradicted else PHASES[0] + number - 9
        if row == PHASES[0] + 1:
            q = squares[PHASES[0]]
        for _ in range(steps):
            middle = q + span / steps / 2 * q * (contradicted - q)
            q += span / steps * middle * (contradicted - middle)
        assert squares[row] == pytest.approx(q, rel=2e-3)


def test_a_label_is_flagged_after_about_the_requested_number_of_visits() -> None:
    for visits in (2, 4, 8):
        found = summarise(Trace(RULES[0], simulate(rule("flow", f"visits = {visits}"), PHASES, 40, seed=0)), PHASES)
        assert visits <= found["visits_until_active"] <= visits + 1


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.5, 2.5])
@pytest.mark.parametrize("family", ["euler", "clamp"])
def test_euler_steps_match_the_formulas(family: str, gain: float) -> None:
    squares = simulate(rule(family, f"4 step = {gain:g}"), PHASES, 1, seed=1)[:, 0]
    v = math.sqrt(squares[0])
    for number in range(1, sum(PHASES) + 1):
        contradicted = not PHASES[0] < number <= PHASES[0] + PHASES[1]
        if family == "euler":
            v = min(1.0, max(-1.0, v + gain * v * (contradicted - v * v)))
        elif v * v <= 1:
            v += gain * v * (contradicted - v * v)
        if gain < 2 or number <= PHASES[0]:  # past 2 an Euler step is chaotic
            assert squares[number] == pytest.approx(v * v, rel=1e-3, abs=1e-30)


def test_the_course_of_a_label_after_the_network_agrees_with_it() -> None:
    traces = [Trace(rule, simulate(rule, PHASES, 3, seed=0)) for rule in RULES]
    found = {(trace.rule.family, trace.rule.text): summarise(trace, PHASES) for trace in traces}
    for (family, text), numbers in found.items():
        assert numbers["lost"] == ((family, text) == ("euler", "4 step = 1")), (family, text)
        stuck = text == "4 step = 2.5" or (family == "clamp" and text != "4 step = 0.5")
        assert numbers["stuck"] == stuck, (family, text)
        if not numbers["lost"]:
            assert numbers["visits_until_active_again"] is not None
    assert found["euler", "4 step = 1"]["visits_until_active_again"] is None


def test_a_label_that_is_never_flagged_has_no_number_of_visits() -> None:
    squares = np.full((sum(PHASES) + 1, 2), 1e-16)
    assert summarise(Trace(RULES[0], squares), PHASES)["visits_until_active"] is None

"""The three update rules against independent integrations and the published formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sopdist import SOP
from sopdist.noise import Flow, Official, Paper
from sopdist.noise.kernels.facts import Facts
from sopdist.noise.kernels.reference import update_rows
from sopdist.noise.rates import Step
from sopdist.noise.rows import NoiseTable
from tests.support import oracle


def visit_once(q: float, contradicted: bool, step: Step) -> float:
    """v^2 of one entry after one visit that does or does not predict its class against the label."""
    table = NoiseTable(1, 3, layout="dense")
    table.v[0, 1] = math.sqrt(q)
    zero = torch.zeros(1)
    facts = Facts(torch.tensor([1 if contradicted else 0]), zero, zero, zero, zero)
    update_rows(table, torch.tensor([0]), torch.tensor([0]), facts, step)
    return float(table.v[0, 1]) ** 2


def integrate(q: float, h: int, time: float, steps: int = 200_000) -> float:
    """dq/dt = q (h - q) over `time` by small Euler steps in float64 (the factor 8 is in the unit of time)."""
    dt = time / steps
    for _ in range(steps):
        q += dt * q * (h - q)
    return q


@pytest.mark.parametrize("visits", [2.0, 4.0, 20.0])
@pytest.mark.parametrize("q", [1e-6, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("h", [0, 1])
def test_flow_is_the_exact_solution_of_the_gradient_flow(visits: float, q: float, h: int) -> None:
    step = Flow(visits).step()
    assert visit_once(q, bool(h), step) == pytest.approx(integrate(q, h, step.v), rel=3e-3)


@given(st.floats(0.01, 1e6), st.just(0.0) | st.floats(1e-30, 1), st.lists(st.booleans(), max_size=30))
def test_flow_stays_between_0_and_1_and_never_vanishes_for_any_rate(visits: float, q: float, path: list[bool]) -> None:
    step = Flow(visits).step()
    for contradicted in path:
        before, q = q, visit_once(q, contradicted, step)
        assert 0 <= q <= 1
        assert (q > 0) == (before > 0)
        if contradicted:
            assert q >= before * (1 - 1e-6)
        else:
            assert q <= before * (1 + 1e-6)


@given(st.floats(0.01, 0.99), st.booleans())
def test_flow_becomes_the_papers_step_as_the_rate_tends_to_0(q: float, contradicted: bool) -> None:
    time = 1e-3
    flow = visit_once(q, contradicted, Flow(math.log(1e16) / time).step())
    euler = visit_once(q, contradicted, Step("paper", time / 2, 0.0))  # T = 8 step, and Step.v = 4 step
    assert flow - q == pytest.approx(euler - q, rel=0.01, abs=2e-7)


def test_visits_is_the_number_of_visits_until_a_label_is_flagged() -> None:
    for visits in (1.0, 3.0, 4.0, 7.0):
        table = NoiseTable(400, 2, layout="dense", seed=3)
        labels, ones = torch.zeros(400, dtype=torch.int64), torch.ones(400)
        facts = Facts(torch.ones(400, dtype=torch.int64), ones, ones, ones, ones)
        start = table.v[:, 1].double() / 1e-8
        for _ in range(int(visits)):
            update_rows(table, torch.arange(400), labels, facts, Flow(visits).step())
        expected = start**2 / (1 + start**2)  # logit(q) has grown by ln(1e16) from q = 1e-16 start^2
        torch.testing.assert_close(table.v[:, 1].double().square(), expected, rtol=1e-4, atol=1e-7)


def test_u_follows_the_same_flow_as_v() -> None:
    table = NoiseTable(1, 2, layout="dense")
    one, step = torch.ones(1), Flow(4).step()
    q = float(table.u[0]) ** 2
    for predicted in (1, 1, 1, 1, 1, 0, 0, 1):  # the label is 0
        facts = Facts(torch.tensor([predicted]), one, one, one, one)
        update_rows(table, torch.tensor([0]), torch.tensor([0]), facts, step)
        q = q / (q + (1 - q) * math.exp(-step.v)) if predicted else q / (1 + step.v * q)
        assert float(table.u[0]) ** 2 == pytest.approx(q, rel=1e-5)


def published_steps(
    batches: list[tuple[Tensor, Tensor, Tensor]], u: Tensor, v: Tensor, rates: Official, eps: float
) -> None:
    """The authors' training of u and v in float64: autograd through the loss of a batch over its size, dense SGD."""
    parameters = [u.requires_grad_(), v.requires_grad_()]
    for z, labels, index in batches:
        loss = oracle.cross_entropy(z, u[index], v[index].detach(), labels, eps, reclip=True)  # v learns by l_MSE alone
        loss = loss + oracle.squared_error(z, u[index], v[index], labels)
        gradient_u, gradient_v = torch.autograd.grad(loss.sum() / rates.batch_size, parameters)
        with torch.no_grad():
            u -= rates.lr_u * gradient_u
            v -= rates.lr_v * gradient_v


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_official_reproduces_the_published_semantics_over_many_batches(layout: str) -> None:
    """Rates large enough that squares pass 1 and stop moving."""
    samples, classes, batch = 24, 5, 8
    rates = Official(lr_u=3.0, lr_v=12.0, batch_size=batch)
    sop = SOP(samples, classes, variant="official", lr_u=3.0, lr_v=12.0, batch_size=batch, layout=layout)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (samples,), generator=generator)
    centre = torch.randn(samples, classes, generator=generator) * 3
    batches = []
    for _ in range(12):
        for index in torch.randperm(samples, generator=generator).split(batch):
            batches.append((centre[index] + torch.randn(batch, classes, generator=generator), labels[index], index))
    u, v = sop.table.u.double(), sop.table.dense_v(torch.arange(samples)).double()
    published_steps([(z.double(), y, i) for z, y, i in batches], u, v, rates, sop.eps)
    for z, y, i in batches:
        sop(z, y, i)
    assert float(v.detach().abs().max()) > 1  # squares did exceed 1
    torch.testing.assert_close(sop.table.u.double(), u.detach(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(sop.table.dense_v(torch.arange(samples)).double(), v.detach(), rtol=1e-3, atol=1e-6)


def test_paper_projects_onto_the_box() -> None:
    table = NoiseTable(1, 2, layout="dense")
    table.u[0], table.v[0, 1] = 0.9, -0.9
    one = torch.ones(1)
    facts = Facts(torch.tensor([1]), one, one, one, one)
    update_rows(table, torch.tensor([0]), torch.tensor([0]), facts, Step("paper", 50.0, 50.0))
    assert float(table.u[0]) == 1
    assert float(table.v[0, 1]) == -1


def test_running_means_are_means_over_the_visits() -> None:
    table = NoiseTable(3, 4)
    values = torch.rand(20)
    for value in values:
        facts = Facts(torch.tensor([1]), value[None], -value[None], torch.zeros(1), value[None] / 2)
        update_rows(table, torch.tensor([2]), torch.tensor([1]), facts, Flow().step())
    assert table.visits.tolist() == [0, 0, 20]
    assert float(table.mean_loss[2]) == pytest.approx(float(values.mean()), rel=1e-5)
    assert float(table.mean_margin[2]) == pytest.approx(-float(values.mean()), rel=1e-5)
    assert float(table.mean_fit[2]) == pytest.approx(float(values.mean()) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (Flow(4), 4),
        (Flow(2.5), 2.5),
        (Paper(10, 10, 0.02), 31),
        (Paper(0.1, 1, 0.002), 2312),
        (Official(1, 10, 128), 68),
        (Paper(1, 1e-6, 0.02), 2.3e8),
        (Paper(1, 0, 0.02), math.inf),
    ],
)
def test_forecast_agrees_with_a_simulation_in_numpy(rates: Flow | Paper | Official, expected: float) -> None:
    assert rates.visits_to_activate() == pytest.approx(expected, rel=0.03)
    step = rates.step()
    if step.rule != "flow" and expected < 1e4:
        v, visits = np.float64(1e-8), 0
        while v * v < 0.5:
            v, visits = v - (-v * (1 - v * v)) * step.v, visits + 1
        assert rates.visits_to_activate() == visits

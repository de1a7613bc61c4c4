"""The onset of memorisation: until then the loss is cross-entropy and rows count votes, then the table acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sopdist import SOP
from sopdist.noise.onset import CONTRADICTED, EARLIER_VISITS, STATE, UNIT, Onset, Sums
from sopdist.noise.rows import START, NoiseTable
from tests.support.ranks import run_on_ranks

N, K, B = 40, 6, 8
LAYOUTS = ("dense", "slots")


def window(fit: float, visits: int = 4_000, spread: float = 0.1) -> Sums:
    """A window whose contradicted samples have this mean p_y."""
    return Sums(visits, round(fit * UNIT * visits), round((fit**2 + spread**2) * UNIT * visits))


def opens_after(fits: list[float], visits: int = 4_000) -> int | None:
    gate = Onset("auto")
    for fit in fits:
        if gate.close_window(window(fit, visits)):
            break
    return gate.opened


# -- the decision ------------------------------------------------------------------------------------------------------

LEARNS = [0.08 - 0.03 * (1 - 0.8**j) for j in range(40)]  # the network becomes surer of what contradicts these labels
MEMORISES = [*LEARNS[:8], *(LEARNS[7] + 0.007 * j for j in range(1, 20))]  # and learns them, from window 9 on


def test_contradicted_labels_that_stay_contradicted_never_open_the_gate() -> None:
    assert opens_after(LEARNS) is None
    assert opens_after([0.05] * 40) is None


def test_contradicted_labels_that_are_learned_open_it() -> None:
    assert opens_after(MEMORISES) in (11, 12, 13)


def test_a_step_of_the_learning_rate_does_not() -> None:
    """It makes the network surer of everything at once: contradicted labels become less likely."""
    assert opens_after([*LEARNS[:12], *(0.8 * fit for fit in LEARNS[12:])]) is None


def test_a_slow_drift_does_not() -> None:
    assert opens_after([0.2 + 0.001 * j for j in range(60)]) is None


def test_few_visits_need_a_stronger_sign() -> None:
    many, few = opens_after(MEMORISES, visits=1_000_000), opens_after(MEMORISES, visits=100)
    assert many is not None
    assert few is None or few > many
    assert opens_after(MEMORISES, visits=19) is None


def test_with_many_classes_a_small_rise_is_enough() -> None:
    """The wrong label of 1000 classes starts from a probability of about 0.001."""
    tenth = [fit / 50 for fit in MEMORISES]
    gate = Onset("auto")
    opened = [gate.close_window(window(fit, 100_000, spread=0.001)) for fit in tenth]
    assert any(opened)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 19))
def test_a_gate_that_is_saved_and_loaded_anywhere_decides_the_same(series: list[float], cut: int) -> None:
    straight, resumed = Onset("auto"), Onset("auto")
    for j, fit in enumerate(series):
        if j == cut:
            state, resumed = resumed.state(), Onset("auto")
            assert len(state) == STATE
            resumed.load_state(state)
        assert straight.close_window(window(fit)) == resumed.close_window(window(fit))
        assert straight.opened == resumed.opened


def test_settings() -> None:
    assert Onset("always").opened == 0
    assert opens_after(LEARNS) is None
    never, third = Onset("never"), Onset(3)
    assert [never.close_window(window(0.9)) for _ in range(9)] == [False] * 9
    assert [third.close_window(window(0.5)) for _ in range(5)] == [False, False, True, False, False]
    for bad in ("sometimes", 0, -1, True, 1.5, None):
        with pytest.raises(ValueError, match="onset must be 'auto', 'never', 'always' or a number of epochs"):
            Onset(bad)
    with pytest.raises(ValueError, match="onset='auto' belongs to variant='flow'"):
        SOP(N, K, variant="paper", onset="auto")
    for target in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="target must be a finite number >= 0"):
            SOP(N, K, target=target)
    assert (SOP(N, K, onset="always").target, SOP(N, K, onset="auto").target) == (0.0, 0.5)


# -- before it: cross-entropy, and votes -------------------------------------------------------------------------------


def batches(epochs: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Logits, labels and indices of every step: each sample once per epoch, mostly predicted as 1 or its label."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(epochs):
        for index in torch.randperm(N, generator=generator).split(B):
            z = torch.randn(len(index), K, generator=generator)
            z[:, 1] += 2.0 * (index % 3 == 0)
            z[torch.arange(len(index)), index % K] += 2.0 * (index % 3 != 0)
            found.append((z, index % K, index))
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_before_the_onset_loss_and_gradient_are_those_of_torch_bit_for_bit(reduction: Any) -> None:
    sop = SOP(N, K, onset="never", reduction=reduction)
    for z, labels, index in batches(3):
        mine, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
        loss = sop(mine, labels, index)
        expected = F.cross_entropy(theirs, labels, reduction="none")
        expected = expected if reduction == "none" else expected.sum() / (len(z) if reduction == "mean" else 1)
        loss.sum().backward()
        expected.sum().backward()
        assert torch.equal(loss, expected)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    assert sop.onset is None


def test_a_label_far_below_the_clipping_bound_still_has_its_gradient() -> None:
    sop = SOP(N, K, onset="never")
    z = torch.zeros(1, K)
    z[0, 0] = 200.0
    z.requires_grad_()
    loss = sop(z, torch.tensor([1]), torch.tensor([0]))
    loss.backward()
    assert float(loss.detach()) == 200.0
    assert z.grad is not None
    assert z.grad[0, :2].tolist() == [1.0, -1.0]


def test_samples_that_are_skipped_have_no_part_in_loss_votes_and_windows() -> None:
    sop, clean = SOP(N, K, onset="auto"), SOP(N, K, onset="auto")
    z, labels, index = batches(1)[0]
    z[2, 0] = float("nan")
    weight = torch.ones(B)
    weight[5] = 0
    rest = torch.tensor([0, 1, 3, 4, 6, 7])
    with pytest.warns(UserWarning, match="not finite"):
        loss = sop(z, labels, index, weight=weight)
    torch.testing.assert_close(loss, clean(z[rest], labels[rest], index[rest]))
    assert torch.equal(sop.table.u, clean.table.u)
    assert torch.equal(sop.table.v, clean.table.v)
    assert torch.equal(sop._windows.sums, clean._windows.sums)


def test_windows_sum_the_visits_to_samples_that_were_contradicted_before() -> None:
    """Against sums over all visits, one at a time, in float64."""
    sop = SOP(N, K, onset="never")
    margins: dict[int, list[float]] = {sample: [] for sample in range(N)}
    for epoch in range(5):
        found = []
        for z, labels, index in batches(5)[epoch * 5 : epoch * 5 + 5]:
            sop(z.requires_grad_(), labels, index)
            p = z.detach().double().softmax(1)
            for row, (sample, label) in enumerate(zip(index.tolist(), labels.tolist(), strict=True)):
                before = margins[sample]
                if len(before) >= EARLIER_VISITS and sum(before) / len(before) < -CONTRADICTED:
                    found.append(float(p[row, label]))
                others = p[row].clone()
                others[label] = -1
                before.append(float(p[row, label] - others.max()))
        visits, fit, square = sop._windows.sums.tolist()
        assert visits == len(found) * UNIT
        assert fit / UNIT == pytest.approx(sum(found), abs=1e-5)
        assert square / UNIT == pytest.approx(sum(value**2 for value in found), abs=1e-5)
        assert (visits > 0) == (epoch >= EARLIER_VISITS)
        sop.flush()


def votes_by_hand(steps: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Sum of margins for each (sample, class), in float64."""
    votes = torch.zeros(N, K, dtype=torch.float64)
    for z, labels, index in steps:
        p = z.double().softmax(1)
        for row, (sample, label) in enumerate(zip(index.tolist(), labels.tolist(), strict=True)):
            others = p[row].clone()
            others[label] = -1
            votes[sample, int(p[row].argmax())] += abs(float(p[row, label] - others.max()))
    return votes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_start_from_their_votes(layout: Any) -> None:
    steps = batches(4)
    sop = SOP(N, K, onset=4, layout=layout)
    for z, labels, index in steps:
        sop(z.requires_grad_(), labels, index)
    votes = votes_by_hand([(z.detach(), labels, index) for z, labels, index in steps])
    label = torch.arange(N) % K
    for_label = votes.gather(1, label[:, None])[:, 0]
    best, class_ = votes.scatter(1, label[:, None], -1).max(1)
    sop.flush()  # the end of the fourth epoch
    assert sop.onset == 4
    expected = best > for_label
    assert 0 < int(expected.sum()) < N
    assert not (sop.flags(label) & ~expected).any()
    assert torch.equal(sop.table.strongest(label)[1][expected], class_[expected])
    fresh = NoiseTable(N, K, layout="dense", seed=0)
    v = sop.table.dense_v(torch.arange(N))
    start = torch.zeros(N, K, dtype=torch.bool)
    start[expected, class_[expected]] = True
    assert torch.equal(v[start], torch.full((int(expected.sum()),), START))
    assert torch.equal(v[~start], fresh.v[~start]), "all other entries have their initial values"
    assert torch.equal(sop.table.u, fresh.u.where(~expected, START))


def test_a_sample_that_was_never_visited_starts_at_zero() -> None:
    sop = SOP(500, K, onset=1)
    sop._windows.count(500)
    sop.flush()
    assert sop.onset == 1
    assert not sop.flags().any()


@pytest.mark.parametrize("onset", ["auto", 2])
def test_slots_equal_dense_bit_for_bit_before_at_and_after_the_onset(onset: Any) -> None:
    dense, slots = (SOP(N, K, onset=onset, layout=layout, slots=K) for layout in ("dense", "slots"))
    for z, labels, index in batches(6):
        one, other = z.clone().requires_grad_(), z.clone().requires_grad_()
        a, b = dense(one, labels, index), slots(other, labels, index)
        a.backward()
        b.backward()
        assert torch.equal(a, b)
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    rows = torch.arange(N)
    assert torch.equal(dense.table.dense_v(rows), slots.table.dense_v(rows))
    assert torch.equal(dense.table.u, slots.table.u)
    assert torch.equal(dense.onset_state(), slots.onset_state())


# -- a network that memorises ------------------------------------------------------------------------------------------

MEMORISED, SHARE = 120, 40  # samples; of which the first 40 have a label that the network contradicts


def memorising(epochs: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Steps of a network that contradicts some labels for four epochs, and then learns them one by one."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for epoch in range(epochs):
        for index in torch.randperm(MEMORISED, generator=generator).split(15):
            labels = index % K
            truth = torch.where(index < SHARE, (labels + 1) % K, labels)
            z = 0.1 * torch.randn(len(index), K, generator=generator)
            z[torch.arange(len(index)), truth] += 4.0
            learned = 0.7 * max(0, epoch - 3)
            z[torch.arange(len(index)), labels] += torch.where(index < SHARE, learned, 0.0)
            found.append((z, labels, index))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_that_are_learned_against_all_earlier_visits_open_the_gate(layout: Any) -> None:
    sop = SOP(MEMORISED, K, layout=layout)
    signal = []
    for z, labels, index in memorising(9):
        before = sop.epochs_observed
        sop(z.requires_grad_(), labels, index)
        sop.flush()
        signal += [sop.contradicted_fit] if sop.epochs_observed > before else []
    assert sop.onset == 5, "they are learned from the fifth epoch on"
    assert signal[:2] == [None, None], "two earlier visits are needed"
    assert all(value is not None for value in signal[2:])
    assert signal[-1] > 1.5 * min(value for value in signal if value is not None)
    labels = torch.arange(MEMORISED) % K
    started = sop.table.strongest(labels)[0] > 0.5
    assert started.nonzero()[:, 0].tolist() == list(range(SHARE))
    steady = SOP(MEMORISED, K, layout=layout)
    for z, labels, index in memorising(4) * 3:
        steady(z.requires_grad_(), labels, index)
    assert steady.onset is None, "contradicted, but not memorised"


# -- saved state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 20, 37, 38, 39, 40, 41, 42, 50, 66])
def test_a_run_that_is_cut_anywhere_resumes_exactly(cut: int) -> None:
    """There are 8 steps per epoch; the cuts are before, right at and after the onset."""
    steps = memorising(9)
    straight, resumed = SOP(MEMORISED, K), SOP(MEMORISED, K)
    for number, (z, labels, index) in enumerate(steps):
        if number == cut:
            state, resumed = resumed.state_dict(), SOP(MEMORISED, K)
            resumed.load_state_dict(state)
        assert torch.equal(straight(z.requires_grad_(), labels, index), resumed(z, labels, index))
    assert straight.onset == resumed.onset is not None
    a, b = straight.state_dict(), resumed.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_table_of_a_version_without_onset_loads_and_acts() -> None:
    old = SOP(N, K, onset="always")
    for z, labels, index in batches(5):
        old(z.requires_grad_(), labels, index)
    state = {name: value for name, value in old.state_dict().items() if not name.startswith("_windows")}
    state["table.meta"] = state["table.meta"][:-1].clone()
    state["table.meta"][0] = 1
    new = SOP(N, K, onset="auto")
    new.load_state_dict(state)
    assert new.onset == 0
    assert torch.equal(new.table.v, old.table.v)
    assert torch.equal(new.flags(), old.flags())


def test_a_state_of_an_earlier_sign_keeps_its_decision() -> None:
    """The gate had 8 numbers, and four sums: a run that was saved then continues, open or closed."""
    for opened, windows in ((-1.0, 3.0), (2.0, 3.0)):
        sop = SOP(N, K, onset="auto")
        for z, labels, index in batches(3):
            sop(z.requires_grad_(), labels, index)
        state = sop.state_dict()
        state["table.meta"] = state["table.meta"].clone()
        state["table.meta"][-1] = int(opened < 0)
        earlier = [opened, windows, 0.5, 0.4, 1.0, 0.3, 1.1, 0.9, 8.0, 8.0, 100.0, 3.0, 70.0]
        state["_windows.state"] = torch.tensor(earlier, dtype=torch.float64)
        resumed = SOP(N, K, onset="auto")
        resumed.load_state_dict(state)
        assert resumed.onset == (None if opened < 0 else int(opened))
        assert (resumed._windows.gate.windows, resumed._windows._seen) == (3, 8)


def test_a_voting_table_that_is_loaded_to_act_always_starts_from_its_votes() -> None:
    voting = SOP(N, K, onset="never")
    steps = batches(3)
    for z, labels, index in steps:
        voting(z.requires_grad_(), labels, index)
    acting = SOP(N, K, onset="always")
    acting.load_state_dict(voting.state_dict())
    acting(steps[0][0], steps[0][1], steps[0][2])
    assert acting.onset == 0
    assert acting.flags().any()
    assert float(acting.table.v.max()) <= 1


def test_the_saved_state_stays_on_the_cpu_in_float64() -> None:
    """Some devices have no float64; the rows and sums move."""
    sop = SOP(N, K, onset="auto").half().to(torch.device("cpu"))
    assert (sop._windows.state.dtype, sop._windows.sums.dtype) == (torch.float64, torch.int64)
    elsewhere = SOP(N, K, onset="auto", device="meta")
    assert (elsewhere._windows.state.device.type, elsewhere._windows.sums.device.type) == ("cpu", "meta")


# -- ranks -------------------------------------------------------------------------------------------------------------


def decides_as_one_rank(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    cases: list[tuple[Any, str, int, Any]] = [
        (2, "dense", N, batches(5)), ("auto", "slots", N, batches(5)),
        ("auto", "dense", MEMORISED, memorising(9)), ("auto", "slots", MEMORISED, memorising(9)),
    ]  # fmt: skip
    for onset, layout, samples, steps in cases:
        alone = SOP(samples, K, onset=onset, layout=layout)
        together = SOP(samples, K, onset=onset, layout=layout, process_group=group)
        for z, labels, index in steps:
            part = torch.arange(len(index)).tensor_split(ranks)[rank]
            alone(z.clone().requires_grad_(), labels, index)
            together(z[part].clone().requires_grad_(), labels[part], index[part])
        assert alone.onset == together.onset
        assert (alone.onset is not None) == (onset == 2 or samples == MEMORISED)
        assert torch.equal(alone.onset_state(), together.onset_state())
        alone.flush()
        together.flush()
        for name in ("u", "v", "mean_loss", "mean_margin", "mean_fit", "visits"):
            mine, theirs = getattr(together.table, name), getattr(alone.table, name)[rank::ranks]
            assert torch.equal(mine, theirs), name


def resumes_on_another_number(group: dist.ProcessGroup) -> None:
    """State saved by one rank in the middle of a window continues on several."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    alone = SOP(N, K, onset="auto")
    steps = batches(4)
    for z, labels, index in steps[:7]:
        alone(z.clone().requires_grad_(), labels, index)
    together = SOP(N, K, onset="auto", process_group=group)
    for name in ("u", "v", "mean_loss", "mean_margin", "mean_fit", "visits"):
        getattr(together.table, name).copy_(getattr(alone.table, name)[rank::ranks])
    together.load_onset_state(alone.onset_state())
    assert torch.equal(together.onset_state(), alone.onset_state())
    for z, labels, index in steps[7:]:
        part = torch.arange(len(index)).tensor_split(ranks)[rank]
        alone(z.clone().requires_grad_(), labels, index)
        together(z[part].clone().requires_grad_(), labels[part], index[part])
    assert torch.equal(together.onset_state(), alone.onset_state())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_decide_together_as_one_rank_does(ranks: int, tmp_path: Path) -> None:
    run_on_ranks([decides_as_one_rank, resumes_on_another_number], ranks, tmp_path)

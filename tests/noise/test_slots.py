"""The layout `slots` equals the layout `dense`, bit for bit, until a row overflows; then the reported bound holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sopdist import SOP
from sopdist.noise.kernels import Facts
from sopdist.noise.kernels.reference import update_rows
from sopdist.noise.rates import Flow, Official, Paper, Rates
from sopdist.noise.rows import NoiseTable

RATES = st.sampled_from(
    [Flow(4), Flow(1.5), Flow(30), Paper(10, 10, 0.02), Paper(30, 300, 0.02), Official(100, 300, 128)]
)


@dataclass
class Stream:
    """Random visits of a few samples: predictions stick to a few favourites, as a network's do."""

    samples: int
    classes: int
    labels: Tensor
    visits: list[tuple[Tensor, Tensor]]  # index, predicted


@st.composite
def streams(draw: st.DrawFn, *, max_classes: int = 300, favourites: int = 6) -> Stream:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**9)))
    samples, classes = draw(st.integers(1, 12)), draw(st.integers(2, max_classes))
    batch, steps = draw(st.integers(1, 12)), draw(st.integers(1, 60))
    labels = torch.randint(classes, (samples,), generator=generator)
    likes = torch.randint(classes, (samples, favourites), generator=generator)
    visits = []
    for _ in range(steps):
        index = torch.randint(samples, (batch,), generator=generator)
        which = torch.randint(favourites, (batch,), generator=generator)
        right = torch.rand(batch, generator=generator) < 0.3
        visits.append((index, torch.where(right, labels[index], likes[index, which])))
    return Stream(samples, classes, labels, visits)


def facts_for(predicted: Tensor) -> Facts:
    noise = torch.linspace(0.1, 3, len(predicted))
    return Facts(predicted, noise, -noise, noise, noise.sigmoid())


def run(stream: Stream, rates: Rates, seed: int, *, slots: int, stride: int = 1) -> tuple[NoiseTable, NoiseTable]:
    shape = (stream.samples * stride, stream.classes)
    dense, sparse = (
        NoiseTable(*shape, layout=layout, slots=slots, seed=seed, first=stride - 1, stride=stride)
        for layout in ("dense", "slots")
    )
    for index, predicted in stream.visits:
        for table in (dense, sparse):
            update_rows(table, index, stream.labels[index], facts_for(predicted), rates.step())
    return dense, sparse


@settings(max_examples=150)
@given(streams(), RATES, st.integers(0, 2**63 - 1), st.integers(1, 3))
def test_slots_equal_dense_bit_for_bit_while_nothing_is_evicted(
    stream: Stream, rates: Rates, seed: int, stride: int
) -> None:
    dense, sparse = run(stream, rates, seed, slots=8, stride=stride)
    assert sparse.evictions is not None
    assert int(sparse.evictions.sum()) == 0
    all_samples = torch.arange(stream.samples)
    assert torch.equal(sparse.dense_v(all_samples), dense.v)
    for name in ("u", "visits", "mean_loss", "mean_margin", "mean_fit"):
        assert torch.equal(getattr(sparse, name), getattr(dense, name))


@settings(max_examples=100)
@given(
    streams(max_classes=40, favourites=9), st.sampled_from([Flow(4), Flow(30), Paper(10, 10, 0.02)]), st.integers(1, 4)
)
def test_after_an_eviction_the_reported_bound_holds(stream: Stream, rates: Rates, slots: int) -> None:
    dense, sparse = (
        NoiseTable(stream.samples, stream.classes, layout=layout, slots=slots, seed=5) for layout in ("dense", "slots")
    )
    assert sparse.classes is not None
    assert sparse.evictions is not None
    assert sparse.evicted is not None
    evicted_pairs: set[tuple[int, int]] = set()  # (sample, class) pairs that were evicted
    returned: set[tuple[int, int]] = set()  # ... and predicted again: these may lag behind
    for index, predicted in stream.visits:
        for sample, class_ in zip(index.tolist(), predicted.tolist(), strict=True):
            one = torch.tensor([sample])
            before = set(sparse.classes[sample].tolist())
            for table in (dense, sparse):
                update_rows(table, one, stream.labels[one], facts_for(torch.tensor([class_])), rates.step())
            after = set(sparse.classes[sample].tolist())
            returned |= {(sample, c) for c in after - before} & evicted_pairs
            evicted_pairs |= {(sample, c) for c in before - after if c >= 0}
    v = sparse.dense_v(torch.arange(stream.samples))
    error = (v.square() - dense.v.square()).abs()
    for pair in returned:
        error[pair] = 0
    assert (error <= sparse.evicted[:, None] + 1e-13).all()
    overflowed = sorted({sample for sample, _ in evicted_pairs})
    assert (sparse.evictions > 0).nonzero()[:, 0].tolist() == overflowed
    assert torch.equal(v[sparse.evictions == 0], dense.v[sparse.evictions == 0])


def test_an_evicted_class_that_returns_catches_up_within_the_visits_setting() -> None:
    table = {layout: NoiseTable(1, 10, layout=layout, slots=2) for layout in ("dense", "slots")}
    label = torch.tensor([0])
    for class_ in [1, 1, 2, 3, 4, 1, 1, 1, 1, 1, 1]:  # 1 is evicted by 4 and then predicted steadily
        for layout in table.values():
            update_rows(layout, torch.tensor([0]), label, facts_for(torch.tensor([class_])), Flow(4).step())
    assert int(table["slots"].evictions.sum()) > 0
    q = {name: float(layout.dense_v(torch.tensor([0]))[0, 1]) ** 2 for name, layout in table.items()}
    assert q["slots"] == pytest.approx(q["dense"], abs=1e-3)


def test_the_smallest_entry_is_evicted_but_never_the_new_one() -> None:
    table = NoiseTable(1, 10, layout="slots", slots=2)
    label = torch.tensor([0])
    for class_ in (1, 1, 1, 2):
        update_rows(table, torch.tensor([0]), label, facts_for(torch.tensor([class_])), Flow(4).step())
    smallest = float(table.v.square().min())
    update_rows(table, torch.tensor([0]), label, facts_for(torch.tensor([7])), Flow(4).step())
    assert table.classes is not None
    assert sorted(table.classes[0].tolist()) == [1, 7]
    assert table.evictions is not None
    assert table.evictions.tolist() == [1]
    assert table.evicted is not None
    assert float(table.evicted[0]) == pytest.approx(smallest, rel=1e-5)


@pytest.mark.parametrize("variant", ["flow", "paper", "official"])
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_losses_and_gradients_are_the_same_bits_in_both_layouts(
    variant: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small training loop: the weights of the network are the same, not only the table."""
    monkeypatch.setenv("SOPDIST_KERNELS", kernels)
    generator = torch.Generator().manual_seed(1)
    samples, classes = 64, 40
    images, labels = (
        torch.randn(samples, 16, generator=generator),
        torch.randint(classes, (samples,), generator=generator),
    )
    order = [torch.randperm(samples, generator=generator) for _ in range(25)]
    rates = {"paper": {"alpha_v": 100.0}, "official": {"lr_u": 100.0, "lr_v": 300.0}}.get(variant, {})
    weights = {}
    for layout in ("dense", "slots"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes))
        sop = SOP(samples, classes, variant=variant, layout=layout, slots=16, **rates)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in order:
            for index in epoch.split(16):
                optimizer.zero_grad()
                sop(model(images[index]), labels[index], index).backward()
                optimizer.step()
        assert sop.evictions() == (0, 0.0)
        weights[layout] = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert float(sop.table.strongest()[0].max()) > 0.5  # the noise term was active
    assert torch.equal(weights["dense"], weights["slots"])


@settings(max_examples=40)
@given(streams(max_classes=30, favourites=9), RATES, st.integers(2, 4), st.sampled_from(["dense", "slots"]))
def test_a_table_sharded_across_owners_equals_one_table(stream: Stream, rates: Rates, owners: int, layout: str) -> None:
    """Sample i belongs to owner i mod W, which gets its facts in batch order; with duplicates and evictions."""
    make = functools.partial(NoiseTable, stream.samples, stream.classes, layout=layout, slots=3, seed=8)
    full = make()
    parts = [make(first=owner, stride=owners) for owner in range(owners)]
    for index, predicted in stream.visits:
        facts = facts_for(predicted)
        update_rows(full, index, stream.labels[index], facts, rates.step())
        for owner, part in enumerate(parts):
            mine = index % owners == owner
            if mine.any():
                local = Facts(*(fact[mine] for fact in facts))
                update_rows(part, index[mine] // owners, stream.labels[index[mine]], local, rates.step())
    for owner, part in enumerate(parts):
        for name, buffer in part.named_buffers():
            if name not in ("meta", "skipped"):
                assert torch.equal(buffer, full.get_buffer(name)[owner::owners]), name

"""SOP with a table that is sharded across ranks: real processes, gloo, and as the oracle one table that gets the joined
batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from sopdist import SOP
from sopdist.noise.kernels.facts import FACT_WIRE_BYTES
from sopdist.noise.rows import row_bytes, row_wire_bytes
from tests.support.ranks import Scenario, run_on_ranks

SAMPLES, CLASSES, BATCH = 61, 7, 12
Parts = list[NDArray[np.int64]]


def joined_batches(epochs: int = 5, *, duplicates: bool = False) -> list[NDArray[np.int64]]:
    """Batches of all ranks together: each sample once per epoch, or drawn at random with repetitions."""
    generator = np.random.default_rng(3)
    if duplicates:
        return [generator.integers(0, SAMPLES, BATCH) for _ in range(25)]
    orders = [generator.permutation(SAMPLES) for _ in range(epochs)]
    return [order[start : start + BATCH] for order in orders for start in range(0, SAMPLES, BATCH)]


def split_batch(batch: NDArray[np.int64], ranks: int, *, lopsided: bool = False) -> Parts:
    """The parts of the ranks; lopsided: everything on the last rank, nothing on the others."""
    if lopsided:
        return [batch[:0]] * (ranks - 1) + [batch]
    return np.array_split(batch, ranks)


def logits_of(batch: NDArray[np.int64], step: int) -> Tensor:
    """Logits that always contradict every third label, and the others sometimes."""
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(len(batch), CLASSES, generator=generator)
    for position, sample in enumerate(batch.tolist()):
        logits[position, (sample + 1) % CLASSES if sample % 3 == 0 else sample % CLASSES] += 4
    return logits


def labels_of(batch: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(batch % CLASSES)


def full_table(sop: SOP) -> dict[str, Tensor]:
    """Every column of a table, of all samples, on every rank."""
    sop.flush()
    table, columns = sop.table, {}
    for name in ("u", "mean_loss", "mean_margin", "mean_fit", "visits"):
        columns[name] = getattr(table, name)
    dense = table.dense_v(torch.arange(len(table)))
    columns |= {f"v{k}": dense[:, k] for k in range(table.num_classes)}
    return {
        name: column if sop.exchange is None else sop.exchange.gather_column(column) for name, column in columns.items()
    }


def compare(group: dist.ProcessGroup, batches: list[NDArray[np.int64]], *, prefetched: bool = False,
            lopsided: bool = False, micro_batches: int = 1, **settings: Any) -> None:  # fmt: skip
    """Train a sharded table and one table on the same logits; rows bit for bit, gradients to rounding."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    settings = {"onset": "always", **settings}
    with pytest.warns(UserWarning, match="has its own table"):
        one = SOP(SAMPLES, CLASSES, reduction="sum", **settings)
    sharded = SOP(SAMPLES, CLASSES, reduction="sum", process_group=group, **settings)
    parts = [split_batch(batch, ranks, lopsided=lopsided) for batch in batches]
    per_epoch = -(-SAMPLES // BATCH)
    for step, batch in enumerate(batches):
        if prefetched:
            if step % per_epoch == 0:
                sharded.flush()
                sharded.prefetch(parts[step])
            if (step + 1) % per_epoch and step + 1 < len(batches):
                sharded.prefetch(parts[step + 1])
        weight = torch.ones(len(batch))
        weight[step % len(batch)] = 0  # one sample of every batch does not count
        logits, first = logits_of(batch, step), sum(len(part) for part in parts[step][:rank])
        mine = slice(first, first + len(parts[step][rank]))
        full, part = logits.clone().requires_grad_(), logits[mine].clone().requires_grad_()
        labels, index = labels_of(batch), torch.from_numpy(batch)
        loss = one(full, labels, index, weight=weight)
        loss.backward()
        share = torch.zeros(())
        for chosen in torch.arange(len(part)).tensor_split(micro_batches):
            share = share + sharded(
                part[chosen], labels[mine][chosen], index[mine][chosen], weight=weight[mine][chosen]
            )
        share.backward()
        total = share.detach().clone()
        dist.all_reduce(total, group=group)
        torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=1e-5)
        assert full.grad is not None
        if len(part):
            assert part.grad is not None
            torch.testing.assert_close(part.grad, full.grad[mine], rtol=0, atol=0)
    ours, oracle = full_table(sharded), full_table(one)
    for name, column in oracle.items():
        assert torch.equal(ours[name], column), name
    assert oracle["visits"].max() > 3
    for reading in ("noise_scores", "visited", "flags", "noise_rate", "evictions"):
        torch.testing.assert_close(getattr(sharded, reading)(), getattr(one, reading)(), rtol=0, atol=0)
    assert one.flags().any()
    given_labels = torch.arange(SAMPLES) % CLASSES
    assert torch.equal(sharded.proposed_labels(given_labels), one.proposed_labels(given_labels))
    assert torch.equal(sharded.suspects(9), one.suspects(9))


def on_request_dense(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), layout="dense")


def on_request_slots(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), layout="slots", slots=2)


def on_request_with_duplicates(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(duplicates=True), layout="slots", slots=3)


def ranks_without_samples(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), lopsided=True)


def prefetched_dense(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), prefetched=True, layout="dense")


def prefetched_slots_in_micro_batches(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), prefetched=True, layout="slots", slots=2, micro_batches=3)


def paper_rates(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), prefetched=True, variant="paper", alpha_u=20.0, alpha_v=1000.0)


def official_rates(group: dist.ProcessGroup) -> None:
    compare(group, joined_batches(), variant="official", lr_u=50.0, lr_v=8000.0)


def means_and_terms_of_plus(group: dist.ProcessGroup) -> None:
    """The mean over the ranks of losses and gradients is that of the joined batch, with both terms of SOP+."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    with pytest.warns(UserWarning, match="has its own table"):
        one = SOP(SAMPLES, CLASSES, consistency=0.9, balance=0.5)
    sharded = SOP(SAMPLES, CLASSES, consistency=0.9, balance=0.5, process_group=group)
    batch = joined_batches()[0]
    parts = np.array_split(batch, ranks)
    first = sum(len(part) for part in parts[:rank])
    mine = slice(first, first + len(parts[rank]))
    weight = torch.linspace(0, 2, len(batch))
    logits, logits2 = logits_of(batch, 0).requires_grad_(), logits_of(batch, 1).requires_grad_()
    oracle = one(logits, labels_of(batch), torch.from_numpy(batch), logits2=logits2, weight=weight)
    oracle.backward()
    part, part2 = (view.detach()[mine].clone().requires_grad_() for view in (logits, logits2))
    index = torch.from_numpy(parts[rank])
    loss = sharded(part, labels_of(parts[rank]), index, logits2=part2, weight=weight[mine])
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    torch.testing.assert_close(mean / ranks, oracle.detach())
    for view, own in ((logits, part), (logits2, part2)):
        assert view.grad is not None
        assert own.grad is not None
        torch.testing.assert_close(own.grad / ranks, view.grad[mine], rtol=1e-5, atol=1e-7)


def evaluation_changes_nothing(group: dist.ProcessGroup) -> None:
    sharded = SOP(SAMPLES, CLASSES, process_group=group)
    before = full_table(sharded)
    batch = split_batch(joined_batches()[0], dist.get_world_size(group))[dist.get_rank(group)]
    with torch.no_grad():
        sharded(logits_of(batch, 0), labels_of(batch), torch.from_numpy(batch))
    sharded.eval()
    sharded(logits_of(batch, 0), labels_of(batch), torch.from_numpy(batch))
    after = full_table(sharded)
    assert all(torch.equal(after[name], column) for name, column in before.items())


def traffic_is_counted(group: dist.ProcessGroup) -> None:
    """Bytes computed manually: rows and facts of samples whose owner is another rank, nothing else."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sharded = SOP(SAMPLES, CLASSES, layout="slots", slots=3, process_group=group)
    parts = split_batch(joined_batches()[0], ranks)
    sharded.prefetch(parts)
    sharded(logits_of(parts[rank], 0), labels_of(parts[rank]), torch.from_numpy(parts[rank]))
    sharded.flush()
    assert sharded.exchange is not None
    stats = sharded.exchange.stats()
    rows_sent = sum(int((part % ranks == rank).sum()) for other, part in enumerate(parts) if other != rank)
    facts_sent = int((parts[rank] % ranks != rank).sum())
    assert stats.sent_bytes == rows_sent * (4 + 3 * (4 + 2)) + facts_sent * FACT_WIRE_BYTES
    assert stats.waited >= 0
    assert stats.travelled > 0


def a_batch_that_was_not_prefetched(group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size(group)
    sharded = SOP(SAMPLES, CLASSES, process_group=group)
    sharded.prefetch([np.arange(rank, rank + 1) for rank in range(ranks)])
    with pytest.raises(RuntimeError, match="1 samples were prefetched"):
        sharded(torch.zeros(3, CLASSES), torch.zeros(3, dtype=torch.long), torch.arange(3))
    with pytest.raises(ValueError, match=f"samples of {ranks} ranks"):
        sharded.prefetch([np.arange(2)])


def different_arguments(group: dist.ProcessGroup) -> None:
    """Every rank raises an error that names the difference, and the group can be used afterwards."""
    rank = dist.get_rank(group)
    for name, values in {
        "num_samples": (SAMPLES, SAMPLES + 1), "num_classes": (CLASSES, CLASSES + 1), "layout": ("dense", "slots"),
        "slots": (8, 3), "consistency": (0.0, 0.9), "balance": (0.0, 0.1), "seed": (0, 1), "variant": ("flow", "paper"),
    }.items():  # fmt: skip
        arguments: dict[str, Any] = {"num_samples": SAMPLES, "num_classes": CLASSES, name: values[min(rank, 1)]}
        with pytest.raises(ValueError, match=rf"{name} is {values[0]} on rank 0 and {values[1]} on rank 1"):
            SOP(**arguments, process_group=group)
    SOP(SAMPLES, CLASSES, process_group=group)


SCENARIOS: list[Scenario] = [
    on_request_dense, on_request_slots, on_request_with_duplicates, ranks_without_samples, prefetched_dense,
    prefetched_slots_in_micro_batches,
    paper_rates, official_rates, means_and_terms_of_plus, evaluation_changes_nothing, traffic_is_counted,
    a_batch_that_was_not_prefetched, different_arguments,
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_sharded_table_equals_one_table(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(SCENARIOS, ranks, tmp_path)


def test_a_thousand_classes_cost_less_than_a_fortieth_of_dense_rows() -> None:
    round_trip = row_wire_bytes("slots", 1000) + FACT_WIRE_BYTES
    assert round_trip == 4 + 8 * 6 + 24
    assert round_trip <= 2 * row_wire_bytes("dense", 1000) / 40
    assert row_wire_bytes("dense", 1000) < row_bytes("dense", 1000)
    sizes = [row_wire_bytes("slots", classes) for classes in (4, 100, 40_000)]
    assert all(small < large for small, large in pairwise(sizes))


def test_a_group_of_one_rank_does_not_communicate(tmp_path: Path) -> None:
    run_on_ranks([_single_rank], 1, tmp_path)


def _single_rank(group: dist.ProcessGroup) -> None:
    sop = SOP(SAMPLES, CLASSES, process_group=group)
    assert sop.exchange is None
    batch = joined_batches()[0]
    sop.prefetch([batch])
    sop(logits_of(batch, 0), labels_of(batch), torch.from_numpy(batch))
    sop.flush()
    assert int(sop.visited().sum()) == len(batch)

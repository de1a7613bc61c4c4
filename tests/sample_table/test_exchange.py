"""The exchange moves rows of any table: here of one with a float64 matrix and an int16 column, that sends rows back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sopdist.sample_table import Exchange, check_same_on_all_ranks, reshard
from sopdist.sample_table.exchange import planned_route
from tests.support.mean_table import MeanTable, visit
from tests.support.ranks import run_on_ranks

SAMPLES, CLASSES, BATCH, EPOCHS = 40, 3, 9, 3


def seen(epoch: int) -> torch.Tensor:
    """What an epoch shows of each sample, (N, K)."""
    return torch.randn(SAMPLES, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(epoch))


def train_and_compare(group: dist.ProcessGroup) -> None:
    """Rows ahead of time, new rows back: the mean over the epochs, bit for bit as one table has it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    one, sharded = MeanTable(SAMPLES, CLASSES), MeanTable(SAMPLES, CLASSES, first=rank, stride=ranks)
    exchange = Exchange(group, sharded)
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        batches = [np.array_split(order[start : start + BATCH], ranks) for start in range(0, SAMPLES, BATCH)]
        exchange.flush()
        exchange.prefetch(batches[0])
        for step, parts in enumerate(batches):
            if step + 1 < len(batches):
                exchange.prefetch(batches[step + 1])
            for micro_batch in np.array_split(parts[rank], min(2, len(parts[rank]))):
                index = torch.from_numpy(micro_batch)
                visit(sharded, exchange, index, seen(epoch)[index])
            index = torch.from_numpy(np.concatenate(parts))
            visit(one, None, index, seen(epoch)[index])
    exchange.flush()
    brute = torch.stack([seen(epoch) for epoch in range(EPOCHS)]).mean(0)
    torch.testing.assert_close(one.mean, brute)
    for k in range(CLASSES):
        assert torch.equal(exchange.gather_column(sharded.mean[:, k].contiguous()), one.mean[:, k])
    assert exchange.gather_column(sharded.visits).tolist() == [EPOCHS] * SAMPLES
    wire = CLASSES * 8 + 2
    assert exchange.stats().sent_bytes % wire == 0


def one_sample_at_a_time(group: dist.ProcessGroup) -> None:
    """A row of 26 bytes, alone in its message: its columns have other alignments than a batch's."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    table = MeanTable(SAMPLES, CLASSES, first=rank, stride=ranks)
    exchange = Exchange(group, table)
    for start in range(2 * ranks):
        index = torch.tensor([(start + rank) % ranks])
        visit(table, exchange, index, seen(0)[index])
        exchange.flush()
    for k in range(CLASSES):
        found = exchange.gather_column(table.mean[:, k].contiguous())[:ranks]
        torch.testing.assert_close(found, seen(0)[:ranks, k])


def arguments_that_differ(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    last = dist.get_world_size(group) - 1
    check_same_on_all_ranks(group, "a table", {"layout": "slots", "terms": [1, 2.5, None]})
    with pytest.raises(ValueError, match=f"a table .*same arguments.*: slots is 8 on rank 0 and 3 on rank {last}"):
        check_same_on_all_ranks(group, "a table", {"slots": 3 if rank == last else 8})


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_table_can_be_sharded(ranks: int, tmp_path: Path) -> None:
    run_on_ranks([train_and_compare, one_sample_at_a_time, arguments_that_differ], ranks, tmp_path)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 5))
def test_any_table_can_be_resharded(samples: int, before: int, after: int) -> None:
    full = MeanTable(samples, CLASSES)
    full.mean.copy_(torch.arange(samples * CLASSES, dtype=torch.float64).view(samples, CLASSES))
    parts = []
    for rank in range(before):
        part = MeanTable(samples, CLASSES, first=rank, stride=before)
        part.mean.copy_(full.mean[rank::before])
        parts.append(part.state_dict())
    for rank in range(after):
        part = MeanTable(samples, CLASSES, first=rank, stride=after)
        part.load_state_dict(reshard(parts, rank, after))
        assert torch.equal(part.mean, full.mean[rank::after])


def test_a_table_keeps_its_dtypes_and_its_samples() -> None:
    table = MeanTable(10, CLASSES, first=1, stride=3).to(torch.float16)
    assert (table.mean.dtype, table.visits.dtype) == (torch.float64, torch.int16)
    assert table.samples_of(slice(None)).tolist() == [1, 4, 7]
    with pytest.raises(ValueError, match=r"first must be an integer in \[0, 3\), got 3"):
        MeanTable(10, CLASSES, first=3, stride=3)


@given(st.data())
def test_planned_routes_deliver_every_row_to_the_rank_that_needs_it(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    samples = st.lists(st.integers(0, 40), max_size=9)
    parts = [np.array(data.draw(samples), dtype=np.int64) for _ in range(ranks)]
    routes = [planned_route(parts, rank, torch.device("cpu")) for rank in range(ranks)]
    # What leaves each owner, cut up by destination, put together at each rank and into the order of its batch.
    boxes = [torch.split(route.rows * ranks + owner, route.to_rank) for owner, route in enumerate(routes)]
    for rank, route in enumerate(routes):
        arrived = torch.cat([box[rank] for box in boxes])
        assert [len(box[rank]) for box in boxes] == route.from_owner
        batch = torch.empty_like(arrived)
        batch[route.order] = arrived
        assert batch.tolist() == parts[rank].tolist()

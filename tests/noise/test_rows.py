"""The table as storage: layouts, bytes, partition, saving, loading and converting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sopdist import SOP
from sopdist.noise.kernels import Facts
from sopdist.noise.kernels.reference import update_rows
from sopdist.noise.rates import Flow
from sopdist.noise.rows import AUTO_DENSE_BYTES, NoiseTable, choose_layout, row_bytes

N, K = 30, 12


def visited(layout: str, *, seed: int = 4, slots: int = 4, favourites: int = 3, classes: int = K) -> NoiseTable:
    """A table after a few hundred visits."""
    table = NoiseTable(N, classes, layout=layout, slots=slots, seed=seed)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        index = torch.randperm(N, generator=generator)
        predicted = (index * 7 + torch.randint(favourites, (N,), generator=generator)) % classes
        number = torch.rand(N, generator=generator)
        facts = Facts(predicted, number, -number, number, number / 2)
        update_rows(table, index, index % classes, facts, Flow(4).step())
    return table


def everything(table: NoiseTable) -> dict[str, torch.Tensor]:
    """The logical content, whatever the layout."""
    names = ("u", "mean_loss", "mean_margin", "mean_fit", "visits")
    return {name: getattr(table, name) for name in names} | {"v": table.dense_v(torch.arange(len(table)))}


def assert_same_content(a: NoiseTable, b: NoiseTable) -> None:
    for (name, x), y in zip(everything(a).items(), everything(b).values(), strict=True):
        assert torch.equal(x, y), name


# -- layout ------------------------------------------------------------------------------------------------------------


def test_slots_take_at_most_a_fortieth_of_dense_at_1000_classes() -> None:
    assert row_bytes("slots", 1000) * 40 <= row_bytes("dense", 1000)


@pytest.mark.parametrize("layout", ["dense", "slots"])
@pytest.mark.parametrize("classes", [10, 1000, 40_000])
def test_nbytes_is_the_size_of_the_buffers(layout: Any, classes: int) -> None:
    table = NoiseTable(7, classes, layout=layout)
    held = sum(buffer.nbytes for name, buffer in table.named_buffers() if name not in ("meta", "skipped"))
    assert table.nbytes == held == 7 * row_bytes(layout, classes)


def test_auto_chooses_dense_if_it_is_small_or_smaller_than_slots() -> None:
    assert choose_layout(50_000, 100) == "dense"
    assert choose_layout(10**9, 10) == "dense"  # slots would not be smaller
    assert choose_layout(2_400_000, 1000) == "slots"
    edge = AUTO_DENSE_BYTES // row_bytes("dense", 1000)
    assert (choose_layout(edge, 1000), choose_layout(edge + 1, 1000)) == ("dense", "slots")


def test_a_partitioned_table_has_the_rows_of_the_full_one() -> None:
    full = NoiseTable(31, K, layout="dense", seed=9)
    for stride in (2, 3, 4):
        for first in range(stride):
            for layout in ("dense", "slots"):
                part = NoiseTable(31, K, layout=layout, seed=9, first=first, stride=stride)
                assert torch.equal(part.u, full.u[first::stride])
                assert torch.equal(part.dense_v(torch.arange(len(part))), full.v[first::stride])


def test_more_ranks_than_samples_leaves_a_rank_without_rows() -> None:
    assert len(NoiseTable(2, K, first=3, stride=4)) == 0


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_a_cast_of_the_module_does_not_change_the_table(cast: str) -> None:
    module = nn.ModuleDict({"net": nn.Linear(2, 2), "sop": SOP(N, K)})
    before = module["sop"].table.v.clone()
    getattr(module, cast)()
    assert module["net"].weight.dtype != torch.float32
    assert torch.equal(module["sop"].table.v, before)
    assert module["sop"].to("meta").table.u.device.type == "meta"


# -- saving and loading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_a_saved_table_loads_bit_for_bit(layout: Any, tmp_path: Any) -> None:
    table = visited(layout)
    torch.save(table.state_dict(), tmp_path / "table.pt")
    fresh = NoiseTable(N, K, layout=layout, slots=4, seed=4)
    fresh.load_state_dict(torch.load(tmp_path / "table.pt", weights_only=True))
    for name, buffer in table.named_buffers():
        assert torch.equal(buffer, fresh.get_buffer(name)), name


@pytest.mark.parametrize(("source", "target"), [("dense", "slots"), ("slots", "dense")])
def test_dense_and_slots_convert_without_loss(source: Any, target: Any) -> None:
    table = visited(source)
    other = NoiseTable(N, K, layout=target, slots=4, seed=4)
    other.load_state_dict(table.state_dict())
    assert_same_content(table, other)
    back = NoiseTable(N, K, layout=source, slots=4, seed=4)
    back.load_state_dict(other.state_dict())
    assert_same_content(table, back)
    if other.evictions is not None:
        assert int(other.evictions.sum()) == 0


def test_more_slots_change_nothing_and_fewer_keep_the_largest_and_count_the_rest() -> None:
    table = visited("slots", slots=4)
    more = NoiseTable(N, K, layout="slots", slots=9, seed=4)
    more.load_state_dict(table.state_dict())
    assert_same_content(table, more)
    for source in (table, visited("dense")):
        fewer = NoiseTable(N, K, layout="slots", slots=1, seed=4)
        fewer.load_state_dict(source.state_dict())
        assert fewer.evictions is not None
        assert fewer.evicted is not None
        moved = table.classes.ge(0)
        assert fewer.evictions.tolist() == (moved.sum(1) - 1).clamp_min(0).tolist()
        largest, rest = table.v.abs().topk(2, dim=1).values.square().unbind(1)
        torch.testing.assert_close(fewer.v[:, 0].square(), largest)
        torch.testing.assert_close(fewer.evicted, rest.where(moved.sum(1) > 1, 0))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_samples": N + 1}, "num_samples is 30 in the saved table and 31 here"),
        ({"num_classes": K + 1}, "num_classes is 12 in the saved table and 13 here"),
        ({"seed": 5}, "seed is 4 in the saved table and 5 here"),
        ({"stride": 2}, "stride is 1 in the saved table and 2 here"),
        (
            {"num_samples": 7, "seed": 1},
            "num_samples is 30 in the saved table and 7 here; seed is 4 in the saved table and 1 here",
        ),
    ],
)
@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_a_table_with_other_settings_is_refused_with_the_differences(
    settings: dict[str, int], says: str, layout: Any
) -> None:
    state = visited("dense").state_dict()
    other = NoiseTable(**({"num_samples": N, "num_classes": K, "seed": 4, "layout": layout} | settings))
    before = {name: buffer.clone() for name, buffer in other.named_buffers()}
    with pytest.raises(RuntimeError, match=says):
        other.load_state_dict(state)
    assert all(torch.equal(before[name], buffer) for name, buffer in other.named_buffers())


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_a_damaged_table_is_refused_and_nothing_changes(layout: Any) -> None:
    good = visited(layout).state_dict()

    def without(name: str) -> dict[str, Any]:
        return {key: value for key, value in good.items() if key != name}

    newer = good["meta"].clone()
    newer[0] = 4
    damaged = [
        (good | {"v": good["v"][:-1]}, "'v' must have shape"),
        (good | {"v": good["v"].half()}, "'v' has the wrong dtype torch.float16"),
        (good | {"visits": good["visits"].long()}, "'visits' has the wrong dtype torch.int64"),
        (without("mean_loss"), "'mean_loss' is missing"),
        (without("meta"), "Missing key"),
        (good | {"meta": newer}, "it has format 4, this sopdist reads 1 to 3"),
        (good | {"meta": good["meta"][:3]}, "its `meta` is damaged"),
        (good | {"surprise": torch.zeros(1)}, "Unexpected key"),
    ]
    damaged += [
        (good | {"u": good["u"] * float("nan")}, "'u' contains values that are not finite"),
        (good | {"visits": good["visits"] - 100}, "'visits' contains -88, but must not be negative"),
        (good | {"skipped": good["skipped"][:1]}, "'skipped' must have shape"),
    ]
    if layout == "slots":
        free = good["classes"] == -1
        damaged += [
            (good | {"classes": good["classes"] + 10}, "'classes' ranges from"),
            (good | {"v": good["v"].masked_fill(free, 0.5)}, "a free slot has a value"),
            (good | {"classes": good["classes"] * 0 + 1}, "a row contains a class twice"),
            (good | {"evictions": good["evictions"] - 1}, "'evictions' contains -1"),
        ]
    for state, says in damaged:
        fresh = NoiseTable(N, K, layout=layout, slots=4, seed=4)
        with pytest.raises(RuntimeError, match=says):
            fresh.load_state_dict(state)
        assert_same_content(fresh, NoiseTable(N, K, layout=layout, slots=4, seed=4))


def test_sop_resumes_where_it_stopped() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [(torch.randn(8, K, generator=generator), torch.randint(K, (8,), generator=generator)) for _ in range(10)]
    index = torch.arange(8)
    uninterrupted, first, second = (SOP(N, K, seed=2) for _ in range(3))
    losses = [float(uninterrupted(z, y, index)) for z, y in steps]
    for z, y in steps[:4]:
        first(z, y, index)
    second.load_state_dict(first.state_dict())
    assert [float(second(z, y, index)) for z, y in steps[4:]] == losses[4:]


@pytest.mark.parametrize("version", [1, 2])
def test_a_table_without_the_mean_fit_gets_it_from_the_mean_loss(version: int) -> None:
    state = visited("slots").state_dict()
    state["meta"][0] = version
    del state["mean_fit"]
    loaded = NoiseTable(N, K, layout="slots", slots=4, seed=4)
    loaded.load_state_dict(state)
    torch.testing.assert_close(loaded.mean_fit, (-state["mean_loss"]).exp())

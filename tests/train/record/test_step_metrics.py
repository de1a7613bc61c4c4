"""Training metrics: sums on the device, compared with a count sample by sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sopdist.data.batch import Batch
from sopdist.methods import StepOutput
from sopdist.train.record.step_metrics import SUMS, StepMetrics, metrics_of


def make_batch(labels: Tensor, weight: Tensor) -> Batch:
    size = len(labels)
    return Batch(torch.zeros(size, 1, 1, 1), labels, torch.arange(size), weight)


def make_output(logits: Tensor, loss: float | Tensor) -> StepOutput:
    """What a method with one view returns."""
    return StepOutput(torch.as_tensor(loss), logits, torch.isfinite(logits).all(dim=1))


def count(logits: Tensor, loss: float, labels: list[int], weight: list[float], clean: list[int]) -> list[float]:
    """The same sums, one sample at a time."""
    sums = dict.fromkeys(SUMS, 0.0)
    sums["loss"] = loss if math.isfinite(loss) else 0.0
    for row, label, w, true in zip(logits.tolist(), labels, weight, clean, strict=True):
        if not w:
            continue
        finite = all(map(math.isfinite, row)) and math.isfinite(loss)
        predicted = row.index(max(row)) if finite else None
        sums["samples"] += 1
        sums["finite"] += finite
        sums["nonfinite"] += not finite
        sums["correct"] += predicted == label
        if true >= 0:
            sums["known"] += 1
            sums["clean_correct"] += predicted == true
            sums["wrong"] += label != true
            sums["memorised"] += label != true and predicted == label
    return list(sums.values())


@given(st.data())
def test_sums_equal_a_count_sample_by_sample(data: st.DataObject) -> None:
    step_metrics, expected = StepMetrics("cpu"), [0.0] * len(SUMS)
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(0, 6))
        numbers = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))
        rows = data.draw(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=size, max_size=size))
        labels, clean = (
            data.draw(st.lists(st.integers(minimum, 3), min_size=size, max_size=size)) for minimum in (0, -1)
        )
        weight = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
        loss = data.draw(st.sampled_from([0.0, 2.5, 7.25, math.nan, math.inf]))
        logits = torch.tensor(rows).reshape(size, 4)
        batch = make_batch(torch.tensor(labels, dtype=torch.int64), torch.tensor(weight))
        bad = step_metrics.add(make_output(logits, loss), batch, torch.tensor(clean, dtype=torch.int32))
        new = count(logits, loss, labels, weight, clean)
        assert int(bad.sum()) == new[SUMS.index("nonfinite")]
        expected = [total + number for total, number in zip(expected, new, strict=True)]
    assert step_metrics.take() == expected
    assert step_metrics.take() == [0.0] * len(SUMS), "taking resets the sums"


def test_metrics_are_means_over_the_samples_that_count() -> None:
    step_metrics = StepMetrics("cpu")
    logits = torch.eye(4)[[0, 1, 2, 3, 3]]  # what the network predicts
    batch = make_batch(torch.tensor([0, 1, 3, 3, 3]), torch.tensor([1.0, 1, 1, 1, 0]))
    step_metrics.add(make_output(logits, 6.0), batch, torch.tensor([0, 2, 2, -1, 0]))
    assert metrics_of(step_metrics.take()) == {
        "loss": 1.5, "accuracy": 0.75, "samples": 4, "nonfinite": 0,
        "clean_accuracy": 2 / 3, "memorised": 1 / 2,  # samples 1 and 2 are wrong; the label of 1 was learned
    }  # fmt: skip


def test_the_sums_of_two_ranks_give_the_metrics_of_one() -> None:
    torch.manual_seed(0)
    logits, labels, clean = torch.randn(11, 5), torch.randint(5, (11,)), torch.randint(-1, 5, (11,))
    weight, losses = (torch.rand(11) > 0.2).float(), torch.rand(11, dtype=torch.float64)
    one = StepMetrics("cpu")
    one.add(make_output(logits, (losses * weight).sum()), make_batch(labels, weight), clean)
    sums = []
    for part in (slice(0, 4), slice(4, 11)):
        rank = StepMetrics("cpu")
        output = make_output(logits[part], (losses * weight)[part].sum())
        rank.add(output, make_batch(labels[part], weight[part]), clean[part])
        sums.append(rank.take())
    together = metrics_of([a + b for a, b in zip(*sums, strict=True)])
    assert together == pytest.approx(metrics_of(one.take()), rel=1e-12)


def test_one_sample_that_is_not_finite_does_not_hide_the_loss_of_the_others() -> None:
    step_metrics = StepMetrics("cpu")
    good = make_batch(torch.tensor([0, 1]), torch.ones(2))
    step_metrics.add(make_output(torch.eye(2), 3.0), good)
    step_metrics.add(make_output(torch.full((2, 2), torch.nan), torch.nan), good)
    metrics = metrics_of(step_metrics.take())
    assert metrics == {"loss": 1.5, "accuracy": 0.5, "samples": 4, "nonfinite": 2}


def test_without_clean_labels_their_metrics_are_omitted_and_without_samples_means_are_none() -> None:
    assert metrics_of(StepMetrics("cpu").take()) == {"loss": None, "accuracy": None, "samples": 0, "nonfinite": 0}


class Waits(TorchDispatchMode):
    """Counts operations that make the host wait for a device: reading a number, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select"))
        return func(*args, **(kwargs or {}))


def test_adding_never_waits_for_the_device() -> None:
    step_metrics, batch = StepMetrics("cpu"), make_batch(torch.tensor([0, 1]), torch.ones(2))
    output, clean = make_output(torch.eye(2), 3.0), torch.tensor([0, 0])
    with Waits() as waits:
        step_metrics.add(output, batch, clean)
        assert waits.count == 0
        bool(torch.ones(()))
    assert waits.count == 1, "waits are detected"


def test_a_second_view_that_is_not_finite_is_counted_too() -> None:
    step_metrics = StepMetrics("cpu")
    batch = make_batch(torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.0]))
    view2 = torch.tensor([[0.0, 1.0], [math.inf, 0.0], [math.nan, 0.0]])
    output = StepOutput(torch.tensor(1.0), torch.zeros(3, 2), torch.isfinite(view2).all(dim=1))
    bad = step_metrics.add(output, batch)
    assert bad.tolist() == [False, True, False]  # the third has weight 0
    assert metrics_of(step_metrics.take())["nonfinite"] == 1

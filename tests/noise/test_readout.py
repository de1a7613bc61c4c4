"""What the table says about the labels after training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sopdist import SOP
from tests.support.batches import LAYOUTS, VARIANTS


@pytest.fixture(params=LAYOUTS)
def learned(request: pytest.FixtureRequest) -> SOP:
    """Ten samples with label 0. The network predicts class 3 for 7, 8 and 9; sample 5 is never visited."""
    sop = SOP(10, 4, onset="always", layout=request.param, slots=2)
    z = torch.zeros(10, 4)
    z[:7, 0] = 4
    z[7:, 3] = 4
    seen = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9])
    for _ in range(8):
        sop(z[seen], torch.zeros(9, dtype=torch.int64), seen)
    return sop


def test_wrong_labels_are_ranked_flagged_and_relabelled(learned: SOP) -> None:
    given_labels = torch.zeros(10, dtype=torch.int64)
    assert sorted(learned.suspects(3).tolist()) == [7, 8, 9]
    assert learned.flags().tolist() == [False] * 7 + [True] * 3
    assert learned.proposed_labels(given_labels).tolist() == [0] * 7 + [3] * 3
    assert learned.noise_rate() == pytest.approx(3 / 9)
    low, high = learned.noise_rate_interval()
    assert 0 <= low <= 3 / 9 <= high <= 1
    assert not learned.provisional
    for kind in ("combined", "loss", "margin"):
        scores = learned.noise_scores(kind)
        assert float(scores[7:].min()) > float(scores[:7].max())
        assert scores[5] == -torch.inf  # no evidence, last in every ranking
    p = torch.tensor([4.0, 0, 0, 0]).softmax(0)
    assert float(learned.noise_scores("loss")[0]) == pytest.approx(-float(p[0].log()), rel=1e-5)
    assert float(learned.noise_scores("margin")[0]) == pytest.approx(float(p[1] - p[0]), rel=1e-5)


def test_bad_arguments_are_refused_with_the_reason(learned: SOP) -> None:
    with pytest.raises(ValueError, match="kind must be"):
        learned.noise_scores("variance")
    with pytest.raises(ValueError, match="the labels of all 10 samples, in index order, got int64 of shape"):
        learned.proposed_labels(torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="count must be in"):
        learned.suspects(11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hard_sample_that_the_network_gets_right_is_never_flagged(layout: Any, variant: Any) -> None:
    """In `paper` u grows by the cross-entropy alone, to 1."""
    sop = SOP(3, 10, variant=variant, onset="always", layout=layout)
    z = torch.zeros(3, 10)
    z[:, 4] = 1.5
    for _ in range(400):
        sop(z, torch.full((3,), 4), torch.arange(3))
    if variant == "paper":
        assert float(sop.table.u.abs().min()) == 1
    assert not sop.flags().any()
    assert sop.noise_rate() == 0
    assert sop.proposed_labels(torch.full((3,), 4)).tolist() == [4, 4, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_corrected_label_is_not_flagged(layout: Any) -> None:
    sop, one = SOP(1, 8, onset="always", layout=layout), torch.tensor([0])
    z = torch.zeros(1, 8)
    z[0, 3] = 4
    for label in [0] * 8 + [3] * 8:  # the network always predicts 3; the label is corrected halfway
        sop(z, torch.tensor([label]), one)
    assert not sop.flags(torch.tensor([3])).any()
    assert sop.noise_rate(torch.tensor([3])) == 0
    assert sop.proposed_labels(torch.tensor([3])).tolist() == [3]
    z[0, 5] = 8
    for _ in range(8):
        sop(z, torch.tensor([3]), one)
    assert sop.proposed_labels(torch.tensor([3])).tolist() == [5]


def test_noise_rate_before_the_first_visit_is_nan() -> None:
    sop = SOP(5, 3)
    assert all(math.isnan(value) for value in (sop.noise_rate(), *sop.noise_rate_interval()))


def test_the_combined_score_is_the_mean_of_misfit_and_margin(learned: SOP) -> None:
    fit, margin = learned.table.mean_fit[7].double(), learned.table.mean_margin[7].double()
    expected = ((1 - fit) + (1 - margin) / 2) / 2
    assert float(learned.noise_scores()[7]) == pytest.approx(float(expected), rel=1e-6)
    assert 0 <= float(learned.noise_scores()[:5].min()) <= float(learned.noise_scores().max()) <= 1


# -- what it does not know ---------------------------------------------------------------------------------------------


def trained(logits: Tensor, labels: Tensor, epochs: int, onset: Any, layout: Any = "dense") -> SOP:
    sop = SOP(len(labels), logits.shape[1], onset=onset, layout=layout)
    for _ in range(epochs):
        sop(logits.clone().requires_grad_(), labels, torch.arange(len(labels)))
    sop.flush()
    return sop


def predictions(truth: Tensor, confidence: Tensor, rival: Tensor) -> Tensor:
    """Logits with p[truth] = confidence and nearly all of the rest at `rival`, of 4 classes."""
    p = torch.full((len(truth), 4), 1e-4).scatter(1, rival[:, None], (1 - confidence)[:, None])
    return p.scatter(1, truth[:, None], confidence[:, None]).log()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_while_the_table_waits_flags_are_provisional_and_nothing_is_proposed(layout: Any) -> None:
    truth = torch.arange(200) % 4
    labels = torch.where(torch.arange(200) < 60, (truth + 1) % 4, truth)
    z = predictions(truth, torch.full((200,), 0.9), (truth + 1) % 4)
    waiting = trained(z, labels, 6, "never", layout)
    assert waiting.provisional
    assert "does not act: onset='never'" in waiting.doubts()[0]
    assert torch.equal(waiting.flags(labels), labels != truth)
    assert torch.equal(waiting.proposed_labels(labels), labels)
    assert waiting.noise_rate(labels) == pytest.approx(0.3, abs=0.05)
    acting = trained(z, labels, 6, 3, layout)
    assert acting.doubts() == []
    assert torch.equal(acting.proposed_labels(labels), truth)
    low, high = acting.noise_rate_interval(labels)
    assert acting.noise_rate(labels) == pytest.approx(0.3)
    assert low <= 0.3 <= high


def test_an_onset_in_the_last_tenth_is_too_late() -> None:
    truth = torch.arange(200) % 4
    labels = torch.where(torch.arange(200) < 60, (truth + 1) % 4, truth)
    z = predictions(truth, torch.full((200,), 0.9), (truth + 1) % 4)
    assert trained(z, labels, 20, 18).doubts() == []
    late = trained(z, labels, 20, 19)
    assert "acts since epoch 19 of 20" in late.doubts()[0]
    assert torch.equal(late.proposed_labels(labels), labels)


def test_a_network_that_is_undecided_about_most_of_what_it_contradicts_is_not_trusted() -> None:
    truth = torch.arange(200) % 4
    labels = torch.where(torch.arange(200) < 60, (truth + 1) % 4, truth)
    unsure = predictions(truth, torch.full((200,), 0.55), (truth + 1) % 4)
    sop = trained(unsure, labels, 6, 3)
    assert "the network contradicted 30.0% of the labels, and it was undecided about 100.0%" in sop.doubts()[0]
    assert torch.equal(sop.proposed_labels(labels), labels)


def test_mistakes_of_a_weak_network_on_clean_labels_are_hardly_flagged() -> None:
    """A fifth of the predictions is wrong, but the network is sure of few of them."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (4000,), generator=draws)
    mistaken = torch.rand(4000, generator=draws) < 0.2
    predicted = torch.where(mistaken, (labels + 1) % 4, labels)
    sureness = torch.rand(4000, generator=draws)
    confidence = torch.where(mistaken, 0.5 + 0.4 * sureness**3, 0.99 - 0.4 * sureness**2)
    z = predictions(predicted, confidence, torch.where(mistaken, labels, (labels + 1) % 4))
    for onset in ("never", 5):
        sop = trained(z, labels, 10, onset)
        assert sop.provisional
        assert float(sop.flags(labels).float().mean()) <= 0.05
        assert sop.noise_rate(labels) <= 0.05
        low, high = sop.noise_rate_interval(labels)
        assert low <= 0.001
        assert high == pytest.approx(0.2, abs=0.03)


def test_labels_are_unflagged_when_the_network_agrees_with_them_again(learned: SOP) -> None:
    z = torch.zeros(3, 4)
    z[:, 0] = 4
    for _ in range(3):
        learned(z, torch.zeros(3, dtype=torch.int64), torch.tensor([7, 8, 9]))
    assert not learned.flags().any()

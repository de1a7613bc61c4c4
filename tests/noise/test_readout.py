"""What the table says about the labels after training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sopdist import SOP
from tests.support.batches import LAYOUTS, VARIANTS


@pytest.fixture(params=LAYOUTS)
def learned(request: pytest.FixtureRequest) -> SOP:
    """Ten samples with label 0. The network predicts class 3 for 7, 8 and 9; sample 5 is never visited."""
    sop = SOP(10, 4, layout=request.param, slots=2)
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
    for kind in ("loss", "margin"):
        scores = learned.noise_scores(kind)
        assert float(scores[7:].min()) > float(scores[:7].max())
        assert scores[5] == -torch.inf  # no evidence, last in every ranking
    p = torch.tensor([4.0, 0, 0, 0]).softmax(0)
    assert float(learned.noise_scores()[0]) == pytest.approx(-float(p[0].log()), rel=1e-5)
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
    sop = SOP(3, 10, variant=variant, layout=layout)
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
    sop, one = SOP(1, 8, layout=layout), torch.tensor([0])
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
    assert SOP(5, 3).noise_rate() != SOP(5, 3).noise_rate()


def test_labels_are_unflagged_when_the_network_agrees_with_them_again(learned: SOP) -> None:
    z = torch.zeros(3, 4)
    z[:, 0] = 4
    for _ in range(3):
        learned(z, torch.zeros(3, dtype=torch.int64), torch.tensor([7, 8, 9]))
    assert not learned.flags().any()

"""What all rows together say about the labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sopdist import SOP
from sopdist.noise.evidence import BINS, CLEAN, DECIDED, SURE, SUREST, TOLERANCE, Evidence, count, weigh


@given(st.integers(1, 400), st.integers(0, 2**31), st.floats(0.1, 3))
def test_the_counts_agree_with_a_sort(rows: int, seed: int, power: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    fit = torch.rand(rows, generator=draws) ** power
    margin = fit - (1 - fit) * torch.rand(rows, generator=draws)
    visited = torch.rand(rows, generator=draws) < 0.9
    visited[0] = True
    found = weigh(count(fit, margin, visited))

    seen = [(f, m) for f, m, v in zip(fit.tolist(), margin.tolist(), visited.tolist(), strict=True) if v]  # brute force
    confidence = fit - margin.clamp_max(0)
    bins = (confidence * (BINS - 1)).int()[visited].tolist()
    contradicted = [m < 0 for _, m in seen]
    for share, expected in ((SURE, found.contradicted_sure), (SUREST, found.contradicted_surest)):
        ordered = sorted(bins, reverse=True)
        least = next(value for place, value in enumerate(ordered) if place + 1 >= share * len(ordered))
        sure = [c for b, c in zip(bins, contradicted, strict=True) if b >= int(least * (1 - TOLERANCE))]
        assert expected == pytest.approx(sum(sure) / len(sure))
    assert found.contradicted == pytest.approx(sum(contradicted) / len(seen))
    rivals = [(f, f - m) for f, m in seen]
    undecided = [abs(f - r) < DECIDED * (f + r) for f, r in rivals]
    assert found.ambiguous == pytest.approx(sum(undecided) / len(seen), abs=1.01 / len(seen)), "but for rounding"


def test_rows_that_were_never_visited_say_nothing() -> None:
    nothing = torch.zeros(5, dtype=torch.bool)
    assert set(weigh(count(torch.zeros(5), -torch.ones(5), nothing))) == {0.0}


@given(st.permutations(range(30)), st.integers(1, 4))
def test_neither_order_nor_ranks_matter(order: list[int], ranks: int) -> None:
    draws = torch.Generator().manual_seed(3)
    fit, margin = torch.rand(30, generator=draws), torch.rand(30, generator=draws) * 2 - 1
    visited = torch.ones(30, dtype=torch.bool)
    together = count(fit, margin, visited)
    mixed = torch.tensor(order)
    parts = [mixed[rank::ranks] for rank in range(ranks)]
    assert torch.equal(sum(count(fit[part], margin[part], visited[part]) for part in parts), together)


def _train(wrong: float, layout: str) -> tuple[SOP, Tensor, Tensor]:
    """A network that is sure of 70 samples, and of the other 30 unsure, half of them against the label."""
    draws = torch.Generator().manual_seed(0)
    truth = torch.arange(100) % 4
    changed = torch.arange(100) < 70 * wrong
    labels = torch.where(changed, (truth + 1) % 4, truth)
    logits = 6.0 * torch.nn.functional.one_hot(truth, 4).float()
    logits[70:] = 0.3 * torch.randn(30, 4, generator=draws)
    logits[70:85].scatter_(1, (labels[70:85, None] + 1) % 4, 0.9)
    sop = SOP(100, 4, onset=2, layout=layout)
    for _ in range(3):
        sop(logits.clone().requires_grad_(), labels, torch.arange(100))
    return sop, labels, changed


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_if_labels_look_clean_the_table_starts_with_the_sure_ones_only(layout: str) -> None:
    sop, labels, _ = _train(0.01, layout)  # one wrong label
    flagged = sop.flags(labels)
    assert bool(flagged[0])
    assert int(flagged.sum()) == 1, "what is contradicted without being sure is not held against a label"


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_if_labels_are_wrong_it_starts_with_all_that_are_contradicted(layout: str) -> None:
    sop, labels, changed = _train(0.3, layout)
    flagged = sop.flags(labels)
    assert bool(flagged[changed].all())
    assert int((sop.table.u[70:] > 0.9).sum()) >= 15, "doubtful ones, too; whether they are flagged is another matter"


def test_the_limit_is_far_from_both_cases() -> None:
    for wrong, clean in ((0.01, True), (0.3, False)):
        evidence = _train(wrong, "dense")[0].table.evidence()
        found = weigh(evidence)
        assert found.looks_clean is clean
        assert abs(found.contradicted_sure - CLEAN) > 0.01


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_if_labels_look_clean_nothing_pulls_towards_what_the_table_says(layout: str) -> None:
    """The loss of a sample that is not flagged is then cross-entropy, without the target term."""
    losses = []
    for wrong in (0.01, 0.3):
        sop, labels, _ = _train(wrong, layout)
        z = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        sample = torch.tensor([69])  # correct, and predicted
        loss = sop(z, labels[sample], sample)
        plain = torch.nn.functional.cross_entropy(z, labels[sample])
        losses.append(float((loss - plain).detach()))
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert losses[1] < -0.01, "the target term is negative"


def test_the_noise_rate_tells_wrong_labels_from_mistakes() -> None:
    at_random = Evidence(0.6, contradicted=0.5, contradicted_sure=0.4, contradicted_surest=0.35, ambiguous=0.2)
    assert at_random.noise_rate == pytest.approx(0.36, abs=0.02)
    mistakes = Evidence(0.6, contradicted=0.2, contradicted_sure=0.03, contradicted_surest=0.0, ambiguous=0.18)
    assert mistakes.noise_rate < 0.03
    confused = Evidence(0.6, contradicted=0.42, contradicted_sure=0.26, contradicted_surest=0.01, ambiguous=0.55)
    assert confused.noise_rate == 0.26


@given(st.tuples(*[st.floats(0, 1)] * 5))
def test_the_noise_rate_is_a_share(shares: tuple[float, ...]) -> None:
    evidence = Evidence(*shares)
    assert 0 <= evidence.noise_rate <= max(evidence.contradicted, evidence.contradicted_sure)

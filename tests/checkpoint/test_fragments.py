"""Replicated tensors are distributed over ranks: each is written once, and all ranks write about the same amount."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sopdist.checkpoint.fragments import Fragment, distribute

SIZES = st.dictionaries(st.text(max_size=4), st.tuples(st.integers(0, 60), st.booleans()), max_size=20)


@given(SIZES, st.integers(1, 7))
def test_every_tensor_is_written_in_full_by_one_rank_and_loads_differ_by_at_most_one_tensor(
    sizes: dict[str, tuple[int, bool]], ranks: int
) -> None:
    dtypes = (torch.float32, torch.uint8)
    tensors = {name: torch.zeros(size, dtype=dtypes[small]) for name, (size, small) in sizes.items()}
    shares = [distribute(tensors, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    for name, fragment in (item for share in shares for item in share.items()):
        assert (fragment.start, fragment.shape) == (0, tuple(tensors[name].shape))
        assert fragment.values.nbytes == tensors[name].nbytes
    loads = [sum(fragment.values.nbytes for fragment in share.values()) for share in shares]
    largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
    assert max(loads) - min(loads) <= largest


def test_the_order_of_names_does_not_matter_so_that_all_ranks_compute_the_same_assignment() -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 4), ("b", 4), ("c", 9), ("d", 0), ("e", 4))}
    backwards = dict(reversed(tensors.items()))
    for rank in range(3):
        assert distribute(tensors, rank, 3).keys() == distribute(backwards, rank, 3).keys()


def test_a_fragment_is_a_view_not_a_copy_and_has_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    (fragment,) = distribute({"weight": weight}, 0, 1).values()
    assert fragment.values.data_ptr() == weight.data_ptr()
    assert not fragment.values.requires_grad


def test_elements_counts_the_full_tensor() -> None:
    assert Fragment(torch.zeros(2), 3, (3, 4)).elements == 12
    assert Fragment.full(torch.tensor(1.0)).elements == 1
    assert Fragment.full(torch.zeros(3, 0)).elements == 0

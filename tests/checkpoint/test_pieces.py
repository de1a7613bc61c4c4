"""Who writes what of tensors that all ranks have: everything once, and about as much as everybody else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sopdist.checkpoint.pieces import Piece, share_out

SIZES = st.dictionaries(st.text(max_size=4), st.tuples(st.integers(0, 60), st.booleans()), max_size=20)


@given(SIZES, st.integers(1, 7))
def test_every_tensor_is_written_whole_by_one_rank_and_loads_differ_by_one_tensor_at_most(
    sizes: dict[str, tuple[int, bool]], ranks: int
) -> None:
    dtypes = (torch.float32, torch.uint8)
    tensors = {name: torch.zeros(size, dtype=dtypes[small]) for name, (size, small) in sizes.items()}
    shares = [share_out(tensors, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    for name, piece in (item for share in shares for item in share.items()):
        assert (piece.start, piece.shape) == (0, tuple(tensors[name].shape))
        assert piece.values.nbytes == tensors[name].nbytes
    loads = [sum(piece.values.nbytes for piece in share.values()) for share in shares]
    largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
    assert max(loads) - min(loads) <= largest


def test_the_order_of_the_names_does_not_matter_so_that_all_ranks_come_to_the_same() -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 4), ("b", 4), ("c", 9), ("d", 0), ("e", 4))}
    backwards = dict(reversed(tensors.items()))
    for rank in range(3):
        assert share_out(tensors, rank, 3).keys() == share_out(backwards, rank, 3).keys()


def test_a_share_is_a_view_not_a_copy_and_carries_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    (piece,) = share_out({"weight": weight}, 0, 1).values()
    assert piece.values.data_ptr() == weight.data_ptr()
    assert not piece.values.requires_grad


def test_elements_are_those_of_the_whole_tensor() -> None:
    assert Piece(torch.zeros(2), 3, (3, 4)).elements == 12
    assert Piece.whole(torch.tensor(1.0)).elements == 1
    assert Piece.whole(torch.zeros(3, 0)).elements == 0

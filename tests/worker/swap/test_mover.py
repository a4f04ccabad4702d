import itertools

import pytest
import torch
from chairlift_worker.plan import Moves
from chairlift_worker.swap.mover import SwapMover, contiguous_runs
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pages_come_back_byte_for_byte_in_other_places(dtype: torch.dtype) -> None:
    sectors = (9 * torch.randn(8, 60, generator=torch.Generator().manual_seed(1))).to(dtype)
    original = sectors.clone()
    mover = SwapMover(sectors=sectors, num_slots=5)
    mover.move(Moves(outs=((2, 0), (3, 1), (6, 4)), ins=()))
    sectors.fill_(7)  # somebody else's
    mover.move(Moves(outs=(), ins=((1, 0), (4, 1), (0, 5))))
    for place, source in ((0, 3), (1, 6), (5, 2)):
        assert torch.equal(sectors[place].view(torch.uint8), original[source].view(torch.uint8))
    assert torch.equal(sectors[2:5], torch.full((3, 60), 7, dtype=dtype))


def test_outs_are_copied_before_ins_overwrite_them() -> None:
    sectors = torch.arange(4.0)[:, None].repeat(1, 3)
    mover = SwapMover(sectors=sectors, num_slots=2)
    mover.move(Moves(outs=((1, 0),), ins=()))
    mover.move(Moves(outs=((2, 1),), ins=((0, 2),)))
    mover.move(Moves(outs=(), ins=((1, 0),)))
    assert sectors[:, 0].tolist() == [2.0, 1.0, 1.0, 3.0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_runs_name_the_same_pairs_in_the_same_order(pairs: list[tuple[int, int]]) -> None:
    runs = list(contiguous_runs(pairs))
    assert [(s + i, t + i) for s, t, length in runs for i in range(length)] == pairs
    for (s, t, length), (following_s, following_t, _) in itertools.pairwise(runs):
        assert (s + length, t + length) != (following_s, following_t), "two runs that are one"

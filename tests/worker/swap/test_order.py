"""Which copies wait for which steps in flight."""

from __future__ import annotations

from array import array

from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.kv.layout import make_layout
from chairlift_worker.plan import Moves, RowPlan, StepPlan
from chairlift_worker.swap.order import NO_STEP, CopyBatch, in_order, touched, written

LAYERS = (LayerFacts(num_kv_heads=1, head_dim=4, sliding_window=None),)
LAYOUT = make_layout(LAYERS, page_size=4)


def plan(*rows: tuple[list[int], int, int]) -> StepPlan:
    """Rows as (table, first position, tokens)."""
    return StepPlan(
        step=1,
        rows=tuple(
            RowPlan(uid=uid, tokens=array("i"), start=start, num_tokens=size, tables=(array("i", table),), sample=None)
            for uid, (table, start, size) in enumerate(rows)
        ),
    )


def test_a_step_writes_to_the_sectors_of_its_own_tokens_only() -> None:
    for start, size, wrote in ((0, 1, {7}), (3, 1, {7}), (4, 1, {8}), (3, 2, {7, 8}), (4, 4, {8}), (4, 5, {8, 9})):
        step = plan(([7, 8, 9, 6], start, size))
        assert written(step, LAYOUT) == wrote
        assert touched(step, LAYOUT) == {7, 8, 9} - ({9} if start + size <= 8 else set()) - (
            {8} if start + size <= 4 else set()
        )


def test_a_sector_that_no_step_in_flight_writes_to_leaves_at_once() -> None:
    in_flight = [plan(([7, 8], 5, 1))]
    moves = Moves(outs=((8, 0), (7, 1)), ins=())
    assert in_order(moves, in_flight, LAYOUT) == [
        CopyBatch(Moves(outs=((7, 1),), ins=()), NO_STEP),
        CopyBatch(Moves(outs=((8, 0),), ins=()), 0),
    ]


def test_a_sector_is_filled_when_the_last_step_that_looks_at_it_is_done() -> None:
    in_flight = [plan(([7, 8], 5, 1)), plan(([6, 7], 5, 1)), plan(([3], 0, 1))]
    for sector, after in ((8, 0), (7, 1), (6, 1), (3, 2), (5, NO_STEP)):
        moves = Moves(outs=(), ins=((0, sector),))
        assert in_order(moves, in_flight, LAYOUT) == [CopyBatch(moves, after)]


def test_outs_come_before_ins_and_nothing_of_nothing() -> None:
    moves = Moves(outs=((1, 0),), ins=((2, 1),))
    assert [batch.moves for batch in in_order(moves, [], LAYOUT)] == [
        Moves(outs=moves.outs, ins=()),
        Moves(outs=(), ins=moves.ins),
    ]
    assert in_order(Moves(outs=(), ins=()), [plan(([1], 0, 1))], LAYOUT) == []

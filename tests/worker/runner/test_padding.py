"""Sizes of padded batches, counted out."""

import itertools

import pytest
from chairlift_worker.runner.padding import PaddedShape, Padding

SMALL = Padding(q_interval=4, kv_interval=16, max_tokens=13, max_rows=9, max_context_len=40, decode_len=24)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "context_len", "expected"),  # tokens, rows, context
    [
        (4, 4, 1, (4, 4, 16)),  # fits as it is
        (5, 1, 5, (8, 4, 16)),  # 3 rows, of one token each
        (5, 4, 30, (12, 8, 32)),  # 4 rows are a multiple already, yet 3 missing tokens need a row: 4 more, so 7 tokens
        (13, 1, 13, (16, 4, 16)),
        (13, 2, 17, (16, 4, 32)),
        (14, 1, 14, (20, 4, 16)),  # 3 rows need 3 tokens: 17, so 20
    ],
)
def test_a_varlen_batch_is_padded_to_the_intervals(num_tokens, num_rows, context_len, expected) -> None:
    padding = Padding(q_interval=4, kv_interval=16, max_tokens=20, max_rows=9, max_context_len=40)
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "context_len": context_len}
    shape = padding.shape(in_place=False, num_sampled=0, **sizes)
    assert (shape.num_tokens, shape.num_rows, shape.context_len) == expected
    assert shape.num_sampled == shape.num_rows
    assert padding.shape(in_place=False, num_sampled=shape.num_rows, **sizes) == shape
    if num_tokens > shape.num_rows:
        more = padding.shape(in_place=False, num_sampled=shape.num_rows + 1, **sizes)
        assert more.num_sampled == shape.num_tokens


def test_a_batch_of_the_fast_path_is_padded_to_powers_of_two_as_far_as_there_are_rows() -> None:
    sizes = [
        SMALL.shape(in_place=True, num_tokens=rows, num_rows=rows, num_sampled=1, context_len=3).num_rows
        for rows in range(1, 10)
    ]
    assert sizes == [1, 2, 4, 4, 8, 8, 8, 8, 9]
    assert SMALL.decode_sizes() == [1, 2, 4, 8, 9]


@pytest.mark.parametrize("interval", [1, 2, 4, 7, 64])
def test_any_batch_has_room_for_its_padding_and_there_are_no_more_shapes_than_said(interval: int) -> None:
    padding = Padding(q_interval=interval, kv_interval=16, max_tokens=13, max_rows=9, max_context_len=40, decode_len=24)
    largest, seen = padding.largest(), set[PaddedShape]()
    for rows, tokens, context, sampled in itertools.product(range(1, 10), range(1, 14), range(1, 41, 3), range(14)):
        if rows > tokens or context < tokens - rows + 1 or sampled > tokens:
            continue
        sizes = {"num_tokens": tokens, "num_rows": rows, "num_sampled": sampled, "context_len": context}
        shape = padding.shape(in_place=False, **sizes)
        assert sampled <= shape.num_sampled <= largest.num_sampled
        more_tokens, more_rows = shape.num_tokens - tokens, shape.num_rows - rows
        assert 0 <= more_rows <= more_tokens
        assert more_rows or not more_tokens, "tokens that belong to no row"
        assert shape.context_len >= context
        if more_rows:
            assert shape.context_len * more_rows >= more_tokens
        assert shape.num_tokens <= largest.num_tokens
        assert shape.num_rows <= largest.num_rows
        assert shape.context_len <= largest.context_len
        assert shape.num_tokens in padding.varlen_sizes(captured=True)
        seen.add(shape)
        if tokens == rows:
            seen.add(padding.shape(in_place=True, **sizes))
    assert len(seen) <= padding.max_shapes(varlen=True, decode=True)
    assert padding.max_shapes(varlen=False, decode=True) == 5

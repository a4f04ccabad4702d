"""Slots of contexts and of new tokens, worked out position by position."""

from array import array

import numpy as np
import pytest
import torch
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import RowPlan
from chairlift_worker.runner.tables import TableReader
from support.layouts import layout_of
from support.paged import Sectors

NUM_SECTORS = 1600
WINDOWS = [(None,), (7,), (1,), (None, 5, 5), (None, None, None, 6), (3, 20, 20, 20)]
STARTS = [0, 1, 5, 6, 7, 8, 30, 100, 101]  # of one-token rows; contexts so different that they fall into groups
LONGER = [(0, 2), (4, 9), (50, 30), (0, 40)]  # (start, num_tokens)


def rows_of(layout: CacheLayout) -> list[RowPlan]:
    sectors = Sectors(layout, NUM_SECTORS)
    return [
        RowPlan(
            uid=uid,
            tokens=array("i"),
            start=start,
            num_tokens=num_tokens,
            tables=sectors.tables(start + num_tokens),
            sample=None,
        )
        for uid, (start, num_tokens) in enumerate([*((start, 1) for start in STARTS), *LONGER])
    ]


def slot(layout: CacheLayout, group: int, row: RowPlan, position: int) -> int:
    of = layout.groups[group]
    place, token = divmod(position, of.sector_len)
    block, offset = divmod(token, layout.page_size)
    sector = row.tables[group][place]
    return sector * layout.sector_slots(of) + block * layout.block_slots(of) + offset


def context(layout: CacheLayout, group: int, row: RowPlan) -> list[int]:
    """Slots of all that some query token of the row sees."""
    window = layout.groups[group].window
    first = 0 if window is None else max(0, row.start - window + 1)
    return [slot(layout, group, row, position) for position in range(first, row.start + row.num_tokens)]


@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_every_row_finds_its_tokens_and_padding_points_to_the_null_sector(
    windows: tuple[int | None, ...], page_size: int
) -> None:
    layout = layout_of(*windows, page_size=page_size)
    rows = rows_of(layout)
    singles, longer = rows[: len(STARTS)], rows[len(STARTS) :]
    for number, group in enumerate(layout.groups):
        reader = TableReader(layout=layout, number=number, num_sectors=NUM_SECTORS, device=torch.device("cpu"))
        metadata = reader.read(singles, np.array(STARTS), longer)
        assert metadata.window == group.window
        new = [slot(layout, number, row, row.start + i) for row in rows for i in range(row.num_tokens)]
        assert metadata.slots.tolist() == new
        null = NUM_SECTORS * layout.sector_slots(group)
        seen = []
        for decode in metadata.groups:
            places = range(len(singles)) if decode.tokens is None else decode.tokens.tolist()
            for place, slots, length in zip(places, decode.context_slots, decode.context_lens.tolist(), strict=True):
                seen.append(place)
                assert slots[:length].tolist() == context(layout, number, rows[place])
                assert set(slots[length:].tolist()) <= {null}
            shorter = decode.context_lens < decode.context_slots.shape[1]
            assert decode.padded == bool(shorter.any())
        assert sorted(seen) == list(range(len(singles)))
        assert [span.context_slots.tolist() for span in metadata.spans] == [context(layout, number, r) for r in longer]
        assert [(span.start, span.num_tokens) for span in metadata.spans] == LONGER

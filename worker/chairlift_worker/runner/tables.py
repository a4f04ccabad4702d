"""A step's rows as one group of layers sees them: page tables turned into slots, by numpy.

To a group, position p of a row is the token o = p % sector_len of sector table[p // sector_len], and its slot is
sector * sector_slots + o // page_size * block_slots + o % page_size (see attention/cache.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chairlift_worker.attention.metadata import DecodeGroup, RowSpan, StepMetadata
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import RowPlan

Ints = npt.NDArray[np.int64]

# One-token rows are padded together while the longest has at most this many times the context of the shortest...
_GROUP_RATIO = 2
# ...or less context than this, where padding costs less than another call.
_GROUP_FREE_LEN = 64


class TableReader:
    """Makes the metadata of one group of layers out of the group's tables in a plan."""

    def __init__(self, *, layout: CacheLayout, number: int, num_sectors: int, device: torch.device) -> None:
        """`number` is the group's in the layout; sector number `num_sectors` is the null sector."""
        group = layout.groups[number]
        self._number = number
        self._window = group.window
        self._sector_len = group.sector_len
        self._sector_slots = layout.sector_slots(group)
        self._null_sector = num_sectors
        offsets = np.arange(group.sector_len, dtype=np.int64)
        self._offsets = offsets // layout.page_size * layout.block_slots(group) + offsets % layout.page_size
        self._device = device

    def read(self, singles: Sequence[RowPlan], starts: Ints, longer: Sequence[RowPlan]) -> StepMetadata:
        """The rows with one token, which start at `starts`, and then the longer ones.

        Raises ValueError where a table is too short, or does not hold what the row sees.
        """
        single_slots, groups = self._groups(singles, starts)
        spans, first = [], len(singles)
        for row in longer:
            spans.append(self._span(row, first))
            first += row.num_tokens
        slots = [single_slots, *(span.context_slots[span.start - span.context_start :].cpu().numpy() for span in spans)]
        return StepMetadata(window=self._window, slots=self._tensor(np.concatenate(slots)), groups=groups, spans=spans)

    def _span(self, row: RowPlan, first: int) -> RowSpan:
        end = row.start + row.num_tokens
        begin = 0 if self._window is None else max(0, row.start - self._window + 1)
        lowest, highest = begin // self._sector_len, -(-end // self._sector_len)
        named = named_sectors([row], self._number, np.array([lowest]), np.array([highest]))
        sectors = named.astype(np.int64)
        shift = lowest * self._sector_len
        slots = self._slots(sectors).reshape(-1)[begin - shift : end - shift]
        return RowSpan(
            first=first,
            num_tokens=row.num_tokens,
            start=row.start,
            context_start=begin,
            context_slots=self._tensor(slots),
        )

    def _groups(self, rows: Sequence[RowPlan], starts: Ints) -> tuple[Ints, list[DecodeGroup]]:
        """Slots of the rows' new tokens, and the rows in groups."""
        if not rows:
            return np.empty(0, np.int64), []
        sector_len = self._sector_len
        begins = np.zeros_like(starts) if self._window is None else np.maximum(starts - self._window + 1, 0)
        lowest, ends = begins // sector_len, starts // sector_len + 1
        counts = ends - lowest
        sectors = np.full((len(rows), int(counts.max())), self._null_sector, np.int64)
        sectors[np.arange(sectors.shape[1]) < counts[:, None]] = named_sectors(rows, self._number, lowest, ends)
        newest = sectors[np.arange(len(rows)), counts - 1]
        new_slots = newest * self._sector_slots + self._offsets[starts % sector_len]
        lens, shifts = starts + 1 - begins, begins - lowest * sector_len
        order = np.argsort(lens, kind="stable")
        borders = _group_borders(lens[order])
        if len(borders) == 2:
            return new_slots, [self._group(sectors, lens, shifts, None)]
        return new_slots, [
            self._group(sectors, lens, shifts, np.sort(order[begin:end])) for begin, end in itertools.pairwise(borders)
        ]

    def _group(self, sectors: Ints, lens: Ints, shifts: Ints, tokens: Ints | None) -> DecodeGroup:
        """Rows whose context is `lens` tokens from token `shifts` of their first sector on."""
        if tokens is not None:
            sectors, lens, shifts = sectors[tokens], lens[tokens], shifts[tokens]
        longest = int(lens.max())
        num_sectors = -(-int((lens + shifts).max()) // self._sector_len)
        slots = self._slots(sectors[:, :num_sectors]).reshape(len(lens), -1)
        places = np.arange(longest)
        if shifts.any():
            wanted = np.minimum(shifts[:, None] + places, slots.shape[1] - 1)
            slots = np.take_along_axis(slots, wanted, axis=1)
        else:
            slots = slots[:, :longest]
        padded = bool((lens < longest).any())
        if padded:
            slots = np.where(places < lens[:, None], slots, self._null_sector * self._sector_slots)
        return DecodeGroup(
            tokens=None if tokens is None else self._tensor(tokens),
            context_slots=self._tensor(np.ascontiguousarray(slots)),
            context_lens=self._tensor(lens),
            padded=padded,
        )

    def _slots(self, sectors: Ints) -> Ints:
        """(..., sectors) -> (..., sectors, sector_len)."""
        return sectors[..., None] * self._sector_slots + self._offsets

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def named_sectors(rows: Sequence[RowPlan], number: int, lows: Ints, ends: Ints) -> npt.NDArray[np.int32]:
    """The rows' sectors [low, end) in the tables of group `number`, one row after the other.

    Raises ValueError where a table is too short, or lacks one of them.
    """
    ranges = list(zip(rows, lows.tolist(), ends.tolist(), strict=True))
    # Slices are copies, so that no view keeps the owner's array from growing.
    named = np.frombuffer(b"".join([row.tables[number][low:end] for row, low, end in ranges]), np.int32)
    if len(named) < int((ends - lows).sum()) or named.min() < 0:
        for row, low, end in ranges:
            table = row.tables[number][low:end]
            if len(table) < end - low or min(table) < 0:
                raise ValueError(f"row {row.uid} sees sectors {low} to {end}, but its pages there are {table.tolist()}")
    return named


def _group_borders(sorted_lens: Ints) -> list[int]:
    """Where groups begin in rows sorted by length, and the end."""
    borders, i = [0], 0
    while i < len(sorted_lens):
        limit = max(_GROUP_FREE_LEN, _GROUP_RATIO * int(sorted_lens[i]))
        i = int(np.searchsorted(sorted_lens, limit, side="right"))
        borders.append(i)
    return borders

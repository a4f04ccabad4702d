"""A step's rows as tables of pages, one for each group of layers, for backends that read pages in place.

To a group, page p of a row is block p % blocks of sector table[p // blocks]. Counted in units (kv/layout.py) it begins
at sector * sector_units + block * 2 * layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import RowPlan
from chairlift_worker.runner.tables import Ints, named_sectors

Ints32 = npt.NDArray[np.int32]


class PageReader:
    """Makes page tables of one group of layers out of the group's tables in a plan."""

    def __init__(self, *, layout: CacheLayout, number: int, num_sectors: int, device: torch.device) -> None:
        """`number` is the group's in the layout. Raises ValueError for more units than a table entry can count."""
        group = layout.groups[number]
        self._number = number
        self._window = group.window
        self._sector_len = group.sector_len
        self._sector_units = layout.sector_units(group)
        self._blocks = np.arange(group.sector_len // layout.page_size, dtype=np.int32) * (2 * len(group.layers))
        self._device = device
        if (num_sectors + 1) * self._sector_units > np.iinfo(np.int32).max:
            raise ValueError(f"a cache of {num_sectors} blocks has more pages than its tables can count")

    def read(self, singles: Sequence[RowPlan], starts: Ints, longer: Sequence[RowPlan]) -> PageRows:
        """The rows with one token, which start at `starts`, and then the longer ones.

        Raises ValueError where a table is too short, or does not hold what the row sees.
        """
        sizes = np.ones(len(singles) + len(longer), np.int64)
        sizes[len(singles) :] = [row.num_tokens for row in longer]
        starts = np.concatenate([starts, np.array([row.start for row in longer], np.int64)])
        first = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=first[1:])
        return PageRows(
            window=self._window,
            first=self._tensor(first),
            start=self._tensor(starts.astype(np.int32)),
            tables=self._tensor(self.tables([*singles, *longer], starts, starts + sizes)),
        )

    def tables(self, rows: Sequence[RowPlan], starts: Ints, ends: Ints) -> Ints32:
        """(rows, pages): first units of the pages of rows whose tokens stand at [start, end)."""
        begins = np.zeros_like(starts) if self._window is None else np.maximum(starts - self._window + 1, 0)
        lows, highs = begins // self._sector_len, (ends - 1) // self._sector_len + 1
        sectors = np.full((len(rows), int(highs.max())), -1, np.int32)
        places = np.arange(sectors.shape[1])
        held = (places >= lows[:, None]) & (places < highs[:, None])
        sectors[held] = named_sectors(rows, self._number, lows, highs)
        units = sectors[:, :, None] * np.int32(self._sector_units) + self._blocks  # stays negative where it was
        return units.reshape(len(rows), -1)

    def _tensor(self, values: Ints32) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class DecodePages:
    """Tables of batches of one-token rows, always in the same memory and of the same width.

    What reads them may keep their addresses. They hold one step at a time: the next one overwrites them.
    """

    def __init__(self, *, readers: Sequence[PageReader], layout: CacheLayout, max_rows: int, max_blocks: int) -> None:
        """For batches of up to `max_rows` rows, each of up to `max_blocks` pages of the layout's size.

        Raises ValueError for layers with windows.
        """
        if any(group.window is not None for group in layout.groups):
            raise ValueError("the decode fast path is not for layers with windows, whose pages come and go")
        self._readers = readers
        self._max_rows = max_rows
        self._max_len = max_blocks * layout.page_size
        self._first = torch.arange(max_rows + 1, dtype=torch.int32)
        self._start = torch.zeros(max_rows, dtype=torch.int32)
        # Tables are filled by whole sectors, which may hold several pages.
        widths = [group.sectors_for(self._max_len) * group.sector_len // layout.page_size for group in layout.groups]
        self._tables = [torch.full((max_rows, width), -1, dtype=torch.int32) for width in widths]

    def fits(self, starts: Ints) -> bool:
        """Whether one-token rows at these positions have room."""
        return len(starts) <= self._max_rows and int(starts.max()) < self._max_len

    def read(self, rows: Sequence[RowPlan], starts: Ints) -> tuple[PageRows, ...]:
        """One-token rows that start at `starts`, for each group of layers; the caller has asked whether they fit.

        Raises ValueError where a table is too short, or does not hold what the row sees.
        """
        count = len(rows)
        self._start.numpy()[:count] = starts
        for reader, tables in zip(self._readers, self._tables, strict=True):
            units = reader.tables(rows, starts, starts + 1)
            tables.numpy()[:count, : units.shape[1]] = units
        return tuple(
            PageRows(window=None, first=self._first[: count + 1], start=self._start[:count], tables=tables[:count])
            for tables in self._tables
        )

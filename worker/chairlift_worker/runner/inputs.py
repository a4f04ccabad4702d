"""Memory that stays where it is for all that a step's forward pass reads: what graphs are captured with.

A batch is put together in memory of the host, pinned where that means something, and copied from there, each tensor in
one piece: nothing waits for the device. Every shape is a view of the same memory.

What pads a batch belongs to nobody: token 0 from position 0 on, in rows whose pages are all the first block of the null
sector. They write there and read only what they have written in the same step; under backends that read pages in place
nobody else looks at the null sector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chairlift_worker.attention.metadata import PageRows
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.runner.batch import StepBatch
from chairlift_worker.runner.padding import PaddedShape


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A padded batch on the host, and where it goes."""

    source: StepBatch
    target: StepBatch

    def send(self) -> StepBatch:
        """Copies it there, in the order of the stream. The source must be left alone until that is done."""
        for there, here in zip(tensors_of(self.target), tensors_of(self.source), strict=True):
            there.copy_(here, non_blocking=True)
        return self.target


class StaticInputs:
    """Room for one batch of any shape up to the largest. Holds one step at a time."""

    def __init__(self, *, layout: CacheLayout, num_sectors: int, largest: PaddedShape, device: torch.device) -> None:
        """Padding points to sector number `num_sectors`, the null sector."""
        self._null_units = [num_sectors * layout.sector_units(group) for group in layout.groups]
        self._source = _Room(layout, largest, torch.device("cpu"), pinned=device.type == "cuda")
        self._target = _Room(layout, largest, device)

    def fill(self, batch: StepBatch, shape: PaddedShape) -> StepBatch:
        """The batch, padded, in this memory. It takes rows that are told as tables of pages."""
        return self.stage(batch, shape).send()

    def stage(self, batch: StepBatch, shape: PaddedShape) -> StagedBatch:
        """The batch, padded, on the host. What was staged before must have been sent."""
        view = self._source.view(batch, shape)
        num_tokens, num_sampled = batch.input_ids.shape[1], batch.sampled.shape[0]
        view.input_ids[0, :num_tokens] = batch.input_ids[0]
        view.input_ids[0, num_tokens:] = 0
        view.position_ids[0, :num_tokens] = batch.position_ids[0]
        view.sampled[:num_sampled] = batch.sampled
        view.sampled[num_sampled:] = 0
        rows = batch.metadata[0]
        assert isinstance(rows, PageRows)
        num_rows = rows.num_rows
        sizes = _shares(shape.num_tokens - num_tokens, shape.num_rows - num_rows)
        positions = [torch.arange(size) for size in sizes]
        if positions:
            view.position_ids[0, num_tokens:] = torch.cat(positions)
        self._source.first[: num_rows + 1] = rows.first
        ends = num_tokens + torch.tensor(sizes, dtype=torch.int32).cumsum(0)
        self._source.first[num_rows + 1 : shape.num_rows + 1] = ends
        self._source.start[:num_rows] = rows.start
        self._source.start[num_rows : shape.num_rows] = 0
        for own, padded, null in zip(batch.metadata, view.metadata, self._null_units, strict=True):
            assert isinstance(own, PageRows)
            assert isinstance(padded, PageRows)
            padded.tables[:num_rows, : own.tables.shape[1]] = own.tables  # what stands behind has no meaning
            padded.tables[num_rows:] = null
        return StagedBatch(view, self._target.view(batch, shape))


class _Room:
    """The tensors of a batch of the largest shape, on one side."""

    def __init__(
        self, layout: CacheLayout, largest: PaddedShape, device: torch.device, *, pinned: bool = False
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self._layout = layout
        tokens, rows = largest.num_tokens, largest.num_rows
        self._input_ids = zeros(1, tokens, dtype=torch.int64)
        self._position_ids = zeros(1, tokens, dtype=torch.int64)
        self._sampled = zeros(largest.num_sampled, dtype=torch.int64)
        self.first = zeros(rows + 1, dtype=torch.int32)
        self.start = zeros(rows, dtype=torch.int32)
        widths = [_width(layout, number, largest.context_len) for number in range(len(layout.groups))]
        self._tables = [zeros(rows * width, dtype=torch.int32) for width in widths]

    def view(self, batch: StepBatch, shape: PaddedShape) -> StepBatch:
        """Its memory as a batch of this shape, whose groups of layers have the windows of the given batch."""
        rows = shape.num_rows
        metadata = []
        for number, (own, memory) in enumerate(zip(batch.metadata, self._tables, strict=True)):
            width = _width(self._layout, number, shape.context_len)
            tables = memory[: rows * width].view(rows, width)
            metadata.append(
                PageRows(window=own.window, first=self.first[: rows + 1], start=self.start[:rows], tables=tables)
            )
        return StepBatch(
            input_ids=self._input_ids[:, : shape.num_tokens],
            position_ids=self._position_ids[:, : shape.num_tokens],
            sampled=self._sampled[: shape.num_sampled],
            metadata=tuple(metadata),
            in_place=batch.in_place,
        )


def tensors_of(batch: StepBatch) -> list[torch.Tensor]:
    """All tensors of a batch whose rows are told as tables of pages."""
    found = [batch.input_ids, batch.position_ids, batch.sampled]
    for rows in batch.metadata:
        assert isinstance(rows, PageRows)
        found += [rows.first, rows.start, rows.tables]
    return found


def _width(layout: CacheLayout, number: int, context_len: int) -> int:
    """Pages in a row of a group's table: tables are filled by whole sectors, which may hold several pages."""
    group = layout.groups[number]
    return group.sectors_for(context_len) * group.sector_len // layout.page_size


def _shares(num_tokens: int, num_rows: int) -> list[int]:
    """So many tokens given to so many rows, as evenly as can be."""
    if not num_rows:
        return []
    least, more = divmod(num_tokens, num_rows)
    return [least + 1] * more + [least] * (num_rows - more)

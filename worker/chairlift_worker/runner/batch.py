"""A step's plan as tensors: packed token ids and positions, slots, and the rows' contexts.

All rows stand one after the other in one sequence, (1, tokens). Only whole rows are handled in Python; tokens and
pages are handled by numpy.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chairlift_worker.attention.base import RowForm
from chairlift_worker.attention.metadata import PageRows, StepMetadata
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import NOTHING_CARRIED, RowPlan, StepPlan
from chairlift_worker.queues import sent
from chairlift_worker.runner.pages import DecodePages, PageReader
from chairlift_worker.runner.tables import Ints, TableReader


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model's forward pass takes."""

    input_ids: torch.Tensor  # (1, tokens) int64
    position_ids: torch.Tensor  # (1, tokens) int64
    sampled: torch.Tensor  # (wanted places,) int64; places of the tokens whose logits are wanted
    metadata: tuple[StepMetadata | PageRows, ...]  # one for each group of layers
    in_place: bool  # whether it takes the decode fast path: the metadata is then in memory that stays the same

    def copied(self, device: torch.device) -> StepBatch:
        """The same in other memory, on that device. It takes rows that are told as tables of pages."""
        return StepBatch(
            input_ids=self.input_ids.to(device, copy=True),
            position_ids=self.position_ids.to(device, copy=True),
            sampled=self.sampled.to(device, copy=True),
            metadata=tuple(_copied(rows, device) for rows in self.metadata),
            in_place=self.in_place,
        )


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a batch that only the device knows by now: those that the step before samples there."""

    places: torch.Tensor  # int64; where they go among the batch's tokens
    sources: torch.Tensor  # int64; where they are among the tokens of the step before

    def put(self, input_ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Puts them into (1, tokens) ids, in the order of the stream."""
        places, sources = (sent(numbers, tokens.device) for numbers in (self.places, self.sources))
        input_ids[0].index_copy_(0, places, tokens.index_select(0, sources))


def find_late(rows: Sequence[RowPlan], place_of: Mapping[int, int]) -> LateTokens | None:
    """The carried tokens that have a place among the tokens of the step before, by uid; None if there are none."""
    ends = itertools.accumulate(row.num_tokens for row in rows)
    found = [
        (end - 1, place_of[row.uid]) for row, end in zip(rows, ends, strict=True) if row.carry and row.uid in place_of
    ]
    if not found:
        return None
    places, sources = zip(*found, strict=True)
    return LateTokens(torch.tensor(places), torch.tensor(sources))


class BatchBuilder:
    """Makes batches of plans."""

    def __init__(
        self,
        *,
        layout: CacheLayout,
        num_sectors: int,
        device: torch.device,
        form: RowForm = "slots",
        max_blocks: int = 0,
        max_rows: int = 0,
    ) -> None:
        """Padding points to sector number `num_sectors`.

        Batches of up to `max_rows` one-token rows of up to `max_blocks` pages take the decode fast path; 0: none does.
        """
        numbers = range(len(layout.groups))
        pages = [PageReader(layout=layout, number=n, num_sectors=num_sectors, device=device) for n in numbers]
        self._readers: Sequence[PageReader | TableReader] = (
            pages
            if form == "pages"
            else [TableReader(layout=layout, number=n, num_sectors=num_sectors, device=device) for n in numbers]
        )
        self._decode = (
            DecodePages(readers=pages, layout=layout, max_rows=max_rows, max_blocks=max_blocks) if max_blocks else None
        )
        self._device = device

    def build(self, plan: StepPlan, carried: Mapping[int, int] = NOTHING_CARRIED) -> StepBatch:
        """The batch of a plan, with the carried tokens of rows that need one, by uid.

        Raises ValueError where the plan breaks its own rules.
        """
        rows = plan.rows
        num_single = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
        singles, longer = rows[:num_single], rows[num_single:]
        _check(rows, longer)
        starts = np.fromiter((row.start for row in singles), np.int64, len(singles))
        tokens = [np.fromiter((_last_token(row, carried) for row in singles), np.int64, len(singles))]
        tokens += [_row_tokens(row, carried) for row in longer]
        positions = [starts, *(np.arange(row.start, row.start + row.num_tokens) for row in longer)]
        in_place = self._decode is not None and not longer and self._decode.fits(starts)
        return StepBatch(
            input_ids=self._tensor(np.concatenate(tokens))[None],
            position_ids=self._tensor(np.concatenate(positions))[None],
            sampled=self._tensor(_wanted(rows)),
            metadata=self._decode.read(singles, starts)
            if self._decode is not None and in_place
            else tuple(reader.read(singles, starts, longer) for reader in self._readers),
            in_place=in_place,
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _copied(rows: StepMetadata | PageRows, device: torch.device) -> PageRows:
    assert isinstance(rows, PageRows)
    return PageRows(
        window=rows.window,
        first=rows.first.to(device, copy=True),
        start=rows.start.to(device, copy=True),
        tables=rows.tables.to(device, copy=True),
    )


def _ints(values: array[int]) -> Ints:
    """An int64 copy of an array('i'). The argument is itself a copy, so that no view keeps the owner's from growing."""
    return np.frombuffer(values, np.int32).astype(np.int64)


def _last_token(row: RowPlan, carried: Mapping[int, int]) -> int:
    """The row's last token. A row that could not be sampled carries none: what follows from it will be dropped."""
    return max(0, carried[row.uid]) if row.carry else row.tokens[row.start + row.num_tokens - 1]


def _row_tokens(row: RowPlan, carried: Mapping[int, int]) -> Ints:
    known = row.tokens[row.start : row.start + row.num_known - row.carry]
    return _ints(known + array("i", [_last_token(row, carried)] if row.carry else row.drafts))


def _wanted(rows: Sequence[RowPlan]) -> Ints:
    """The places of each row whose logits are wanted: those of its `scored` span, then its last `num_sampled`."""
    ends = np.cumsum([row.num_tokens for row in rows])
    if all(row.scored is None for row in rows):
        return _runs(ends, np.array([row.num_sampled for row in rows]))
    runs = [run for row, end in zip(rows, ends.tolist(), strict=True) for run in _runs_of(row, end)]
    stops, counts = zip(*runs, strict=True)
    return _runs(np.array(stops), np.array(counts))


def _runs_of(row: RowPlan, end: int) -> list[tuple[int, int]]:
    """The row's wanted places as (stop, count), where its tokens stop at place `end`."""
    sampled = (end, row.num_sampled)
    if row.scored is None:
        return [sampled]
    stop = end - row.num_tokens + row.scored.index - 1 + row.scored.num_tokens - row.start
    return [(stop, row.scored.num_tokens), sampled]


def _runs(stops: Ints, counts: Ints) -> Ints:
    """Runs of so many places that stop at these, one after the other."""
    places = np.repeat(stops - np.cumsum(counts), counts) + np.arange(counts.sum())
    return places.astype(np.int64)


def _check(rows: Sequence[RowPlan], longer: Sequence[RowPlan]) -> None:
    if not rows:
        raise ValueError("a plan without rows cannot run")
    if any(row.num_tokens <= 1 for row in longer):
        raise ValueError("rows with one token come before the others, and no row is empty")
    for row in rows:
        end = row.start + row.num_known
        if len(row.tokens) < end - row.carry or row.start < 0:
            raise ValueError(f"row {row.uid} runs to position {end} with {len(row.tokens)} tokens")
        if row.drafts and (row.carry or row.sample is None or row.num_known < 1):
            raise ValueError(f"row {row.uid} has drafts, but does not sample at a token that is known")
        span = row.scored
        if span is not None and not row.start < span.index < span.index + span.num_tokens <= end + 1:
            raise ValueError(f"row {row.uid} judges tokens of its prompt at places that it does not compute")

"""A step's plan as tensors: packed token ids and positions, slots, and the rows' contexts.

All rows stand one after the other in one sequence, (1, tokens). Only whole rows are handled in Python; tokens and
pages are handled by numpy.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chairlift_worker.attention.metadata import DecodeGroup, RowSpan, StepMetadata
from chairlift_worker.plan import RowPlan, StepPlan

Ints = npt.NDArray[np.int64]

# One-token rows are padded together while the longest has at most this many times the context of the shortest...
_GROUP_RATIO = 2
# ...or less context than this, where padding costs less than another call.
_GROUP_FREE_LEN = 64


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model's forward pass takes."""

    input_ids: torch.Tensor  # (1, tokens) int64
    position_ids: torch.Tensor  # (1, tokens) int64
    sampled: torch.Tensor  # (sampling rows,) int64; places of the tokens whose logits are wanted
    metadata: StepMetadata


class BatchBuilder:
    """Makes batches of plans."""

    def __init__(self, *, page_size: int, null_slot: int, device: torch.device) -> None:
        self._page_size = page_size
        self._null_slot = null_slot
        self._device = device

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of a plan. Raises ValueError where the plan breaks its own rules."""
        rows = plan.rows
        num_single = next((i for i, row in enumerate(rows) if row.num_tokens != 1), len(rows))
        singles, longer = rows[:num_single], rows[num_single:]
        _check(rows, longer, self._page_size)
        starts = np.fromiter((row.start for row in singles), np.int64, len(singles))
        single_slots, groups = self._groups(singles, starts)
        spans, first = [], num_single
        for row in longer:
            spans.append(self._span(row, first))
            first += row.num_tokens
        tokens = [np.fromiter((row.tokens[row.start] for row in singles), np.int64, len(singles))]
        tokens += [_ints(row.tokens[row.start : row.start + row.num_tokens]) for row in longer]
        positions = [starts, *(np.arange(row.start, row.start + row.num_tokens) for row in longer)]
        slots = [torch.from_numpy(single_slots), *(span.context_slots[span.start :].cpu() for span in spans)]
        lasts = np.cumsum([row.num_tokens for row in rows]) - 1
        sampled = lasts[[row.sample is not None for row in rows]]
        metadata = StepMetadata(slots=torch.cat(slots).to(self._device), groups=groups, spans=spans)
        return StepBatch(
            input_ids=self._tensor(np.concatenate(tokens))[None],
            position_ids=self._tensor(np.concatenate(positions))[None],
            sampled=self._tensor(sampled.astype(np.int64)),
            metadata=metadata,
        )

    def _span(self, row: RowPlan, first: int) -> RowSpan:
        context_len = row.start + row.num_tokens
        slots = self._slots(_ints(row.pages[: -(-context_len // self._page_size)])).reshape(-1)[:context_len]
        return RowSpan(first=first, num_tokens=row.num_tokens, start=row.start, context_slots=self._tensor(slots))

    def _groups(self, rows: Sequence[RowPlan], starts: Ints) -> tuple[Ints, list[DecodeGroup]]:
        """Slots of the rows' new tokens, and the rows in groups."""
        if not rows:
            return np.empty(0, np.int64), []
        page_size = self._page_size
        counts = starts // page_size + 1
        pages = np.full((len(rows), int(counts.max())), self._null_slot // page_size, np.int64)
        named = np.concatenate([_ints(row.pages[:count]) for row, count in zip(rows, counts.tolist(), strict=True)])
        pages[np.arange(pages.shape[1]) < counts[:, None]] = named
        new_slots = pages[np.arange(len(rows)), starts // page_size] * page_size + starts % page_size
        lens = starts + 1
        order = np.argsort(lens, kind="stable")
        borders = _group_borders(lens[order])
        if len(borders) == 2:
            return new_slots, [self._group(pages, lens, None)]
        return new_slots, [
            self._group(pages, lens, np.sort(order[begin:end])) for begin, end in itertools.pairwise(borders)
        ]

    def _group(self, pages: Ints, lens: Ints, tokens: Ints | None) -> DecodeGroup:
        if tokens is not None:
            pages, lens = pages[tokens], lens[tokens]
        longest = int(lens.max())
        slots = self._slots(pages[:, : -(-longest // self._page_size)]).reshape(len(lens), -1)[:, :longest]
        padded = bool((lens < longest).any())
        if padded:
            slots = np.where(np.arange(longest) < lens[:, None], slots, self._null_slot)
        return DecodeGroup(
            tokens=None if tokens is None else self._tensor(tokens),
            context_slots=self._tensor(np.ascontiguousarray(slots)),
            context_lens=self._tensor(lens),
            padded=padded,
        )

    def _slots(self, pages: Ints) -> Ints:
        """(..., pages) -> (..., pages, page_size)."""
        return pages[..., None] * self._page_size + np.arange(self._page_size)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _ints(values: array[int]) -> Ints:
    """An int64 copy of an array('i'). The argument is itself a copy, so that no view keeps the owner's from growing."""
    return np.frombuffer(values, np.int32).astype(np.int64)


def _group_borders(sorted_lens: Ints) -> list[int]:
    """Where groups begin in rows sorted by length, and the end."""
    borders, i = [0], 0
    while i < len(sorted_lens):
        limit = max(_GROUP_FREE_LEN, _GROUP_RATIO * int(sorted_lens[i]))
        i = int(np.searchsorted(sorted_lens, limit, side="right"))
        borders.append(i)
    return borders


def _check(rows: Sequence[RowPlan], longer: Sequence[RowPlan], page_size: int) -> None:
    if not rows:
        raise ValueError("a plan without rows cannot run")
    if any(row.num_tokens <= 1 for row in longer):
        raise ValueError("rows with one token come before the others, and no row is empty")
    for row in rows:
        end = row.start + row.num_tokens
        if len(row.pages) * page_size < end or len(row.tokens) < end or row.start < 0:
            raise ValueError(
                f"row {row.uid} runs to position {end} with {len(row.tokens)} tokens and {len(row.pages)} pages"
            )

"""Where the rows of one step stand in the packed tensors and in the cache.

Built once a step for each group of layers, read by every layer of the group. Contexts begin where the group's window
does, so that what a layer reads is bounded by its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row: its query tokens in the packed tensors, and the slots of its context."""

    first: int  # of its query tokens, in the packed tensors
    num_tokens: int
    start: int  # position of its first query token
    context_start: int  # position of the first token that any of its query tokens sees
    context_slots: torch.Tensor  # (start + num_tokens - context_start,) int64; slot of each position

    @property
    def end(self) -> int:
        """The position after the last query token's."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token with contexts of similar length, padded to the longest."""

    tokens: torch.Tensor | None  # (rows,) int64, their places in the packed tensors; None: 0, 1, 2, ...
    context_slots: torch.Tensor  # (rows, padded length) int64; the null slot where there is no position
    context_lens: torch.Tensor  # (rows,) int64; how many tokens each row sees, its own included
    padded: bool  # whether some row is shorter than the padded length

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.context_slots.shape[0]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The rows of a step, to one group of layers: groups of one-token rows, then the longer rows one by one.

    Masks are added to the scores: 0 where a token may look, minus infinity elsewhere. They are made at the first layer
    that asks and kept for the others.
    """

    window: int | None  # of the group's layers; contexts hold nothing that no query token of the row sees
    slots: torch.Tensor  # (tokens,) int64; where the new keys and values go
    groups: Sequence[DecodeGroup]
    spans: Sequence[RowSpan]
    _masks: dict[int, torch.Tensor | None] = field(default_factory=dict)

    def group_mask(self, number: int, dtype: torch.dtype) -> torch.Tensor | None:
        """(rows, 1, 1, padded length): where the rows' tokens may look; None if everywhere."""
        if number not in self._masks:
            self._masks[number] = _group_mask(self.groups[number], dtype)
        return self._masks[number]

    def span_mask(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """(query tokens, context): where the tokens of that longer row may look: back, and not too far."""
        key = len(self.groups) + number
        mask = self._masks.get(key)
        if mask is None:
            mask = _span_mask(self.spans[number], self.window, dtype)
            self._masks[key] = mask
        return mask


@dataclass(frozen=True, slots=True)
class PageRows:
    """The rows of a step, to one group of layers, as tables of pages.

    A unit is what one layer's keys, or values, take in a page (kv/layout.py): a table entry is the number of the
    page's first unit. Entries below the window are negative, those behind a row's last page have no meaning.
    """

    window: int | None  # of the group's layers
    first: torch.Tensor  # (rows + 1,) int32; each row's first query token in the packed tensors, and their number
    start: torch.Tensor  # (rows,) int32; position of that token
    tables: torch.Tensor  # (rows, pages) int32

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.start.shape[0]


def _span_mask(span: RowSpan, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    device = span.context_slots.device
    queries = torch.arange(span.start, span.end, device=device)[:, None]
    keys = torch.arange(span.context_start, span.end, device=device)[None, :]
    visible = keys <= queries
    return _additive(visible if window is None else visible & (keys > queries - window), dtype)


def _group_mask(group: DecodeGroup, dtype: torch.dtype) -> torch.Tensor | None:
    if not group.padded:
        return None
    places = torch.arange(group.context_slots.shape[1], device=group.context_slots.device)[None, :]
    return _additive(places < group.context_lens[:, None], dtype)[:, None, None, :]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))

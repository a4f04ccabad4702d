"""Where the rows of one step stand in the packed tensors and in the cache: built once, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row: its query tokens in the packed tensors, and the slots of its whole context."""

    first: int  # of its query tokens, in the packed tensors
    num_tokens: int
    start: int  # position of its first query token
    context_slots: torch.Tensor  # (start + num_tokens,) int64; slot of each position

    @property
    def context_len(self) -> int:
        """Positions that the last query token may see, its own included."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token with contexts of similar length, padded to the longest."""

    tokens: torch.Tensor | None  # (rows,) int64, their places in the packed tensors; None: 0, 1, 2, ...
    context_slots: torch.Tensor  # (rows, padded length) int64; the null slot where there is no position
    context_lens: torch.Tensor  # (rows,) int64
    padded: bool  # whether some row is shorter than the padded length

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.context_slots.shape[0]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The rows of a step: groups of one-token rows, then the longer rows one by one.

    Masks are added to the scores: 0 where a token may look, minus infinity elsewhere. They are made at the first layer
    that asks and kept for the others.
    """

    slots: torch.Tensor  # (tokens,) int64; where the new keys and values go
    groups: Sequence[DecodeGroup]
    spans: Sequence[RowSpan]
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def group_mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """(rows, 1, 1, padded length): where the rows' tokens may look; None if everywhere."""
        key = (number, window)
        if key not in self._masks:
            self._masks[key] = _group_mask(self.groups[number], window, dtype)
        return self._masks[key]

    def span_mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(query tokens, context): where the tokens of that longer row may look: back, and not too far."""
        key = (len(self.groups) + number, window)
        mask = self._masks.get(key)
        if mask is None:
            span = self.spans[number]
            device = span.context_slots.device
            queries = torch.arange(span.start, span.context_len, device=device)[:, None]
            keys = torch.arange(span.context_len, device=device)[None, :]
            mask = _additive(_visible(queries, keys, window), dtype)
            self._masks[key] = mask
        return mask


def _visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether the query at a position may see the key at a position; the two broadcast."""
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _group_mask(group: DecodeGroup, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    padded_len = group.context_slots.shape[1]
    if not group.padded and (window is None or padded_len <= window):
        return None
    keys = torch.arange(padded_len, device=group.context_slots.device)[None, :]
    return _additive(_visible(group.context_lens[:, None] - 1, keys, window), dtype)[:, None, None, :]

"""Attention in plain torch, token by token as the formula says: slow, and what the others are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from chairlift_worker.attention.base import AttentionCall, AttentionOptions, AttentionStep, PagedStep, RowForm
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.metadata import StepMetadata


class ReferenceAttention:
    """The plain backend, `eager`; computes in float32 whatever the model's type."""

    name = "eager"
    form: RowForm = "slots"

    def step(self, cache: PagedCache, metadata: Sequence[StepMetadata]) -> AttentionStep:
        """One forward pass."""
        return PagedStep(backend=self, cache=cache, metadata=metadata)

    def attend(self, call: AttentionCall, cache: PagedCache, metadata: StepMetadata) -> torch.Tensor:
        """(tokens, query heads, head dim); one row at a time."""
        out = torch.empty_like(call.query)
        keys, values = cache.slot_keys(call.layer), cache.slot_values(call.layer)
        for first, num_tokens, context in _rows(metadata):
            key = keys[context].float().repeat_interleave(call.num_groups, dim=1)  # (context, query heads, head dim)
            value = values[context].float().repeat_interleave(call.num_groups, dim=1)
            for token in range(num_tokens):
                position = len(context) - num_tokens + token
                query = call.query[first + token].float()
                out[first + token] = _attend_one(query, key, value, position, call.options).to(out.dtype)
        return out


def _rows(metadata: StepMetadata) -> Iterator[tuple[int, int, torch.Tensor]]:
    """First token, number of tokens and context slots of each row; the context ends with the row's last token."""
    for group in metadata.groups:
        for i in range(group.num_rows):
            token = i if group.tokens is None else int(group.tokens[i])
            yield token, 1, group.context_slots[i, : int(group.context_lens[i])]
    for span in metadata.spans:
        yield span.first, span.num_tokens, span.context_slots


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: int, options: AttentionOptions
) -> torch.Tensor:
    """One token's (query heads, head dim); `position` is its place among the context's keys and values."""
    oldest = 0 if options.sliding_window is None else max(0, position + 1 - options.sliding_window)
    key, value = key[oldest : position + 1], value[oldest : position + 1]
    scores = torch.einsum("hd,khd->hk", query, key) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.float()[:, None]], dim=1)
    weights = scores.softmax(dim=1)[:, : key.shape[0]]
    return torch.einsum("hk,khd->hd", weights, value)

"""Attention by torch's scaled_dot_product_attention on contexts gathered from the pages.

One-token rows go in padded batches, longer rows one by one. Query heads that share a key-value head are the query
"tokens" of one head, so keys and values are never repeated. What the torch function cannot do (soft caps, sinks) is
computed in plain matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift_worker.attention.base import AttentionCall, AttentionOptions, AttentionStep, PagedStep, RowForm
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.metadata import DecodeGroup, StepMetadata


class SdpaAttention:
    """The backend `sdpa`."""

    name = "sdpa"
    form: RowForm = "slots"

    def step(self, cache: PagedCache, metadata: Sequence[StepMetadata]) -> AttentionStep:
        """One forward pass."""
        return PagedStep(backend=self, cache=cache, metadata=metadata)

    def attend(self, call: AttentionCall, cache: PagedCache, metadata: StepMetadata) -> torch.Tensor:
        """(tokens, query heads, head dim)."""
        if not metadata.spans and len(metadata.groups) == 1 and metadata.groups[0].tokens is None:
            return _attend_group(call, cache, metadata, 0)
        out = torch.empty_like(call.query)
        for number, group in enumerate(metadata.groups):
            rows = _attend_group(call, cache, metadata, number)
            if group.tokens is None:
                out[: group.num_rows] = rows
            else:
                out.index_copy_(0, group.tokens, rows)
        for number, span in enumerate(metadata.spans):
            out[span.first : span.first + span.num_tokens] = _attend_span(call, cache, metadata, number)
        return out


def _attend_group(call: AttentionCall, cache: PagedCache, metadata: StepMetadata, number: int) -> torch.Tensor:
    """(rows, query heads, head dim) of one-token rows."""
    group = metadata.groups[number]
    query = _group_query(call, group)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = call.key.shape[1]
    query = query.reshape(group.num_rows, num_kv_heads, call.num_groups, head_dim)
    key = _gather(cache.slot_keys(call.layer), group.context_slots)
    value = _gather(cache.slot_values(call.layer), group.context_slots)
    mask = metadata.group_mask(number, query.dtype)
    if _is_plain(call.options):
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.options.scaling)
    else:
        mask = None if mask is None else mask[:, :, None]
        out = _attend_by_matmul(query[:, :, :, None], key, value, mask, call.options)[:, :, :, 0]
    return out.reshape(group.num_rows, num_heads, head_dim)


def _attend_span(call: AttentionCall, cache: PagedCache, metadata: StepMetadata, number: int) -> torch.Tensor:
    """(tokens, query heads, head dim) of one longer row."""
    span, window = metadata.spans[number], metadata.window
    packed = slice(span.first, span.first + span.num_tokens)
    query = call.query[packed].transpose(0, 1)[None]  # (1, query heads, tokens, head dim)
    if span.start == 0:  # the whole context is in this step
        key, value = call.key[packed].transpose(0, 1)[None], call.value[packed].transpose(0, 1)[None]
    else:
        key = _gather(cache.slot_keys(call.layer), span.context_slots[None])
        value = _gather(cache.slot_values(call.layer), span.context_slots[None])
    if not _is_plain(call.options):
        grouped = query.view(1, key.shape[1], call.num_groups, *query.shape[2:])
        out = _attend_by_matmul(grouped, key, value, metadata.span_mask(number, query.dtype), call.options).flatten(
            1, 2
        )
        return out[0].transpose(0, 1)
    square = span.start == 0 and (window is None or span.num_tokens <= window)
    out = scaled_dot_product_attention(
        query,
        key.repeat_interleave(call.num_groups, dim=1),
        value.repeat_interleave(call.num_groups, dim=1),
        attn_mask=None if square else metadata.span_mask(number, query.dtype),
        is_causal=square,
        scale=call.options.scaling,
    )
    return out[0].transpose(0, 1)


def _attend_by_matmul(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """Query is (rows, kv heads, groups, tokens, head dim), key and value (rows, kv heads, context, head dim)."""
    scores = torch.einsum("bhgqd,bhkd->bhgqk", query, key).float() * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, query.shape[1], query.shape[2], 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.einsum("bhgqk,bhkd->bhgqd", weights, value)


def _gather(slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(rows, kv heads, length, head dim) from (slots, kv heads, head dim) and (rows, length)."""
    return slots.index_select(0, wanted.flatten()).view(*wanted.shape, *slots.shape[1:]).transpose(1, 2)


def _group_query(call: AttentionCall, group: DecodeGroup) -> torch.Tensor:
    return call.query[: group.num_rows] if group.tokens is None else call.query.index_select(0, group.tokens)


def _is_plain(options: AttentionOptions) -> bool:
    return options.softcap is None and options.sinks is None

"""The memory of keys and values: pages of slots, one slot a token, per layer.

| what                | where                                                                |
|---------------------|----------------------------------------------------------------------|
| page p of a layer   | keys[layer][p] and values[layer][p], (page_size, kv heads, head dim) |
| slot s of a layer   | slot_keys(layer)[s], with s = page * page_size + offset              |
| the null page       | page number num_pages: always zero, given to nobody                  |

Padding points to the null page, never to a page that a request used: a stale NaN there would spread through 0 * NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift_worker.attention.layer import LayerFacts


def page_bytes(*, layers: Sequence[LayerFacts], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page number: its keys and values in all layers."""
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
    return per_token * page_size * dtype.itemsize


class PagedCache:
    """Keys and values of `num_pages` pages, for all layers. The pool hands out page numbers; this owns the bytes."""

    def __init__(
        self,
        *,
        layers: Sequence[LayerFacts],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates (num_pages + 1) pages of zeros per layer. Raises ValueError on sizes under 1."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a cache needs pages: num_pages={num_pages}, page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        shapes = [(num_pages + 1, page_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def null_slot(self) -> int:
        """First slot of the null page."""
        return self.num_pages * self.page_size

    def slot_keys(self, layer: int) -> torch.Tensor:
        """A layer's keys as (slots, kv heads, head dim); a view."""
        return self.keys[layer].flatten(0, 1)

    def slot_values(self, layer: int) -> torch.Tensor:
        """A layer's values as (slots, kv heads, head dim); a view."""
        return self.values[layer].flatten(0, 1)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put one token's key and value into each of `slots`; key and value are (tokens, kv heads, head dim)."""
        self.slot_keys(layer).index_copy_(0, slots, key)
        self.slot_values(layer).index_copy_(0, slots, value)

"""What one attention layer is, as far as its cache and its masks are concerned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Shape and reach of one layer's keys and values."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens seen, the query's own included; None: all

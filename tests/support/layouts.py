"""Cache layouts of made-up models."""

from __future__ import annotations

from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.kv.layout import CacheLayout, make_layout


def layout_of(*windows: int | None, page_size: int = 4) -> CacheLayout:
    """One small layer for each window; None is full attention."""
    layers = [LayerFacts(num_kv_heads=1, head_dim=2, sliding_window=window) for window in windows]
    return make_layout(layers, page_size=page_size)

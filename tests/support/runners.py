"""Runners over transformers modules."""

from __future__ import annotations

from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.runner import ModuleForward, Runner
from transformers.modeling_utils import PreTrainedModel


def module_runner(
    model: PreTrainedModel,
    layout: CacheLayout,
    *,
    backend: str,
    num_sectors: int,
    max_blocks_per_request: int = 0,
    max_requests: int = 0,
) -> Runner:
    """A runner with a cache of its own."""
    cache = PagedCache(layout=layout, num_sectors=num_sectors, dtype=model.dtype)
    return Runner(
        forward=ModuleForward(model=model, backend=make_backend(backend), cache=cache),
        cache=cache,
        max_blocks_per_request=max_blocks_per_request,
        max_requests=max_requests,
    )

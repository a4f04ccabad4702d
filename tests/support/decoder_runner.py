"""Runners over the native decoder."""

from __future__ import annotations

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.decoder.build import build_forward
from chairlift_worker.decoder.choice import Quantization
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.runner import Runner


def decoder_runner(
    model: LoadedModel,
    layout: CacheLayout,
    *,
    num_sectors: int,
    isa: Isa = Isa.BEST,
    quantization: Quantization = "none",
    max_blocks_per_request: int = 0,
    max_requests: int = 0,
) -> Runner:
    """A runner with a cache of its own."""
    cache = PagedCache(layout=layout, num_sectors=num_sectors, dtype=model.dtype)
    return Runner(
        forward=build_forward(model, cache=cache, quantization=quantization, isa=isa),
        cache=cache,
        max_blocks_per_request=max_blocks_per_request,
        max_requests=max_requests,
    )

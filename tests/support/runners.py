"""Runners over transformers modules."""

from __future__ import annotations

from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.pass_config import PassConfig
from chairlift_worker.runner import Padding, Runner, make_module_forward
from transformers.modeling_utils import PreTrainedModel

PLAIN = PassConfig()


def module_runner(
    model: PreTrainedModel,
    layout: CacheLayout,
    *,
    backend: str,
    num_sectors: int,
    max_blocks_per_request: int = 0,
    max_requests: int = 0,
    max_batch_tokens: int = 512,
    passes: PassConfig = PLAIN,
    num_inputs: int = 1,
) -> Runner:
    """A runner with a cache of its own. `max_requests` bounds the rows of the fast path, and of captured batches."""
    cache = PagedCache(layout=layout, num_sectors=num_sectors, dtype=model.dtype)
    padding = Padding(
        q_interval=passes.graphs.q_interval,
        kv_interval=passes.graphs.kv_interval,
        max_tokens=max_batch_tokens,
        max_rows=max_requests,
        max_context_len=model.config.max_position_embeddings,
        decode_len=max_blocks_per_request * layout.page_size,
    )
    forward = make_module_forward(
        model=model,
        backend=make_backend(backend),
        cache=cache,
        passes=passes,
        padding=padding,
        num_inputs=num_inputs,
    )
    return Runner(
        forward=forward,
        cache=cache,
        max_blocks_per_request=max_blocks_per_request,
        max_requests=max_requests,
    )

"""Forward passes through a transformers module, as the settings have them."""

from __future__ import annotations

from typing import Any

import structlog
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionBackend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.pass_config import PassConfig
from chairlift_worker.runner.compiled import CompiledForward
from chairlift_worker.runner.forward import Forward, ModuleForward
from chairlift_worker.runner.graphs import graphs_for
from chairlift_worker.runner.inputs import StaticInputs
from chairlift_worker.runner.padding import Padding
from chairlift_worker.runner.replay import GraphForward

_log = structlog.get_logger(__name__)


def make_module_forward(
    *,
    model: PreTrainedModel,
    backend: AttentionBackend[Any],
    cache: PagedCache,
    passes: PassConfig,
    padding: Padding,
    num_inputs: int = 1,
) -> Forward:
    """The pass: compiled where that is asked for, and captured; `num_inputs` steps may be in flight.

    Raises ValueError for graphs of a backend that takes slots.
    """
    varlen, decode = passes.varlen_compile, passes.decode_compile
    forward: Forward
    if varlen is None and decode is None:
        forward = ModuleForward(model=model, backend=backend, cache=cache)
    else:
        forward = CompiledForward(
            model=model,
            backend=backend,
            cache=cache,
            varlen=varlen,
            decode=decode,
            padding=padding,
            captured=passes.graphs.varlen,
        )
    if not passes.graphs.are_on:
        return forward
    device = cache.sectors.device
    captured = GraphForward(
        forward=forward,
        graphs=graphs_for(device),
        inputs=[
            StaticInputs(layout=cache.layout, num_sectors=cache.num_sectors, largest=padding.largest(), device=device)
            for _ in range(num_inputs)
        ],
        fixed=[cache.sectors, *model.parameters(), *model.buffers()],
        padding=padding,
        options=passes.graphs,
    )
    _log.info("steps are captured as graphs", graphs_at_most=captured.max_captured, sets_of_inputs=num_inputs)
    return captured

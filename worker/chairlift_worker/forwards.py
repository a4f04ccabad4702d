"""Which forward pass runs: the native decoder's, or that of the transformers module."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.config import WorkerConfig
from chairlift_worker.decoder.build import DecoderWeights, build_forward, release
from chairlift_worker.decoder.forward import DecoderForward
from chairlift_worker.decoder.verify import bound, difference
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.runner import Forward, ModuleForward, Padding, make_module_forward
from chairlift_worker.setting_log import SettingError

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Computation:
    """A model that can be run."""

    forward: Forward
    take: Callable[[PreTrainedModel], None] | None  # puts other weights in; None: they are the module's own


def make_computation(config: WorkerConfig, model: LoadedModel, cache: PagedCache, *, num_inputs: int) -> Computation:
    """The forward pass that the config calls for, over this cache; `num_inputs` steps may be in flight.

    Afterwards the module may be without weights. Raises SettingError where the native decoder was to quantise weights
    that it cannot compute with.
    """
    backend = make_backend(config.attn_implementation, isa=config.impl.isa)
    if config.impl.impl == "native":
        plain = ModuleForward(model=model.module, backend=backend, cache=cache)
        decoder = _decoder(config, model, cache, plain)
        if decoder is not None:
            take = DecoderWeights(forward=decoder, options=model.attention_options).take
            release(model.module)
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what the module's weights took goes back to the system
            return Computation(decoder, take)
    forward = make_module_forward(
        model=model.module,
        backend=backend,
        cache=cache,
        passes=config.passes,
        padding=_padding(config, model),
        num_inputs=num_inputs,
    )
    return Computation(forward, None)


def _decoder(
    config: WorkerConfig, model: LoadedModel, cache: PagedCache, reference: ModuleForward
) -> DecoderForward | None:
    """The native decoder; None, with a warning, where it does not compute what the module does."""
    quantization = config.impl.quantization
    most = bound(model.dtype, quantization, is_int8_cache=cache.layout.is_int8)
    for isa in _to_try(config.impl.isa):
        try:
            decoder = build_forward(model, cache=cache, quantization=quantization, isa=isa)
        except ValueError as error:
            raise SettingError(f"quantization = {quantization}: {error}") from error
        off = difference(decoder, reference, cache=cache, vocab_size=model.vocab_size)
        if off <= most:
            return decoder
        fault = f"with {isa.name} its logits differ from those of the model's own module by {off:.1e} of their length"
        _log.warning(f"the native decoder is not used: {fault}")
    if quantization != "none":
        raise SettingError(f"quantization = {quantization}: the native decoder does not compute what the module does")
    return None


def _to_try(isa: Isa) -> tuple[Isa, ...]:
    """AMX's instructions were never run by the tests of a machine without them: what it falls back to was."""
    return (Isa.AMX, Isa.AVX512_BF16) if isa is Isa.AMX else (isa,)


def _padding(config: WorkerConfig, model: LoadedModel) -> Padding:
    graphs = config.passes.graphs
    return Padding(
        q_interval=graphs.q_interval,
        kv_interval=graphs.kv_interval,
        max_tokens=config.max_batch_tokens,
        max_rows=config.max_requests_per_batch,
        max_context_len=min(model.context_len, config.cache_len),
        decode_len=config.max_blocks_per_request * config.page_size,
    )

"""The worker's settings with nothing left open: what was asked, or what model and machine call for, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, ParamSpec, TypeVar

from chairlift_worker.attention.choice import (
    Chosen,
    choose_backend,
    choose_kv_cache,
    choose_max_blocks,
    choose_sharing,
)
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.decoder.choice import ImplOptions, choose_impl, choose_isa, choose_quantization
from chairlift_worker.host import FreeMemory
from chairlift_worker.ipc.messages import SettingMsg
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import CacheLayout, make_layout
from chairlift_worker.pass_config import PassConfig, resolve_passes
from chairlift_worker.setting_log import SettingError, SettingLog
from chairlift_worker.speculation.speculator import DraftLimits
from chairlift_worker.speculation_choice import resolve_speculation
from chairlift_worker.step_budget import MAX_JUDGED
from chairlift_worker.step_choice import choose_chunk, choose_margin, choose_stretch, choose_threads
from chairlift_worker.swap.sizing import size_pool

CPU_PAGE_SIZE: Final = 16
CPU_MAX_BATCH_TOKENS: Final = 512
MIN_AUTO_BATCH_TOKENS: Final = 256
MAX_REQUESTS: Final = 1024
MEMORY_PERCENT: Final = 0.8
CPU_CACHE_BYTES: Final = 4 << 30


T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the resolution needs to know of the loaded model."""

    context_len: int
    layers: tuple[LayerFacts, ...]
    item_bytes: int  # one number of the model's own type
    token_bytes: int  # input and activation buffers of one query token
    logits_bytes: int  # buffers of one place that is sampled at
    dtype: str
    dtype_reason: str
    attention_faults: Mapping[str, str]  # backends that cannot run it, and why
    decoder_fault: str | None = None  # why the native decoder cannot compute it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Every setting's value; see `WorkerSettings` for what each means."""

    attn_implementation: str
    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_prefill_chunk: int
    max_requests_per_batch: int
    max_blocks_per_request: int  # 0: no decode fast path
    scheduler_type: Literal["fifo", "prefill_first"]
    safety_margin: float
    max_step_stretch: float  # 0: prompts take what there is
    allow_block_sharing: bool
    num_threads: int
    num_swap_blocks: int  # sectors that the swap pool holds
    use_async_batching: bool
    drafts: DraftLimits | None  # None: no speculation
    passes: PassConfig  # how the module is run, where it is the module that is run
    impl: ImplOptions
    layout: CacheLayout
    cache_len: int  # slots of key-value cache that a request alone can use
    settings: tuple[SettingMsg, ...]  # the settings above and the rest, as users see them
    warnings: tuple[str, ...]  # what is not as it was asked


def resolve(settings: WorkerSettings, *, model: ModelFacts, memory: FreeMemory, cores: int) -> WorkerConfig:
    """Fills in what is open. Raises SettingError where what was asked cannot be."""
    log = SettingLog()
    _note_model(settings, model, log)
    backend = log.choice("attn_implementation", _backend(settings, model))
    layout = _layout(settings, log, model, backend)
    percent = _given_or(
        settings.max_memory_percent, MEMORY_PERCENT, log, "max_memory_percent", "default with logit processing"
    )
    budget = int(memory.num_bytes * percent)
    max_batch_tokens = _max_batch_tokens(settings, log, model, budget)
    chunk = log.choice("max_prefill_chunk", choose_chunk(settings.max_prefill_chunk, max_batch_tokens=max_batch_tokens))
    room = _Room(layout=layout, free=memory, budget=budget, max_batch_tokens=max_batch_tokens, chunk=chunk)
    num_blocks = _num_blocks(settings, log, model, room)
    max_requests = _max_requests(settings, log, max_batch_tokens, num_blocks // len(layout.groups))
    max_blocks = log.choice("max_blocks_per_request", _max_blocks(settings, backend, layout, model.context_len))
    margin = log.choice("safety_margin", choose_margin(settings.safety_margin, settings.scheduler_type))
    stretch = log.choice(
        "max_step_stretch", _possible(choose_stretch, settings.max_step_stretch, settings.scheduler_type)
    )
    passes = resolve_passes(settings, log, backend=backend, has_fast_path=max_blocks > 0)
    impl = _impl(settings, log, model, backend, passes)
    sharing = log.choice("allow_block_sharing", choose_sharing(settings.allow_block_sharing, layout=layout))
    threads = log.choice("num_threads", choose_threads(settings.num_threads, cores))
    num_swap_blocks = _num_swap_blocks(settings, log, memory, num_blocks, layout.sector_bytes(model.item_bytes))
    drafts = resolve_speculation(settings, log)
    _note_plain(settings, log)
    return WorkerConfig(
        attn_implementation=backend,
        page_size=layout.page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_prefill_chunk=chunk,
        max_requests_per_batch=max_requests,
        max_blocks_per_request=max_blocks,
        scheduler_type=settings.scheduler_type,
        safety_margin=margin,
        max_step_stretch=stretch,
        allow_block_sharing=sharing,
        num_threads=threads,
        num_swap_blocks=num_swap_blocks,
        use_async_batching=settings.use_async_batching,
        drafts=drafts,
        passes=passes,
        impl=impl,
        layout=layout,
        cache_len=layout.capacity(num_sectors=num_blocks, step_len=chunk, limit=model.context_len),
        settings=tuple(log.entries),
        warnings=tuple(log.warnings),
    )


def _possible(choose: Callable[P, Chosen[T]], *args: P.args, **kwargs: P.kwargs) -> Chosen[T]:
    try:
        return choose(*args, **kwargs)
    except ValueError as error:
        raise SettingError(str(error)) from error


def _backend(settings: WorkerSettings, model: ModelFacts) -> Chosen[str]:
    return _possible(
        choose_backend,
        settings.attn_implementation,
        auto_switch=settings.auto_switch_to_flash,
        faults=model.attention_faults,
    )


def _layout(settings: WorkerSettings, log: SettingLog, model: ModelFacts, backend: str) -> CacheLayout:
    kv_cache = log.choice("kv_cache_dtype", _possible(choose_kv_cache, settings.kv_cache_dtype, backend=backend))
    why = "default on a CPU: small pages share more and waste less"
    page_size = _given_or(settings.page_size, CPU_PAGE_SIZE, log, "page_size", why)
    return make_layout(model.layers, page_size=page_size, kv_cache=kv_cache)


def _impl(
    settings: WorkerSettings, log: SettingLog, model: ModelFacts, backend: str, passes: PassConfig
) -> ImplOptions:
    try:
        impl = choose_impl(settings.model_impl, fault=model.decoder_fault, backend=backend, are_plain=passes.are_plain)
        bits = choose_quantization(settings.quantization, impl=impl.value, why=impl.reason)
        isa = choose_isa(settings.cpu_isa)
    except ValueError as error:
        raise SettingError(str(error)) from error
    return ImplOptions(
        impl=log.choice("model_impl", impl),
        quantization=log.choice("quantization", bits),
        isa=log.choice("cpu_isa", isa, shown=isa.value.name.lower()),
    )


def _max_blocks(settings: WorkerSettings, backend: str, layout: CacheLayout, context_len: int) -> Chosen[int]:
    return choose_max_blocks(
        settings.max_blocks_per_request,
        backend=backend,
        layout=layout,
        context_len=context_len,
        max_lengths=(settings.max_prompt_length, settings.max_generated_length),
    )


def _given_or(given: T | None, default: T, log: SettingLog, name: str, why: str) -> T:
    """What was set, else the default and the reason for it."""
    return log.note(name, default, why) if given is None else log.note(name, given, "as set")


def _max_batch_tokens(settings: WorkerSettings, log: SettingLog, model: ModelFacts, budget: int) -> int:
    if settings.max_batch_tokens is not None:
        return log.note("max_batch_tokens", settings.max_batch_tokens, "as set")
    affordable = budget // 2 // model.token_bytes  # never more than half: the rest is for the cache
    if affordable >= CPU_MAX_BATCH_TOKENS:
        return log.note(
            "max_batch_tokens", CPU_MAX_BATCH_TOKENS, "default on a CPU: longer steps stall running streams"
        )
    value = max(MIN_AUTO_BATCH_TOKENS, affordable)
    return log.note("max_batch_tokens", value, f"buffers of {model.token_bytes} bytes a token in {budget} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Where the cache is to fit in."""

    layout: CacheLayout
    free: FreeMemory
    budget: int  # bytes, of the free ones
    max_batch_tokens: int
    chunk: int


def _num_blocks(settings: WorkerSettings, log: SettingLog, model: ModelFacts, room: _Room) -> int:
    layout, free = room.layout, room.free
    block_bytes = layout.sector_bytes(model.item_bytes)
    if settings.num_blocks is not None:
        need = settings.num_blocks * block_bytes
        if need > free.num_bytes:
            raise SettingError(
                f"num_blocks = {settings.num_blocks}: a cache of {need} bytes, "
                f"but {free.num_bytes} bytes are {free.reason}"
            )
        if layout.capacity(num_sectors=settings.num_blocks, step_len=room.chunk, limit=1) < 1:
            raise SettingError(
                f"num_blocks = {settings.num_blocks}: a request of this model takes at least {len(layout.groups)}, "
                "one for each kind of its layers"
            )
        return log.note("num_blocks", settings.num_blocks, f"as set{layout.describe_sector()}")
    places = 1 if settings.speculative == "none" else 1 + settings.speculative_tokens
    sampled = places * (settings.max_requests_per_batch or MAX_REQUESTS)
    rows = min(room.max_batch_tokens, sampled + MAX_JUDGED)
    buffers = room.max_batch_tokens * model.token_bytes + rows * model.logits_bytes
    left, reason = room.budget - buffers, f"{free.reason}, after {buffers} bytes of buffers"
    most = CPU_CACHE_BYTES // settings.tp_size  # each rank has its heads of every page
    if settings.max_memory_percent is None and left > most:
        left, reason = most, "4 GiB, the most that is taken unasked on a CPU"
    all_requests = MAX_REQUESTS * layout.peak(0, model.context_len, room.chunk)
    num_blocks = min(left // block_bytes, all_requests)
    if layout.capacity(num_sectors=num_blocks, step_len=room.chunk, limit=1) < 1:
        raise SettingError(
            f"max_memory_percent = {settings.max_memory_percent or MEMORY_PERCENT}: "
            f"{free.num_bytes} bytes are {free.reason}; "
            f"not one page of {block_bytes} bytes for each kind of layers fits beside {buffers} bytes of buffers"
        )
    return log.note("num_blocks", num_blocks, f"{num_blocks * block_bytes} bytes: {reason}{layout.describe_sector()}")


def _num_swap_blocks(
    settings: WorkerSettings, log: SettingLog, memory: FreeMemory, num_blocks: int, sector_bytes: int
) -> int:
    log.note("cpu_offload_space", settings.cpu_offload_space, "as set, or the default")
    log.note(
        "cpu_offload_space_safety_threshold", settings.cpu_offload_space_safety_threshold, "as set, or the default"
    )
    number, reason = size_pool(
        space=settings.cpu_offload_space,
        threshold=settings.cpu_offload_space_safety_threshold,
        available_bytes=(memory.num_bytes - num_blocks * sector_bytes) * settings.tp_size,  # of all ranks, as the space
        sector_bytes=sector_bytes * settings.tp_size,
    )
    return log.note("swap_blocks", number, reason)


def _note_model(settings: WorkerSettings, model: ModelFacts, log: SettingLog) -> None:
    log.note("model", settings.model, "as set")
    log.note("dtype", model.dtype, model.dtype_reason)
    log.note("context_len", model.context_len, "as set" if settings.max_context else "the model's")


def _note_plain(settings: WorkerSettings, log: SettingLog) -> None:
    """Settings that hold as they were set."""
    for name in (
        "auto_switch_to_flash",
        "max_prompt_length",
        "max_generated_length",
        "scheduler_type",
        "use_async_batching",
        "return_logprobs",
        "tp_size",
        "trust_remote_code",
        "log_level",
        "log_format",
    ):
        value = getattr(settings, name)
        log.note(name, "unset" if value is None else value, "as set, or the default")
    alone = "; there is but one rank, which waits for nobody" if settings.tp_size == 1 else ""
    log.note("cpu_group_timeout", settings.cpu_group_timeout, f"as set, or the default{alone}")
    log.note("model_config", ", ".join(settings.model_config) or "unset", "as set, or the default")
    if settings.fault_injection:
        log.note("fault_injection", settings.fault_injection, "as set: this worker makes faults on purpose")


def _max_requests(settings: WorkerSettings, log: SettingLog, max_batch_tokens: int, most_requests: int) -> int:
    asked = settings.max_requests_per_batch or MAX_REQUESTS
    value = min(asked, max_batch_tokens, most_requests)
    if value < asked:
        reason = f"{asked} lowered to fit max_batch_tokens and num_blocks"
    else:
        reason = "as set" if settings.max_requests_per_batch else "default"
    return log.note("max_requests_per_batch", value, reason)

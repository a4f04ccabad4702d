"""The worker's settings with nothing left open: what was asked, or what model and machine call for, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from chairlift_worker.host import FreeMemory
from chairlift_worker.ipc.messages import SettingMsg
from chairlift_worker.ipc.settings import WorkerSettings

CPU_PAGE_SIZE: Final = 16
CPU_MAX_BATCH_TOKENS: Final = 512
MIN_AUTO_BATCH_TOKENS: Final = 256
MAX_REQUESTS: Final = 1024
MEMORY_PERCENT: Final = 0.8
CPU_CACHE_BYTES: Final = 4 << 30
FIFO_MARGIN: Final = 0.15


T = TypeVar("T")


class SettingError(ValueError):
    """A setting cannot be met. The message is one line that names the setting and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the resolution needs to know of the loaded model."""

    context_len: int
    slot_bytes: int  # key-value cache of one token, all layers
    token_bytes: int  # input and activation buffers of one query token
    logits_bytes: int  # buffers of one sampling row
    has_sliding_layers: bool
    dtype: str
    dtype_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Every setting's value; see `WorkerSettings` for what each means."""

    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_prefill_chunk: int
    max_requests_per_batch: int
    scheduler_type: Literal["fifo", "prefill_first"]
    safety_margin: float
    allow_block_sharing: bool
    num_threads: int
    settings: tuple[SettingMsg, ...]  # all of the above and the rest, as users see them

    @property
    def cache_len(self) -> int:
        """Slots of key-value cache that a request alone can use."""
        return self.num_blocks * self.page_size


class _Log:
    """Collects values with their reasons."""

    def __init__(self) -> None:
        self.entries: list[SettingMsg] = []

    def note(self, name: str, value: T, reason: str) -> T:
        self.entries.append(SettingMsg(name=name, value=str(value), reason=reason))
        return value


def resolve(settings: WorkerSettings, *, model: ModelFacts, memory: FreeMemory, cores: int) -> WorkerConfig:
    """Fills in what is open. Raises SettingError where what was asked cannot be."""
    log = _Log()
    given = "as set"
    log.note("model", settings.model, given)
    log.note("dtype", model.dtype, model.dtype_reason)
    log.note("attn_implementation", settings.attn_implementation, "as set, or the default")
    page_size = (
        log.note("page_size", settings.page_size, given)
        if settings.page_size is not None
        else log.note("page_size", CPU_PAGE_SIZE, "default on a CPU: small pages share more and waste less")
    )
    percent = (
        log.note("max_memory_percent", settings.max_memory_percent, given)
        if settings.max_memory_percent is not None
        else log.note("max_memory_percent", MEMORY_PERCENT, "default with logit processing")
    )
    budget = int(memory.num_bytes * percent)
    max_batch_tokens = _max_batch_tokens(settings, log, model, budget)
    num_blocks = _num_blocks(settings, log, model, memory, budget, page_size, max_batch_tokens)
    max_requests = _max_requests(settings, log, max_batch_tokens, num_blocks)
    chunk = _clamped(settings.max_prefill_chunk, max_batch_tokens)
    log.note("max_prefill_chunk", *chunk)
    margin = _safety_margin(settings)
    log.note("safety_margin", *margin)
    sharing = _sharing(settings, model)
    log.note("allow_block_sharing", *sharing)
    threads = (settings.num_threads, given) if settings.num_threads else (cores, "all cores of this process")
    log.note("num_threads", *threads)
    log.note("scheduler_type", settings.scheduler_type, "as set, or the default")
    log.note("return_logprobs", settings.return_logprobs, "as set, or the default")
    log.note("context_len", model.context_len, "as set" if settings.max_context else "the model's")
    log.note("trust_remote_code", settings.trust_remote_code, "as set, or the default")
    log.note("log_level", settings.log_level, "as set, or the default")
    log.note("log_format", settings.log_format, "as set, or the default")
    if settings.fault_injection:
        log.note("fault_injection", settings.fault_injection, "as set: this worker makes faults on purpose")
    return WorkerConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_prefill_chunk=chunk[0],
        max_requests_per_batch=max_requests,
        scheduler_type=settings.scheduler_type,
        safety_margin=margin[0],
        allow_block_sharing=sharing[0],
        num_threads=threads[0],
        settings=tuple(log.entries),
    )


def _max_batch_tokens(settings: WorkerSettings, log: _Log, model: ModelFacts, budget: int) -> int:
    if settings.max_batch_tokens is not None:
        return log.note("max_batch_tokens", settings.max_batch_tokens, "as set")
    affordable = budget // 2 // model.token_bytes  # never more than half: the rest is for the cache
    if affordable >= CPU_MAX_BATCH_TOKENS:
        return log.note(
            "max_batch_tokens", CPU_MAX_BATCH_TOKENS, "default on a CPU: longer steps stall running streams"
        )
    value = max(MIN_AUTO_BATCH_TOKENS, affordable)
    return log.note("max_batch_tokens", value, f"buffers of {model.token_bytes} bytes a token in {budget} bytes")


def _num_blocks(
    settings: WorkerSettings,
    log: _Log,
    model: ModelFacts,
    memory: FreeMemory,
    budget: int,
    page_size: int,
    max_batch_tokens: int,
) -> int:
    page_bytes = page_size * model.slot_bytes
    if settings.num_blocks is not None:
        need = settings.num_blocks * page_bytes
        if need > memory.num_bytes:
            raise SettingError(
                f"num_blocks = {settings.num_blocks}: a cache of {need} bytes, "
                f"but {memory.num_bytes} bytes are {memory.reason}"
            )
        return log.note("num_blocks", settings.num_blocks, "as set")
    rows = min(max_batch_tokens, settings.max_requests_per_batch or MAX_REQUESTS)
    buffers = max_batch_tokens * model.token_bytes + rows * model.logits_bytes
    room, reason = budget - buffers, f"{memory.reason}, after {buffers} bytes of buffers"
    if settings.max_memory_percent is None and room > CPU_CACHE_BYTES:
        room, reason = CPU_CACHE_BYTES, "4 GiB, the most that is taken unasked on a CPU"
    all_requests = MAX_REQUESTS * -(-model.context_len // page_size)
    num_blocks = min(room // page_bytes, all_requests)
    if num_blocks < 1:
        raise SettingError(
            f"max_memory_percent = {settings.max_memory_percent or MEMORY_PERCENT}: "
            f"{memory.num_bytes} bytes are {memory.reason}; "
            f"not one page of {page_bytes} bytes fits beside {buffers} bytes of buffers"
        )
    return log.note("num_blocks", num_blocks, f"{num_blocks * page_bytes} bytes: {reason}")


def _max_requests(settings: WorkerSettings, log: _Log, max_batch_tokens: int, num_blocks: int) -> int:
    asked = settings.max_requests_per_batch or MAX_REQUESTS
    value = min(asked, max_batch_tokens, num_blocks)
    if value < asked:
        reason = f"{asked} lowered to fit max_batch_tokens and num_blocks"
    else:
        reason = "as set" if settings.max_requests_per_batch else "default"
    return log.note("max_requests_per_batch", value, reason)


def _clamped(chunk: int | None, max_batch_tokens: int) -> tuple[int, str]:
    if chunk is None:
        return max_batch_tokens, "default: max_batch_tokens"
    if chunk > max_batch_tokens:
        return max_batch_tokens, f"{chunk} lowered to max_batch_tokens"
    return chunk, "as set"


def _safety_margin(settings: WorkerSettings) -> tuple[float, str]:
    if settings.safety_margin is not None:
        return settings.safety_margin, "as set"
    if settings.scheduler_type == "fifo":
        return FIFO_MARGIN, "default of fifo"
    return 0.0, "default of prefill_first"


def _sharing(settings: WorkerSettings, model: ModelFacts) -> tuple[bool, str]:
    if settings.allow_block_sharing and model.has_sliding_layers:
        return False, "turned off: the model has sliding-window layers"
    return settings.allow_block_sharing, "as set, or the default"

"""Composition root of the worker: from settings to parts that are ready to run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import structlog
import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.choice import find_faults
from chairlift_worker.config import ModelFacts, WorkerConfig, resolve
from chairlift_worker.control import Control
from chairlift_worker.decoder.recipe import recipe_fault
from chairlift_worker.device_executor import DeviceExecutor
from chairlift_worker.engine import Engine
from chairlift_worker.executor import ModelExecutor
from chairlift_worker.faults import Faults
from chairlift_worker.forwards import make_computation
from chairlift_worker.host import free_memory, num_cores
from chairlift_worker.ipc.channel import WorkerChannel
from chairlift_worker.ipc.messages import ReadyMsg
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.ipc.status import Phase
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.memory_errors import is_out_of_memory
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.model.loader import load_model
from chairlift_worker.model.weights import LiveWeights
from chairlift_worker.pace import Pace
from chairlift_worker.pipeline import LaunchedSteps, Pipeline, Steps
from chairlift_worker.queues import queues_for
from chairlift_worker.roster import Roster
from chairlift_worker.runner import Forward, Runner
from chairlift_worker.scheduler import Scheduler
from chairlift_worker.setting_log import SettingError
from chairlift_worker.speculation.speculator import Speculator
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.mover import SwapMover
from chairlift_worker.swap.policy import NEVER_SWAP
from chairlift_worker.swap.pool import SwapPool
from chairlift_worker.swap.space import SwapSpace

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A worker's parts, joined and warm."""

    roster: Roster
    scheduler: Scheduler
    executor: ModelExecutor
    steps: Steps  # that run on it, or on the device
    control: Control
    ready: ReadyMsg  # what the worker says of itself


def build(settings: WorkerSettings, channel: WorkerChannel, *, incarnation: int = 1) -> Parts:
    """Loads, resolves, allocates, warms up. Raises ModelError or SettingError, in one line, where that cannot be.

    `incarnation` counts the service's workers, from 1.
    """
    try:
        faults = Faults(settings.fault_injection, incarnation=incarnation)
    except ValueError as error:
        raise SettingError(str(error)) from error
    channel.results = faults.wrap(channel.results)
    torch.set_num_threads(settings.num_threads or num_cores())
    channel.status.set(phase=Phase.LOADING)
    model = load_model(settings)
    config = resolve(settings, model=_facts(model), memory=free_memory(), cores=num_cores())
    for entry in config.settings:
        _log.info("setting", name=entry.name, value=entry.value, reason=entry.reason)
    for warning in config.warnings:
        _log.warning(warning)
    cache = _cache(config, model)
    depth = 2 if config.use_async_batching else 1  # steps in flight
    computation = make_computation(config, model, cache, num_inputs=depth)
    runner = _runner(config, computation.forward, cache)
    mover = SwapMover(sectors=cache.sectors, num_slots=config.num_swap_blocks)
    executor = ModelExecutor(runner=runner, mover=mover, faults=faults)
    channel.status.set(phase=Phase.WARMING)
    executor.warm_up()
    memory = PagedMemory(num_pages=config.num_blocks, layout=config.layout, sharing=config.allow_block_sharing)
    costs = executor.measure_swap_costs() if config.num_swap_blocks else NEVER_SWAP
    roster = Roster(memory=memory, swap=SwapSpace(pool=SwapPool(num_slots=config.num_swap_blocks), costs=costs))
    return Parts(
        roster=roster,
        scheduler=_scheduler(config, roster, executor, model.context_len),
        executor=executor,
        steps=_steps(runner, mover, executor, faults, depth=depth),
        control=Control(
            roster=roster,
            weights=LiveWeights(module=model.module, take=computation.take, overridden=model.overridden),
        ),
        ready=ReadyMsg(model=model.card(cache_len=config.cache_len), settings=config.settings),
    )


def make_engine(parts: Parts, channel: WorkerChannel) -> Engine:
    """The engine over these parts."""
    return Engine(
        channel=channel,
        roster=parts.roster,
        scheduler=parts.scheduler,
        pipeline=parts.steps,
        control=parts.control,
    )


def _cache(config: WorkerConfig, model: LoadedModel) -> PagedCache:
    try:
        return PagedCache(layout=config.layout, num_sectors=config.num_blocks, dtype=model.dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SettingError(f"num_blocks = {config.num_blocks}: there is no memory for such a cache") from error


def _runner(config: WorkerConfig, forward: Forward, cache: PagedCache) -> Runner:
    return Runner(
        forward=forward,
        cache=cache,
        max_blocks_per_request=config.max_blocks_per_request,
        max_requests=config.max_requests_per_batch,
    )


def _steps(runner: Runner, mover: SwapMover, executor: ModelExecutor, faults: Faults, *, depth: int) -> Steps:
    """What keeps `depth` steps in flight: a GPU itself, or on a CPU a thread."""
    device = runner.cache.sectors.device
    if device.type == "cpu":
        return Pipeline(executor=executor, depth=depth)
    launcher = DeviceExecutor(runner=runner, mover=mover, queues=queues_for(device), faults=faults)
    return LaunchedSteps(launcher=launcher, depth=depth)


def _scheduler(config: WorkerConfig, roster: Roster, executor: ModelExecutor, max_len: int) -> Scheduler:
    limits = StepLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_requests_per_batch=config.max_requests_per_batch,
        scheduler_type=config.scheduler_type,
        safety_margin=config.safety_margin,
        pace=_pace(config, executor, max_len),
    )
    if config.drafts is None:
        return Scheduler(limits=limits, roster=roster)
    costs = executor.measure_step_costs(max_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    in_ms = {size: round(cost / 1e6, 2) for size, cost in zip(costs.sizes, costs.costs_ns, strict=True)}
    _log.info("step costs by tokens", milliseconds=in_ms)
    return Scheduler(limits=limits, roster=roster, speculator=Speculator(limits=config.drafts, costs=costs))


def _pace(config: WorkerConfig, executor: ModelExecutor, max_len: int) -> Pace | None:
    if not config.max_step_stretch:
        return None
    pace = executor.measure_pace(
        max_tokens=config.max_batch_tokens,
        max_rows=config.max_requests_per_batch,
        max_len=max_len,
        max_stretch=config.max_step_stretch,
    )
    if pace is not None:
        beside = {number: pace.prompt_tokens(number) for number in (1, 8, 32)}
        _log.info("prompt tokens in a step beside generating requests", tokens_by_requests=beside)
    return pace


def _facts(model: LoadedModel) -> ModelFacts:
    """What the resolution needs, buffer sizes estimated by the widths of the largest layers."""
    text = model.module.config.get_text_config()
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    item = model.dtype.itemsize
    return ModelFacts(
        context_len=model.context_len,
        layers=model.layers,
        item_bytes=item,
        token_bytes=math.ceil(item * (8 * hidden + 3 * inner)),
        logits_bytes=model.vocab_size * (item + 4),  # as the model gives them, and in float32
        dtype=model.dtype_name,
        dtype_reason=model.dtype_reason,
        attention_faults=find_faults(device=model.module.device, dtype=model.dtype),
        decoder_fault=recipe_fault(model.module, model.attention_options),
    )

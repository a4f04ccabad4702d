"""Composition root of the worker: from settings to parts that are ready to run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import structlog
import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.choice import find_faults
from chairlift_worker.config import ModelFacts, WorkerConfig, resolve
from chairlift_worker.constraint.constraints import Constraints
from chairlift_worker.constraint.grammars import Grammars
from chairlift_worker.control import Control, Weights
from chairlift_worker.decoder.recipe import recipe_fault
from chairlift_worker.device_executor import DeviceExecutor
from chairlift_worker.distributed.follower import Follower
from chairlift_worker.distributed.group import RankGroup
from chairlift_worker.distributed.leader import Leader
from chairlift_worker.distributed.weights import LedWeights, SplitWeights
from chairlift_worker.engine import Engine
from chairlift_worker.executor import ModelExecutor
from chairlift_worker.faults import Faults
from chairlift_worker.forwards import Computation, make_computation
from chairlift_worker.host import free_memory, num_cores
from chairlift_worker.ipc.channel import WorkerChannel
from chairlift_worker.ipc.messages import ReadyMsg
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.ipc.status import Phase, StatusWriter
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
    constraints: Constraints
    control: Control
    ready: ReadyMsg  # what the worker says of itself
    leader: Leader | None  # of other ranks; None: there are none


def build(
    settings: WorkerSettings, channel: WorkerChannel, *, incarnation: int = 1, group: RankGroup | None = None
) -> Parts:
    """Loads, resolves, allocates, warms up. Raises ModelError or SettingError, in one line, where that cannot be.

    `incarnation` counts the service's workers, from 1. With several ranks this is rank 0 of the `group`.
    """
    try:
        faults = Faults(settings.fault_injection, incarnation=incarnation)
    except ValueError as error:
        raise SettingError(str(error)) from error
    channel.results = faults.wrap(channel.results)
    channel.status.set(phase=Phase.LOADING)
    model = _load(settings, group)
    free = free_memory().shared_by(settings.tp_size)
    config = resolve(settings, model=_facts(model, settings.tp_size), memory=free, cores=_cores(settings))
    for entry in config.settings:
        _log.info("setting", name=entry.name, value=entry.value, reason=entry.reason)
    for warning in config.warnings:
        _log.warning(warning)
    cache = _cache(config, model)
    depth = 2 if config.use_async_batching else 1  # steps in flight
    computation = make_computation(config, model, cache, num_inputs=depth)
    leader = None if group is None else _lead(group, config)
    runner = _runner(config, computation.forward, cache, leader)
    mover = _mover(config, cache, leader)
    constraints = _constraints(model)
    executor = ModelExecutor(runner=runner, mover=mover, faults=faults, masks=constraints)
    channel.status.set(phase=Phase.WARMING)
    executor.warm_up()
    memory = PagedMemory(num_pages=config.num_blocks, layout=config.layout, sharing=config.allow_block_sharing)
    costs = executor.measure_swap_costs() if config.num_swap_blocks else NEVER_SWAP
    roster = Roster(memory=memory, swap=SwapSpace(pool=SwapPool(num_slots=config.num_swap_blocks), costs=costs))
    scheduler = _scheduler(config, roster, executor, model.context_len)
    if leader is not None:
        leader.ready(settings.cpu_group_timeout)
    return Parts(
        roster=roster,
        scheduler=scheduler,
        executor=executor,
        steps=_steps(runner, mover, executor, faults, constraints, depth=depth),
        constraints=constraints,
        control=Control(roster=roster, weights=_weights(model, computation, group, leader)),
        ready=ReadyMsg(model=model.card(cache_len=config.cache_len), settings=config.settings),
        leader=leader,
    )


def build_follower(settings: WorkerSettings, group: RankGroup, status: StatusWriter) -> Follower:
    """The same for a rank that follows: rank 0 resolves the settings, and measures what there is to be measured."""
    status.set(phase=Phase.LOADING)
    model = _load(settings, group)
    config = msgspec.msgpack.decode(group.share(), type=WorkerConfig)
    cache = _cache(config, model)
    computation = make_computation(config, model, cache, num_inputs=1)
    return Follower(
        group=group,
        runner=_runner(config, computation.forward, cache, None),
        mover=_mover(config, cache, None),
        weights=SplitWeights(group=group, weights=_own_weights(model, computation)),
        status=status,
    )


def make_engine(parts: Parts, channel: WorkerChannel) -> Engine:
    """The engine over these parts."""
    return Engine(
        channel=channel,
        roster=parts.roster,
        scheduler=parts.scheduler,
        pipeline=parts.steps,
        control=parts.control,
        constraints=parts.constraints,
        on_rest=None if parts.leader is None else parts.leader.beat,
    )


def _load(settings: WorkerSettings, group: RankGroup | None) -> LoadedModel:
    torch.set_num_threads(settings.num_threads or _cores(settings))
    if group is None:
        return load_model(settings)
    model = load_model(settings, first_alone=group.first_alone())
    group.adopt(model.module)
    group.wait_for_all()  # so that all that they take of the memory is taken
    return model


def _cores(settings: WorkerSettings) -> int:
    """Of each rank."""
    return max(1, num_cores() // settings.tp_size)


def _lead(group: RankGroup, config: WorkerConfig) -> Leader:
    group.share(msgspec.msgpack.encode(config))
    return Leader(group=group, layout=config.layout)


def _weights(model: LoadedModel, computation: Computation, group: RankGroup | None, leader: Leader | None) -> Weights:
    own = _own_weights(model, computation)
    if group is None or leader is None:
        return own
    return LedWeights(leader=leader, weights=SplitWeights(group=group, weights=own))


def _own_weights(model: LoadedModel, computation: Computation) -> LiveWeights:
    return LiveWeights(module=model.module, take=computation.take, overridden=model.overridden)


def _cache(config: WorkerConfig, model: LoadedModel) -> PagedCache:
    try:
        return PagedCache(layout=config.layout, num_sectors=config.num_blocks, dtype=model.dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SettingError(f"num_blocks = {config.num_blocks}: there is no memory for such a cache") from error


def _mover(config: WorkerConfig, cache: PagedCache, leader: Leader | None) -> SwapMover:
    on_move = None if leader is None else leader.move
    return SwapMover(sectors=cache.sectors, num_slots=config.num_swap_blocks, on_move=on_move)


def _runner(config: WorkerConfig, forward: Forward, cache: PagedCache, leader: Leader | None) -> Runner:
    return Runner(
        forward=forward,
        cache=cache,
        max_blocks_per_request=config.max_blocks_per_request,
        max_requests=config.max_requests_per_batch,
        lead=leader,
    )


def _steps(
    runner: Runner, mover: SwapMover, executor: ModelExecutor, faults: Faults, constraints: Constraints, *, depth: int
) -> Steps:
    """What keeps `depth` steps in flight: a GPU itself, or, on a CPU and where other ranks are told, a thread."""
    device = runner.cache.sectors.device
    if device.type == "cpu" or runner.leads:
        return Pipeline(executor=executor, depth=depth)
    launcher = DeviceExecutor(runner=runner, mover=mover, queues=queues_for(device), faults=faults, masks=constraints)
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


def _constraints(model: LoadedModel) -> Constraints:
    return Constraints(
        grammars=Grammars(
            tokenizer_dir=model.tokenizer_dir, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
    )


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


def _facts(model: LoadedModel, tp_size: int) -> ModelFacts:
    """What the resolution needs, buffer sizes estimated by the widths of the largest layers."""
    text = model.module.config.get_text_config()
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    item = model.dtype.itemsize
    return ModelFacts(
        context_len=model.context_len,
        layers=model.layers,
        item_bytes=item,
        token_bytes=math.ceil(item * (8 * hidden + 3 * inner / tp_size)),
        logits_bytes=model.vocab_size * (item + 4),  # as the model gives them, and in float32
        dtype=model.dtype_name,
        dtype_reason=model.dtype_reason,
        attention_faults=find_faults(device=model.module.device, dtype=model.dtype),
        decoder_fault=f"with tp_size = {tp_size} ranks share each layer"
        if tp_size > 1
        else recipe_fault(model.module, model.attention_options),
    )

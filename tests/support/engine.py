"""The worker's own engine over a tiny model, without a second process.

Loop, scheduler, memory, swap pool, pipeline, runner and sampler are the real ones; only the rings are lists. All books
are checked after every turn.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.control import Control
from chairlift_worker.device_executor import DeviceExecutor
from chairlift_worker.engine import Engine
from chairlift_worker.executor import ModelExecutor
from chairlift_worker.faults import Faults
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    CancelMsg,
    EndingMsg,
    RequestMsg,
    StartedMsg,
    StepMsg,
    WorkerMsg,
    decode_worker,
    encode,
)
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import CacheLayout, KvCacheType, make_layout
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.launched import LaunchedStep
from chairlift_worker.model import load_model
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.pass_config import PassConfig
from chairlift_worker.pipeline import LaunchedSteps, Pipeline, Steps
from chairlift_worker.plan import StepPlan, StepResult
from chairlift_worker.roster import Roster
from chairlift_worker.runner import Runner
from chairlift_worker.runner.replay import GraphForward
from chairlift_worker.scheduler import Scheduler
from chairlift_worker.speculation.policy import ALWAYS_DRAFT, StepCosts
from chairlift_worker.speculation.speculator import DraftLimits, Speculator
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.mover import SwapMover
from chairlift_worker.swap.policy import ALWAYS_SWAP, SwapCosts
from chairlift_worker.swap.pool import SwapPool
from chairlift_worker.swap.space import SwapSpace

from support.decoder_runner import decoder_runner
from support.foresight import Seer
from support.lagging import Clockwork
from support.runners import PLAIN, module_runner

LIMITS = StepLimits(
    max_batch_tokens=64, max_prefill_chunk=64, max_requests_per_batch=16, scheduler_type="fifo", safety_margin=0.0
)


@functools.cache
def loaded(folder: Path, dtype: str = "float32") -> LoadedModel:
    """The model of a folder, as the worker loads it; once a session, read only."""
    return load_model(WorkerSettings(model=str(folder), dtype=dtype))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a worker's settings decide."""

    num_sectors: int = 256
    page_size: int = 4
    sharing: bool = False
    swap_slots: int = 0
    costs: SwapCosts = ALWAYS_SWAP
    depth: int = 1  # steps in flight: 2 is async batching
    backend: str = "native"
    isa: Isa | None = None  # of the native decoder; None: the transformers module computes
    max_blocks_per_request: int = 0  # of the decode fast path; 0 is off
    limits: StepLimits = LIMITS
    passes: PassConfig = PLAIN
    drafts: DraftLimits | None = None
    draft_costs: StepCosts = ALWAYS_DRAFT
    kv_cache: KvCacheType = "auto"
    lag: int | None = None  # steps run on a device's queues that lag behind each other, by this seed
    foresight: bool = False  # drafts come from what is known of the outputs, not from looking up

    def layout(self, model: LoadedModel) -> CacheLayout:
        return make_layout(model.layers, page_size=self.page_size, kv_cache=self.kv_cache)


@dataclass
class Outcome:
    """What the service would hear of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # NaN where not asked
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # likeliest first; empty where not asked
    started: StartedMsg | None = None
    ending: EndingMsg | None = None


class Recorder:
    """An executor that remembers its plans."""

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan, carried: Mapping[int, int]) -> StepResult:
        self.plans.append(plan)
        return self._executor.execute(plan, carried)


class LaunchRecorder:
    """A launcher that remembers its plans."""

    def __init__(self, launcher: DeviceExecutor) -> None:
        self._launcher = launcher
        self.plans: list[StepPlan] = []

    def begin(self, plan: StepPlan) -> LaunchedStep:
        self.plans.append(plan)
        return self._launcher.begin(plan)


class Inbox(list[bytes]):
    """The requests ring."""

    def receive(self) -> bytes | None:
        return self.pop(0) if self else None


class Status:
    """A status page that nobody reads."""

    def set(self, **figures: int) -> None:
        self.figures = figures

    def beat(self) -> None:
        pass


class Roll:
    """A roll that nobody reads."""

    def note(self, step: int, uids: Iterable[int], *, depth: int) -> None:
        self.uids = frozenset(uids)


class ListChannel:
    """Both rings as lists of encoded records."""

    def __init__(self) -> None:
        self.requests = Inbox()
        self.status = Status()
        self.roll = Roll()
        self.results: list[bytes] = []

    def send_result(self, record: bytes, *, heartbeat: object) -> None:
        self.results.append(record)

    def take(self) -> list[WorkerMsg]:
        messages = [decode_worker(record) for record in self.results]
        self.results.clear()
        return messages


class NoWeights:
    """Weights that nobody updates."""

    def update(self, folder: str) -> int:
        raise AssertionError("no test updates the weights here")


def _runner(model: LoadedModel, shape: Shape) -> Runner:
    if shape.isa is not None:
        return decoder_runner(
            model,
            shape.layout(model),
            num_sectors=shape.num_sectors,
            isa=shape.isa,
            max_blocks_per_request=shape.max_blocks_per_request,
            max_requests=shape.limits.max_requests_per_batch,
        )
    return module_runner(
        model.module,
        shape.layout(model),
        backend=shape.backend,
        num_sectors=shape.num_sectors,
        max_blocks_per_request=shape.max_blocks_per_request,
        max_requests=shape.limits.max_requests_per_batch,
        max_batch_tokens=shape.limits.max_batch_tokens,
        passes=shape.passes,
        num_inputs=shape.depth,
    )


class Rig:
    """An engine and what it told of each request. Time is counted in turns."""

    def __init__(
        self,
        model: LoadedModel,
        shape: Shape,
        texts: Mapping[int, Sequence[int]] = MappingProxyType({}),
        *,
        faults: str = "",
    ) -> None:
        """`texts` has prompts and outputs by uid, for a shape with foresight. `faults` are made on purpose."""
        self.shape = shape
        self.layout = shape.layout(model)
        self.runner = _runner(model, shape)
        self.mover = SwapMover(sectors=self.runner.cache.sectors, num_slots=shape.swap_slots)
        self.executor, self.pipeline = _steps(shape, self.runner, self.mover, Faults(faults))
        self.memory = PagedMemory(num_pages=shape.num_sectors, layout=self.layout, sharing=shape.sharing)
        self.swap = SwapSpace(pool=SwapPool(num_slots=shape.swap_slots), costs=shape.costs)
        self.roster = Roster(memory=self.memory, swap=self.swap)
        self.channel = ListChannel()
        self.engine = Engine(
            channel=self.channel,
            roster=self.roster,
            scheduler=Scheduler(
                limits=shape.limits,
                roster=self.roster,
                speculator=_speculator(shape, texts),
            ),
            pipeline=self.pipeline,
            control=Control(roster=self.roster, weights=NoWeights()),
            clock=lambda: self.now,
        )
        self.now = 1
        self.outcomes: dict[int, Outcome] = {}
        self.answers: list[WorkerMsg] = []

    @property
    def num_graphs(self) -> int:
        """How many graphs were captured, which is never more than were announced."""
        forward = self.runner._forward
        if not isinstance(forward, GraphForward):
            return 0
        assert forward.num_captured <= forward.max_captured
        return forward.num_captured

    def add(self, message: AddRequestMsg) -> None:
        self.outcomes[message.uid] = Outcome()
        self.send(message)

    def cancel(self, uid: int) -> None:
        self.send(CancelMsg(uid=uid))

    def send(self, message: RequestMsg) -> None:
        self.channel.requests.append(encode(message))

    def turn(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        self.now += 1
        done = self.engine.turn()
        self.roster.check()
        for message in self.channel.take():
            if isinstance(message, StepMsg):
                self._take(message)
            else:
                self.answers.append(message)
        return done

    def run(self, max_turns: int = 20_000) -> None:
        """Until there is nothing to do."""
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError(f"not done after {max_turns} turns")

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        pool = self.memory.pool
        assert pool.num_free + pool.num_kept == pool.num_pages
        assert self.memory.index.num_promised == 0
        assert self.swap.pool.num_used == 0
        assert len(self.roster.waiting) == len(self.roster.active) == len(self.pipeline) == 0
        assert all(outcome.ending is not None for outcome in self.outcomes.values())

    def close(self) -> None:
        self.pipeline.close()

    def _take(self, message: StepMsg) -> None:
        uids, tokens, logprobs = array("Q"), array("i"), array("f")
        uids.frombytes(message.uids)
        tokens.frombytes(message.token_ids)
        logprobs.frombytes(message.logprobs or array("f", [float("nan")] * len(uids)).tobytes())
        for started in message.started:
            assert self.outcomes[started.uid].started is None, "started twice"
            self.outcomes[started.uid].started = started
        tops = _tops_of(message)
        for uid, token, logprob, top in zip(uids, tokens, logprobs, tops, strict=True):
            assert self.outcomes[uid].started is not None, "a token before the start"
            assert self.outcomes[uid].ending is None, "a token after the ending"
            self.outcomes[uid].ids.append(token)
            self.outcomes[uid].logprobs.append(logprob)
            self.outcomes[uid].tops.append(top)
        for ending in message.endings:
            assert self.outcomes[ending.uid].ending is None, "two endings"
            self.outcomes[ending.uid].ending = ending


def _tops_of(message: StepMsg) -> list[list[tuple[int, float]]]:
    """The likeliest tokens beside each of a step's tokens."""
    entries = iter(zip(array("i", message.top_ids), array("f", message.top_logprobs), strict=True))
    counts = message.num_tops or bytes(len(message.uids) // 8)
    tops = [list(itertools.islice(entries, count)) for count in counts]
    assert next(entries, None) is None
    return tops


def _speculator(shape: Shape, texts: Mapping[int, Sequence[int]]) -> Speculator | None:
    if shape.drafts is None:
        return None
    if shape.foresight:
        return Seer(limits=shape.drafts, costs=shape.draft_costs, texts=texts)
    return Speculator(limits=shape.drafts, costs=shape.draft_costs)


def _steps(shape: Shape, runner: Runner, mover: SwapMover, faults: Faults) -> tuple[Recorder | LaunchRecorder, Steps]:
    if shape.lag is None:
        recorder = Recorder(ModelExecutor(runner=runner, mover=mover, faults=faults))
        return recorder, Pipeline(executor=recorder, depth=shape.depth)
    queues = Clockwork(shape.lag).queues()
    launches = LaunchRecorder(DeviceExecutor(runner=runner, mover=mover, queues=queues, faults=faults))
    return launches, LaunchedSteps(launcher=launches, depth=shape.depth)

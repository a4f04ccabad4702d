"""Random mixed workloads for an engine over a tiny model."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from chairlift_worker.attention.native_kernel import isas
from chairlift_worker.decoder.recipe import recipe_fault
from chairlift_worker.graph_choice import GraphOptions
from chairlift_worker.ipc.messages import (
    NO_DEADLINE,
    AddRequestMsg,
    FlushPrefixCacheMsg,
    ProcessorsMsg,
    SamplingMsg,
)
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.pace import Pace
from chairlift_worker.pass_config import PassConfig
from chairlift_worker.speculation.policy import ALWAYS_DRAFT, StepCosts
from chairlift_worker.speculation.speculator import DraftLimits
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.policy import ALWAYS_SWAP, NEVER_SWAP, SwapCosts
from hypothesis import strategies as st

from support.engine import Rig, Shape
from support.processors import make_processors
from support.runners import PLAIN

VOCAB: Final = (4, 383)  # ids that are no special tokens, of all tiny models
PREFIX_LEN: Final = 48
LAST_TICK: Final = 40  # of arrivals, cancellations and deadlines' beginnings
FEW_TOKENS_ARE_CHEAP: Final = StepCosts(sizes=(1, 8, 16), costs_ns=(10.0, 12.0, 24.0))
GREEDY: Final = SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def random_ids(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randint(*VOCAB) for _ in range(num_tokens))


PREFIXES: Final = [random_ids(PREFIX_LEN, 1_000_000 + seed) for seed in range(2)]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request and when its caller acts."""

    prompt: tuple[int, ...] = field(repr=False)
    max_new_tokens: int
    sampling: SamplingMsg = GREEDY
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = True
    top_logprobs: int = 0  # with logprobs
    raw_logprobs: bool = False
    arrives: int = 0
    cancelled: int | None = None  # ticks after its arrival
    patience: int | None = None  # its deadline, in ticks after its arrival

    @property
    def max_total(self) -> int:
        """Tokens whose keys and values it may need."""
        return len(self.prompt) + self.max_new_tokens - 1

    def message(self, uid: int, now: int = 0) -> AddRequestMsg:
        return AddRequestMsg(
            uid=uid,
            prompt=array("i", self.prompt).tobytes(),
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            logprobs=self.logprobs,
            arrival_ns=now,
            deadline_ns=NO_DEADLINE if self.patience is None else now + self.patience,
            top_logprobs=self.top_logprobs if self.logprobs else 0,
            raw_logprobs=self.raw_logprobs,
        )

    def alone(self) -> Job:
        """The same request, undisturbed by its caller: what its solo run depends on."""
        return replace(self, logprobs=True, arrives=0, cancelled=None, patience=None)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in order of arrival, and the worker that they come to."""

    shape: Shape
    jobs: tuple[Job, ...]
    flushes: tuple[int, ...] = ()  # ticks at which somebody flushes the prefix cache

    def fits_pairwise(self, layout: CacheLayout) -> bool:
        """Whether any two requests fit the cache together, however long they get."""
        peaks = sorted(layout.peak(0, job.max_total, self.shape.limits.max_prefill_chunk) for job in self.jobs)
        return sum(peaks[-2:]) <= self.shape.num_sectors


def play(workload: Workload, model: LoadedModel, alone: Callable[[Job], Sequence[int]]) -> Rig:
    """Runs a workload to its end. Request number n, from 1 on, is jobs[n - 1]; `alone` gives a job's whole output."""
    texts = {}
    if workload.shape.drafts and workload.shape.foresight:
        texts = {uid: [*job.prompt, *alone(job.alone())] for uid, job in enumerate(workload.jobs, start=1)}
    rig = Rig(model, workload.shape, texts)
    horizon = max([0, *workload.flushes, *(job.arrives + (job.cancelled or 0) for job in workload.jobs)])
    tick = 0
    try:
        while rig.roster.waiting or rig.roster.active or rig.pipeline or tick <= horizon:
            _act(workload, rig, tick)
            busy = bool(rig.channel.requests or rig.roster.waiting or rig.roster.active)
            num_plans = len(rig.executor.plans)
            worked = rig.turn()
            idle_now = not (rig.roster.waiting or rig.roster.active)
            assert worked or idle_now or not busy, "requests are there, and the engine does nothing"
            assert len(rig.executor.plans) <= num_plans + rig.shape.depth
            tick += 1
            assert tick < 20_000, "without end"
        assert not rig.turn()
    finally:
        rig.close()
    return rig


def _act(workload: Workload, rig: Rig, tick: int) -> None:
    """What callers and operators do at this moment."""
    for uid, job in enumerate(workload.jobs, start=1):
        if job.arrives == tick:
            rig.add(job.message(uid, rig.now))
        if job.cancelled is not None and job.arrives + job.cancelled == tick:
            rig.cancel(uid)
    if tick in workload.flushes:
        rig.send(FlushPrefixCacheMsg(op=tick + 1))


def random_processors(generator: random.Random, stop_ids: tuple[int, ...]) -> ProcessorsMsg | None:
    """Half of all requests have none; the others one to all of them."""
    share = generator.choice([0.0, 0.0, 0.2, 0.6])
    all_of_them = {
        "logit_bias": {generator.randint(*VOCAB): generator.choice([-3.0, 3.0, 100.0]) for _ in range(3)},
        "repetition_penalty": generator.choice([1.3, 0.7, 5.0]),
        "presence_penalty": generator.choice([-2.0, 1.5]),
        "frequency_penalty": generator.choice([-1.0, 2.0]),
        "no_repeat_ngram_size": generator.choice([1, 2, 3]),
        "banned_sequences": [random_ids(generator.choice([1, 1, 2]), generator.randint(0, 99)) for _ in range(20)],
        "min_new_tokens": generator.choice([1, 2, 9]),
        "early_stop_ids": stop_ids,
        "allowed_ids": range(*VOCAB, 2),
        "banned_ids": range(VOCAB[0] + 1, VOCAB[1], generator.choice([2, 40])),  # none of every second that is allowed
    }
    chosen = {name: value for name, value in all_of_them.items() if generator.random() < share}
    return make_processors(**chosen) if chosen else None


def random_sampling(generator: random.Random, stop_ids: tuple[int, ...]) -> SamplingMsg:
    processors = random_processors(generator, stop_ids)
    if generator.random() < 0.5:
        return msgspec.structs.replace(GREEDY, processors=processors)
    return SamplingMsg(
        temperature=generator.choice([0.5, 1.0, 1.7]),
        top_k=generator.choice([0, 0, 3, 40]),
        top_p=generator.choice([1.0, 1.0, 0.9]),
        min_p=generator.choice([0.0, 0.0, 0.05]),
        seed=generator.choice([0, 1, 2**64 - 1]),
        processors=processors,
    )


def random_job(seed: int, *, longest: int, crowd: bool) -> Job:
    """A request of up to `longest` tokens. In a crowd all begin short, at once, and grow into each other's way."""
    generator = random.Random(seed)
    prompt_len = generator.randint(1, longest // 3 if crowd else longest - 1)
    shared = generator.choice([0, 0, 8, 16, 17, PREFIX_LEN])
    prefix = generator.choice(PREFIXES)[: min(shared, prompt_len)]
    tail_len, period = prompt_len - len(prefix), generator.choice([0, 1, 3, 7])
    phrase = random_ids(period or tail_len, generator.randint(0, 3))
    tail = (phrase * (tail_len + 1))[:tail_len]
    most = longest - prompt_len + 1
    impatience = 0.05 if crowd else 0.2
    stop_ids = random_ids(generator.choice([0, 0, 0, 1, 8]), 77)
    return Job(
        prompt=(*prefix, *tail),
        max_new_tokens=generator.choice([most, most, generator.randint(1, most)]),
        sampling=random_sampling(generator, stop_ids),
        stop_ids=stop_ids,
        logprobs=generator.random() < 0.7,
        top_logprobs=generator.choice([0, 0, 2, 20]),
        raw_logprobs=generator.random() < 0.3,
        arrives=generator.randint(0, 3) if crowd else generator.randint(0, LAST_TICK),
        cancelled=generator.randint(0, LAST_TICK) if generator.random() < impatience else None,
        patience=generator.randint(1, LAST_TICK) if generator.random() < impatience else None,
    )


def random_limits(generator: random.Random) -> StepLimits:
    max_batch_tokens = generator.choice([64, 64, 64, 16, 3])
    return StepLimits(
        max_batch_tokens=max_batch_tokens,
        max_prefill_chunk=min(max_batch_tokens, generator.choice([64, 16, 7, 1])),
        max_requests_per_batch=min(max_batch_tokens, generator.choice([12, 12, 12, 5, 1])),
        scheduler_type=generator.choice(["fifo", "prefill_first"]),
        safety_margin=generator.choice([0.0, 0.0, 0.15, 0.9]),
        pace=generator.choice([None, Pace(step_ns=1.0, token_ns=1.0, max_stretch=2.0)]),
    )


def random_shape(generator: random.Random, jobs: Sequence[Job], model: LoadedModel) -> Shape:
    """Caches from those that hold the longest request alone, to the last sector, to those that hold them all."""
    page_size = generator.choice([4, 4, 5, 16])
    limits = random_limits(generator)
    layout = Shape(page_size=page_size).layout(model)
    needed = [layout.peak(0, job.max_total, limits.max_prefill_chunk) for job in jobs]
    least, enough = max(needed), sum(needed)
    backend = generator.choice(["native", "native", "sdpa"])
    takes_decoder = backend == "native" and recipe_fault(model.module, model.attention_options) is None
    isa = generator.choice([None, *isas()]) if takes_decoder else None
    fast_path = backend == "native" and not model.has_sliding_layers
    depth = generator.choice([1, 2])
    drafts = generator.choice([None, DraftLimits(num_tokens=generator.choice([1, 3, 7]), min_len=1, max_len=3)])
    graphs = [PLAIN, PLAIN, captured(varlen=True, decode=True), captured(varlen=not fast_path, decode=True)]
    return Shape(
        num_sectors=generator.choice([least, least + 1, 2 * least, 2 * least, (least + enough) // 2, enough + 4]),
        page_size=page_size,
        sharing=layout.is_uniform and generator.random() < 0.5,
        swap_slots=generator.choice([10 * enough, 10 * enough, least, 1, 0]),
        costs=generator.choice([ALWAYS_SWAP, ALWAYS_SWAP, by_cost(layout), by_cost(layout), NEVER_SWAP]),
        depth=depth,
        backend=backend,
        max_blocks_per_request=generator.choice([0, 4, 64]) if fast_path else 0,
        limits=limits,
        isa=isa,
        passes=generator.choice(graphs) if backend == "native" and isa is None else PLAIN,
        drafts=drafts if depth == 1 else None,
        lag=generator.choice([None, generator.randrange(1000)]),
        foresight=generator.random() < 0.6,
        draft_costs=generator.choice([ALWAYS_DRAFT, ALWAYS_DRAFT, FEW_TOKENS_ARE_CHEAP]),
    )


def captured(*, varlen: bool, decode: bool) -> PassConfig:
    """Steps captured as graphs, padded to so little that there are many shapes."""
    return PassConfig(graphs=GraphOptions(varlen=varlen, decode=decode, q_interval=8, kv_interval=32))


@st.composite
def workloads(draw: st.DrawFn, *, model: LoadedModel, name: str, num_jobs: int) -> Workload:
    """Any workload; of each length there are `num_jobs` different requests. Other names give other workloads.

    All but the number of requests follows from one number, so that no kind is preferred.
    """
    generator = random.Random(f"{name} {draw(st.integers(0, 2**64 - 1))}")
    longest, crowd = generator.choice([3, 20, 40, 40, 70]), generator.random() < 0.6
    seeds = [generator.randrange(num_jobs) for _ in range(10)]
    seeds = seeds[: draw(st.sampled_from([1, 2, 5, 7, 8, 9, 10]))]
    jobs = [random_job(seed, longest=longest, crowd=crowd) for seed in seeds]
    return Workload(
        shape=random_shape(generator, jobs, model),
        jobs=tuple(sorted(jobs, key=lambda job: job.arrives)),
        flushes=(generator.randint(0, LAST_TICK),) if generator.random() < 0.3 else (),
    )


def by_cost(layout: CacheLayout) -> SwapCosts:
    """Sectors that are not well filled are not worth their copy."""
    return SwapCosts(token_ns=1.0, sector_ns=max(group.sector_len for group in layout.groups) / 3)

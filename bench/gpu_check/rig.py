"""The worker's own parts in this process, without rings and settings: scheduler, memory, swap pool, runner, steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.choice import IN_PLACE
from chairlift_worker.device_executor import DeviceExecutor
from chairlift_worker.faults import Faults
from chairlift_worker.graph_choice import GraphOptions
from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, SamplingMsg
from chairlift_worker.kv.layout import make_layout
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.model.probe import probe
from chairlift_worker.pass_config import PassConfig
from chairlift_worker.pipeline import LaunchedSteps
from chairlift_worker.queues import queues_for
from chairlift_worker.request import Request
from chairlift_worker.roster import Roster
from chairlift_worker.runner import Padding, Runner, make_module_forward
from chairlift_worker.scheduler import Scheduler
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.mover import SwapMover
from chairlift_worker.swap.policy import ALWAYS_SWAP
from chairlift_worker.swap.pool import SwapPool
from chairlift_worker.swap.space import SwapSpace
from transformers import PreTrainedModel

GREEDY = SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a worker's settings decide."""

    backend: str
    page_size: int = 16
    num_sectors: int = 256
    swap_slots: int = 0
    depth: int = 1
    max_batch_tokens: int = 256
    max_prefill_chunk: int = 256
    max_requests: int = 16
    max_len: int = 512  # of a request, in tokens
    passes: PassConfig = field(default_factory=PassConfig)


@dataclass(frozen=True)
class Run:
    """What came of some requests."""

    outputs: list[list[int]]
    seconds: float
    num_steps: int
    num_swapped: int

    @property
    def tokens_a_second(self) -> float:
        """Of output."""
        return sum(map(len, self.outputs)) / self.seconds


class Rig:
    """A model that is ready to run requests."""

    def __init__(self, module: PreTrainedModel, shape: Shape) -> None:
        self._shape = shape
        facts = probe("gpu-check", module)
        self._layout = make_layout(facts.layers, page_size=shape.page_size)
        cache = PagedCache(layout=self._layout, num_sectors=shape.num_sectors, dtype=module.dtype, device=module.device)
        has_windows = any(layer.sliding_window is not None for layer in facts.layers)
        blocks = 0 if has_windows or shape.backend not in IN_PLACE else -(-shape.max_len // shape.page_size)
        padding = Padding(
            q_interval=shape.passes.graphs.q_interval,
            kv_interval=shape.passes.graphs.kv_interval,
            max_tokens=shape.max_batch_tokens,
            max_rows=shape.max_requests,
            max_context_len=shape.max_len,
            decode_len=blocks * shape.page_size,
        )
        forward = make_module_forward(
            model=module,
            backend=make_backend(shape.backend),
            cache=cache,
            passes=shape.passes,
            padding=padding,
            num_inputs=shape.depth,
        )
        self.runner = Runner(
            forward=forward, cache=cache, max_blocks_per_request=blocks, max_requests=shape.max_requests
        )
        mover = SwapMover(sectors=cache.sectors, num_slots=shape.swap_slots)
        launcher = DeviceExecutor(runner=self.runner, mover=mover, queues=queues_for(module.device), faults=Faults(""))
        self._steps = LaunchedSteps(launcher=launcher, depth=shape.depth)

    def run(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: Sequence[SamplingMsg] = ()
    ) -> Run:
        """All prompts at once, to their whole length. Greedy where nothing is said."""
        shape = self._shape
        swap = SwapSpace(pool=SwapPool(num_slots=shape.swap_slots), costs=ALWAYS_SWAP)
        memory = PagedMemory(num_pages=shape.num_sectors, layout=self._layout, sharing=False)
        roster = Roster(memory=memory, swap=swap)
        limits = StepLimits(
            max_batch_tokens=shape.max_batch_tokens,
            max_prefill_chunk=shape.max_prefill_chunk,
            max_requests_per_batch=shape.max_requests,
            scheduler_type="fifo",
            safety_margin=0.0,
        )
        scheduler = Scheduler(limits=limits, roster=roster)
        requests = [
            Request(_message(uid, prompt, max_new_tokens, sampling[uid % len(sampling)] if sampling else GREEDY))
            for uid, prompt in enumerate(prompts)
        ]
        began, num_steps = time.monotonic(), 0
        for request in requests:
            roster.add(request)
        while True:
            plan = scheduler.plan(time.monotonic_ns())
            if plan is not None:
                num_steps += 1
                self._steps.submit(plan)
            if self._steps and (plan is None or self._steps.is_full):
                finished, result = self._steps.finish()
                scheduler.apply(finished, result, time.monotonic_ns())
                errors = [row.error for row in result.rows if row.error]
                if errors:
                    raise RuntimeError(errors[0])
                roster.outbox.take(num_steps)
            elif plan is None:
                break
        seconds = time.monotonic() - began
        roster.check()
        outputs = [request.tokens[request.prompt_len :].tolist() for request in requests]
        return Run(outputs, seconds, num_steps, roster.counters.preemptions_swap)


def captured(*, q_interval: int, kv_interval: int) -> PassConfig:
    """Both paths as graphs."""
    return PassConfig(graphs=GraphOptions(varlen=True, decode=True, q_interval=q_interval, kv_interval=kv_interval))


def random_prompts(lengths: Sequence[int], *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _message(uid: int, prompt: Sequence[int], max_new_tokens: int, sampling: SamplingMsg) -> AddRequestMsg:
    return AddRequestMsg(
        uid=uid,
        prompt=array("i", prompt).tobytes(),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=(),
        logprobs=False,
        arrival_ns=0,
        deadline_ns=NO_DEADLINE,
    )

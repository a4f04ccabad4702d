"""A scheduler with its roster over the fake device, and what came out of it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift_worker.ipc.messages import (
    NO_DEADLINE,
    AddRequestMsg,
    EndingMsg,
    ForkMsg,
    SamplingMsg,
    StartedMsg,
    StepMsg,
)
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.plan import NO_MOVES, RowResult, StepPlan, StepResult, in_pieces
from chairlift_worker.request import requests_of
from chairlift_worker.roster import Roster
from chairlift_worker.scheduler import Scheduler
from chairlift_worker.speculation.policy import ALWAYS_DRAFT, StepCosts
from chairlift_worker.speculation.speculator import DraftLimits, Speculator
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.policy import ALWAYS_SWAP
from chairlift_worker.swap.pool import SwapPool
from chairlift_worker.swap.space import SwapSpace

from support.fake_device import VOCAB, FakeDevice
from support.layouts import layout_of


def add_message(
    uid: int,
    prompt: list[int],
    max_new_tokens: int = 4,
    *,
    stop_ids: tuple[int, ...] = (),
    seed: int = 0,
    deadline_ns: int = NO_DEADLINE,
    arrival_ns: int | None = None,
    priority: int = 0,
    forks: tuple[tuple[int, int], ...] = (),
    prompt_logprobs: int = 0,
) -> AddRequestMsg:
    """`forks` are the uids and seeds of further choices."""
    return AddRequestMsg(
        uid=uid,
        prompt=array("i", prompt).tobytes(),
        max_new_tokens=max_new_tokens,
        sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed),
        stop_ids=stop_ids,
        logprobs=False,
        arrival_ns=uid if arrival_ns is None else arrival_ns,
        deadline_ns=deadline_ns,
        priority=priority,
        forks=tuple(ForkMsg(uid=fork, seed=own_seed) for fork, own_seed in forks),
        prompt_logprobs=prompt_logprobs,
    )


@dataclass
class Bench:
    """Steps a scheduler and collects what it says. Checks all books after every step."""

    num_pages: int = 64
    page_size: int = 4
    sharing: bool = True
    windows: tuple[int | None, ...] = (None,)  # of the layers; None is full attention
    limits: dict[str, Any] = field(default_factory=dict)
    swap_slots: int = 0
    depth: int = 1  # steps in flight: 2 is async batching
    pass_tokens: int | None = None  # of a forward pass: steps are run in pieces
    drafts: DraftLimits | None = None
    costs: StepCosts = ALWAYS_DRAFT
    vocab_size: int = VOCAB  # of the fake model; a small one says by chance what it said before

    def __post_init__(self) -> None:
        self.layout = layout_of(*self.windows, page_size=self.page_size)
        self.memory = PagedMemory(num_pages=self.num_pages, layout=self.layout, sharing=self.sharing)
        self.swap = SwapSpace(pool=SwapPool(num_slots=self.swap_slots), costs=ALWAYS_SWAP)
        self.roster = Roster(memory=self.memory, swap=self.swap)
        defaults = {
            "max_batch_tokens": 64,
            "max_prefill_chunk": 64,
            "max_requests_per_batch": 16,
            "scheduler_type": "fifo",
            "safety_margin": 0.0,
        }
        self.scheduler = Scheduler(
            limits=StepLimits(**{**defaults, **self.limits}),
            roster=self.roster,
            speculator=None if self.drafts is None else Speculator(limits=self.drafts, costs=self.costs),
        )
        self.device = FakeDevice(layout=self.layout, num_sectors=self.num_pages, vocab_size=self.vocab_size)
        self._in_flight: list[StepPlan] = []
        self._carried: dict[int, int] = {}
        self.now = 1
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}
        self.judged: dict[int, list[float]] = {}  # log-probabilities of prompts, from the second token on
        self.started: dict[int, StartedMsg] = {}
        self.endings: dict[int, EndingMsg] = {}

    def add(self, uid: int, prompt: list[int], max_new_tokens: int = 4, **kwargs: Any) -> None:
        for request in requests_of(add_message(uid, prompt, max_new_tokens, **kwargs)):
            self.outputs[request.uid], self.judged[request.uid] = [], []
            self.roster.add(request)

    def step(self) -> StepPlan | None:
        self.now += 1
        self.roster.expire(self.now)
        plan = self.scheduler.plan(self.now)
        self.roster.check()
        if plan is not None:
            self.plans.append(plan)
            self._check_windows(plan)
            self._in_flight.append(plan)
        drains = plan is None and bool(self._in_flight)
        if drains or len(self._in_flight) >= self.depth:
            self._finish_step()
            self.roster.check()
        self._collect()
        return self.step() if drains else plan

    def _finish_step(self) -> None:
        """Runs the oldest step only now, after the next was planned: what that planned must not disturb it."""
        plan = self._in_flight.pop(0)
        result = self._execute(plan)
        self._carried = {row.uid: row.token_id for row in result.rows}
        self.scheduler.apply(plan, result, self.now)

    def _execute(self, plan: StepPlan) -> StepResult:
        if self.pass_tokens is None:
            return self.device.execute(plan, self._carried)
        self.device.execute(StepPlan(step=plan.step, rows=(), moves=plan.moves), {})
        rows: list[RowResult] = []
        for piece in in_pieces(plan, self.pass_tokens):
            rows += self.device.execute(replace(piece, moves=NO_MOVES), self._carried).rows
        return StepResult(step=plan.step, rows=tuple(rows))

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def _check_windows(self, plan: StepPlan) -> None:
        """However long it gets, a request holds of layers with a window what the window and steps in flight need."""
        for row in plan.rows:
            request = self.roster.active[row.uid]
            table, in_flight = request.table, request.planned - request.computed
            for group, sectors, first in zip(self.layout.groups, table.sectors, table.first, strict=True):
                if group.window is not None:
                    most = math.ceil((group.window + in_flight) / group.sector_len) + 1
                    assert len(sectors) - first <= most, f"{row.uid} holds too much for a window of {group.window}"

    def assert_idle(self) -> None:
        pool = self.memory.pool
        assert pool.num_free + pool.num_kept == pool.num_pages
        assert self.memory.index.num_promised == 0
        assert self.swap.pool.num_used == 0
        assert len(self.roster.waiting) == len(self.roster.active) == 0
        assert self.scheduler.plan(self.now) is None

    def _collect(self) -> None:
        for message in self.roster.outbox.take(len(self.plans)):
            self._take(message)

    def _take(self, message: StepMsg) -> None:
        for prompt in message.prompts:
            assert prompt.uid not in self.endings, "a prompt is judged after the ending"
            assert not self.outputs[prompt.uid], "a prompt is judged after a token"
            assert prompt.index == 1 + len(self.judged[prompt.uid]), "tokens are judged twice, or left out"
            self.judged[prompt.uid] += array("f", prompt.logprobs)
        uids, tokens = array("Q"), array("i")
        uids.frombytes(message.uids)
        tokens.frombytes(message.token_ids)
        for uid, token in zip(uids, tokens, strict=True):
            assert uid not in self.endings, "a token after the ending"
            self.outputs[uid].append(token)
        for started in message.started:
            assert started.uid not in self.started
            self.started[started.uid] = started
        for ending in message.endings:
            assert ending.uid not in self.endings, "two endings"
            self.endings[ending.uid] = ending

"""Runs a plan: copies, forward pass, sampling."""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from chairlift_worker.faults import Faults
from chairlift_worker.pace import Pace, pace_of
from chairlift_worker.pieces import Pieces
from chairlift_worker.plan import NOTHING_CARRIED, Moves, RowPlan, SampleSpec, StepPlan, StepResult
from chairlift_worker.runner import Runner
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling.masks import Masks
from chairlift_worker.speculation.policy import StepCosts
from chairlift_worker.swap.mover import SwapMover
from chairlift_worker.swap.policy import SwapCosts

_GREEDY: Final = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, logprob=False)
# Tokens of the steps whose costs are measured, and how often each is run.
_PROBE_SIZES: Final = (1, 2, 4, 8, 16, 32)
_NUM_PROBES: Final = 5
_PACE_CONTEXT: Final = 512  # tokens that those of a third step look back on
_PACE_TOKENS: Final = 128  # of the larger step by which the pace is measured
_PROBE_TOKENS: Final = 64  # length of the prompt by which the cost of computing is measured


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one execution's time went, in nanoseconds."""

    build_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    swap_ns: int = 0


class ModelExecutor:
    """The engine's executor over a real model."""

    def __init__(self, *, runner: Runner, mover: SwapMover, faults: Faults, masks: Masks | None = None) -> None:
        """Without `masks` no row may be constrained."""
        self._runner = runner
        self._mover = mover
        self._masks = masks
        self._sampler = Sampler(on_row=faults.before_sampling, masks=masks)
        self._pieces = Pieces(runner=runner, sampler=self._sampler, faults=faults)
        self.last_times = StepTimes()

    def warm_up(self) -> None:
        """Runs a prompt and a batch of single tokens, so that the first request does not pay for first-time work.

        Whatever lies in the first pages is overwritten: to be called before the first request.
        """
        num_groups = len(self._runner.cache.layout.groups)
        tokens, tables = array("i", [0] * 4), tuple(array("i", [number]) for number in range(num_groups))
        prompt = RowPlan(uid=0, tokens=tokens, start=0, num_tokens=4, tables=tables, sample=_GREEDY)
        single = RowPlan(uid=0, tokens=tokens, start=3, num_tokens=1, tables=tables, sample=_GREEDY)
        for rows in ((prompt,), (single,), (single,) * 4):
            self._sampler.sample(self._runner.forward(StepPlan(step=0, rows=rows)), rows)

    def measure_swap_costs(self) -> SwapCosts:
        """What computing a token of a prompt costs, and copying a sector; to be called before the first request."""
        layout = self._runner.cache.layout
        num_tokens = min(_PROBE_TOKENS, self._probe_len)
        tokens = array("i", [0] * num_tokens)
        tables = tuple(array("i", [number]) for number in range(len(layout.groups)))
        row = RowPlan(uid=0, tokens=tokens, start=0, num_tokens=num_tokens, tables=tables, sample=_GREEDY)
        plan = StepPlan(step=0, rows=(row,))
        forward_ns = min(self._timed(lambda: self._runner.forward(plan)) for _ in range(3))
        moves = Moves(outs=((0, 0),), ins=())
        copy_ns = min(self._timed(lambda: self._mover.move(moves)) for _ in range(5))
        return SwapCosts(token_ns=forward_ns / num_tokens, sector_ns=copy_ns)

    def measure_step_costs(self, *, max_tokens: int, max_rows: int) -> StepCosts:
        """What steps of few tokens cost, up to these bounds; to be called before the first request.

        They are steps with drafts: logits are computed at each token.
        """
        most = min(max_tokens, max_rows * self._probe_len)
        sizes = [size for size in _PROBE_SIZES if size <= max(2, most)]
        # By turns, so that a machine that gets slower or faster meanwhile does so for all sizes.
        rounds = [[self._time_step(size) for size in sizes] for _ in range(_NUM_PROBES)]
        costs = [statistics.median(times) for times in zip(*rounds, strict=True)]
        return StepCosts(sizes=tuple(sizes), costs_ns=tuple(itertools.accumulate(costs, max)))

    def measure_pace(self, *, max_tokens: int, max_rows: int, max_len: int, max_stretch: float) -> Pace | None:
        """What steps cost, up to these bounds; None where they have one token. To be called before any request.

        `max_len` is the length of the model's context.
        """
        length = min(self._probe_len, max_tokens, max_len)
        context = min(_PACE_CONTEXT, max_len - length)
        rows = max(1, min(_PACE_TOKENS // length, max_rows, max_tokens // length))
        if length * rows < 2:
            return None
        sizes = ((1, 1, 0), (rows, length, 0), (rows, length, context))
        one, many, behind = (min(self._time_prompts(*size) for _ in range(_NUM_PROBES)) for size in sizes)
        return pace_of(
            one_token_ns=one,
            many_tokens_ns=many,
            num_tokens=rows * length,
            max_stretch=max_stretch,
            context_ns=(behind - many) / (rows * length * max(1, context)),
        )

    def _time_prompts(self, num_rows: int, length: int, context: int) -> int:
        """A step of so many pieces of prompts behind a context, all in the same pages over and over."""
        groups = self._runner.cache.layout.groups
        end = context + length
        tables = tuple(array("i", [number] * group.sectors_for(end)) for number, group in enumerate(groups))
        tokens = array("i", [0] * end)
        row = RowPlan(uid=0, tokens=tokens, start=context, num_tokens=length, tables=tables, sample=_GREEDY)
        plan = StepPlan(step=0, rows=(row,) * num_rows)
        return self._timed(lambda: self._runner.forward(plan))

    @property
    def _probe_len(self) -> int:
        """Tokens of a row that takes one sector of each group."""
        return min(group.sector_len for group in self._runner.cache.layout.groups)

    def _time_step(self, num_tokens: int) -> int:
        tables = tuple(array("i", [number]) for number in range(len(self._runner.cache.layout.groups)))
        count, rest = divmod(num_tokens, self._probe_len)
        rows = tuple(
            RowPlan(
                uid=0,
                tokens=array("i", [0]),
                start=0,
                num_tokens=size,
                tables=tables,
                sample=_GREEDY,
                drafts=(0,) * (size - 1),
            )
            for size in [rest] * (rest > 0) + [self._probe_len] * count
        )
        plan = StepPlan(step=0, rows=rows)
        return self._timed(lambda: self._sampler.sample(self._runner.forward(plan), rows))

    def _timed(self, call: Callable[[], object]) -> int:
        """Nanoseconds that a call takes, with what it makes the device do."""
        self._runner.wait()
        begin = time.monotonic_ns()
        call()
        self._runner.wait()
        return time.monotonic_ns() - begin

    def execute(self, plan: StepPlan, carried: Mapping[int, int] = NOTHING_CARRIED) -> StepResult:
        """The plan's result. Whatever the model raises passes through, but that there is no memory."""
        begin = time.monotonic_ns()
        self._mover.move(plan.moves)
        if self._masks is not None:
            self._masks.prepare(plan.rows)
        swap_ns = time.monotonic_ns() - begin
        rows = self._pieces.compute(plan, carried)
        times = self._pieces.last_times
        self.last_times = StepTimes(
            build_ns=times.build_ns, forward_ns=times.forward_ns, sample_ns=times.sample_ns, swap_ns=swap_ns
        )
        return StepResult(step=plan.step, rows=rows)

"""A step's forward pass and its sampling; in pieces, where memory is too short for all of it at once.

A step's rows do not look at each other, so it makes no difference which of them are computed first, and a row may be
computed a part after the other. What a pass has written before it failed is written again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
import torch

from chairlift_worker.faults import Faults
from chairlift_worker.memory_errors import is_out_of_memory
from chairlift_worker.plan import RowResult, StepPlan, failed_row, in_pieces
from chairlift_worker.runner import Runner
from chairlift_worker.sampling import Sampler

# Steps after one that found no memory whose passes stay as small as those that found some.
CAREFUL_STEPS: Final = 256
# Passes of so few tokens are tried as they are: what they take is little, and many of them would take long.
LEAST_LIMIT: Final = 16
NO_MEMORY: Final = "INTERNAL: there was not enough memory to compute this request."

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class PassTimes:
    """Where the time of a step's passes went, in nanoseconds."""

    build_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


class Pieces:
    """Computes steps, in one pass each, or in several.

    A pass that finds no memory is tried again in two, and so on. A row that finds none alone fails, and its request
    with it; the others of the step go on. For a while passes are no larger than those that found memory.
    """

    def __init__(self, *, runner: Runner, sampler: Sampler, faults: Faults) -> None:
        self._runner = runner
        self._sampler = sampler
        self._faults = faults
        self._max_tokens = 0  # of a pass, while memory is short
        self._careful_steps = 0  # left
        self.last_times = PassTimes()

    @property
    def is_careful(self) -> bool:
        """Whether passes are kept small, since one has found no memory."""
        return self._careful_steps > 0

    def compute(self, plan: StepPlan, carried: Mapping[int, int]) -> tuple[RowResult, ...]:
        """The results of a plan's rows, in their order. What the model raises for other reasons passes through."""
        self.last_times = PassTimes()
        limit = self._take_limit(plan)
        if plan.num_tokens > limit:
            return self._compute_pieces(plan, carried, limit, is_short=False)
        results = self._try(plan, carried)
        if results is not None:
            return results
        _let_go()  # what nobody uses may be enough
        return self._compute_pieces(plan, carried, _half(plan), is_short=True)

    def _compute_pieces(
        self, plan: StepPlan, carried: Mapping[int, int], limit: int, *, is_short: bool
    ) -> tuple[RowResult, ...]:
        """The same in passes of at most `limit` tokens. `is_short`: a pass of this step has found no memory already."""
        results: dict[int, tuple[RowResult, ...]] = {}
        todo, fitting = in_pieces(plan, limit)[::-1], 0
        while todo:
            failed = {uid for uid, told in results.items() if told[-1].error is not None}
            piece = _without(todo.pop(), failed)
            if piece is None:
                continue
            sampled = self._try(piece, carried)
            if sampled is not None:
                fitting = max(fitting, piece.num_tokens)
                for result in sampled:
                    results[result.uid] = (*results.get(result.uid, ()), result)
                continue
            smaller = in_pieces(piece, _half(piece))
            if is_short and len(smaller) == 1:
                results[piece.rows[0].uid] = (failed_row(piece.rows[0].uid, NO_MEMORY),)
                continue
            if not is_short:
                _let_go()
            is_short = True
            todo += smaller[::-1]
        if is_short:
            self._be_careful(plan, fitting)
        return tuple([result for row in plan.rows for result in results.get(row.uid, ())])

    def _try(self, piece: StepPlan, carried: Mapping[int, int]) -> tuple[RowResult, ...] | None:
        """The results of a piece's rows; None if there is no memory for it."""
        try:
            self._faults.before_forward(piece)
            logits = self._runner.forward(piece, carried)
            began = time.monotonic_ns()
            self._faults.spoil(logits, piece.rows)
            sampled = self._sampler.sample(logits, piece.rows, carried)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        times, inside = self.last_times, self._runner.last_times
        times.build_ns += inside.build_ns
        times.forward_ns += inside.forward_ns
        times.sample_ns += time.monotonic_ns() - began
        return sampled

    def _take_limit(self, plan: StepPlan) -> int:
        """Tokens that a pass of this step may have."""
        if not self._careful_steps:
            return plan.num_tokens
        self._careful_steps -= 1
        return self._max_tokens

    def _be_careful(self, plan: StepPlan, fitting: int) -> None:
        """Bounds the passes to come: in this step those of `fitting` tokens found memory, and larger ones did not."""
        limit = max(fitting, LEAST_LIMIT)
        if not self._careful_steps or limit < self._max_tokens:
            _log.warning(
                "a step found no memory: for a while steps are computed in smaller pieces",
                step=plan.step,
                tokens=plan.num_tokens,
                tokens_at_most=limit,
                steps=CAREFUL_STEPS,
            )
        self._max_tokens = limit
        self._careful_steps = CAREFUL_STEPS


def _without(piece: StepPlan, failed: Container[int]) -> StepPlan | None:
    """What is left of a piece without the rests of rows that have failed; None if nothing is."""
    rows = tuple([row for row in piece.rows if row.uid not in failed])
    return StepPlan(step=piece.step, rows=rows) if rows else None


def _half(plan: StepPlan) -> int:
    return -(-plan.num_tokens // 2)


def _let_go() -> None:
    """Gives memory back that nobody uses any more."""
    gc.collect()
    torch.cuda.empty_cache()

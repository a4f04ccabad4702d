"""Runs a plan: forward pass, then sampling, with the faults that tests ask for."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Final

from chairlift_worker.faults import Faults
from chairlift_worker.plan import RowPlan, SampleSpec, StepPlan, StepResult
from chairlift_worker.runner import Runner
from chairlift_worker.sampling import Sampler

_GREEDY: Final = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, logprob=False)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one execution's time went, in nanoseconds."""

    build_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


class ModelExecutor:
    """The engine's executor over a real model."""

    def __init__(self, *, runner: Runner, faults: Faults) -> None:
        self._runner = runner
        self._faults = faults
        self._sampler = Sampler(on_row=faults.before_sampling)
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

    def execute(self, plan: StepPlan) -> StepResult:
        """The plan's result. Whatever the model raises passes through."""
        self._faults.before_forward(plan.step)
        logits = self._runner.forward(plan)
        begin = time.monotonic_ns()
        result = StepResult(step=plan.step, rows=self._sampler.sample(logits, plan.rows))
        runner_times = self._runner.last_times
        self.last_times = StepTimes(
            build_ns=runner_times.build_ns,
            forward_ns=runner_times.forward_ns,
            sample_ns=time.monotonic_ns() - begin,
        )
        return result

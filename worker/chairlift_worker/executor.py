"""Runs a plan: forward pass, then sampling, with the faults that tests ask for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from chairlift_worker.faults import Faults
from chairlift_worker.plan import StepPlan, StepResult
from chairlift_worker.runner import Runner
from chairlift_worker.sampling import Sampler


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

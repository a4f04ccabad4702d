"""Runs plans on a device that works by itself: a step is begun, and asked for its result later.

Nothing waits for the device between the two. Tokens are sampled there, and the next step takes them from there. Rows
that want more than the device samples are sampled on the host, from a copy of their logits; whoever needs their tokens
waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from chairlift_worker.faults import Faults
from chairlift_worker.launched import LaunchedStep
from chairlift_worker.memory_errors import is_out_of_memory
from chairlift_worker.pieces import Pieces
from chairlift_worker.plan import StepPlan
from chairlift_worker.queues import Mark, Queues
from chairlift_worker.runner import Runner
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling.device import DeviceSampler
from chairlift_worker.sampling.masks import Masks
from chairlift_worker.swap.mover import SwapMover
from chairlift_worker.swap.order import NO_STEP, in_order, written


class DeviceExecutor:
    """Begins steps in the order in which they are given; two may be in flight."""

    def __init__(
        self, *, runner: Runner, mover: SwapMover, queues: Queues, faults: Faults, masks: Masks | None = None
    ) -> None:
        """Without `masks` no row may be constrained."""
        self._runner = runner
        self._mover = mover
        self._queues = queues
        self._faults = faults
        self._sampler = DeviceSampler(on_row=faults.before_sampling)
        self._host_sampler = Sampler(on_row=faults.before_sampling, masks=masks)
        self._pieces = Pieces(runner=runner, sampler=self._host_sampler, faults=faults)
        self._steps: list[LaunchedStep] = []  # the newest, and those before it that are in flight
        self._leaving: dict[int, Mark] = {}  # sectors that are copied out, and the place behind their copies

    def begin(self, plan: StepPlan) -> LaunchedStep:
        """Begins a step. Whatever the model raises passes through, here or where the result is asked for."""
        before = self._steps[-1] if self._steps else None
        self._steps = [step for step in self._steps if not step.is_known]
        self._copy(plan)
        step = self._launch_or_compute(plan, before)
        self._steps.append(step)
        return step

    def _copy(self, plan: StepPlan) -> None:
        """Has the plan's sectors copied, beside the forward passes where they do not meet."""
        compute, copies = self._queues.compute, self._queues.copies
        layout = self._runner.cache.layout
        for batch in in_order(plan.moves, [step.plan for step in self._steps], layout):
            if batch.after != NO_STEP:
                copies.after(self._steps[batch.after].computed)
            copies.run(partial(self._mover.move, batch.moves))
            mark = copies.mark()
            self._leaving.update((sector, mark) for sector, _ in batch.moves.outs)
            if batch.moves.ins:
                compute.after(mark)
        if self._leaving:
            for sector in written(plan, layout) & self._leaving.keys():
                compute.after(self._leaving.pop(sector))
        if plan.moves.copies:  # behind the steps in flight that compute what they read, before what they write is read
            compute.run(partial(self._mover.copy, plan.moves.copies))

    def _launch_or_compute(self, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        if not self._pieces.is_careful:
            try:
                self._faults.before_forward(plan)
                return self._launch(plan, before)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        carried = {} if before is None else before.host_tokens(row.uid for row in plan.rows if row.carry)
        for step in self._steps:
            step.result()  # what is in flight keeps memory, and inputs
        self._queues.compute.mark().wait()
        return LaunchedStep.known(plan, self._pieces.compute(plan, carried), computed=self._queues.compute.mark())

    def _launch(self, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        compute, inputs, results = self._queues.compute, self._queues.inputs, self._queues.results
        carried, place_of = _carried(plan, before)
        ready = self._runner.prepare(plan, carried, place_of)
        step = LaunchedStep(plan, before=before, sampler=self._sampler, host_sampler=self._host_sampler)
        inputs.run(ready.send)
        compute.after(inputs.mark())

        @torch.inference_mode()
        def work() -> None:
            logits = ready.run(None if before is None else before.tokens)
            self._faults.spoil(logits, plan.rows)
            step.sample(logits)

        compute.run(work)
        step.computed = compute.mark()
        results.after(step.computed)
        results.run(step.fetch)
        step.fetched = results.mark()
        return step


def _carried(plan: StepPlan, before: LaunchedStep | None) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """The carried tokens that are known, or have to be waited for, by uid; and the places of the others."""
    uids = [row.uid for row in plan.rows if row.carry]
    if before is None or not uids:
        return {}, {}
    there = {} if before.is_known else before.place_of
    late = {uid: there[uid] for uid in uids if uid in there}
    return before.host_tokens(uid for uid in uids if uid not in late), late

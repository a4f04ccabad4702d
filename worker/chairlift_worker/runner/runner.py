"""The forward pass of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.plan import NOTHING_CARRIED, StepPlan
from chairlift_worker.runner.batch import BatchBuilder
from chairlift_worker.runner.forward import Forward


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went, in nanoseconds."""

    build_ns: int = 0
    forward_ns: int = 0


class Runner:
    """Runs plans through the model. One thread only."""

    def __init__(
        self, *, forward: Forward, cache: PagedCache, max_blocks_per_request: int = 0, max_requests: int = 0
    ) -> None:
        """`cache` is the memory of keys and values that `forward` writes to.

        Batches of at most `max_requests` one-token rows with at most `max_blocks_per_request` pages each take the
        decode fast path, which is for passes that take pages and models without windows; 0: none does.
        """
        self.cache = cache
        self._forward = forward
        self._builder = BatchBuilder(
            layout=cache.layout,
            num_sectors=cache.num_sectors,
            device=cache.sectors.device,
            form=forward.form,
            max_blocks=max_blocks_per_request,
            max_rows=max_requests,
        )
        self.last_times = StepTimes()
        self.steps_by_path: Counter[str] = Counter()  # "decode", the fast path, and "varlen", any batch

    @torch.inference_mode()
    def forward(self, plan: StepPlan, carried: Mapping[int, int] = NOTHING_CARRIED) -> torch.Tensor:
        """(sampled places, vocabulary) float32 logits, in the plan's order; the step's keys and values are then cached.

        `carried` has the last token of each row with `carry`, by uid.

        Raises ValueError for a plan that breaks its rules, and whatever the model raises.
        """
        began = time.monotonic_ns()
        batch = self._builder.build(plan, carried)
        built = time.monotonic_ns()
        self.steps_by_path["decode" if batch.in_place else "varlen"] += 1
        logits = self._forward(batch)
        self.last_times = StepTimes(build_ns=built - began, forward_ns=time.monotonic_ns() - built)
        return logits

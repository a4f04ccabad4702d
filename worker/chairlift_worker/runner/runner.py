"""The forward pass of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.plan import NOTHING_CARRIED, StepPlan
from chairlift_worker.runner.batch import BatchBuilder, StepBatch, find_late
from chairlift_worker.runner.forward import Forward, Pass, PlainPass
from chairlift_worker.runner.replay import GraphForward


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went, in nanoseconds."""

    build_ns: int = 0
    forward_ns: int = 0


class StepLead(Protocol):
    """Has other processes compute the same step."""

    def in_step(self, plan: StepPlan, carried: Mapping[int, int]) -> AbstractContextManager[None]:
        """To be entered around the forward pass."""
        ...


class Runner:
    """Runs plans through the model. One thread only."""

    def __init__(
        self,
        *,
        forward: Forward,
        cache: PagedCache,
        max_blocks_per_request: int = 0,
        max_requests: int = 0,
        lead: StepLead | None = None,
    ) -> None:
        """`cache` is the memory of keys and values that `forward` writes to. Without a `lead` it computes alone.

        Batches of at most `max_requests` one-token rows with at most `max_blocks_per_request` pages each take the
        decode fast path, which is for passes that take pages and models without windows; 0: none does.
        """
        self.cache = cache
        self._forward = forward
        self._device = cache.sectors.device
        # Tables of pages are made on the host: memory that stays where it is, or one copy, brings them to the device.
        self._batch_device = torch.device("cpu") if forward.form == "pages" else self._device
        self._builder = BatchBuilder(
            layout=cache.layout,
            num_sectors=cache.num_sectors,
            device=self._batch_device,
            form=forward.form,
            max_blocks=max_blocks_per_request,
            max_rows=max_requests,
        )
        self._lead = lead
        self.last_times = StepTimes()
        self.steps_by_path: Counter[str] = Counter()  # "decode", the fast path, and "varlen", any batch

    @property
    def leads(self) -> bool:
        """Whether other processes compute the same steps, by `forward`."""
        return self._lead is not None

    @torch.inference_mode()
    def forward(self, plan: StepPlan, carried: Mapping[int, int] = NOTHING_CARRIED) -> torch.Tensor:
        """(sampled places, vocabulary) float32 logits, in the plan's order; the step's keys and values are then cached.

        `carried` has the last token of each row with `carry`, by uid.

        Raises ValueError for a plan that breaks its rules, and whatever the model raises.
        """
        began = time.monotonic_ns()
        batch = self._build(plan, carried)
        if not isinstance(self._forward, GraphForward) and self._batch_device != self._device:
            batch = batch.copied(self._device)
        built = time.monotonic_ns()
        with nullcontext() if self._lead is None else self._lead.in_step(plan, carried):
            logits = self._forward(batch)
        self.last_times = StepTimes(build_ns=built - began, forward_ns=time.monotonic_ns() - built)
        return logits

    @torch.inference_mode()
    def prepare(
        self,
        plan: StepPlan,
        carried: Mapping[int, int] = NOTHING_CARRIED,
        place_of: Mapping[int, int] = NOTHING_CARRIED,
    ) -> Pass:
        """The same as a pass that is yet to be done.

        Of rows with `carry` that `place_of` has the uid of, it takes the token there among those of the step before.
        """
        batch = self._build(plan, {**dict.fromkeys(place_of, 0), **carried} if place_of else carried)
        late = find_late(plan.rows, place_of)
        if isinstance(self._forward, GraphForward):
            return self._forward.prepare(batch, late)
        return PlainPass(self._forward, batch.copied(self._device) if self._forward.form == "pages" else batch, late)

    def wait(self) -> None:
        """Until the device has done everything that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _build(self, plan: StepPlan, carried: Mapping[int, int]) -> StepBatch:
        batch = self._builder.build(plan, carried)
        self.steps_by_path["decode" if batch.in_place else "varlen"] += 1
        return batch

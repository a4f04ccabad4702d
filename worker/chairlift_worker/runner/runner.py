"""The forward pass of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionBackend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.interface import STEP_KEYWORD, AttentionSwitch
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import StepPlan
from chairlift_worker.runner.batch import NOTHING_CARRIED, BatchBuilder


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went, in nanoseconds."""

    build_ns: int = 0
    forward_ns: int = 0


class Runner:
    """Owns the key-value memory and runs plans through the model. One thread only."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        layout: CacheLayout,
        backend: AttentionBackend[Any],
        num_sectors: int,
        max_blocks_per_request: int = 0,
        max_requests: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`model` is in eval mode, on `device`; its config is never left changed. `layout` is that of its layers.

        Batches of at most `max_requests` one-token rows with at most `max_blocks_per_request` pages each take the
        decode fast path, which is for backends that take pages and models without windows; 0: none does.
        """
        self._model = model
        self._backend = backend
        self._device = torch.device(device)
        self.cache = PagedCache(layout=layout, num_sectors=num_sectors, dtype=model.dtype, device=self._device)
        self._builder = BatchBuilder(
            layout=layout,
            num_sectors=num_sectors,
            device=self._device,
            form=backend.form,
            max_blocks=max_blocks_per_request,
            max_rows=max_requests,
        )
        self._switch = AttentionSwitch(model)
        self.last_times = StepTimes()
        self.steps_by_path: Counter[str] = Counter()  # "decode", the fast path, and "varlen", any batch

    @torch.inference_mode()
    def forward(self, plan: StepPlan, carried: Mapping[int, int] = NOTHING_CARRIED) -> torch.Tensor:
        """(sampling rows, vocabulary) float32 logits, in the plan's order; the step's keys and values are then cached.

        `carried` has the last token of each row with `carry`, by uid.

        Raises ValueError for a plan that breaks its rules, and whatever the model raises.
        """
        began = time.monotonic_ns()
        batch = self._builder.build(plan, carried)
        built = time.monotonic_ns()
        self.steps_by_path["decode" if batch.in_place else "varlen"] += 1
        step = self._backend.step(self.cache, batch.metadata)
        with self._switch:
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.sampled,
                **{STEP_KEYWORD: step},
            )
        logits: torch.Tensor = output.logits[0].float()
        self.last_times = StepTimes(build_ns=built - began, forward_ns=time.monotonic_ns() - built)
        return logits

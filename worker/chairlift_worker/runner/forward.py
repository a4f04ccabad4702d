"""What a forward pass is, and the one through a transformers module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionBackend, RowForm
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.interface import STEP_KEYWORD, AttentionSwitch
from chairlift_worker.runner.batch import LateTokens, StepBatch


class Forward(Protocol):
    """From a batch to logits; the batch's keys and values are then in the cache."""

    form: RowForm  # in which it wants the batch's rows told

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """(sampled places, vocabulary) float32 logits, in the batch's order."""
        ...


class Pass(Protocol):
    """A forward pass that is ready to be done."""

    def send(self) -> None:
        """Brings its batch to the device."""
        ...

    def run(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The logits, once the batch is there. `tokens` are those of the step before, for those that come late."""
        ...


@dataclass(frozen=True, slots=True)
class PlainPass:
    """One whose batch is there already."""

    forward: Forward
    batch: StepBatch
    late: LateTokens | None

    def send(self) -> None:
        """See `Pass`."""

    def run(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """See `Pass`."""
        if self.late is not None:
            assert tokens is not None, "the batch waits for tokens of the step before"
            self.late.put(self.batch.input_ids, tokens)
        return self.forward(self.batch)


class ModuleForward:
    """A transformers module, its attention on pages."""

    def __init__(self, *, model: PreTrainedModel, backend: AttentionBackend[Any], cache: PagedCache) -> None:
        """`model` is in eval mode, on the cache's device; its config is never left changed."""
        self.form: RowForm = backend.form
        self._model = model
        self._backend = backend
        self._cache = cache
        self._switch = AttentionSwitch(model)

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """(sampled places, vocabulary) float32 logits, in the batch's order. Raises whatever the model raises."""
        step = self._backend.step(self._cache, batch.metadata)
        with self._switch:
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.sampled,
                **{STEP_KEYWORD: step},
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits

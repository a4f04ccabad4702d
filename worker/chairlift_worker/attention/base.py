"""What an attention backend is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.metadata import StepMetadata

RowForm = Literal["slots", "pages"]
"""How a step's rows are told: by the slots of their contexts (StepMetadata), or by tables of pages (PageRows)."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's own way to attend."""

    scaling: float
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap), before the mask
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None  # (query heads,): a score that takes its share of the softmax and gives nothing


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries, keys and values of the packed rows."""

    layer: int
    query: torch.Tensor  # (tokens, query heads, head dim)
    key: torch.Tensor  # (tokens, kv heads, head dim)
    value: torch.Tensor  # (tokens, kv heads, head dim)
    options: AttentionOptions

    @property
    def num_groups(self) -> int:
        """Query heads per key-value head; query head h reads key-value head h // num_groups."""
        return self.query.shape[1] // self.key.shape[1]


class AttentionStep(Protocol):
    """What the model's attention layers talk to during one forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """(tokens, query heads, head dim), in the query's type."""
        ...


RowsT_contra = TypeVar("RowsT_contra", contravariant=True)


class AttentionBackend(Protocol[RowsT_contra]):
    """Writes a step's new keys and values into the pages, and attends through them."""

    name: str
    form: RowForm  # of the metadata that it takes

    def step(self, cache: PagedCache, metadata: Sequence[RowsT_contra]) -> AttentionStep:
        """One forward pass over rows; `metadata` has one entry for each group of layers."""
        ...


class GatheringBackend(Protocol):
    """Attends by slots. The new keys and values are in the cache already when it is asked."""

    def attend(self, call: AttentionCall, cache: PagedCache, metadata: StepMetadata) -> torch.Tensor:
        """(tokens, query heads, head dim), in the query's type. The metadata is that of the layer's group."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One forward pass of a backend that attends by slots."""

    backend: GatheringBackend
    cache: PagedCache
    metadata: Sequence[StepMetadata]  # one for each group of layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the new keys and values, then attend. Raises ValueError for a window that the layer never had."""
        metadata = self.metadata[self.cache.group_of[call.layer]]
        check_window(call, metadata.window)
        self.cache.write(call.layer, metadata.slots, call.key, call.value)
        return self.backend.attend(call, self.cache, metadata)


def check_window(call: AttentionCall, window: int | None) -> None:
    """Raises ValueError where a layer asks for another window than that of its cache."""
    if call.options.sliding_window != window:
        raise ValueError(
            f"layer {call.layer} asks for a window of {call.options.sliding_window}, "
            f"but its cache was made for {window}"
        )

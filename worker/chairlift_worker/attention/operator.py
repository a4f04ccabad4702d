"""Attention as one operator that torch.compile carries along without looking into it.

Compiled code knows of a step only its packed tokens. What the rows are and where their pages lie is looked up when the
operator runs, so that compiled code depends on neither, nor on the backend. Tokens that belong to nobody, which stand
behind the step's own, never reach the backend: their output is zero.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from chairlift_worker.attention.base import AttentionCall, AttentionOptions, AttentionStep

_SCHEMA: Final = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scaling, float? softcap, "
    "int? sliding_window) -> Tensor"
)


class _Current(threading.local):
    """What the operator serves in this thread."""

    step: AttentionStep | None = None  # None: nothing is computed, as when code is compiled
    num_tokens: int = 0


_current: Final = _Current()


@contextmanager
def serving(step: AttentionStep | None, num_tokens: int) -> Iterator[None]:
    """Context in which the operator hands the first `num_tokens` packed tokens to this step."""
    _current.step, _current.num_tokens = step, num_tokens
    try:
        yield
    finally:
        _current.step = None


class OperatorStep:
    """The step that compiled code knows: whichever one is served when it runs."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """(tokens, query heads, head dim). Raises what the served step raises."""
        options = call.options
        out: torch.Tensor = torch.ops.chairlift.attend(
            call.query,
            call.key,
            call.value,
            options.sinks,
            call.layer,
            options.scaling,
            options.softcap,
            options.sliding_window,
        )
        return out


@torch.library.custom_op("chairlift::attend", mutates_args=(), schema=_SCHEMA)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    softcap: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    step, num_tokens = _current.step, _current.num_tokens
    if step is None:
        return query.new_zeros(query.shape)
    options = AttentionOptions(scaling=scaling, softcap=softcap, sliding_window=sliding_window, sinks=sinks)
    own = slice(0, num_tokens)
    out = step.attend(AttentionCall(layer=layer, query=query[own], key=key[own], value=value[own], options=options))
    if num_tokens == query.shape[0]:
        return out
    whole = query.new_zeros(query.shape)
    whole[own] = out
    return whole


@_attend.register_fake
def _describe(query: torch.Tensor, *_arguments: object) -> torch.Tensor:
    """What comes out, as far as compiled code has to know."""
    return query.new_empty(query.shape)

"""The tokens of a step, out of the columns in which the worker sends them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chairlift_worker.ipc.messages import StepMsg


@dataclass(slots=True)
class StepToken:
    """A token that was generated."""

    uid: int
    token_id: int
    logprob: float  # NaN where the worker sent none
    top_ids: Sequence[int] = ()  # the likeliest tokens at its place, likeliest first
    top_logprobs: Sequence[float] = ()


def tokens_of(step: StepMsg) -> Iterator[StepToken]:
    """They, in their order."""
    uids = memoryview(step.uids).cast("Q")
    token_ids = memoryview(step.token_ids).cast("i")
    logprobs = memoryview(step.logprobs).cast("f") if step.logprobs else None
    top_ids, top_logprobs = memoryview(step.top_ids).cast("i"), memoryview(step.top_logprobs).cast("f")
    begin = 0
    for i, uid in enumerate(uids):
        token = StepToken(uid, token_ids[i], math.nan if logprobs is None else logprobs[i])
        if step.num_tops:
            end = begin + step.num_tops[i]
            token.top_ids, token.top_logprobs, begin = top_ids[begin:end], top_logprobs[begin:end], end
        yield token

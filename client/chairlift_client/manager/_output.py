"""What the manager hands out: the names of transformers' continuous batching."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from chairlift_client._types import FinishReason, RequestState


class RequestStatus(enum.IntEnum):
    """Where a request stands. `PENDING` also covers one whose pages were given up or swapped out."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


STATUS_OF_STATE = {
    RequestState.UNSPECIFIED: RequestStatus.PENDING,
    RequestState.WAITING: RequestStatus.PENDING,
    RequestState.PREFILLING: RequestStatus.PREFILLING,
    RequestState.DECODING: RequestStatus.DECODING,
    RequestState.SWAPPED: RequestStatus.PENDING,
    RequestState.PAUSED: RequestStatus.DECODING,
    # Its last tokens; how it ended comes with its ending.
    RequestState.FINISHED: RequestStatus.DECODING,
}


@dataclass
class GenerationOutput:
    """A request's output so far. Each one stands for itself: nothing changes it later.

    `generated_tokens` is cumulative, a stop token included; `logprobs` has an entry for each, where they were asked
    for. `error` is set with FAILED, `finish_reason` with FINISHED. Times are `time.perf_counter()` of this process;
    `timestamps`, if asked for, say when each token arrived here.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None
    finish_reason: FinishReason | None = None

    def is_finished(self) -> bool:
        """Whether the request is over, well or not."""
        return self.status >= RequestStatus.FINISHED

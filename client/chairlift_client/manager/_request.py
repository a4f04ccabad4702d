"""One request of a session: what came of it, and how much of that was handed out."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from chairlift.v1 import event_pb2

from chairlift_client._types import FinishReason, RequestState
from chairlift_client.manager._output import STATUS_OF_STATE, GenerationOutput, RequestStatus


class TrackedRequest:
    """Collects a request's events. Owned by its Session, under whose lock alone it is touched.

    `stop_token_ids` are the ids that may end it; with `stops_anywhere` any token may. They, and `max_new_tokens` once
    it is known, tell which token may be its last: that one is held back until the ending, so that a streaming reader
    gets it together with FINISHED.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        streaming: bool,
        record_timestamps: bool,
        stop_token_ids: Collection[int],
        stops_anywhere: bool = False,
    ) -> None:
        self.request_id: Final = request_id
        self._prompt_ids = prompt_ids
        self._streaming = streaming
        self._stops = frozenset(stop_token_ids)
        self._stops_anywhere = stops_anywhere
        self._max_new_tokens: int | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._timestamps: list[float] | None = [] if record_timestamps else None
        self._status = RequestStatus.PENDING
        self._error: str | None = None
        self._reason: FinishReason | None = None
        self._created = time.perf_counter()
        self._lifespan = (-1.0, -1.0)
        self._num_handed_out = 0

    @property
    def is_over(self) -> bool:
        """Whether its ending has come."""
        return self._status >= RequestStatus.FINISHED

    def accept(self, message: event_pb2.Accepted) -> None:
        """Note what holds for it; told again whenever the stream is attached again."""
        self._max_new_tokens = message.max_new_tokens
        self._move_to(STATUS_OF_STATE[RequestState(message.state)])

    def extend(self, delta: event_pb2.Delta) -> None:
        """Take the tokens that are not here yet; after a broken connection the service sends some again.

        Raises ValueError if tokens between those here and those of the delta are missing.
        """
        known = len(self._tokens) - delta.index
        if known < 0:
            raise ValueError(f"tokens {len(self._tokens)} to {delta.index} are missing")
        new = delta.token_ids[known:]
        self._tokens.extend(new)
        self._logprobs.extend(entry.chosen for entry in delta.logprobs[known:])
        if self._timestamps is not None:
            self._timestamps.extend([time.perf_counter()] * len(new))
        self._move_to(STATUS_OF_STATE[RequestState(delta.state)])

    def finish(self, message: event_pb2.Finished) -> None:
        """Its good ending."""
        self._reason = FinishReason(message.reason)
        self._move_to(RequestStatus.FINISHED)

    def fail(self, error: str) -> None:
        """Its ending by error; what it had generated stays."""
        if not self.is_over:
            self._error = error
            self._move_to(RequestStatus.FAILED)

    def has_output(self) -> bool:
        """Whether `next_output` has something to hand out."""
        if self.is_over:
            return True
        held_back = 1 if self._tokens and self._may_be_last() else 0
        return self._streaming and self._num_handed_out < len(self._tokens) - held_back

    def next_output(self) -> GenerationOutput:
        """The next output: of a streaming request one token more than the last, else all; the ending comes last."""
        is_last = not self._streaming or self._num_handed_out + 1 >= len(self._tokens)
        if self.is_over and is_last:
            return self._output(len(self._tokens), self._status)
        self._num_handed_out += 1
        return self._output(self._num_handed_out, RequestStatus.DECODING)

    def _may_be_last(self) -> bool:
        if self._stops_anywhere or len(self._tokens) == self._max_new_tokens:
            return True
        return self._tokens[-1] in self._stops

    def _move_to(self, status: RequestStatus) -> None:
        if self.is_over:
            return
        now = time.perf_counter()
        if self._status == RequestStatus.PENDING and status != RequestStatus.PENDING and self._lifespan[0] < 0:
            self._lifespan = (now, -1.0)
        if status >= RequestStatus.FINISHED:
            self._lifespan = (self._lifespan[0], now)
        self._status = status

    def _output(self, num_tokens: int, status: RequestStatus) -> GenerationOutput:
        over = status >= RequestStatus.FINISHED
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self._prompt_ids,
            generated_tokens=self._tokens[:num_tokens],
            logprobs=self._logprobs[:num_tokens],
            error=self._error if over else None,
            status=status,
            created_time=self._created,
            lifespan=self._lifespan,
            timestamps=None if self._timestamps is None else self._timestamps[:num_tokens],
            finish_reason=self._reason if over else None,
        )

"""The bound on what waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.generation import Generation


class Admission:
    """Counts requests, each choice by itself, and their prompt tokens, that the worker was sent and has not started.

    A place is taken before a prompt is tokenised, so that tokenising is bounded too. One request is always let in
    where none waits, however long its prompt: else it would be refused for ever.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0

    @contextlib.contextmanager
    def places(self, num_requests: int) -> Iterator[None]:
        """Holds places while requests are validated.

        Raises ServiceError: QUEUE_FULL if there are too few now, MESSAGE_TOO_LARGE if there never are so many.
        """
        if num_requests > self._max_requests:
            raise ServiceError(
                Reason.MESSAGE_TOO_LARGE,
                f"{num_requests} requests in one call; at most {self._max_requests} may wait",
                metadata={"max_waiting_requests": str(self._max_requests)},
            )
        if self.num_requests + num_requests > self._max_requests:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{self.num_requests} requests wait, the limit is {self._max_requests}"
            )
        self.num_requests += num_requests
        try:
            yield
        finally:
            self.num_requests -= num_requests

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ServiceError with QUEUE_FULL if so many prompt tokens are too many now."""
        if self.num_tokens and self.num_tokens + num_tokens > self._max_tokens:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{self.num_tokens} prompt tokens wait, {num_tokens} more would pass the limit of {self._max_tokens}",
            )

    def enter(self, generation: Generation) -> None:
        """It waits from now on."""
        generation.waiting = True
        self.num_requests += 1
        self.num_tokens += _num_tokens(generation)

    def leave(self, generation: Generation) -> None:
        """It has started, or is over. A second call does nothing."""
        if generation.waiting:
            generation.waiting = False
            self.num_requests -= 1
            self.num_tokens -= _num_tokens(generation)


def _num_tokens(generation: Generation) -> int:
    """Of a request's choices the head alone has the prompt: the others begin with what is computed of it."""
    return 0 if generation.choice else generation.request.num_prompt_tokens

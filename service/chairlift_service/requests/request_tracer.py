"""Who is told of every request's ending, for its trace."""

from __future__ import annotations

from typing import Protocol

from chairlift_worker.ipc.messages import EndingMsg

from chairlift_service.errors import ServiceError
from chairlift_service.requests.generation import Generation


class RequestTracer(Protocol):
    """Makes spans. No method fails, or waits, but for `close`."""

    def ended(self, generation: Generation, ending: EndingMsg) -> None:
        """The worker told a generation's ending."""
        ...

    def lost(self, generation: Generation, error: ServiceError) -> None:
        """A generation ended without the worker's word."""
        ...

    def close(self) -> None:
        """Sends what is there, within a bound. To be called outside of the event loop."""
        ...

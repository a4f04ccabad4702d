"""How far one stream of the fake server has told one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from chairlift.v1 import event_pb2

from chairlift_client.testing._model import FakeRequest

FakeEvent = event_pb2.Accepted | event_pb2.Delta | event_pb2.Finished | event_pb2.Failed


def event_field(event: object) -> dict[str, Any]:
    """The event as the field of a stream's message."""
    names = {
        event_pb2.Accepted: "accepted",
        event_pb2.Delta: "delta",
        event_pb2.Finished: "finished",
        event_pb2.Failed: "failed",
    }
    return {names[type(event)]: event}


class Place:
    """Tells `accepted`, each choice's deltas, a token each, and its ending; a failure in place of all endings.

    `num_out` says how many tokens of a choice are out by now. Call everything with the engine's lock held.
    """

    def __init__(self, request: FakeRequest, *, num_out: Callable[[FakeRequest], int], from_index: int = 0) -> None:
        self.request = request
        self._num_out = num_out
        self._from_index = from_index
        self._cursors = [min(from_index, len(choice.output)) for choice in request.choices]
        self._begun = False
        self._over: set[int] = set()  # choices whose endings are told

    @property
    def is_done(self) -> bool:
        """Whether nothing follows."""
        return len(self._over) == len(self._cursors)

    def news(self) -> list[FakeEvent]:
        """What there is to tell since the last time."""
        return list(self._news())

    def _news(self) -> Iterator[FakeEvent]:
        if not self._begun:
            self._begun = True
            yield self.request.accepted()
            if self.request.message.logprobs.prompt_top_n and not self._from_index:
                yield self.request.prompt_delta()
        for choice in self.request.choices:
            out, cursor = self._num_out(choice), self._cursors[choice.choice]
            for index in range(cursor, out):
                yield choice.delta(index, index + 1)
            self._cursors[choice.choice] = max(cursor, out)
            is_over = out == len(choice.output) and self.request.failure is None
            if is_over and choice.choice not in self._over:
                self._over.add(choice.choice)
                yield choice.finished()
        if self.request.failure is not None and not self.is_done:
            self._over.update(range(len(self._cursors)))
            yield self.request.failure

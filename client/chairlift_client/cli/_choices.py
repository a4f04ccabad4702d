"""Several answers of one stream, for reading: one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from chairlift.v1 import generation_service_pb2

_Event = generation_service_pb2.GenerateResponse


def in_turn(events: Iterable[_Event]) -> Iterator[_Event]:
    """The events, those of each choice together: the first one's as they come, the others' once it is their turn."""
    current = 0
    waiting: defaultdict[int, list[_Event]] = defaultdict(list)
    for event in events:
        choice = _choice_of(event)
        if choice is None or choice == current:
            yield event
        else:
            waiting[choice].append(event)
        while event.HasField("finished") and choice == current:
            current += 1
            together = waiting.pop(current, None)
            if not together:
                break
            yield from together
            event, choice = together[-1], current  # noqa: PLW2901 - the next one may be over, too


def _choice_of(event: _Event) -> int | None:
    match event.WhichOneof("event"):
        case "delta":
            return event.delta.choice
        case "finished":
            return event.finished.choice
        case _:
            return None

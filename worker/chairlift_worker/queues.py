"""Queues of a device: what is in one is done in order, what is in different ones side by side, unless one waits.

On a GPU they are streams. A CPU does at once what it is given. Tests have queues that lag behind each other as far as
they may (tests/support/lagging.py), so that a wait which is missing shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]


class Mark(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """Sleeps until the device has done everything before this place. Raises what that raised."""
        ...


class Queue(Protocol):
    """Work that is done in order."""

    def run(self, work: Work) -> None:
        """Does this next. May raise what the work raises, or leave that to a mark behind it."""
        ...

    def mark(self) -> Mark:
        """The place behind everything that has been given to it so far."""
        ...

    def after(self, mark: Mark) -> None:
        """What follows begins when everything before that place, of another queue, is done. Nobody sleeps."""
        ...


@dataclass(frozen=True, slots=True)
class Queues:
    """What a step's work is spread over."""

    compute: Queue  # forward passes and sampling
    inputs: Queue  # a step's batch to the device
    copies: Queue  # sectors of the cache to the swap pool and back
    results: Queue  # tokens to the host


class DirectQueue:
    """Does work when it gets it."""

    def run(self, work: Work) -> None:
        """See `Queue`."""
        work()

    def mark(self) -> Mark:
        """See `Queue`."""
        return _DONE

    def after(self, mark: Mark) -> None:
        """See `Queue`."""


class _Done:
    def wait(self) -> None:
        pass


_DONE = _Done()


class CudaQueue:
    """A stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Work) -> None:
        """See `Queue`. What the work asks the device to do is done later; all else that it does is done now."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        """See `Queue`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaMark(event)

    def after(self, mark: Mark) -> None:
        """See `Queue`."""
        assert isinstance(mark, CudaMark), "a stream waits for streams"
        self._stream.wait_event(mark.event)


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event in a stream."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """See `Mark`."""
        self.event.synchronize()


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, made in the order of the stream: nobody waits. On a CPU the values themselves."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def queues_for(device: torch.device) -> Queues:
    """A device's queues."""
    if device.type != "cuda":
        return Queues(compute=DirectQueue(), inputs=DirectQueue(), copies=DirectQueue(), results=DirectQueue())
    torch.cuda.synchronize(device)
    own = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
    # What knows nothing of queues, such as an update of the weights, uses the default stream: so it is in order.
    return Queues(CudaQueue(torch.cuda.default_stream(device)), *map(CudaQueue, own))

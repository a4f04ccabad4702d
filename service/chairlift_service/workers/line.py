"""The way to whichever worker there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from chairlift_worker.ipc.messages import AddRequestMsg, AnswerMsg, ControlMsg

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.workers.link import Link


class EndsHere(Protocol):
    """Ends requests that no worker has."""

    def cancelled(self, uid: int) -> None:
        """Ends a live request with CANCELLED. Must not raise; does nothing where it is over."""
        ...


class WorkerLine:
    """What the rest of the service sends by, while workers come and go.

    From the loss of a worker on, requests wait here, by uid, until the next one has been sent them: those that it had,
    and those that come meanwhile. What they are stands in the registry. A Cancel ends them here.
    """

    def __init__(self) -> None:
        self._link: Link | None = None
        self._ends: EndsHere | None = None
        self._waiting: dict[int, None] = {}  # an ordered set of uids
        self._over = False

    def open(self, *, ends: EndsHere) -> None:
        """To be called once, before anything is sent."""
        self._ends = ends

    def connect(self, link: Link) -> None:
        """There is a worker. What waits is to be sent to it: see `first_waiting`."""
        self._link = link

    def disconnect(self, uids: Iterable[int]) -> None:
        """The worker is gone; these requests wait for the next one."""
        self._link = None
        self._waiting = dict.fromkeys(uids)

    def close(self) -> None:
        """There will be no worker any more."""
        self._over = True
        self.disconnect(())

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has been sent."""
        return len(self._waiting)

    @property
    def first_waiting(self) -> int | None:
        """The uid of the one that has waited longest."""
        return next(iter(self._waiting), None)

    def let_go(self, uid: int) -> None:
        """It does not wait any more: the worker has been sent it, or it is over."""
        self._waiting.pop(uid, None)

    def add(self, messages: Sequence[AddRequestMsg]) -> None:
        """Sends all of them, or none; without a worker they wait for one. Raises ServiceError as `Link.add`."""
        if self._over:
            raise _gone()
        if self._link is None or self._waiting:  # nobody overtakes
            self._waiting.update(dict.fromkeys(uid for message in messages for uid in _uids(message)))
        else:
            self._link.add(messages)

    def cancel(self, uid: int) -> None:
        """Sends a Cancel now, or as soon as there is room. Never fails; does nothing once all workers are gone."""
        if uid in self._waiting:
            asyncio.get_running_loop().call_soon(self._end_waiting, uid)  # after what the caller still has to do
        elif self._link is not None:
            self._link.cancel(uid)

    def hold(self, uid: int, *, held: bool) -> None:
        """Has the worker hold a request, or go on with it. Never fails; one that waits is sent as it is then."""
        if self._link is not None and uid not in self._waiting:
            self._link.hold(uid, held=held)

    def ask(self, make: Callable[[int], ControlMsg]) -> asyncio.Future[AnswerMsg]:
        """As `Questions.ask`. Raises WORKER_LOST while there is no worker."""
        if self._link is None:
            raise _gone()
        return self._link.questions.ask(make)

    def _end_waiting(self, uid: int) -> None:
        if uid in self._waiting:
            del self._waiting[uid]
            assert self._ends is not None  # set by open()
            self._ends.cancelled(uid)
        else:  # it was sent meanwhile
            self.cancel(uid)


def _uids(message: AddRequestMsg) -> Iterator[int]:
    yield message.uid
    yield from (fork.uid for fork in message.forks)


def _gone() -> ServiceError:
    return ServiceError(Reason.WORKER_LOST, "the worker is gone")

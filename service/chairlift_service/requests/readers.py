"""Who reads what: one reader for each request, and one for each session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from typing import Literal

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.brake import Brake
from chairlift_service.requests.cursor import Cursor, Ended, Event, Started
from chairlift_service.requests.generation import Generation

Target = tuple[Literal["request"], int] | tuple[Literal["session"], str]
"""What is read: a request, by its head's uid, or a session, by name."""


class Reader:
    """Cursors into the logs of what one call reads, and a bell that rings when one of them has something new.

    It holds no output, so that a slow call costs nothing but the log, and cancelling a wait loses nothing. It counts as
    slow only while a message is on its way: whoever waits for the bell has taken all there was.
    """

    __slots__ = (
        "_announced",
        "_bell",
        "_brake",
        "_changed",
        "_cursors",
        "_delivery",
        "_endings_only",
        "_error",
        "_full",
        "_until",
        "target",
    )

    def __init__(self, *, target: Target, brake: Brake, endings_only: bool = False) -> None:
        self.target = target
        self._endings_only = endings_only  # the bell is silent until a generation is over
        self._cursors: dict[int, Cursor] = {}
        self._announced: set[int] = set()  # uids of the heads of which it is told that they have started
        self._changed: dict[int, None] = {}  # an ordered set of uids
        self._error: ServiceError | None = None
        self._bell = asyncio.Event()
        self._brake = brake
        self._full: dict[int, Generation] = {}  # those of which the call has too much before it
        self._delivery: asyncio.Timeout | None = None  # of the message that is on its way
        self._until: float | None = None  # the loop's time by which the call must have taken more

    def follow(self, generation: Generation, *, index: int = 0) -> None:
        """Reads this request too, each of its choices from token `index` on; of a shorter one what is to come."""
        for choice in generation.choices:
            self._cursors[choice.uid] = Cursor(generation=choice, index=min(index, len(choice.output)))
            self.notify(choice)

    @property
    def is_done(self) -> bool:
        """Whether the endings of all that it reads are told."""
        return not self._cursors

    def notify(self, generation: Generation) -> None:
        """Something of the generation changed."""
        if self._endings_only and generation.ending is None:
            return
        cursor = self._cursors.get(generation.uid)
        if cursor is not None:
            self._changed[generation.uid] = None
            self._bell.set()
            self._watch(cursor)

    def end(self, error: ServiceError) -> None:
        """Makes `events` raise `error` once all that is known by then is told. The first error counts.

        The call holds nothing back any more, and has a full buffer's time to take what is told.
        """
        if self._error is None:
            self._error = error
            self._release_all()
            self._allow_time()
        self._bell.set()

    def close(self) -> None:
        """Nobody reads by it any more: it holds nothing back."""
        self._cursors.clear()
        self._release_all()

    async def deliver(self, write: Awaitable[None]) -> None:
        """Waits until a message is taken.

        Raises ServiceError where the time for that is over: what `end` was given, else READER_TOO_SLOW.
        """
        try:
            async with asyncio.timeout_at(self._until) as self._delivery:
                await write
        except TimeoutError:
            text = "the stream was read too slowly for too long"
            raise self._error or ServiceError(Reason.READER_TOO_SLOW, text) from None
        finally:
            self._delivery = None

    async def events(self) -> AsyncIterator[tuple[Generation, Event]]:
        """What happens: one event of each generation in turn, in its order; a request's start, and its error, once.

        Ends by itself never; raises what `end` was given. Holds nothing that would have to be cleaned up where the
        iteration is given up.
        """
        while True:
            self._release_all()
            await self._bell.wait()
            while self._changed:
                uid = next(iter(self._changed))
                del self._changed[uid]
                cursor = self._cursors.get(uid)
                if cursor is None or (event := cursor.next_event()) is None:
                    continue
                if uid in self._full and self._brake.is_relieved(cursor):
                    self._release(uid)
                if isinstance(event, Ended):
                    self._let_go(cursor.generation, event)  # so that its log can be
                else:
                    self._changed[uid] = None  # there may be more, but the others come first
                if self._is_news(cursor.generation, event):
                    yield cursor.generation, event
            if self._error is not None:
                raise self._error
            self._bell.clear()

    def _is_news(self, generation: Generation, event: Event) -> bool:
        if not isinstance(event, Started):
            return True
        is_news = generation.head.uid not in self._announced
        if generation.family:
            self._announced.add(generation.head.uid)
        return is_news

    def _let_go(self, generation: Generation, event: Ended) -> None:
        """Its ending is told, and that of the choices that fail with it."""
        is_fault = isinstance(event.ending, ServiceError)
        for choice in generation.choices if is_fault else (generation,):
            self._cursors.pop(choice.uid, None)
        if not any(choice.uid in self._cursors for choice in generation.choices):
            self._announced.discard(generation.head.uid)

    def _watch(self, cursor: Cursor) -> None:
        """Holds the request back if the call does not keep up with it."""
        generation = cursor.generation
        if self._delivery is None or self._error is not None or generation.uid in self._full:
            return
        if generation.ending is None and self._brake.is_full(cursor):
            if not self._full:
                self._allow_time()
            self._full[generation.uid] = generation
            self._brake.hold(generation)

    def _allow_time(self) -> None:
        """From now on the call's time is limited."""
        self._until = asyncio.get_running_loop().time() + self._brake.patience_s
        if self._delivery is not None and not self._delivery.expired():
            self._delivery.reschedule(self._until)

    def _release(self, uid: int) -> None:
        self._brake.release(self._full.pop(uid))
        if not self._full and self._error is None:
            self._until = None

    def _release_all(self) -> None:
        for uid in list(self._full):
            self._release(uid)


class Readers:
    """All readers by target. A second reader of a target takes over, and the first ends with ABORTED."""

    def __init__(self, *, brake: Brake) -> None:
        self._brake = brake
        self._readers: dict[Target, Reader] = {}

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def num_of_requests(self) -> int:
        """Readers of single requests; those of sessions never end by themselves."""
        return sum(kind == "request" for kind, _ in self._readers)

    @contextlib.contextmanager
    def open(self, target: Target, *, endings_only: bool = False) -> Iterator[Reader]:
        """A new reader of the target, gone at the end of the block."""
        before = self._readers.get(target)
        if before is not None:
            before.end(ServiceError(Reason.READER_REPLACED, "another reader took over"))
        reader = Reader(target=target, brake=self._brake, endings_only=endings_only)
        self._readers[target] = reader
        try:
            yield reader
        finally:
            reader.close()
            if self._readers.get(target) is reader:
                del self._readers[target]

    def of(self, generation: Generation) -> Iterable[Reader]:
        """Readers that this generation concerns."""
        targets: list[Target] = [("request", generation.head.uid)]
        if generation.detached and generation.request.session:
            targets.append(("session", generation.request.session))
        return [reader for target in targets if (reader := self._readers.get(target)) is not None]

    def notify(self, generation: Generation) -> None:
        """Something of the generation changed."""
        for reader in self.of(generation):
            reader.notify(generation)

    def end_all(self, error: ServiceError) -> None:
        """Ends every open reader with this error, once it has told what is known by now."""
        for reader in list(self._readers.values()):
            reader.end(error)

"""Readers that do not keep up: when their requests are held, when they go on, and when a reader's time is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from chairlift.v1 import event_pb2
from chairlift_service.errors import ServiceError
from chairlift_service.requests.cursor import Event
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.requests.readers import Reader
from support.books import Books, ending, step

BUFFER = 8


class Caller:
    """Takes messages one by one, when the test says so: until then a write does not come to its end."""

    def __init__(self, reader: Reader) -> None:
        self._allowed = asyncio.Semaphore(0)
        self.taken: list[Event] = []
        self.task = asyncio.create_task(self._read(reader))

    async def take(self, num_messages: int = 1) -> None:
        for _ in range(num_messages):
            self._allowed.release()
        await turns()

    @property
    def slices(self) -> list[int]:
        """Tokens of each delta taken."""
        return [len(event.token_ids) for event in self.taken if isinstance(event, LogSlice)]

    async def _read(self, reader: Reader) -> None:
        async for _, event in reader.events():
            await reader.deliver(self._write(event))

    async def _write(self, event: Event) -> None:
        await self._allowed.acquire()
        self.taken.append(event)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def calling(reader: Reader) -> AsyncIterator[Caller]:
    caller = Caller(reader)
    await turns()
    try:
        yield caller
    finally:
        caller.task.cancel()
        await asyncio.gather(caller.task, return_exceptions=True)


async def tokens(books: Books, num: int, *, uid: int = 1, token: int = 97) -> None:
    """A step for each token, with time for the reader after each."""
    for _ in range(num):
        books.dispatcher.apply(step([(uid, token)]))
        await turns()


def started(books: Books, **fields: object) -> Generation:
    generation = books.add(1, **fields)
    books.dispatcher.apply(step(started=[1]))
    return generation


async def test_a_request_is_held_when_the_buffer_is_full_and_goes_on_when_half_is_taken() -> None:
    books = Books(buffer_tokens=BUFFER)
    generation = started(books)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader) as caller:  # `accepted` is on its way
            await tokens(books, BUFFER - 1)
            assert books.port.holds == []
            await tokens(books, 1)
            assert books.port.holds == [(1, True)]
            assert generation.shown_state == event_pb2.REQUEST_STATE_PAUSED
            await tokens(books, 2)  # of a step that was in flight
            assert books.port.holds == [(1, True)]
            await caller.take()  # the ten are a delta now, on its way
            assert books.port.holds == [(1, True), (1, False)]
            assert generation.shown_state == event_pb2.REQUEST_STATE_DECODING
            await tokens(books, BUFFER)
            await caller.take(2)
            assert caller.slices == [BUFFER + 2, BUFFER]
            assert books.port.holds == [(1, True), (1, False)] * 2


async def test_a_reader_that_keeps_up_is_never_held_however_much_it_gets() -> None:
    books = Books(buffer_tokens=BUFFER)
    generation = started(books)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader) as caller:
            await caller.take(1000)
            await tokens(books, 10 * BUFFER)
            assert sum(caller.slices) == 10 * BUFFER
    assert books.port.holds == []


async def test_who_waits_for_text_is_not_slow_where_the_tokens_have_none() -> None:
    books = Books(buffer_tokens=BUFFER)
    generation = started(books, want_ids=False)
    generation.output._decoder.push = lambda token_id: ""  # type: ignore[union-attr, method-assign] # no text at all
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader) as caller:
            await tokens(books, BUFFER)
            assert books.port.holds == [(1, True)]  # while `accepted` was on its way
            await caller.take()
            assert books.port.holds == [(1, True), (1, False)]
            await tokens(books, 3 * BUFFER)
            assert books.port.holds == [(1, True), (1, False)]


async def test_a_request_without_a_reader_and_one_that_is_read_whole_are_never_held() -> None:
    books = Books(buffer_tokens=BUFFER)
    generation = started(books, detached=True)
    await tokens(books, 2 * BUFFER)
    with books.readers.open(("request", 1), endings_only=True) as reader:
        reader.follow(generation)
        await tokens(books, 2 * BUFFER)
    assert books.port.holds == []


async def test_a_reader_that_stays_full_ends_when_its_time_is_over() -> None:
    books = Books(buffer_tokens=BUFFER, patience_s=0.05)
    generation = started(books)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader) as caller:
            await tokens(books, BUFFER - 1)
            await asyncio.sleep(0.1)
            assert not caller.task.done(), "it has room: there is no hurry"
            await tokens(books, 1)
            with pytest.raises(ServiceError, match="READER_TOO_SLOW"):
                await asyncio.wait_for(caller.task, 5)
    assert books.port.holds == [(1, True), (1, False)]


async def test_time_lost_before_half_is_taken_counts_and_a_relieved_reader_has_all_of_it_again() -> None:
    books = Books(buffer_tokens=2 * 512, patience_s=60)
    generation = started(books)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader) as caller:
            books.dispatcher.apply(step([(1, 97)] * 3 * 512))
            first = reader._until
            assert first is not None
            await caller.take()
            assert reader._until == first, "512 of 1,536 are on their way, which leaves more than half a buffer"
            await caller.take()
            assert reader._until is None
            books.dispatcher.apply(step([(1, 97)] * 3 * 512))
            assert reader._until is not None
            assert reader._until > first


async def test_what_is_over_is_not_held_and_its_reader_may_take_its_time() -> None:
    books = Books(buffer_tokens=BUFFER, patience_s=0.05)
    generation = started(books, detached=True)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader) as caller:
            books.dispatcher.apply(step([(1, 97)] * BUFFER, endings=[ending(1)]))
            assert books.port.holds == []
            await asyncio.sleep(0.1)
            assert not caller.task.done(), "what is over needs no hurry"
            await caller.take(3)
            assert caller.slices == [BUFFER]


async def test_a_reader_that_leaves_holds_nobody_back() -> None:
    books = Books(buffer_tokens=BUFFER)
    generation = started(books, detached=True)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(generation)
        async with calling(reader):
            await tokens(books, BUFFER)
            assert generation.num_full == 1
    assert generation.num_full == 0
    assert books.port.holds == [(1, True), (1, False)]


async def test_a_reader_that_was_replaced_holds_nobody_back_and_ends_although_it_does_not_read() -> None:
    books = Books(buffer_tokens=BUFFER, patience_s=0.05)
    generation = started(books, detached=True)
    with books.readers.open(("request", 1)) as first:
        first.follow(generation)
        async with calling(first) as caller:
            await tokens(books, BUFFER)
            with books.readers.open(("request", 1)) as second:
                assert books.port.holds == [(1, True), (1, False)]
                second.follow(generation)
                await tokens(books, BUFFER)
                with pytest.raises(ServiceError, match="READER_REPLACED"):
                    await asyncio.wait_for(caller.task, 5)


async def test_with_two_readers_the_slower_one_counts() -> None:
    books = Books(buffer_tokens=BUFFER)
    generation = started(books, detached=True, session="s")
    with books.readers.open(("request", 1)) as own, books.readers.open(("session", "s")) as of_session:
        for reader in (own, of_session):
            reader.follow(generation)
        async with calling(own) as one, calling(of_session) as other:
            await tokens(books, BUFFER)
            assert books.port.holds == [(1, True)]
            await one.take(2)
            assert books.port.holds == [(1, True)]
            await other.take(2)
            assert books.port.holds == [(1, True), (1, False)]


async def test_in_a_session_a_request_that_always_has_more_keeps_no_other_waiting() -> None:
    books = Books(buffer_tokens=BUFFER)
    for uid in (1, 2):
        books.add(uid, detached=True, session="s")
    books.dispatcher.apply(step(started=[1, 2]))
    with books.readers.open(("session", "s")) as reader:
        for generation in books.registry.of_session("s"):
            reader.follow(generation)
        async with calling(reader) as caller:
            for _ in range(4 * BUFFER):  # both have more each time that a message was taken
                books.dispatcher.apply(step([(1, 97), (2, 98)]))
                await caller.take()
            tokens_of = {
                token: sum(list(event.token_ids).count(token) for event in caller.taken if isinstance(event, LogSlice))
                for token in (97, 98)
            }
    assert min(tokens_of.values()) > 3 * BUFFER
    assert books.port.holds == []

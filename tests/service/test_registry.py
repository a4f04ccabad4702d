"""The books of the service: log, cursor, readers, kept results, admission. Without gRPC and without a worker."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from chairlift.v1 import event_pb2, generation_service_pb2
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.admission import Admission
from chairlift_service.requests.canceller import Canceller
from chairlift_service.requests.cursor import MAX_DELTA_TOKENS, Cursor, Ended, Started
from chairlift_service.requests.kept import MAX_DEPARTED, Departed, KeptResults
from chairlift_service.requests.lease import Lease
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.requests.registry import check_free, fail_all, readable
from chairlift_worker.ipc.messages import EndingReason
from hypothesis import given
from hypothesis import strategies as st
from support.books import Books, a_generation, ending, step


@given(
    letters=st.text(alphabet="abcdef", max_size=30),
    looks=st.lists(st.booleans(), max_size=31),
    want_ids=st.booleans(),
    closed=st.booleans(),
)
def test_slices_of_a_cursor_join_to_the_whole_whenever_it_looks(
    letters: str, looks: list[bool], want_ids: bool, closed: bool
) -> None:
    generation = a_generation(1, want_ids=want_ids)
    cursor = Cursor(generation=generation)
    generation.start(0)
    slices: list[LogSlice] = []

    def look() -> None:
        while (event := cursor.next_event()) is not None:
            if isinstance(event, LogSlice):
                slices.append(event)

    for i, letter in enumerate(letters):
        generation.append(ord(letter), math.nan)
        if i < len(looks) and looks[i]:
            look()
    if closed:
        generation.end(ending(1))
    look()
    assert "".join(piece.text for piece in slices) == (letters if closed else letters[:-1])
    index = 0
    for piece in slices:
        assert piece.index == index
        assert piece.text or (want_ids and piece.token_ids)
        index += len(piece.token_ids)
    if want_ids:
        assert "".join(chr(token) for piece in slices for token in piece.token_ids) == letters


def test_a_reader_far_behind_gets_slices_of_bounded_size() -> None:
    generation = a_generation(1)
    generation.start(0)
    for _ in range(2 * MAX_DELTA_TOKENS + 5):
        generation.append(97, math.nan)
    cursor = Cursor(generation=generation)
    assert cursor.next_event() == Started()
    sizes = [len(event.token_ids) for event in iter(cursor.next_event, None) if isinstance(event, LogSlice)]
    assert sizes == [MAX_DELTA_TOKENS, MAX_DELTA_TOKENS, 5]


def test_nothing_is_told_before_the_start_and_nothing_after_the_ending() -> None:
    generation = a_generation(1)
    cursor = Cursor(generation=generation)
    assert cursor.next_event() is None
    generation.start(0)
    assert [cursor.next_event(), cursor.next_event()] == [Started(), None]
    generation.append(97, math.nan)
    generation.end(ending(1))
    assert not generation.end(ServiceError(Reason.INTERNAL, "too late"))
    events = list(iter(cursor.next_event, None))
    assert [type(event) for event in events] == [LogSlice, Ended]
    assert events[-1] == Ended(ending(1))
    assert cursor.next_event() is None


def test_a_request_cancelled_while_waiting_is_accepted_then_finished_and_a_failed_one_only_fails() -> None:
    cancelled, failed = a_generation(1), a_generation(2)
    cancelled.end(ending(1, EndingReason.CANCELLED))
    failed.end(error := ServiceError(Reason.WORKER_LOST, "gone"))
    told = [list(iter(Cursor(generation=each).next_event, None)) for each in (cancelled, failed)]
    assert told == [[Started(), Ended(ending(1, EndingReason.CANCELLED))], [Ended(error)]]


def test_a_step_is_applied_start_first_then_tokens_then_endings() -> None:
    books = Books()
    one, two = books.add(1), books.add(2, want_logprobs=True)
    books.dispatcher.apply(step([(1, 97), (2, 98)], started=[1, 2], endings=[ending(1)], logprobs=[math.nan, -0.5]))
    assert one.output.slice(0, 1).text == "a"
    assert one.ending == ending(1)
    assert list(two.output.slice(0, 1).logprobs) == [-0.5]
    assert (two.state, two.ending) == (event_pb2.REQUEST_STATE_DECODING, None)
    assert books.registry.live(1) is None
    assert books.registry.find("r1") is None


def test_late_output_of_a_request_that_is_over_or_was_never_there_is_discarded() -> None:
    books = Books()
    one = books.add(1)
    books.dispatcher.apply(step([(1, 97)], started=[1], endings=[ending(1)]))
    books.dispatcher.apply(step([(1, 98), (77, 99)], started=[1, 77], endings=[ending(1), ending(77)]))
    assert len(one.output) == 1
    assert len(books.registry) == 0


def test_text_that_cannot_be_made_ends_its_request_alone_and_tells_the_worker() -> None:
    books = Books()
    one, two = books.add(1), books.add(2)
    books.dispatcher.apply(step([(1, 97), (2, 97)], started=[1, 2]))
    books.dispatcher.apply(step([(1, 666), (2, 98)]))
    books.dispatcher.apply(step([(1, 99), (2, 99)]))
    assert isinstance(one.ending, ServiceError)
    assert one.ending.reason is Reason.INTERNAL
    assert books.port.cancelled == [1]
    assert books.registry.live(1) is one  # until the worker confirms
    assert (len(one.output), one.state) == (2, event_pb2.REQUEST_STATE_FINISHED)  # nothing after the ending
    books.dispatcher.apply(step(endings=[ending(1, EndingReason.CANCELLED), ending(2)]))
    assert isinstance(one.ending, ServiceError)
    assert two.output.slice(0, 3).text == "abc"
    assert books.registry.num_live == 0


def test_endings_by_status_carry_the_reason_that_the_worker_names() -> None:
    books = Books()
    one, two = books.add(1), books.add(2)
    books.dispatcher.apply(
        step(endings=[ending(1, EndingReason.DEADLINE), ending(2, EndingReason.ERROR, "POISONED_REQUEST: it burns")])
    )
    assert isinstance(one.ending, ServiceError)
    assert one.ending.reason is Reason.DEADLINE_EXCEEDED
    assert isinstance(two.ending, ServiceError)
    assert (two.ending.reason, two.ending.message) == (Reason.POISONED_REQUEST, "it burns")


def test_closing_a_lease_sends_one_cancel_for_what_is_live_and_none_for_what_is_over() -> None:
    books = Books()
    generations = [books.add(uid) for uid in (1, 2, 3)]
    lease = Lease(generations=generations, registry=books.registry, port=books.port)
    books.dispatcher.apply(step(endings=[ending(2)]))
    with lease:
        pass
    lease.close()
    assert books.port.cancelled == [1, 3]
    assert books.registry.num_live == 2  # kept until the worker confirms
    books.dispatcher.apply(step(endings=[ending(1, EndingReason.CANCELLED), ending(3, EndingReason.CANCELLED)]))
    assert (books.registry.num_live, len(books.registry)) == (0, 0)


def test_the_queue_counts_until_the_start_or_the_ending_and_once() -> None:
    books = Books()
    for uid in (1, 2, 3):
        books.add(uid)
    assert (books.admission.num_requests, books.admission.num_tokens) == (3, 9)
    books.dispatcher.apply(step(started=[1]))
    books.dispatcher.apply(step(started=[1]))
    assert (books.admission.num_requests, books.admission.num_tokens) == (2, 6)
    books.dispatcher.apply(step(endings=[ending(1), ending(2, EndingReason.CANCELLED)]))
    fail_all(books.registry, books.readers, ServiceError(Reason.WORKER_LOST, "gone"))
    assert (books.admission.num_requests, books.admission.num_tokens) == (0, 0)


def test_places_are_held_while_requests_are_validated_and_given_back_when_that_fails() -> None:
    admission = Admission(max_requests=2, max_tokens=10)
    with admission.places(2), pytest.raises(ServiceError, match="QUEUE_FULL"), admission.places(1):
        pass
    assert admission.num_requests == 0
    with contextlib.suppress(RuntimeError), admission.places(2):
        raise RuntimeError
    assert admission.num_requests == 0


def test_more_requests_than_may_ever_wait_are_too_many_for_one_call() -> None:
    admission = Admission(max_requests=2, max_tokens=10)
    with pytest.raises(ServiceError, match="3 requests in one call; at most 2 may wait") as caught, admission.places(3):
        pass
    assert caught.value.reason is Reason.MESSAGE_TOO_LARGE
    assert caught.value.retry_after is None  # the same call can never be taken
    assert admission.num_requests == 0


def test_ids_are_taken_while_live_and_twins_are_found() -> None:
    books = Books()
    books.add(1, detached=True)
    with pytest.raises(ServiceError, match="DUPLICATE_REQUEST_ID"):
        check_free(books.registry, ["new", "r1"])
    with pytest.raises(ServiceError, match="DUPLICATE_REQUEST_ID"):
        check_free(books.registry, ["new", "new"])
    books.dispatcher.apply(step(endings=[ending(1)]))
    check_free(books.registry, ["r1"])


def test_results_leave_by_age_oldest_first_and_are_told_apart_from_what_never_was() -> None:
    books = Books(ttl_s=0)
    books.add(1, detached=True)
    books.dispatcher.apply(step(endings=[ending(1)]))
    assert len(books.registry) == 0
    for request_id, reason in (("r1", Reason.RESULT_EXPIRED), ("never", Reason.REQUEST_NOT_FOUND)):
        with pytest.raises(ServiceError) as refused:
            readable(books.registry, request_id)
        assert refused.value.reason is reason


def test_kept_memory_counts_what_is_kept_and_lets_the_oldest_go() -> None:
    kept = KeptResults(ttl_s=300, max_bytes=20_000)
    generations = [a_generation(uid, detached=True) for uid in range(10)]
    gone: list[int] = []
    for now, generation in enumerate(generations):
        kept.keep(generation, now_ns=now)
        gone += [each.uid for each in kept.take_surplus(now_ns=now)]
    assert gone == list(range(10 - len(kept)))
    assert 0 < kept.num_bytes <= 20_000
    for generation in generations:
        kept.let_go(generation)
        kept.let_go(generation)
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_departed_ids_are_bounded() -> None:
    departed = Departed(capacity=3)
    for uid in range(5):
        departed.add(a_generation(uid, detached=uid % 2 == 0))
    assert [departed.was_kept(f"r{uid}") for uid in range(5)] == [None, None, True, False, True]
    assert MAX_DEPARTED == 10_000


def test_cancelling_tells_live_over_and_unknown_apart() -> None:
    books = Books()
    canceller = Canceller(registry=books.registry, port=books.port)
    books.add(1)
    kept = books.add(2, detached=True)
    books.dispatcher.apply(step(endings=[ending(2)]))
    pb = generation_service_pb2
    assert [canceller.cancel(name) for name in ("r1", "r2", "r2", "no")] == [
        pb.CANCEL_STATUS_CANCELLED,
        pb.CANCEL_STATUS_ALREADY_FINISHED,
        pb.CANCEL_STATUS_ALREADY_FINISHED,
        pb.CANCEL_STATUS_NOT_FOUND,
    ]
    assert books.port.cancelled == [1]
    assert kept not in books.kept
    books.dispatcher.apply(step([(1, 97)], started=[1], endings=[ending(1, EndingReason.LENGTH)]))
    assert canceller.cancel("r1") == pb.CANCEL_STATUS_ALREADY_FINISHED


async def test_a_session_s_reader_hears_of_detached_requests_added_before_and_after_it_came() -> None:
    books = Books()
    books.add(1, detached=True, session="s")
    with books.readers.open(("session", "s")) as reader:
        for generation in books.registry.of_session("s"):
            reader.follow(generation)
        books.add(2, detached=True, session="s")
        books.add(3, session="s")  # read by its own call
        books.add(4, detached=True, session="t")
        endings = [ending(uid) for uid in (1, 2, 3, 4)]
        books.dispatcher.apply(step(started=[1, 2, 3, 4], endings=endings))
        told = []
        events = reader.events()
        for _ in range(4):
            generation, event = await asyncio.wait_for(anext(events), 1)
            told.append((generation.uid, type(event)))
        assert told == [(1, Started), (2, Started), (1, Ended), (2, Ended)], "in turn, each in its order"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(events), 0.05)
        assert not reader._cursors
    assert len(books.readers) == 0


async def test_a_reader_that_is_ended_tells_what_it_knows_first() -> None:
    books = Books()
    one = books.add(1)
    with books.readers.open(("request", 1)) as reader:
        reader.follow(one)
        books.dispatcher.apply(step([(1, 97)], started=[1], endings=[ending(1)]))
        fail_all(books.registry, books.readers, ServiceError(Reason.WORKER_LOST, "gone"))
        events = reader.events()
        assert [type((await anext(events))[1]) for _ in range(3)] == [Started, LogSlice, Ended]
        with pytest.raises(ServiceError, match="WORKER_LOST"):
            await anext(events)


async def test_only_the_last_reader_of_a_target_stays() -> None:
    readers = Books().readers
    with readers.open(("request", 1)) as first:
        with readers.open(("request", 1)) as second, readers.open(("request", 2)):
            with pytest.raises(ServiceError, match="READER_REPLACED"):
                await asyncio.wait_for(anext(first.events()), 1)
            assert readers.num_of_requests == 2
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(second.events()), 0.05)
        assert len(readers) == 0
    assert len(readers) == 0

"""The link over real rings, with the worker's end played by the test."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator

import pytest
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.workers.link import LEFT_FOR_CANCELS_BYTES, MAX_RECORDS_PER_TURN, Link
from chairlift_worker.ipc.channel import ServiceChannel, WorkerChannel
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    CancelMsg,
    FlushedMsg,
    FlushPrefixCacheMsg,
    HoldMsg,
    RequestMsg,
    SamplingMsg,
    ShutdownMsg,
    StartFailedMsg,
    StepMsg,
    WorkerMsg,
    decode_request,
    encode,
)
from support.served import eventually

SAMPLING = SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


class Steps:
    """Collects what the link hands on."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.fault: Exception | None = None

    def apply(self, step: StepMsg) -> None:
        if self.fault is not None:
            raise self.fault
        self.seen.append(step.step)


def add(uid: int, num_tokens: int = 4) -> AddRequestMsg:
    return AddRequestMsg(
        uid=uid,
        prompt=array("i", [7] * num_tokens).tobytes(),
        max_new_tokens=1,
        sampling=SAMPLING,
        stop_ids=(),
        logprobs=False,
        arrival_ns=1,
        deadline_ns=0,
    )


def flush(op: int) -> FlushPrefixCacheMsg:
    return FlushPrefixCacheMsg(op=op)


def step(number: int) -> StepMsg:
    return StepMsg(step=number, uids=b"", token_ids=b"", logprobs=b"", started=(), endings=())


@pytest.fixture
def service() -> Iterator[ServiceChannel]:
    channel = ServiceChannel.create(request_bytes=64 * 1024, result_bytes=64 * 1024)
    yield channel
    channel.close()


@pytest.fixture
def worker(service: ServiceChannel) -> Iterator[WorkerChannel]:
    channel = WorkerChannel.attach(service.description, duplicate=True)
    yield channel
    channel.close()


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
async def link(service: ServiceChannel, steps: Steps) -> Link:
    link = Link(channel=service)
    link.open(sink=steps)
    return link


@pytest.fixture(autouse=True)
async def closed(link: Link) -> object:
    yield
    link.close()


def sent(worker: WorkerChannel) -> list[RequestMsg]:
    messages = []
    while (record := worker.requests.receive()) is not None:
        messages.append(decode_request(record))
    return messages


def say(worker: WorkerChannel, message: WorkerMsg) -> None:
    assert worker.results.try_send(encode(message))


async def test_requests_arrive_whole_and_in_order(link: Link, worker: WorkerChannel) -> None:
    link.add([add(1), add(2)])
    link.cancel(1)
    assert link.shutdown()
    assert sent(worker) == [add(1), add(2), CancelMsg(uid=1), ShutdownMsg()]


async def test_a_batch_that_does_not_fit_now_sends_nothing_and_leaves_room_for_cancels(
    link: Link, worker: WorkerChannel, service: ServiceChannel
) -> None:
    for uid in range(1, 1000):
        try:
            link.add([add(uid, 250)])
        except ServiceError as refused_early:
            assert refused_early.reason is Reason.QUEUE_FULL  # noqa: PT017 - it may come at any of the thousand
            break
    else:
        pytest.fail("a ring of 64 KiB took a thousand requests of 1 KiB")
    assert service.requests.free_bytes >= LEFT_FOR_CANCELS_BYTES
    with pytest.raises(ServiceError) as refused:
        link.add([add(901), add(902, 250)])
    assert refused.value.reason is Reason.QUEUE_FULL
    assert [message.uid for message in sent(worker) if isinstance(message, AddRequestMsg)] == list(range(1, uid))


async def test_what_never_fits_is_too_large(link: Link, worker: WorkerChannel) -> None:
    most = 64 * 1024 // 2 - LEFT_FOR_CANCELS_BYTES
    with pytest.raises(ServiceError) as refused:
        link.add([add(1, most // 4)])
    assert refused.value.reason is Reason.MESSAGE_TOO_LARGE
    link.add([add(1, most // 4 - 50)])
    assert len(sent(worker)) == 1


async def test_cancellations_outlast_a_full_ring_each_once_and_in_order(link: Link, worker: WorkerChannel) -> None:
    for uid in range(10_000):
        link.cancel(uid)
    seen = sent(worker)
    assert len(seen) < 10_000
    link.cancel(3)
    async with asyncio.timeout(10):
        while link._unsent:
            await asyncio.sleep(0.005)
            seen += sent(worker)
    seen += sent(worker)
    assert seen == [CancelMsg(uid=uid) for uid in range(10_000)] + [CancelMsg(uid=3)]


async def test_of_holds_that_wait_for_room_the_last_word_counts_and_a_cancel_is_the_last(
    link: Link, worker: WorkerChannel
) -> None:
    for uid in range(10_000):  # more than the ring takes
        link.hold(uid, held=True)
    link.hold(9998, held=False)
    link.cancel(9999)
    link.hold(9999, held=False)
    seen = sent(worker)
    async with asyncio.timeout(10):
        while link._unsent:
            await asyncio.sleep(0.005)
            seen += sent(worker)
    seen += sent(worker)
    holds = [HoldMsg(uid=uid, held=True) for uid in range(9998)]
    assert seen == [*holds, HoldMsg(uid=9998, held=False), CancelMsg(uid=9999)]


async def test_steps_are_handed_on_in_order_whether_the_loop_sleeps_or_not(
    link: Link, worker: WorkerChannel, steps: Steps
) -> None:
    for number in range(200):
        say(worker, step(number))
        if number % 50 == 0:
            await eventually(lambda: len(steps.seen) == number + 1)  # noqa: B023 - awaited within the turn
    await eventually(lambda: len(steps.seen) == 200)
    assert steps.seen == list(range(200))


async def test_a_flood_of_steps_leaves_the_loop_its_turns(link: Link, worker: WorkerChannel, steps: Steps) -> None:
    await asyncio.sleep(0.01)
    for number in range(10 * MAX_RECORDS_PER_TURN):
        say(worker, step(number))
    turns = 0
    while len(steps.seen) < 10 * MAX_RECORDS_PER_TURN:
        before = len(steps.seen)
        await asyncio.sleep(0)
        turns += 1
        assert len(steps.seen) - before <= MAX_RECORDS_PER_TURN
        assert turns < 10_000
    assert turns >= 10


async def test_an_idle_link_costs_no_turns(link: Link, worker: WorkerChannel, steps: Steps) -> None:
    say(worker, step(1))
    await eventually(lambda: steps.seen == [1])
    calls = []
    original = link._on_bell
    link._on_bell = lambda: calls.append(original())  # type: ignore[method-assign] # counts the turns
    link._loop.remove_reader(link._channel.results_doorbell.fd)
    link._loop.add_reader(link._channel.results_doorbell.fd, link._on_bell)
    await asyncio.sleep(0.2)
    assert calls == []


async def test_a_flush_is_answered_by_number(link: Link, worker: WorkerChannel) -> None:
    first, second = (link.questions.ask(flush) for _ in range(2))
    ops = [message.op for message in sent(worker) if isinstance(message, FlushPrefixCacheMsg)]
    say(worker, FlushedMsg(op=ops[1], num_pages=22))
    say(worker, FlushedMsg(op=99, num_pages=33))
    say(worker, FlushedMsg(op=ops[0], num_pages=11))
    assert [answer.num_pages for answer in await asyncio.gather(first, second)] == [11, 22]


async def test_closing_fails_what_waits_and_refuses_what_comes(link: Link) -> None:
    question = link.questions.ask(flush)
    link.close()
    with pytest.raises(ServiceError, match="WORKER_LOST"):
        await question
    with pytest.raises(ServiceError, match="WORKER_LOST"):
        link.add([add(1)])
    with pytest.raises(ServiceError, match="WORKER_LOST"):
        link.questions.ask(flush)
    link.cancel(1)
    assert not link.shutdown()


async def test_the_first_message_is_told(link: Link, worker: WorkerChannel) -> None:
    say(worker, StartFailedMsg(message="no"))
    assert await asyncio.wait_for(link.hello, 2) == StartFailedMsg(message="no")


async def test_what_a_dead_worker_left_is_still_handed_on(link: Link, worker: WorkerChannel, steps: Steps) -> None:
    for number in range(100):
        say(worker, step(number))
    worker.close()
    link.receive_rest()
    assert steps.seen == list(range(100))


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x93\xa4step\x01"])
async def test_a_record_that_is_no_message_breaks_the_link_and_nothing_is_read_after_it(
    link: Link, worker: WorkerChannel, steps: Steps, record: bytes
) -> None:
    assert worker.results.try_send(record)
    say(worker, step(1))
    await asyncio.wait_for(link.broken, 2)
    await asyncio.sleep(0.05)
    assert steps.seen == []


async def test_a_fault_while_steps_are_applied_breaks_the_link(link: Link, worker: WorkerChannel, steps: Steps) -> None:
    steps.fault = ValueError("a bug")
    say(worker, step(1))
    assert await asyncio.wait_for(link.broken, 2) == "a fault of the service"

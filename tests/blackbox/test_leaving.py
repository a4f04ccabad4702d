"""Callers that go away in the middle: nobody else notices, and nothing of them stays."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest
from chairlift_client import Accepted, AsyncClient, Client, Delta, Finished
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.smollm2 import smollm2_folder
from support.tiny_models import generate_ids, tiny_model

NUM_CLIENTS = 32
NUM_TOKENS = 40
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Room for about half of the clients at once, and prompts of several steps; any machine is some time at a step."""
    args = ("--page-size", "4", "--num-blocks", "220", "--max-batch-tokens", "48", "--max-prefill-chunk", "16")
    args += ("--fault-injection", "slow:6")
    with live_server(tiny_model("llama"), "--dtype", "float32", *args) as running:
        with Client(running.target) as client:
            client.complete([5, 6, 7], max_new_tokens=2, **GREEDY)
        yield running


def prompt(number: int) -> list[int]:
    return [4 + (number * 37 + i * i * 11) % 370 for i in range(3 + number * 2)]


async def stream(client: AsyncClient, number: int, *, leave_after: float | None) -> list[int] | None:
    """The whole answer's ids; None if the caller left after so many seconds."""
    ids: list[int] = []

    async def read() -> None:
        async with client.generate(prompt(number), max_new_tokens=NUM_TOKENS, **GREEDY) as events:
            async for event in events:
                if isinstance(event, Delta):
                    ids.extend(event.token_ids)

    if leave_after is None:
        await read()
        return ids
    try:
        await asyncio.wait_for(read(), leave_after)
    except TimeoutError:
        return None
    return ids


async def test_a_quarter_of_32_clients_leaves_in_every_state_and_the_others_get_their_ids(server: LiveServer) -> None:
    rng = random.Random(3)
    wanted = {
        number: generate_ids(tiny_model("llama"), prompt(number), NUM_TOKENS).ids for number in range(NUM_CLIENTS)
    }
    async with AsyncClient(server.target) as client:  # the connection itself takes descriptors
        await client.get_model()
        before = Footprint.of(server)
        left = 0
        for _ in range(3):
            leaving = set(rng.sample(range(NUM_CLIENTS), NUM_CLIENTS // 4))
            answers = await asyncio.gather(
                *(
                    stream(client, i, leave_after=rng.random() * 0.8 if i in leaving else None)
                    for i in range(NUM_CLIENTS)
                )
            )
            for number, ids in enumerate(answers):
                if ids is None:
                    left += 1
                else:
                    assert ids == wanted[number], f"client {number}"
        assert left > 3, "too few left in the middle for this test to mean anything"
        await asyncio.to_thread(assert_idle, server, before)


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """A real model: a step takes longer than the news of a caller's leaving."""
    with live_server(smollm2_folder(), "--dtype", "float32", "--num-blocks", "64") as running:
        yield running


@pytest.mark.parametrize("how", ["close the stream", "close the channel"])
def test_a_disconnected_callers_request_computes_at_most_two_more_tokens(slow_server: LiveServer, how: str) -> None:
    start = assert_idle(slow_server).statistics["generated_tokens"]
    client = Client(slow_server.target)
    events = client.generate(prompt(1), max_new_tokens=300, **GREEDY)
    received = 0
    while received < 5:
        event = next(events)
        if isinstance(event, Delta):
            received += len(event.token_ids)
    if how == "close the stream":
        events.close()
    client.close()
    generated = assert_idle(slow_server).statistics["generated_tokens"] - start
    assert generated <= received + 2


def let_go(client: Client, added: list[Accepted]) -> None:
    """Cancels the requests, waits until they are over, and lets their kept results go."""
    ids = [accepted.request_id for accepted in added]
    client.cancel(*ids)
    for request_id in ids:
        *_, last = client.result(request_id, timeout=10)
        assert isinstance(last.event, Finished)
    assert {outcome.name for outcome in client.cancel(*ids).values()} == {"ALREADY_FINISHED"}


def test_cancel_by_id_says_what_became_of_each_request(server: LiveServer) -> None:
    with Client(server.target) as client:
        long = client.add_request(prompt(2), max_new_tokens=300, **GREEDY)
        short = client.add_request(prompt(3), max_new_tokens=1, **GREEDY)
        list(client.result(short.request_id))
        outcomes = client.cancel(long.request_id, short.request_id, "nobody")
        assert [outcome.name for outcome in outcomes.values()] == ["CANCELLED", "ALREADY_FINISHED", "NOT_FOUND"]
        *_, last = client.result(long.request_id)
        assert isinstance(last.event, Finished)
        assert last.event.reason.name == "CANCELLED"
        client.cancel(long.request_id)
    assert_idle(server)


def test_five_hundred_cancelled_requests_leave_nothing(server: LiveServer) -> None:
    rng = random.Random(4)
    with Client(server.target) as client:
        client.get_model()
        before = Footprint.of(server)
        for _ in range(10):
            added = client.add_requests(
                [(prompt(rng.randrange(NUM_CLIENTS)), {"max_new_tokens": 200, **GREEDY}) for _ in range(50)]
            )
            time.sleep(rng.random() * 0.1)
            let_go(client, added)
        assert_idle(server, before)


def test_a_queued_request_of_a_caller_that_left_is_never_prefilled(server: LiveServer) -> None:
    with Client(server.target) as client:
        blocker = client.add_requests([(prompt(30), {"max_new_tokens": 150, **GREEDY}) for _ in range(12)])
        before = client.get_server().statistics
        with client.generate([9] * 200, max_new_tokens=5, **GREEDY):
            pass  # left before it could start
        let_go(client, blocker)
    after = assert_idle(server).statistics
    assert after["prompt_tokens"] - before["prompt_tokens"] <= 12 * len(prompt(30))

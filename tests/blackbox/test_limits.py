"""Lengths at and past the limits of a cache of 64 slots, on the real service, each next to a neighbour that goes on."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator

import psutil
import pytest
from chairlift_client import (
    AdminClient,
    Client,
    Delta,
    Finished,
    FinishReason,
    InvalidRequestError,
    LengthLimit,
    Result,
)
from support.live_server import LiveServer, live_server
from support.tiny_models import VOCAB_SIZE, generate_ids, tiny_model

PAGE, NUM_PAGES = 16, 4
CAPACITY = PAGE * NUM_PAGES
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    args = ("--dtype", "float32", "--page-size", str(PAGE), "--num-blocks", str(NUM_PAGES))
    with live_server(tiny_model("llama"), *args) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [4 + (start * 37 + i * i * 11) % 370 for i in range(length)]


def wanted(ids: list[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(generate_ids(tiny_model("llama"), ids, num_tokens).ids)


def expect_still_serving(client: Client) -> None:
    assert client.complete(prompt(5), max_new_tokens=3, timeout=10, **GREEDY).token_ids == wanted(prompt(5), 3)


def test_a_prompt_over_the_cache_is_refused_at_once_with_the_limit_and_blocks_nobody(client: Client) -> None:
    assert client.get_server().statistics["blocks_total"] == NUM_PAGES
    began = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        client.complete(prompt(CAPACITY + 1), max_new_tokens=1, timeout=10, **GREEDY)
    assert time.monotonic() - began < 1.0
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert str(CAPACITY + 1) in str(caught.value)
    assert str(CAPACITY) in str(caught.value)
    expect_still_serving(client)


@pytest.mark.parametrize(("asked", "lowered_by"), [(5, LengthLimit.UNSPECIFIED), (6, LengthLimit.CACHE)])
def test_the_last_token_needs_no_slot_and_what_does_not_fit_is_lowered(client: Client, asked, lowered_by) -> None:
    answer = client.complete(prompt(CAPACITY - 4), max_new_tokens=asked, timeout=20, **GREEDY)
    assert answer.token_ids == wanted(prompt(CAPACITY - 4), 5)
    assert (answer.accepted.max_new_tokens, answer.accepted.lowered_by) == (5, lowered_by)
    assert answer.reason is FinishReason.LENGTH


def test_two_requests_that_fit_alone_but_not_together_both_finish(client: Client, pool) -> None:
    prompts = [prompt(30), prompt(31, start=1)]
    answers = pool.map(lambda ids: client.complete(ids, max_new_tokens=30, timeout=30, **GREEDY), prompts)
    assert [answer.token_ids for answer in answers] == [wanted(ids, 30) for ids in prompts]


def test_a_seeded_request_that_loses_its_pages_goes_on_to_the_tokens_of_its_undisturbed_run(client, pool) -> None:
    options = {"max_new_tokens": 32, "seed": 42, "temperature": 0.8, "ignore_eos": True, "timeout": 30.0}
    alone = client.complete(prompt(10), **options)
    for _ in range(10):  # it may take a few tries for the two to meet
        with client.generate(prompt(31, start=1), max_new_tokens=30, **GREEDY) as older:
            next(older)  # it has started
            younger = pool.submit(client.complete, prompt(10), **options)
            assert sum(len(event.token_ids) for event in older if isinstance(event, Delta)) == 30
        answer: Result = younger.result(30)
        assert answer.token_ids == alone.token_ids
        if answer.choices[0].finished.timings.preemptions:
            return
    raise AssertionError("it was never preempted")


def test_the_urgent_overtakes_those_who_wait_and_the_others_keep_their_order(
    server: LiveServer, client: Client
) -> None:
    """Each needs most of the cache, so that they run one after another."""
    with AdminClient(server.admin_target) as admin:
        admin.pause()
        for name, priority in (("a", 0), ("b", 0), ("low", -1), ("c", 0), ("urgent", 10)):
            client.add_request(
                prompt(40), max_new_tokens=20, request_id=name, session="queue", priority=priority, **GREEDY
            )
        admin.resume()
    ended: list[str] = []
    with client.result(session="queue", timeout=30) as events:
        for event in events:
            ended += [event.request_id] if isinstance(event.event, Finished) else []
            if len(ended) == 5:
                break
    assert ended == ["urgent", "a", "b", "c", "low"]
    client.cancel(session="queue")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_exactly_as_many_tokens_as_asked_in_one_message_or_many(client: Client, count: int) -> None:
    whole = client.complete(prompt(7), max_new_tokens=count, **GREEDY)
    *deltas, ending = list(client.generate(prompt(7), max_new_tokens=count, **GREEDY))[1:]
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.limit) == (FinishReason.LENGTH, LengthLimit.MAX_NEW_TOKENS)
    assert all(isinstance(delta, Delta) and delta.num_tokens for delta in deltas)
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert whole.token_ids == wanted(prompt(7), count)
    assert ending.usage.generated_tokens == whole.usage.generated_tokens == count


def test_a_stop_as_the_first_token_is_an_answer_of_one_token(client: Client) -> None:
    (first,) = wanted(prompt(7), 1)
    answer = client.complete(prompt(7), max_new_tokens=9, temperature=0.0, stop_token_ids=[first])
    assert answer.token_ids == (first,)
    assert (answer.reason, answer.choices[0].finished.stop_token_id) == (FinishReason.STOP, first)
    assert answer.usage.generated_tokens == 1


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([-1], {}),
        ([5, VOCAB_SIZE], {}),
        ([2**31], {}),
        ([5], {"stop_token_ids": [10**9]}),
        ([5], {"stop_token_ids": [-1]}),
        ([], {}),
        ("", {}),
        ([5], {"temperature": float("nan")}),
        ([5], {"top_p": 0.0}),
        ([5], {"min_p": 1.0}),
        ([5], {"top_k": -2}),
        ([5], {"max_new_tokens": 0}),
    ],
    ids=str,
)
def test_bad_values_are_refused_before_the_worker_and_the_neighbour_gets_its_own_ids(client, ids, options) -> None:
    with client.generate(prompt(6), max_new_tokens=20, **GREEDY) as neighbour:
        next(neighbour)
        with pytest.raises(InvalidRequestError):
            client.complete(ids, **{"max_new_tokens": 4, "timeout": 10, **options})
        with pytest.raises(InvalidRequestError):  # nor in a batch of otherwise good requests
            client.add_requests([([5], {"max_new_tokens": 4}), (ids, {"max_new_tokens": 4, **options})])
        tokens = tuple(t for event in neighbour if isinstance(event, Delta) for t in event.token_ids)
    assert tokens == wanted(prompt(6), 20)


def test_a_blank_is_a_prompt(client: Client) -> None:
    (blank,) = client.tokenize(" ").token_ids
    assert client.complete(" ", max_new_tokens=3, **GREEDY).token_ids == wanted([blank], 3)


def test_an_idle_service_and_its_worker_use_next_to_no_processor(server: LiveServer, client: Client) -> None:
    expect_still_serving(client)
    service = psutil.Process(server.process.pid)
    family = [service, *service.children(recursive=True)]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    before, began = used(), time.monotonic()
    time.sleep(2.0)
    assert used() - before < 0.05 * (time.monotonic() - began)

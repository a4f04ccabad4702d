"""Faults inside the worker of the real service: who is hurt, what they are told, and what is left behind."""

from __future__ import annotations

import asyncio
import re

import pytest
from chairlift_client import AsyncClient, Client, Delta, HealthStatus, InternalError
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import generate_ids, tiny_model

MODEL = "llama"
NUM_STREAMS = 8
NUM_TOKENS = 30
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# 5 ms at a step, so that all streams are there when something happens; prompts that take several steps.
SLOW = "slow:5"
SIZES = (
    *("--dtype", "float32", "--page-size", "4", "--num-blocks", "400"),
    *("--max-batch-tokens", "64", "--max-prefill-chunk", "8", "--step-timeout", "20"),
)
MODES = {
    "one step": (),
    "two steps": ("--use-async-batching",),
    "drafts": ("--speculative", "ngram"),
    "module": ("--model-impl", "transformers", "--attn-implementation", "sdpa"),
}


def every_mode(usual: str) -> pytest.MarkDecorator:
    """All modes, of which `make test` takes the usual one."""
    modes = [
        pytest.param(args, id=name, marks=() if name == usual else pytest.mark.full) for name, args in MODES.items()
    ]
    return pytest.mark.parametrize("mode", modes)


PREFIX = [4 + i * i * 7 % 370 for i in range(17)]


def prompt(number: int) -> list[int]:
    """Requests in pairs have a prefix of four pages in common."""
    return [*PREFIX, *([9, 8] * (number // 2 % 3)), 20 + number]


def wanted(number: int) -> tuple[int, ...]:
    return tuple(generate_ids(tiny_model(MODEL), prompt(number), NUM_TOKENS).ids)


Outcome = tuple[tuple[int, ...], str]


async def read(client: AsyncClient, number: int) -> Outcome:
    """What a stream brought, and reason and message of the INTERNAL that ended it, or nothing."""
    ids: list[int] = []
    try:
        async with client.generate(prompt(number), max_new_tokens=NUM_TOKENS, **GREEDY) as events:
            async for event in events:
                if isinstance(event, Delta):
                    assert event.index == len(ids), "tokens lost or doubled"
                    ids.extend(event.token_ids)
    except InternalError as error:
        return tuple(ids), f"{error.reason}: {error}"
    return tuple(ids), ""


def read_all(server: LiveServer) -> list[Outcome]:
    """All streams at once."""

    async def together() -> list[Outcome]:
        async with AsyncClient(server.target) as client:
            return await asyncio.gather(*(read(client, number) for number in range(NUM_STREAMS)))

    return asyncio.run(together())


def expect_whole(outcomes: list[Outcome]) -> None:
    for number, (ids, error) in enumerate(outcomes):
        assert (ids, error) == (wanted(number), ""), f"stream {number}"


def complete(server: LiveServer, number: int, *, after: tuple[int, ...] = ()) -> tuple[tuple[int, ...], int]:
    """What comes of a stream's prompt and some of its output, alone; and how much of it was found in the cache."""
    with Client(server.target) as client:
        answer = client.complete([*prompt(number), *after], max_new_tokens=NUM_TOKENS - len(after), **GREEDY)
        assert client.health() is HealthStatus.SERVING
        return answer.token_ids, answer.usage.cached_tokens


def footprint(server: LiveServer, mode: tuple[str, ...]) -> Footprint | None:
    """None where the first step makes a thread."""
    return None if mode == MODES["two steps"] else Footprint.of(server)


@every_mode("two steps")
def test_a_requests_failure_ends_it_alone(mode: tuple[str, ...]) -> None:
    faults = "nan:4:6,sample:6:9,nan:8:0"  # the service's requests, each at one of its tokens
    expected = {("NUMERICAL_ERROR", 6), ("POISONED_REQUEST", 9), ("NUMERICAL_ERROR", 0)}
    with live_server(tiny_model(MODEL), *SIZES, *mode, "--fault-injection", f"{SLOW},{faults}") as server:
        before = footprint(server, mode)
        outcomes = read_all(server)
        failed = [number for number, (_, error) in enumerate(outcomes) if error]
        for number, (ids, error) in enumerate(outcomes):
            assert ids == wanted(number)[: len(ids) if error else NUM_TOKENS], f"stream {number}"
            if error:
                expected.remove((error.partition(":")[0], len(ids)))
                assert len(error) < 1024
        assert not expected
        assert assert_idle(server, before).statistics["worker_restarts"] == 0
        for number in failed:
            ids = outcomes[number][0]
            rest, cached = complete(server, number, after=ids)
            assert rest == wanted(number)[len(ids) :]
            assert cached <= (len(prompt(number)) - 1) // 4 * 4, "of its own part nothing is to be found"
        assert_idle(server, before)


@every_mode("drafts")
def test_steps_that_find_no_memory_cost_nobody_a_token(mode: tuple[str, ...]) -> None:
    faults = "alloc:3,memory:5,memory:12"
    with live_server(tiny_model(MODEL), *SIZES, *mode, "--fault-injection", f"{SLOW},{faults}") as server:
        before = footprint(server, mode)
        expect_whole(read_all(server))
        assert assert_idle(server, before).statistics["worker_restarts"] == 0
        assert 1 <= server.log().count("a step found no memory") <= 3


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(MODES["one step"], id="one step"),
        pytest.param(MODES["two steps"], id="two steps", marks=pytest.mark.full),
    ],
)
def test_where_there_is_no_memory_at_all_the_steps_requests_fail_and_the_worker_serves_on(
    mode: tuple[str, ...],
) -> None:
    with live_server(tiny_model(MODEL), *SIZES, *mode, "--fault-injection", f"{SLOW},memory:12:1000") as server:
        before = footprint(server, mode)
        outcomes = read_all(server)
        failed = [number for number, (_, error) in enumerate(outcomes) if error]
        assert failed
        for number, (ids, error) in enumerate(outcomes):
            assert ids == wanted(number)[: len(ids) if error else NUM_TOKENS], f"stream {number}"
            assert not error or re.match("INTERNAL: .*memory", error)
        info = assert_idle(server, before)
        assert info.statistics["worker_restarts"] == 0
        for number in range(NUM_STREAMS):
            assert complete(server, number)[0] == wanted(number)
        assert_idle(server, before)


@pytest.mark.parametrize(
    ("faults", "restarts"),
    [
        pytest.param("forward:7", 1, marks=pytest.mark.full),
        ("crash:3", 1),  # in the midst of the first prompts, whose pages are being written
        ("torn:9", 1),
        pytest.param("hang:7", 1, marks=pytest.mark.full),
        pytest.param("ring_full:40:5,slow_step:6:500", 0, marks=pytest.mark.full),
    ],
)
def test_whatever_befalls_the_worker_in_a_step_every_stream_is_whole(faults: str, restarts: int) -> None:
    args = (*SIZES, "--step-timeout", "3") if "hang" in faults else SIZES
    with live_server(tiny_model(MODEL), *args, "--fault-injection", f"{SLOW},{faults}") as server:
        before = Footprint.of(server)
        expect_whole(read_all(server))
        assert assert_idle(server, before).statistics["worker_restarts"] == restarts
        for number in range(2):  # from pages that the streams have left in the cache
            ids, cached = complete(server, number)
            assert ids == wanted(number)
            assert cached == (len(prompt(number)) - 1) // 4 * 4


def test_a_request_that_kills_its_worker_ends_and_its_neighbours_do_not() -> None:
    with live_server(tiny_model(MODEL), *SIZES, "--fault-injection", f"{SLOW},crash_uid:4") as server:
        outcomes = read_all(server)
        (failed,) = [number for number, (_, error) in enumerate(outcomes) if error]
        assert outcomes[failed][1].startswith("POISONED_REQUEST: ")
        for number, (ids, error) in enumerate(outcomes):
            if not error:
                assert ids == wanted(number), f"stream {number}"
        assert assert_idle(server).statistics["worker_restarts"] == 2


@pytest.mark.parametrize(
    "text", ["explode:3", *(pytest.param(text, marks=pytest.mark.full) for text in ("crash", "memory:1:2:3"))]
)
def test_faults_that_do_not_exist_are_refused_at_start_in_one_line(text: str) -> None:
    with pytest.raises(AssertionError) as caught, live_server(tiny_model(MODEL), "--fault-injection", text):
        pass
    assert re.search(rf"it ended with 1:.*fault_injection = '{text}'", str(caught.value), re.DOTALL)
    assert "Traceback" not in str(caught.value)

"""kill -9, or SIGSTOP, of the worker of the real service: streams go on, and say what they would have said.

`--kills=N` kills it N times under 64 streams, for `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from chairlift_client import AdminClient, AsyncClient, Client, Delta, Finished, HealthStatus, InternalError, ServerState
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import generate_ids, tiny_model

NUM_STREAMS = 64
NUM_TOKENS = 40
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "ignore_eos": True}
# Looks back at all that there is of the prompt and the output.
LOOKING_BACK = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2, "logprobs": 3}
# A cache for about a third of the streams, swap for some of the rest, several steps to each prompt, 10 ms at a step.
CRAMPED = (
    *("--page-size", "4", "--num-blocks", "300", "--cpu-offload-space", "0.001", "--max-batch-tokens", "64"),
    *("--max-prefill-chunk", "16", "--max-requests-per-batch", "24", "--fault-injection", "slow:10"),
)


def prompt(number: int) -> list[int]:
    return [4 + (number * 37 + i * i * 11) % 370 for i in range(3 + number % 20 * 2)]


def options(number: int) -> dict[str, object]:
    """Every other stream is greedy; each of the others has its own seed, and every other of those looks back."""
    if number % 2 == 0:
        return GREEDY
    return {**SEEDED, "seed": number} | (LOOKING_BACK if number % 4 == 3 else {})


class Stream:
    """One caller's view: ids in order, and when they came."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids: list[int] = []
        self.times: list[float] = []
        self.finished: Finished | None = None

    async def read(self, client: AsyncClient, *, num_tokens: int = NUM_TOKENS) -> None:
        async with client.generate(prompt(self.number), max_new_tokens=num_tokens, **options(self.number)) as events:
            async for event in events:
                assert self.finished is None, "something after the ending"
                if isinstance(event, Delta):
                    assert event.index == len(self.ids), "tokens lost or doubled"
                    self.ids.extend(event.token_ids)
                    self.times.append(time.monotonic())
                elif isinstance(event, Finished):
                    self.finished = event
        assert self.finished is not None
        assert self.finished.usage.generated_tokens == len(self.ids) == num_tokens


async def all_streams(server: LiveServer, *, meanwhile: object = None, num_tokens: int = NUM_TOKENS) -> list[Stream]:
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    async with AsyncClient(server.target) as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.read(client, num_tokens=num_tokens))
        if meanwhile is not None:
            await meanwhile(streams)  # type: ignore[operator]
    return streams


async def until(streams: list[Stream], *, num_tokens: int) -> None:
    """Until some streams have so many tokens."""
    async with asyncio.timeout(60):
        while sum(len(stream.ids) for stream in streams) < num_tokens:  # noqa: ASYNC110 - what comes has no event
            await asyncio.sleep(0.005)


def worker_pid(server: LiveServer) -> int:
    with Client(server.target) as client:
        (pid,) = client.get_server().worker_pids
    return pid


def wait_for_another(server: LiveServer, pid: int, *, timeout_s: float = 60) -> None:
    with Client(server.target) as client:
        deadline = time.monotonic() + timeout_s
        while (info := client.get_server()).state is ServerState.RECOVERING or info.worker_pids in ((), (pid,)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert client.health() is HealthStatus.SERVING


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tiny_model("llama"), "--dtype", "float32", "--step-timeout", "3", *CRAMPED) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: LiveServer) -> list[list[int]]:
    """What the streams say where nothing happens; the greedy ones as transformers says it."""
    ids = [stream.ids for stream in asyncio.run(all_streams(server))]
    for number in range(0, NUM_STREAMS, 2):
        assert ids[number] == generate_ids(tiny_model("llama"), prompt(number), NUM_TOKENS).ids
    return ids


@pytest.mark.timeout(3600)
async def test_64_streams_outlive_a_killed_worker_and_say_the_same(
    server: LiveServer, undisturbed: list[list[int]], pytestconfig: pytest.Config
) -> None:
    """In every state: waiting, part-way through a prompt, generating, swapped out."""
    before = Footprint.of(server)
    pauses = []
    kills = pytestconfig.getoption("--kills")
    for number in range(kills):
        pid = worker_pid(server)
        killed_at = 0.0

        async def kill(streams: list[Stream], pid: int = pid, number: int = number) -> None:
            nonlocal killed_at
            await until(streams, num_tokens=150 + number * 97 % 1500)
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()

        streams = await all_streams(server, meanwhile=kill)
        assert [stream.ids for stream in streams] == undisturbed
        pauses.append(min(t for stream in streams for t in stream.times if t > killed_at + 0.2) - killed_at)
        wait_for_another(server, pid)
    info = assert_idle(server, before)
    assert info.statistics["worker_restarts"] == kills
    print(f"{kills} kills: {NUM_STREAMS * kills} streams whole; to the first token s {sorted(pauses)}")
    if kills == 3:
        swapped, waited = info.statistics["preemptions_swap"], info.statistics["preemptions_recompute"]
        assert swapped + waited > 0, "the cache was not cramped"


async def test_a_stopped_worker_is_replaced(server: LiveServer, undisturbed: list[list[int]]) -> None:
    pid = worker_pid(server)

    async def stop(streams: list[Stream]) -> None:
        await until(streams, num_tokens=300)
        os.kill(pid, signal.SIGSTOP)

    assert [stream.ids for stream in await all_streams(server, meanwhile=stop)] == undisturbed
    assert not psutil.pid_exists(pid)
    assert_idle(server)


async def test_held_and_paused_requests_are_carried_over(server: LiveServer) -> None:
    """A session whose worker dies while the service is paused goes on at Resume, from where it was."""
    wanted = generate_ids(tiny_model("llama"), prompt(6), 60).ids
    async with AsyncClient(server.target) as client:
        async with client.generate(prompt(6), max_new_tokens=60, **GREEDY) as events:
            ids: list[int] = []
            async for event in events:
                ids.extend(event.token_ids if isinstance(event, Delta) else ())
                if len(ids) >= 5:
                    break
            with AdminClient(server.admin_target) as admin:
                admin.pause()
                pid = worker_pid(server)
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(wait_for_another, server, pid)
                assert (await client.get_server()).state is ServerState.PAUSED
                admin.resume()
            async for event in events:
                ids.extend(event.token_ids if isinstance(event, Delta) else ())
        assert ids == wanted
    assert_idle(server)


@pytest.mark.full
async def test_in_bfloat16_nothing_that_was_sent_changes() -> None:
    """Computing again rounds differently, so that what follows may differ; no index is lost, doubled or sent twice."""
    with live_server(tiny_model("llama"), "--dtype", "bfloat16", *CRAMPED) as server:
        pid = worker_pid(server)

        async def kill(streams: list[Stream]) -> None:
            await until(streams, num_tokens=300)
            os.kill(pid, signal.SIGKILL)

        await all_streams(server, meanwhile=kill)
        assert_idle(server)


@pytest.mark.full
async def test_a_request_in_the_batch_at_two_deaths_ends_and_the_next_one_is_served() -> None:
    with live_server(tiny_model("llama"), "--dtype", "float32", "--fault-injection", "slow:20") as server:
        async with AsyncClient(server.target) as client:
            ids: list[int] = []

            async def read_and_kill() -> None:
                kill_at = 10
                async with client.generate([5, 6, 7], max_new_tokens=400, **GREEDY) as events:
                    async for event in events:
                        ids.extend(event.token_ids if isinstance(event, Delta) else ())
                        if len(ids) >= kill_at:
                            os.kill(worker_pid(server), signal.SIGKILL)
                            kill_at = len(ids) + 10

            with pytest.raises(InternalError) as caught:
                await read_and_kill()
            assert caught.value.reason == "POISONED_REQUEST"
            assert ids == generate_ids(tiny_model("llama"), [5, 6, 7], 400).ids[: len(ids)]
            await asyncio.to_thread(wait_for_another, server, -1)
            assert (await client.complete([5, 6, 7], max_new_tokens=5, **GREEDY)).token_ids == tuple(ids[:5])
        assert_idle(server)

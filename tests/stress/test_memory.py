"""Memory that stays: many short requests leave both processes as large as few did.

`make soak` watches their sizes for an hour (`--soak-seconds`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import psutil
import pytest
from chairlift_client import AsyncClient
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import tiny_model

CONCURRENCY = 32
WARM_UP = 12_000  # more than the service remembers of ids that are gone


async def complete_many(server: LiveServer, number: int, *, seed: int) -> None:
    """So many short requests, the prompts all different, a few of them cancelled in the middle."""
    rng = random.Random(seed)
    turns = asyncio.Semaphore(CONCURRENCY)

    async def one(client: AsyncClient) -> None:
        prompt = [rng.randrange(4, 380) for _ in range(rng.randrange(1, 40))]
        max_new_tokens, leaves = rng.randrange(1, 12), rng.random() < 0.1
        async with turns:
            if not leaves:
                await client.complete(prompt, max_new_tokens=max_new_tokens, seed=rng.randrange(1000), temperature=0.9)
                return
            async with client.generate(prompt, max_new_tokens=50, ignore_eos=True) as events:
                await anext(aiter(events))

    async with AsyncClient(server.target) as client:
        await asyncio.gather(*(one(client) for _ in range(number)))


def sizes(server: LiveServer) -> tuple[int, int]:
    """Resident bytes of service and worker, when both are idle."""
    assert_idle(server)
    service = psutil.Process(server.process.pid)
    (worker,) = service.children()
    return service.memory_info().rss, worker.memory_info().rss


def test_two_thousand_requests_take_no_more_memory_than_two_hundred() -> None:
    with live_server(tiny_model("llama"), "--dtype", "float32", "--num-blocks", "256") as server:
        asyncio.run(complete_many(server, 200, seed=1))
        early, footprint = sizes(server), Footprint.of(server)
        asyncio.run(complete_many(server, 1800, seed=2))
        late = sizes(server)
        assert_idle(server, footprint)
    for name, before, after in zip(("service", "worker"), early, late, strict=True):
        print(f"{name}: {before / 1e6:.1f} MB after 200 requests, {after / 1e6:.1f} MB after 2,000")
        assert after <= before * 1.05, f"the {name} grew from {before} to {after} bytes"


async def complete_for(server: LiveServer, seconds: float, *, rest_s: float) -> list[tuple[int, int]]:
    """Short requests of all kinds for so long, some at a time; the sizes of service and worker on the way."""
    service = psutil.Process(server.process.pid)
    (worker,) = service.children()
    began, found = time.monotonic(), []
    round_number = 0
    while time.monotonic() < began + seconds:
        await complete_many(server, 20, seed=round_number)
        found.append((service.memory_info().rss, worker.memory_info().rss))
        round_number += 1
        await asyncio.sleep(rest_s)
    return found


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_resident_sizes_stay_flat(pytestconfig: pytest.Config) -> None:
    """The last quarter of the time within 2 % of the second; the first is for what is made once.

    Tokens come at the pace of a real model. As fast as the tiny one has them a message is on its way nearly always, so
    also when a call is cancelled, and then gRPC keeps some 200 bytes for ever (grpc/grpc#43360). The first quarter is
    long enough for all that is bounded by a number of requests to be full.
    """
    seconds = pytestconfig.getoption("--soak-seconds")
    pace = ("--fault-injection", "slow:20")
    with live_server(tiny_model("llama"), "--dtype", "float32", "--num-blocks", "256", *pace) as server:
        asyncio.run(complete_many(server, WARM_UP if seconds > 60 else 400, seed=1))
        found = asyncio.run(complete_for(server, seconds, rest_s=1.0 if seconds > 60 else 0.0))
        assert_idle(server)
    quarter = len(found) // 4
    for name, sizes_of in zip(("service", "worker"), zip(*found, strict=True), strict=True):
        second, last = statistics.median(sizes_of[quarter : 2 * quarter]), statistics.median(sizes_of[-quarter:])
        print(f"{name}: {second / 1e6:.1f} MB in the second quarter, {last / 1e6:.1f} in the last, of {seconds} s")
        assert last <= second * 1.02, f"the {name} grew from {second} to {last} bytes"

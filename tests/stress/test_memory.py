"""Memory that stays: many short requests leave both processes as large as few did."""

from __future__ import annotations

import asyncio
import random

import psutil
from chairlift_client import AsyncClient
from support.idle import Footprint, assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import tiny_model

CONCURRENCY = 32


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

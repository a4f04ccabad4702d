"""Callers that do not read, on the real service: only their own requests stand still, and memory stays bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import psutil
import pytest
from chairlift.v1 import generation_service_pb2, generation_service_pb2_grpc
from chairlift_client import AsyncClient
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import generate_ids, tiny_model

NUM_OTHERS = 8
NUM_TOKENS = 100
LONG = 2000
BUFFER = 256
MOST_UNDER_WAY = 500  # tokens of one request in messages that fit the window, and in one that waits for room there
GREEDY = {"temperature": 0.0, "ignore_eos": True}
TIMEOUT_S = 10.0
MOST_GROWTH_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = ("--dtype", "float32", "--model-config", "max_position_embeddings=4096", "--num-blocks", "512")
    reading = ("--page-size", "16", "--reader-buffer-tokens", str(BUFFER), "--slow-reader-timeout", str(TIMEOUT_S))
    with live_server(tiny_model("llama"), *model, *reading) as running:
        yield running


@pytest.fixture
async def slow(server: LiveServer) -> AsyncIterator[Any]:
    """A caller whose window takes next to nothing."""
    windows = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(server.target, options=windows) as channel:
        yield generation_service_pb2_grpc.GenerationServiceStub(channel)


def prompt(number: int) -> list[int]:
    return [4 + (number * 37 + i * i * 11) % 370 for i in range(5 + number)]


async def begin(slow: Any, number: int) -> Any:
    """A long generation of which only the first message is read."""
    request = {
        "token_ids": {"ids": prompt(number)},
        "max_new_tokens": LONG,
        "sampling": {"temperature": 0.0},
        "stop": {"ignore_eos": True},
    }
    call = slow.Generate(generation_service_pb2.GenerateRequest(request=request))
    assert (await call.read()).WhichOneof("event") == "accepted"
    return call


async def read_on(call: Any) -> list[int]:
    ids: list[int] = []
    while (event := await call.read()) is not grpc.aio.EOF:
        ids += event.delta.token_ids
    return ids


async def standstill(client: AsyncClient) -> int:
    """Waits until nothing is generated any more; the number of tokens so far."""
    before = -1
    async with asyncio.timeout(60):
        while (now := (await client.get_server()).statistics["generated_tokens"]) != before:
            before = now
            await asyncio.sleep(0.3)
    return before


async def test_of_ten_callers_two_do_not_read_and_the_one_that_comes_back_in_time_misses_nothing(
    server: LiveServer, slow: Any
) -> None:
    numbers = range(2, 2 + NUM_OTHERS)
    wanted = [generate_ids(tiny_model("llama"), prompt(number), NUM_TOKENS).ids for number in numbers]
    service = psutil.Process(server.process.pid)
    async with AsyncClient(server.target) as client:
        undisturbed = await client.complete(prompt(0), max_new_tokens=LONG, **GREEDY)
        begun = (await client.get_server()).statistics["generated_tokens"]
        footprint = service.memory_info().rss
        returning, absent = await begin(slow, 0), await begin(slow, 1)
        others = await asyncio.gather(
            *(client.complete(prompt(n), max_new_tokens=NUM_TOKENS, **GREEDY) for n in numbers)
        )
        assert [list(other.token_ids) for other in others] == wanted
        generated = await standstill(client) - begun - NUM_OTHERS * NUM_TOKENS
        assert 2 * BUFFER <= generated <= 2 * (BUFFER + MOST_UNDER_WAY), "both wait for their readers"
        assert await read_on(returning) == list(undisturbed.token_ids)
        assert service.memory_info().rss - footprint < MOST_GROWTH_BYTES
        async with asyncio.timeout(60):
            while (await client.get_server()).statistics["requests_held"]:  # noqa: ASYNC110 - of the one that never reads
                await asyncio.sleep(0.1)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await read_on(absent)
    assert told.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grpc-retry-pushback-ms" in dict(told.value.trailing_metadata())
    assert_idle(server)

"""Callers that do not read, with windows so small that it shows: their requests stand still, nobody else's do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from chairlift.v1 import generation_service_pb2, generation_service_pb2_grpc
from support.served import Served, echo, eventually, generate, ids_request, refusal_of, rest, serving

_pb = generation_service_pb2

BUFFER = 256
# Tokens in messages that fit the caller's window, and in one that waits for room there.
MOST_UNDER_WAY = 600
LONG = {"context_len": 4096, "cache_len": 4096, "step_s": 0.0}
WINDOWS = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@contextlib.asynccontextmanager
async def slow_caller(served: Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(served.target, options=WINDOWS) as channel:
        yield generation_service_pb2_grpc.GenerationServiceStub(channel)


async def held(served: Served) -> None:
    """Waits until the worker stands still although a request is live."""
    registry = served.core.registry
    await eventually(lambda: any(each.num_full for each in registry._live.values()), timeout_s=30)
    await asyncio.sleep(0.05)
    steps = served.status.steps
    await asyncio.sleep(0.1)
    assert served.status.steps == steps


def ids_of(events: list[Any]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def test_a_caller_that_reads_again_in_time_gets_everything_and_others_never_notice() -> None:
    async with serving(script=LONG, reader_buffer_tokens=BUFFER) as served, slow_caller(served) as slow:
        call = slow.Generate(generate(40, 41, 42, max_new_tokens=2000, logprobs={}))
        first = await call.read()
        assert first.WhichOneof("event") == "accepted"
        await held(served)
        (generation,) = served.core.registry._live.values()
        assert BUFFER <= len(generation.output) < BUFFER + MOST_UNDER_WAY
        other = await rest(served.generation.Generate(generate(7, 8, max_new_tokens=300)))
        assert ids_of(other) == echo([7, 8], 300)
        events = await rest(call)
        assert ids_of(events) == echo([40, 41, 42], 2000)
        assert events[-1].WhichOneof("event") == "finished"
        deltas = [event.delta for event in events[:-1]]
        assert max(delta.num_tokens for delta in deltas) > BUFFER // 4, "joined deltas for who comes late"
        await served.idle()


async def test_a_caller_that_never_reads_is_told_so_and_its_request_ends() -> None:
    settings = {"reader_buffer_tokens": BUFFER, "slow_reader_timeout": 0.3}
    async with serving(script=LONG, **settings) as served, slow_caller(served) as slow:
        call = slow.Generate(generate(40, 41, 42, max_new_tokens=4000, logprobs={}))
        await call.read()
        await held(served)
        await served.idle()  # although the caller still has not read a byte
        got = []
        try:
            async with asyncio.timeout(30):
                while (event := await call.read()) is not grpc.aio.EOF:
                    got += event.delta.token_ids
        except grpc.aio.AioRpcError as error:
            told = refusal_of(error)
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW")
        assert told.retry_s == 1.0
        assert told.pushback_ms == "1000"
        assert got == echo([40, 41, 42], len(got))
        assert len(got) < MOST_UNDER_WAY


async def test_a_detached_request_outlives_its_slow_reader_and_its_result_can_be_read_on() -> None:
    settings = {"reader_buffer_tokens": BUFFER, "slow_reader_timeout": 0.3}
    async with serving(script=LONG, **settings) as served, slow_caller(served) as slow:
        request = ids_request(40, 41, 42, max_new_tokens=2000, request_id="a", logprobs={})
        await served.generation.AddRequest(_pb.AddRequestRequest(request=request))
        call = slow.Result(_pb.ResultRequest(request_id="a"))
        await call.read()
        await held(served)
        await served.idle()  # the reader is gone, the request ran on to its end
        got = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (event := await call.read()) is not grpc.aio.EOF:
                got += event.delta.token_ids
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        whole = await rest(served.generation.Result(_pb.ResultRequest(request_id="a", from_index=len(got))))
        assert got + ids_of(whole) == echo([40, 41, 42], 2000)
        await served.idle()


async def test_cancelling_a_held_request_ends_it_at_once() -> None:
    async with serving(script=LONG, reader_buffer_tokens=BUFFER) as served, slow_caller(served) as slow:
        call = slow.Generate(generate(40, 41, max_new_tokens=4000, request_id="a", logprobs={}))
        await call.read()
        await held(served)
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["a"]))
        await eventually(lambda: served.core.registry.num_live == 0)
        events = await rest(call)
        assert events[-1].WhichOneof("event") == "finished"
        await served.idle()

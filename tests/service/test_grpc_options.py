"""Server options: gRPC ignores one that it does not know, so the spelling is looked up in the library itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc._cython.cygrpc
import pytest
from chairlift_client._channel import channel_options
from chairlift_service.grpc_options import ConnectionLimits, server_options
from support.served import generate, rest, serving

OPTIONS = dict(
    server_options(ConnectionLimits(max_message_bytes=123_456, max_age=3.5, max_age_grace=0.0001, max_idle=60))
)
SETTINGS, PING, GOAWAY = 4, 6, 7


@pytest.fixture(scope="module")
def library() -> bytes:
    return Path(grpc._cython.cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted({*OPTIONS, *dict(channel_options("h:1")), *dict(channel_options("[::1]:1"))}))
def test_grpc_knows_the_option(library: bytes, name: str) -> None:
    assert name.encode() + b"\0" in library
    assert name.encode() + b"x\0" not in library


def test_messages_are_bounded_alike_in_both_directions() -> None:
    assert OPTIONS["grpc.max_receive_message_length"] == OPTIONS["grpc.max_send_message_length"] == 123_456


def test_seconds_become_the_milliseconds_that_grpc_counts_and_what_is_unset_stays_grpcs() -> None:
    assert OPTIONS["grpc.max_connection_age_ms"] == 3500
    assert OPTIONS["grpc.max_connection_age_grace_ms"] == 1
    assert OPTIONS["grpc.max_connection_idle_ms"] == 60_000
    assert not [name for name, _ in server_options(ConnectionLimits(max_message_bytes=1)) if "connection" in name]


def test_pings_every_ten_seconds_are_allowed_without_calls_too() -> None:
    assert OPTIONS["grpc.http2.min_ping_interval_without_data_ms"] < 10_000
    assert OPTIONS["grpc.keepalive_permit_without_calls"] == 1


@contextlib.asynccontextmanager
async def server_a_hundred_times_faster() -> AsyncIterator[int]:
    """The port of a server with our options whose clock for pings runs a hundred times as fast: 10 s are 0.1 s."""
    options = [
        (name, value // 100 if "ping_interval" in name else value)
        for name, value in server_options(ConnectionLimits(max_message_bytes=1000))
    ]
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def goaway_after(port: int, *, num_pings: int, interval_s: float) -> bytes | None:
    """Pings without any call, as RFC 9113 writes them; what the server says on going away, None if it stays."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    told = asyncio.create_task(_goaway(reader))
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, b""))
        for _ in range(num_pings):
            writer.write(frame(PING, b"pingpong"))
            await asyncio.wait((told,), timeout=interval_s)
            if told.done():
                break
        await asyncio.wait((told,), timeout=0.2)
        return told.result() if told.done() else None
    finally:
        told.cancel()
        writer.close()


def frame(kind: int, payload: bytes) -> bytes:
    """On stream 0, without flags."""
    return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload


async def _goaway(reader: asyncio.StreamReader) -> bytes:
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] == GOAWAY:
            return payload[8:]


async def test_a_client_that_pings_every_ten_seconds_may_stay_and_one_that_pings_all_the_time_may_not() -> None:
    async with server_a_hundred_times_faster() as port:
        assert await goaway_after(port, num_pings=8, interval_s=0.1) is None
        assert await goaway_after(port, num_pings=8, interval_s=0.001) == b"too_many_pings"


async def test_a_connection_is_replaced_by_age_and_its_stream_lives_on() -> None:
    async with serving(script={"step_s": 0.01}, max_connection_age=0.1) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=60))
        events = await rest(call)
        assert events[-1].finished.usage.generated_tokens == 60
        again = await rest(served.generation.Generate(generate(5, max_new_tokens=1)))
        assert again[-1].finished.usage.generated_tokens == 1


async def test_a_stream_that_outlives_the_grace_of_an_old_connection_is_cut() -> None:
    async with serving(script={"step_s": 0.01}, max_connection_age=0.1, max_connection_age_grace=0.1) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=1000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await served.idle()

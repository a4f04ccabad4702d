"""Calls that are made to break something: each is refused as the table of errors says, and others go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from support.served import Served, refusal, serving


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


async def read(call: grpc.aio.StreamStreamCall) -> list[bytes]:
    return [message async for message in call]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_bytes_that_are_no_message_on_a_stream_of_them_are_unreadable(served: Served, version: str) -> None:
    reflection = served.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    services = b"\x3a\x01x"  # list_services
    (answer,) = await read(reflection(iter([services])))
    assert b"chairlift.v1.GenerationService" in answer
    refused = await refusal(reflection(iter([b"\xff\xff"])))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "UNREADABLE_REQUEST")
    assert refused.initial_metadata == ()
    after_one = reflection(iter([services, b"\xff\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read(after_one), 30)
    assert caught.value.code() is grpc.StatusCode.INTERNAL

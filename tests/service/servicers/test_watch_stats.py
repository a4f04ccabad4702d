"""WatchStats over the fake worker."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from chairlift.v1 import info_service_pb2
from support.served import eventually, generate, refusal, rest, serving

_pb = info_service_pb2


def every(milliseconds: int) -> _pb.WatchStatsRequest:
    request = _pb.WatchStatsRequest()
    request.interval.FromMilliseconds(milliseconds)
    return request


async def test_the_first_look_comes_at_once_and_later_ones_tell_what_has_happened_since() -> None:
    async with serving() as served:
        watch = served.info.WatchStats(every(50))
        first = await asyncio.wait_for(watch.read(), 5)
        assert (first.state, first.statistics.generated_tokens) == (_pb.SERVER_STATE_SERVING, 0)
        await rest(served.generation.Generate(generate(5, 6, 7, max_new_tokens=9)))
        await served.idle()
        async with asyncio.timeout(5):
            while (look := await watch.read()).statistics.generated_tokens < 9:
                pass
        server = await served.info.GetServer(_pb.GetServerRequest())
        assert look.statistics == server.statistics
        assert (look.statistics.generated_tokens, look.statistics.prompt_tokens) == (9, 3)
        after = await watch.read()
        assert 45 <= after.uptime.ToMilliseconds() - look.uptime.ToMilliseconds() < 5000
        watch.cancel()


async def test_without_an_interval_it_is_a_second() -> None:
    async with serving() as served:
        watch = served.info.WatchStats(_pb.WatchStatsRequest())
        first, second = await watch.read(), await watch.read()
        assert 990 <= second.uptime.ToMilliseconds() - first.uptime.ToMilliseconds() < 6000
        watch.cancel()


@pytest.mark.parametrize("milliseconds", [-1, 0, 49, 3_600_001])
async def test_an_interval_that_is_none_is_refused(milliseconds: int) -> None:
    async with serving() as served:
        refused = await refusal(served.info.WatchStats(every(milliseconds)))
        assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("interval",))


async def test_a_watcher_does_not_hold_the_end_up_and_hears_of_it() -> None:
    async with serving() as served:
        watch = served.info.WatchStats(every(3_600_000))
        await watch.read()
        began = time.monotonic()
        served.signals.first.set()
        await eventually(served.run.done)
        closing = asyncio.create_task(served.app.close())
        refused = await refusal(watch)
        await closing
        assert time.monotonic() - began < 2
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")

"""Leaving and cancelling, in every state: the request ends in the worker, once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from chairlift.v1 import event_pb2, generation_service_pb2
from grpc_health.v1 import health_pb2
from support.served import Served, eventually, generate, ids_request, num_fds, refusal, rest, serving

_pb = generation_service_pb2
LONG = 1000


async def outcomes(served: Served, *ids: str, session: str = "") -> dict[str, int]:
    answer = await served.generation.Cancel(_pb.CancelRequest(request_ids=ids, session=session))
    return {outcome.request_id: outcome.status for outcome in answer.outcomes}


def running(served: Served) -> int:
    return served.status.requests_running


async def left_after(served: Served, call: Any) -> None:
    """Leaves by cancelling the call, and checks how little is computed after that."""
    before = served.status.generated_tokens
    left = time.monotonic()
    call.cancel()
    await eventually(lambda: served.core.registry.num_live == 0, timeout_s=1.0)
    step_s = 0.02
    most = 2 + (time.monotonic() - left) / step_s  # two steps, and those that ran while the caller's news travelled
    assert served.status.generated_tokens - before <= most
    await served.idle()


async def test_a_caller_that_leaves_after_the_first_message_ends_its_request() -> None:
    async with serving(script={"step_s": 0.02}) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=LONG))
        await call.read()
        await left_after(served, call)


async def test_a_caller_that_leaves_while_it_waits_is_never_started() -> None:
    async with serving(script={"step_s": 0.02, "max_running": 1}) as served:
        first = served.generation.Generate(generate(5, max_new_tokens=LONG))
        await first.read()
        queued = served.generation.Generate(generate(6, 7, 8, max_new_tokens=LONG))
        await queued.initial_metadata()
        assert served.core.registry.num_live == 2
        queued.cancel()
        await eventually(lambda: served.core.registry.num_live == 1, timeout_s=1.0)
        await left_after(served, first)
        assert served.status.prompt_tokens == 1  # the first one's


async def test_a_caller_whose_channel_is_closed_ends_its_request() -> None:
    async with serving(script={"step_s": 0.02}) as served:
        other = grpc.aio.insecure_channel(served.target)
        call = type(served.generation)(other).Generate(generate(5, max_new_tokens=LONG))
        await call.read()
        await other.close()
        await eventually(lambda: served.core.registry.num_live == 0, timeout_s=1.0)
        await served.idle()


async def test_a_caller_that_reads_nothing_and_leaves_while_its_messages_are_stuck_is_let_go() -> None:
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with serving(script={"step_s": 0.0005}) as served, grpc.aio.insecure_channel(served.target, options) as other:
        for leave in ("call", "channel"):
            request = generate(5, max_new_tokens=LONG, logprobs={"top_n": 1})
            call = type(served.generation)(other).Generate(request)
            await eventually(lambda: served.core.registry.num_live == 0 and len(served.core.readers) == 1)
            await asyncio.sleep(0.2)
            assert len(served.core.readers) == 1  # it is over, but nobody takes it
            if leave == "call":
                call.cancel()
            else:
                await other.close()
            await served.idle()


async def test_a_dropped_complete_ends_its_request() -> None:
    async with serving(script={"step_s": 0.02}) as served:
        call = served.generation.Complete(_pb.CompleteRequest(request=ids_request(5, max_new_tokens=LONG)))
        waiter = asyncio.ensure_future(call.code())
        await eventually(lambda: running(served) == 1)
        await left_after(served, call)
        assert await waiter is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("timeout_s", [0.001, 0.3])
async def test_a_deadline_ends_the_request_also_while_it_waits(timeout_s: float) -> None:
    async with serving(script={"step_s": 0.02, "max_running": 1}) as served:
        calls = [served.generation.Generate(generate(5, max_new_tokens=LONG), timeout=timeout_s) for _ in range(5)]
        unary = served.generation.Complete(
            _pb.CompleteRequest(request=ids_request(5, max_new_tokens=LONG)), timeout=timeout_s
        )
        for call in (*calls, unary):
            assert (await refusal(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: served.core.registry.num_live == 0, timeout_s=1.0)
        await served.idle()
        assert served.status.prompt_tokens <= 1  # those that waited were never started


async def test_the_deadline_of_adding_is_not_that_of_the_request() -> None:
    async with serving(script={"step_s": 0.02}) as served:
        request = _pb.AddRequestRequest(request=ids_request(5, request_id="on", max_new_tokens=20))
        await served.generation.AddRequest(request, timeout=0.2)
        await asyncio.sleep(0.3)
        events = await rest(served.generation.Result(_pb.ResultRequest(request_id="on")))
        assert events[-1].finished.usage.generated_tokens == 20


async def test_cancel_ends_running_and_waiting_requests_with_cancelled() -> None:
    async with serving(script={"step_s": 0.01, "max_running": 1}) as served:
        calls = [served.generation.Generate(generate(5, request_id="r0", max_new_tokens=LONG))]
        await calls[0].read()
        calls.append(served.generation.Generate(generate(5, request_id="r1", max_new_tokens=LONG)))
        await calls[1].initial_metadata()
        assert await outcomes(served, "r0", "r1", "none") == {
            "r0": _pb.CANCEL_STATUS_CANCELLED,
            "r1": _pb.CANCEL_STATUS_CANCELLED,
            "none": _pb.CANCEL_STATUS_NOT_FOUND,
        }
        for call in calls:
            events = await rest(call)
            assert events[-1].finished.reason == event_pb2.FINISH_REASON_CANCELLED
            assert await call.code() is grpc.StatusCode.OK
        assert events[0].WhichOneof("event") == "accepted"  # of the one that never started
        assert not events[0].accepted.HasField("cached_tokens")
        assert await outcomes(served, "r0") == {"r0": _pb.CANCEL_STATUS_ALREADY_FINISHED}
        await served.idle()


async def test_a_session_is_cancelled_with_all_its_requests_and_no_others() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        batch = [ids_request(5, request_id=f"s{i}", session="mine", max_new_tokens=LONG) for i in range(3)]
        await served.generation.AddRequests(_pb.AddRequestsRequest(requests=batch))
        other = served.generation.Generate(generate(5, request_id="other", session="yours", max_new_tokens=50))
        await other.read()
        cancelled = _pb.CANCEL_STATUS_CANCELLED
        assert await outcomes(served, "s1", session="mine") == {"s0": cancelled, "s1": cancelled, "s2": cancelled}
        assert (await rest(other))[-1].finished.usage.generated_tokens == 50
        await eventually(lambda: served.core.registry.num_live == 0)
        assert len(served.core.registry) == 0  # let go as they ended
        assert await outcomes(served, session="mine") == {}


async def test_who_reads_a_session_that_is_cancelled_gets_its_endings_although_nothing_is_kept() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        batch = [ids_request(5, request_id=f"s{i}", session="mine", max_new_tokens=LONG) for i in range(2)]
        await served.generation.AddRequests(_pb.AddRequestsRequest(requests=batch))
        whole = served.generation.Result(_pb.ResultRequest(session="mine"))
        one = served.generation.Result(_pb.ResultRequest(request_id="s1"))
        await asyncio.gather(whole.read(), one.read())
        await outcomes(served, session="mine")
        ended = set()
        while len(ended) < 2:
            event = await asyncio.wait_for(whole.read(), 5)
            if event.WhichOneof("event") == "finished":
                assert event.finished.reason == event_pb2.FINISH_REASON_CANCELLED
                ended.add(event.request_id)
        assert ended == {"s0", "s1"}
        assert (await rest(one))[-1].finished.reason == event_pb2.FINISH_REASON_CANCELLED
        assert len(served.core.registry) == 0
        refused = await refusal(served.generation.Result(_pb.ResultRequest(request_id="s1")))
        assert refused.reason == "RESULT_EXPIRED"
        whole.cancel()


async def test_what_is_cancelled_by_id_is_kept_until_it_is_cancelled_again() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        added = ids_request(5, request_id="mine", max_new_tokens=LONG)
        await served.generation.AddRequest(_pb.AddRequestRequest(request=added))
        await outcomes(served, "mine")
        await eventually(lambda: served.core.registry.num_live == 0)
        events = await rest(served.generation.Result(_pb.ResultRequest(request_id="mine")))
        assert events[-1].finished.reason == event_pb2.FINISH_REASON_CANCELLED
        assert await outcomes(served, "mine") == {"mine": _pb.CANCEL_STATUS_ALREADY_FINISHED}
        assert len(served.core.registry) == 0


async def test_what_was_said_to_be_cancelled_ends_as_cancelled_even_if_it_came_to_its_end_meanwhile() -> None:
    async with serving(script={"step_s": 0}) as served:
        reasons = []
        for i in range(40):
            call = served.generation.Generate(generate(5, request_id=f"r{i}", max_new_tokens=3))
            await call.initial_metadata()
            status = (await outcomes(served, f"r{i}"))[f"r{i}"]
            reason = (await rest(call))[-1].finished.reason
            assert (status == _pb.CANCEL_STATUS_CANCELLED) == (reason == event_pb2.FINISH_REASON_CANCELLED)
            reasons.append(reason)
        await served.idle()
        assert len(reasons) == 40


async def test_500_requests_whose_callers_leave_at_any_moment_leave_nothing() -> None:
    async with serving(script={"step_s": 0.002, "max_running": 8}) as served:
        await asyncio.gather(*(leave_early(served, 0.0005 * (i % 40)) for i in range(20)))  # opens what stays open
        await served.idle()
        fds, tasks = num_fds(), len(asyncio.all_tasks())
        for _ in range(10):
            await asyncio.gather(*(leave_early(served, 0.0005 * (i % 40)) for i in range(50)))
        await served.idle()
        assert num_fds() <= fds
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def leave_early(served: Served, after_s: float) -> None:
    call = served.generation.Generate(generate(5, 6, max_new_tokens=LONG))
    await asyncio.sleep(after_s)
    call.cancel()


async def test_health_and_cancel_answer_at_once_while_500_streams_are_open() -> None:
    async with serving(script={"step_s": 0.005, "max_running": 4}, max_waiting_requests=600) as served:
        calls = [served.generation.Generate(generate(5, request_id=f"r{i}", max_new_tokens=LONG)) for i in range(500)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        assert served.core.registry.num_live == 500
        began = time.monotonic()
        await served.health.Check(health_pb2.HealthCheckRequest())
        assert await outcomes(served, "r499") == {"r499": _pb.CANCEL_STATUS_CANCELLED}
        assert time.monotonic() - began < 1.0
        for call in calls:
            call.cancel()
        await served.idle()

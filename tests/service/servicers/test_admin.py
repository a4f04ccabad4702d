"""Pause, resume, drain, stop and other weights, over the fake worker, seen by callers and by operators."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from chairlift.v1 import admin_service_pb2, event_pb2, generation_service_pb2, info_service_pb2
from grpc_health.v1 import health_pb2
from support.fake_worker import BAD_FOLDER, NUM_FLUSHED, NUM_TENSORS, SHIFT
from support.served import Served, echo, eventually, generate, ids_request, refusal, rest, serving

_pb = generation_service_pb2
_admin = admin_service_pb2
LONG = 1000


async def state(served: Served) -> str:
    info = await served.info.GetServer(info_service_pb2.GetServerRequest())
    return info_service_pb2.ServerState.Name(info.state).removeprefix("SERVER_STATE_")


async def healthy(served: Served) -> bool:
    answer = await served.health.Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def ids(events: list[Any]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


def generated(served: Served) -> int:
    return served.status.generated_tokens


async def detached(served: Served, name: str, **fields: Any) -> Any:
    message = _pb.AddRequestRequest(request=ids_request(5, 6, 7, request_id=name, **fields))
    return (await served.generation.AddRequest(message)).accepted


async def test_a_pause_holds_everything_where_it_is_and_a_resume_goes_on_with_no_token_lost_or_doubled() -> None:
    async with serving(script={"step_s": 0.005}, admin=True) as served:
        call = served.generation.Generate(generate(5, 6, 7, max_new_tokens=200))
        first = [await call.read(), await call.read()]
        answer = await served.admin.Pause(_admin.PauseRequest())
        assert answer.num_requests == 1
        stood = generated(served)
        assert await state(served) == "PAUSED"
        assert await healthy(served)
        accepted = await detached(served, "queued", max_new_tokens=4)
        assert accepted.state == event_pb2.REQUEST_STATE_PAUSED
        await asyncio.sleep(0.2)
        assert generated(served) == stood
        result = served.generation.Result(_pb.ResultRequest(request_id="queued"))
        await served.admin.Resume(_admin.ResumeRequest())
        assert await state(served) == "SERVING"
        events = first + await rest(call)
        assert ids(events) == echo([5, 6, 7], 200)
        assert events[-1].finished.usage.generated_tokens == 200
        assert ids(await rest(result)) == echo([5, 6, 7], 4)
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["queued"]))
        await served.idle()


async def test_requests_show_as_paused_while_they_are_and_as_before_afterwards() -> None:
    async with serving(script={"step_s": 0.005}, admin=True) as served:
        await detached(served, "r", max_new_tokens=LONG)
        await eventually(lambda: generated(served) > 3)
        await served.admin.Pause(_admin.PauseRequest())
        reader = served.generation.Result(_pb.ResultRequest(request_id="r"))
        assert (await reader.read()).accepted.state == event_pb2.REQUEST_STATE_PAUSED
        assert (await reader.read()).delta.state == event_pb2.REQUEST_STATE_PAUSED
        await served.admin.Resume(_admin.ResumeRequest())
        assert (await reader.read()).delta.state == event_pb2.REQUEST_STATE_DECODING
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["r"]))
        assert (await rest(reader))[-1].finished.reason == event_pb2.FINISH_REASON_CANCELLED


async def test_cancel_deadline_leaving_and_the_bound_of_the_queue_work_while_paused() -> None:
    async with serving(script={"step_s": 0.005}, admin=True, max_waiting_requests=3) as served:
        running = served.generation.Generate(generate(5, request_id="running", max_new_tokens=LONG))
        await running.read()
        await served.admin.Pause(_admin.PauseRequest())
        late = served.generation.Generate(generate(5, max_new_tokens=LONG), timeout=0.2)
        leaving = served.generation.Generate(generate(5, max_new_tokens=LONG))
        await detached(served, "queued")
        await leaving.initial_metadata()
        refused = await refusal(served.generation.Generate(generate(5)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert (await refusal(late)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        leaving.cancel()
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["running", "queued"]))
        assert (await rest(running))[-1].finished.reason == event_pb2.FINISH_REASON_CANCELLED
        await eventually(lambda: served.core.registry.num_live == 0)
        assert await state(served) == "PAUSED"
        await served.admin.Resume(_admin.ResumeRequest())
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["queued"]))
        await served.idle()


async def test_a_drain_refuses_what_is_new_answers_when_all_is_over_and_ends_with_a_resume() -> None:
    async with serving(script={"step_s": 0.005}, admin=True) as served:
        call = served.generation.Generate(generate(5, 6, 7, max_new_tokens=100))
        await call.read()
        drain = asyncio.ensure_future(served.admin.Drain(_admin.DrainRequest()))
        await eventually(lambda: not served.core.main_health.serving)
        assert await state(served) == "DRAINING"
        assert not await healthy(served)
        refused = await refusal(served.generation.Generate(generate(5)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DRAINING")
        assert not drain.done()
        assert (await rest(call))[-1].finished.usage.generated_tokens == 100
        await asyncio.wait_for(drain, 2)
        assert await state(served) == "DRAINING"
        await served.admin.Resume(_admin.ResumeRequest())
        assert await healthy(served)
        assert ids(await rest(served.generation.Generate(generate(5, 6, max_new_tokens=5)))) == echo([5, 6], 5)
        await served.idle()


async def test_a_drain_whose_deadline_passes_goes_on_and_can_be_waited_for_again() -> None:
    async with serving(script={"step_s": 0.005}, admin=True) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=100))
        await call.read()
        late = await refusal(served.admin.Drain(_admin.DrainRequest(), timeout=0.1))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await state(served) == "DRAINING"
        again = asyncio.ensure_future(served.admin.Drain(_admin.DrainRequest()))
        assert (await rest(call))[-1].finished.usage.generated_tokens == 100
        await asyncio.wait_for(again, 2)


async def test_a_resume_ends_the_wait_of_a_drain() -> None:
    async with serving(script={"step_s": 0.005}, admin=True) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=LONG))
        await call.read()
        drain = served.admin.Drain(_admin.DrainRequest())
        await eventually(lambda: not served.core.main_health.serving)
        await served.admin.Resume(_admin.ResumeRequest())
        refused = await refusal(drain)
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
        call.cancel()


@pytest.mark.parametrize("by", ["operator", "signal"])
async def test_a_drain_lets_what_is_paused_go_on_to_its_end(by: str) -> None:
    async with serving(script={"step_s": 0.002}, admin=True) as served:
        call = served.generation.Generate(generate(5, 6, max_new_tokens=50))
        await call.read()
        await served.admin.Pause(_admin.PauseRequest())
        if by == "operator":
            await asyncio.wait_for(served.admin.Drain(_admin.DrainRequest()), 5)
        else:
            served.signals.first.set()
        assert (await rest(call))[-1].finished.usage.generated_tokens == 50
        if by == "signal":
            await asyncio.wait_for(served.run, 5)


async def test_a_hard_stop_ends_all_and_refuses_what_is_new_until_a_resume() -> None:
    async with serving(script={"step_s": 0.005, "max_running": 2}, admin=True) as served:
        pid = served.worker_pid
        streams = [served.generation.Generate(generate(5, max_new_tokens=LONG)) for _ in range(2)]
        await asyncio.gather(*(call.read() for call in streams))
        streams.append(served.generation.Generate(generate(5, max_new_tokens=LONG)))
        await streams[2].initial_metadata()
        await detached(served, "kept", session="s", max_new_tokens=LONG)
        session = served.generation.Result(_pb.ResultRequest(session="s"))
        await session.initial_metadata()
        answer = await served.admin.Stop(_admin.StopRequest())
        assert answer.num_requests == 4
        assert served.core.registry.num_live == 0
        assert await state(served) == "STOPPED"
        assert not await healthy(served)
        for call in streams:
            refused = await refusal(call)
            assert (refused.code, refused.reason, refused.retry_s) == (grpc.StatusCode.UNAVAILABLE, "STOPPED", 1.0)
        failed = await asyncio.wait_for(session.read(), 5)
        assert (failed.request_id, failed.failed.status.code) == ("kept", grpc.StatusCode.UNAVAILABLE.value[0])
        refused = await refusal(served.generation.Generate(generate(5)))
        assert (refused.code, refused.reason, refused.initial_metadata) == (grpc.StatusCode.UNAVAILABLE, "STOPPED", ())
        stood = generated(served)
        await asyncio.sleep(0.1)
        assert generated(served) == stood
        await served.admin.Resume(_admin.ResumeRequest())
        assert ids(await rest(served.generation.Generate(generate(5, 6, max_new_tokens=5)))) == echo([5, 6], 5)
        assert served.worker_pid == pid
        session.cancel()
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["kept"]))
        await served.idle()


async def test_a_paused_service_can_be_stopped_and_then_resumed() -> None:
    async with serving(script={"step_s": 0.005}, admin=True) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=LONG))
        await call.read()
        await served.admin.Pause(_admin.PauseRequest())
        assert (await served.admin.Stop(_admin.StopRequest())).num_requests == 1
        assert (await refusal(call)).reason == "STOPPED"
        await served.admin.Resume(_admin.ResumeRequest())
        assert ids(await rest(served.generation.Generate(generate(5, 6, max_new_tokens=5)))) == echo([5, 6], 5)
        await served.idle()


async def test_a_stopped_service_ends_well_on_a_signal() -> None:
    async with serving(admin=True) as served:
        await served.admin.Stop(_admin.StopRequest())
        served.signals.first.set()
        assert (await asyncio.wait_for(served.run, 5)).value == 0


async def test_what_the_state_does_not_allow_is_refused_and_changes_nothing() -> None:
    async with serving(admin=True) as served:
        calls = {
            "Resume": lambda: served.admin.Resume(_admin.ResumeRequest()),
            "Pause": lambda: served.admin.Pause(_admin.PauseRequest()),
            "Stop": lambda: served.admin.Stop(_admin.StopRequest()),
            "Drain": lambda: served.admin.Drain(_admin.DrainRequest()),
            "UpdateWeights": lambda: served.admin.UpdateWeights(_admin.UpdateWeightsRequest(path="/w")),
        }
        for enter, shown, refused in (
            (None, "SERVING", ["Resume", "UpdateWeights"]),
            ("Pause", "PAUSED", ["Pause"]),
            ("Drain", "DRAINING", ["Pause", "UpdateWeights"]),
            ("Stop", "STOPPED", ["Pause", "Stop", "Drain", "UpdateWeights"]),
        ):
            if enter:
                await calls[enter]()
            for name in refused:
                error = await refusal(calls[name]())
                assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE"), name
            assert await state(served) == shown
        await calls["Resume"]()


async def test_other_weights_are_taken_while_paused_and_what_is_in_flight_goes_on_with_them() -> None:
    async with serving(script={"step_s": 0.005, "update_s": 0.1}, admin=True) as served:
        call = served.generation.Generate(generate(5, 6, 7, max_new_tokens=100))
        events = [await call.read(), await call.read()]
        await served.admin.Pause(_admin.PauseRequest())
        stood = generated(served)
        answer = await served.admin.UpdateWeights(_admin.UpdateWeightsRequest(path="/new"))
        assert (answer.num_tensors, answer.num_requests, answer.num_blocks) == (NUM_TENSORS, 1, NUM_FLUSHED)
        assert await state(served) == "PAUSED"
        await served.admin.Resume(_admin.ResumeRequest())
        events += await rest(call)
        old, new = echo([5, 6, 7], 100)[:stood], [token + SHIFT for token in echo([5, 6, 7], 100)[stood:]]
        assert ids(events) == old + new
        await served.idle()


@pytest.mark.parametrize(
    ("path", "reason"), [(BAD_FOLDER, "INVALID_WEIGHTS"), ("relative", "INVALID_VALUE"), ("", "INVALID_VALUE")]
)
async def test_weights_that_do_not_fit_are_refused_and_the_service_stays_paused(path: str, reason: str) -> None:
    async with serving(admin=True) as served:
        await served.admin.Pause(_admin.PauseRequest())
        refused = await refusal(served.admin.UpdateWeights(_admin.UpdateWeightsRequest(path=path)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert refused.fields == (() if reason == "INVALID_WEIGHTS" else ("path",))
        if reason == "INVALID_WEIGHTS":
            assert refused.message == "/bad: tensors missing in its files: one"
        assert await state(served) == "PAUSED"
        await served.admin.Resume(_admin.ResumeRequest())
        assert ids(await rest(served.generation.Generate(generate(5, max_new_tokens=3)))) == [5, 5, 5]


async def test_an_update_whose_call_is_left_goes_on_and_nothing_else_is_allowed_meanwhile() -> None:
    async with serving(script={"update_s": 0.6}, admin=True) as served:
        await served.admin.Pause(_admin.PauseRequest())
        began = time.monotonic()
        left = await refusal(served.admin.UpdateWeights(_admin.UpdateWeightsRequest(path="/new"), timeout=0.1))
        assert left.code is grpc.StatusCode.DEADLINE_EXCEEDED
        for call in (
            served.admin.Resume(_admin.ResumeRequest()),
            served.admin.UpdateWeights(_admin.UpdateWeightsRequest(path="/new")),
        ):
            assert (await refusal(call)).reason == "WRONG_STATE"
        await detached(served, "queued", max_new_tokens=3)  # but requests are taken
        while (await refusal_or_none(served.admin.Resume(_admin.ResumeRequest()))) is not None:
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.02)
        assert time.monotonic() - began >= 0.6
        events = await rest(served.generation.Result(_pb.ResultRequest(request_id="queued")))
        assert ids(events) == [token + SHIFT for token in echo([5, 6, 7], 3)]


async def refusal_or_none(call: Any) -> grpc.StatusCode | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_a_signal_during_an_update_drains_once_the_update_is_over() -> None:
    async with serving(script={"update_s": 0.3, "step_s": 0.002}, admin=True) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=30))
        await call.read()
        await served.admin.Pause(_admin.PauseRequest())
        update = served.admin.UpdateWeights(_admin.UpdateWeightsRequest(path="/new"))
        await asyncio.sleep(0.1)
        served.signals.first.set()
        assert (await rest(call))[-1].finished.usage.generated_tokens == 30
        assert (await update).num_tensors == NUM_TENSORS
        assert (await asyncio.wait_for(served.run, 5)).value == 0

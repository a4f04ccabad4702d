"""A worker that is lost is replaced, and what lives goes on; against the fake worker, over real sockets and rings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

import grpc
import pytest
from chairlift.v1 import admin_service_pb2, event_pb2, generation_service_pb2, info_service_pb2
from chairlift_service.workers import succession
from grpc_health.v1 import health_pb2
from support.fake_worker import CRASH_TOKEN, SHIFT
from support.served import Served, echo, eventually, generate, ids_request, num_fds, refusal, rest, serving

_pb = generation_service_pb2
SLOW = {"step_s": 0.02}


async def tokens_of(call: Any) -> list[int]:
    """All ids of a stream that must end well, whose indices must be those of an unbroken one."""
    ids: list[int] = []
    messages = [message async for message in call]
    assert [message.WhichOneof("event") for message in messages].count("accepted") == 1
    assert messages[-1].HasField("finished")
    for message in messages:
        if message.HasField("delta"):
            assert message.delta.index == len(ids)
            ids += message.delta.token_ids
    assert messages[-1].finished.usage.generated_tokens == len(ids)
    return ids


async def statistics(served: Served) -> info_service_pb2.Statistics:
    return (await served.info.GetServer(info_service_pb2.GetServerRequest())).statistics


def kill(served: Served) -> int:
    pid = served.worker_pid
    os.kill(pid, signal.SIGKILL)
    return pid


async def replaced(served: Served, pid: int, *, timeout_s: float = 20) -> None:
    await eventually(lambda: served.core.succession.pids not in ((), (pid,)), timeout_s=timeout_s)
    await eventually(lambda: served.core.main_health.serving, timeout_s=timeout_s)


async def test_streams_go_on_after_a_kill_and_nothing_is_lost_doubled_or_changed() -> None:
    async with serving(script=SLOW) as served:
        prompts = [[5 + i, 6, 7 + i, 8] for i in range(16)]
        calls = [served.generation.Generate(generate(*prompt, max_new_tokens=60)) for prompt in prompts]
        texts = [asyncio.create_task(tokens_of(call)) for call in calls]
        await eventually(lambda: served.status.generated_tokens > 100)
        pid = kill(served)
        await replaced(served, pid)
        for prompt, task in zip(prompts, texts, strict=True):
            assert await asyncio.wait_for(task, 30) == echo(prompt, 60)
        counted = await statistics(served)
        assert counted.worker_restarts == 1
        assert counted.prompt_tokens == 16 * 4  # each counted once
        assert counted.generated_tokens >= 16 * 60
        await served.idle()


@pytest.mark.timeout(1800)
async def test_deaths_in_a_row_with_other_requests_cost_nobody_anything(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Each worker has fresh rings: what a dead one was writing is never read. `--kills=20` makes it 200 deaths."""
    rounds = 10 * pytestconfig.getoption("--kills") if pytestconfig.getoption("--kills") > 3 else 5
    monkeypatch.setattr(succession, "STEADY_S", 1e9)  # a worker helps by its steps alone
    async with serving(script=SLOW) as served:
        await tokens_of(served.generation.Generate(generate(1)))  # which opens the connection
        before = num_fds()
        for number in range(rounds):
            prompt = [number + 1, 9]
            call = served.generation.Generate(generate(*prompt, max_new_tokens=30))
            task = asyncio.create_task(tokens_of(call))
            await eventually(lambda: served.status.generated_tokens > 3)
            began = time.monotonic()
            await replaced(served, kill(served))
            assert time.monotonic() - began < 5  # no back-off: each had finished a step
            assert await asyncio.wait_for(task, 20) == echo(prompt, 30)
        assert (await statistics(served)).worker_restarts == rounds
        await served.idle()
        assert num_fds() <= before


async def test_meanwhile_health_says_so_and_requests_are_taken_cancelled_and_kept_in_order() -> None:
    async with serving(script={**SLOW, "start_s": 1.0}) as served:
        running = served.generation.Generate(generate(7, max_new_tokens=40))
        await running.read()
        await running.read()
        kill(served)
        await eventually(lambda: not served.core.main_health.serving)
        check = await served.health.Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
        server = await served.info.GetServer(info_service_pb2.GetServerRequest())
        assert server.state == info_service_pb2.SERVER_STATE_RECOVERING
        assert server.statistics.requests_waiting == 1
        await served.generation.AddRequest(_pb.AddRequestRequest(request=ids_request(3, 4, request_id="new")))
        await served.generation.AddRequest(_pb.AddRequestRequest(request=ids_request(5, request_id="unwanted")))
        cancelled = await served.generation.Cancel(_pb.CancelRequest(request_ids=["unwanted"]))
        assert cancelled.outcomes[0].status == _pb.CANCEL_STATUS_CANCELLED
        ended = [m async for m in served.generation.Result(_pb.ResultRequest(request_id="unwanted"))]
        assert ended[-1].finished.reason == event_pb2.FINISH_REASON_CANCELLED
        assert not served.core.main_health.serving  # all that before there was another worker
        result = [m async for m in served.generation.Result(_pb.ResultRequest(request_id="new"))]
        assert [i for m in result for i in m.delta.token_ids] == echo([3, 4], 8)
        ids = [i for m in await rest(running) if m.HasField("delta") for i in m.delta.token_ids]
        assert ids == [7] * (40 - 1)  # but for the one read before
        await served.idle()


async def test_a_call_that_leaves_meanwhile_is_not_carried_over() -> None:
    async with serving(script={**SLOW, "start_s": 0.7}) as served:
        call = served.generation.Generate(generate(7, max_new_tokens=500))
        await call.read()
        pid = kill(served)
        await eventually(lambda: not served.core.main_health.serving)
        call.cancel()
        await eventually(lambda: served.core.registry.num_live == 0, timeout_s=1.0)
        await replaced(served, pid)
        assert served.status.generated_tokens == 0
        await served.idle()


async def test_a_stopped_worker_is_replaced_like_a_dead_one() -> None:
    async with serving(script=SLOW, step_timeout=0.5) as served:
        task = asyncio.create_task(tokens_of(served.generation.Generate(generate(5, 6, max_new_tokens=60))))
        await eventually(lambda: served.status.generated_tokens > 5)
        pid = served.worker_pid
        os.kill(pid, signal.SIGSTOP)
        await replaced(served, pid)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert await asyncio.wait_for(task, 20) == echo([5, 6], 60)


async def test_what_a_worker_writes_that_is_no_message_makes_it_lost() -> None:
    async with serving(script=SLOW) as served:
        task = asyncio.create_task(tokens_of(served.generation.Generate(generate(5, 6, max_new_tokens=60))))
        await eventually(lambda: served.status.generated_tokens > 5)
        pid = served.worker_pid
        served.worker.link._break("torn")
        await replaced(served, pid)
        assert await asyncio.wait_for(task, 20) == echo([5, 6], 60)


async def test_a_request_that_kills_workers_is_found_and_its_neighbours_go_on() -> None:
    async with serving(script=SLOW) as served:
        prompts = [[5 + i, 6] for i in range(8)]
        tasks = [
            asyncio.create_task(tokens_of(served.generation.Generate(generate(*prompt, max_new_tokens=80))))
            for prompt in prompts
        ]
        await eventually(lambda: served.status.generated_tokens > 20)
        poison = served.generation.Generate(generate(CRASH_TOKEN, max_new_tokens=5))
        seen = await refusal(poison)
        assert (seen.code, seen.reason) == (grpc.StatusCode.INTERNAL, "POISONED_REQUEST")
        assert seen.retry_s is None
        for prompt, task in zip(prompts, tasks, strict=True):
            assert await asyncio.wait_for(task, 30) == echo(prompt, 80)
        assert (await statistics(served)).worker_restarts == 2
        await served.idle()


async def test_a_request_present_at_two_deaths_is_given_up() -> None:
    async with serving(script=SLOW) as served:
        call = served.generation.Generate(generate(5, 6, max_new_tokens=1000))
        for _ in range(2):
            count = len(served.core.registry.all_live()[0].output) if served.core.registry.num_live else 0
            await eventually(lambda: served.core.registry.num_live == 1)
            (generation,) = served.core.registry.all_live()
            await eventually(lambda count=count, generation=generation: len(generation.output) > count + 3)  # type: ignore[misc]
            pid = kill(served)
            await replaced(served, pid)
        seen = await refusal(call)
        assert (seen.code, seen.reason) == (grpc.StatusCode.INTERNAL, "POISONED_REQUEST")
        await served.idle()


async def test_requests_that_only_waited_are_not_blamed() -> None:
    async with serving(script={**SLOW, "max_running": 1}) as served:
        poison = served.generation.Generate(generate(CRASH_TOKEN, max_new_tokens=5))
        waiting = [served.generation.Generate(generate(9, i + 1, max_new_tokens=5)) for i in range(5)]
        assert (await refusal(poison)).reason == "POISONED_REQUEST"
        for number, call in enumerate(waiting):
            assert await asyncio.wait_for(tokens_of(call), 20) == echo([9, number + 1], 5)


async def test_pause_and_other_weights_are_the_successors_too() -> None:
    async with serving(script=SLOW, admin=True) as served:
        call = served.generation.Generate(generate(5, 6, max_new_tokens=200))
        await call.read()
        await call.read()
        await served.admin.Pause(admin_service_pb2.PauseRequest())
        await served.admin.UpdateWeights(admin_service_pb2.UpdateWeightsRequest(path="/other"))
        pid = kill(served)
        await replaced(served, pid)
        steps = served.status.generated_tokens
        await asyncio.sleep(0.2)
        assert served.status.generated_tokens == steps  # it stands still
        server = await served.info.GetServer(info_service_pb2.GetServerRequest())
        assert server.state == info_service_pb2.SERVER_STATE_PAUSED
        await served.admin.Resume(admin_service_pb2.ResumeRequest())
        ids = [i for m in await rest(call) if m.HasField("delta") for i in m.delta.token_ids]
        assert ids[-3:] == [i + SHIFT for i in echo([5, 6], 200)[-3:]]
        await served.idle()


async def test_a_successor_that_is_lost_while_it_takes_the_weights_is_replaced_too() -> None:
    async with serving(script={**SLOW, "update_s": 0.4}, admin=True) as served:
        await served.admin.Pause(admin_service_pb2.PauseRequest())
        await served.admin.UpdateWeights(admin_service_pb2.UpdateWeightsRequest(path="/other"))
        await served.admin.Resume(admin_service_pb2.ResumeRequest())
        task = asyncio.create_task(tokens_of(served.generation.Generate(generate(5, 6, max_new_tokens=60))))
        await eventually(lambda: served.status.generated_tokens > 5)
        first = kill(served)
        await eventually(lambda: served.core.succession.pids not in ((), (first,)))
        second = served.worker_pid
        await eventually(served.worker.link.hello.done)
        os.kill(second, signal.SIGKILL)
        await replaced(served, second)
        assert await asyncio.wait_for(task, 20) == [i + SHIFT for i in echo([5, 6], 60)]
        await served.idle()


async def test_without_a_successor_for_the_limit_all_ends_with_unavailable() -> None:
    async with serving(script=SLOW, worker_restart_limit=1.5) as served:
        call = served.generation.Generate(generate(5, 6, max_new_tokens=1000))
        await call.read()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAKE_WORKER", '{"fail_start": "no memory left"}')
            began = time.monotonic()
            kill(served)
            seen = await refusal(call)
            assert 1.4 < time.monotonic() - began < 10
        assert (seen.code, seen.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert seen.retry_s
        with pytest.raises(Exception, match=r"worker_restart_limit = 1.5 s: no memory left"):
            await served.run
        assert served.core.succession.pids == ()


async def test_a_limit_of_none_ends_the_service_with_its_worker() -> None:
    async with serving(script=SLOW, worker_restart_limit=0) as served:
        call = served.generation.Generate(generate(5, 6, max_new_tokens=1000))
        await call.read()
        kill(served)
        assert (await refusal(call)).reason == "WORKER_LOST"
        with pytest.raises(Exception, match="worker lost: signal SIGKILL"):
            await served.run


async def test_a_drain_outlives_its_worker() -> None:
    async with serving(script=SLOW, drain_timeout=20) as served:
        task = asyncio.create_task(tokens_of(served.generation.Generate(generate(5, 6, max_new_tokens=60))))
        await eventually(lambda: served.status.generated_tokens > 5)
        served.signals.first.set()
        kill(served)
        assert await asyncio.wait_for(task, 20) == echo([5, 6], 60)
        with contextlib.suppress(asyncio.CancelledError):
            assert (await asyncio.wait_for(served.run, 10)).name == "DRAINED"

"""When a worker counts as stuck, and what becomes of one that is."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time

import grpc
import pytest
from chairlift_service import supervisor
from chairlift_service.supervisor import STUCK_BASE_S, STUCK_PER_TOKEN_S, stuck_for
from chairlift_service.worker_process import WorkerProcess, describe_exit
from chairlift_worker.ipc.status import Phase, Status
from support.served import eventually, generate, num_fds, refusal, serving

NOW = 10**15


def status(
    *, phase: Phase = Phase.RUNNING, silent_s: float = 0.0, planned_tokens: int = 0, beat: bool = True
) -> Status:
    others = dict.fromkeys(set(Status.__struct_fields__) - {"phase", "heartbeat_ns", "planned_tokens"}, 0)
    heartbeat_ns = NOW - round(silent_s * 1e9) if beat else 0
    return Status(phase=phase, heartbeat_ns=heartbeat_ns, planned_tokens=planned_tokens, **others)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.RUNNING])
def test_a_worker_is_stuck_after_a_bound_that_grows_with_the_planned_tokens(phase: Phase) -> None:
    for tokens in (0, 1, 8192):
        bound = STUCK_BASE_S + tokens * STUCK_PER_TOKEN_S
        assert stuck_for(status(phase=phase, silent_s=bound - 0.1, planned_tokens=tokens), now_ns=NOW) is None
        late = stuck_for(status(phase=phase, silent_s=bound + 0.1, planned_tokens=tokens), now_ns=NOW)
        assert late == pytest.approx(bound + 0.1)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING, Phase.WARMING])
def test_loading_may_take_long(phase: Phase) -> None:
    assert stuck_for(status(phase=phase, silent_s=1e5), now_ns=NOW) is None


def test_a_worker_that_has_not_begun_to_beat_is_not_stuck() -> None:
    assert stuck_for(status(beat=False), now_ns=NOW) is None


async def test_a_stopped_worker_is_given_up_killed_and_its_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STUCK_BASE_S", 0.5)
    monkeypatch.setattr(supervisor, "WATCH_PERIOD_S", 0.1)
    async with serving(script={"step_s": 0.02}) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=1000))
        await call.read()
        pid = served.worker_pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert time.monotonic() - began < 3
        with pytest.raises(Exception, match="worker lost: stuck: no sign of life for"):
            await served.run
        await eventually(lambda: served.core.supervisor.pids == ())


async def test_what_a_worker_writes_that_is_no_message_makes_it_lost() -> None:
    async with serving(script={"step_s": 0.02}) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=1000))
        await call.read()
        served.core.link._break("torn")
        assert (await refusal(call)).reason == "WORKER_LOST"
        with pytest.raises(Exception, match="worker lost: torn"):
            await served.run


async def test_a_process_is_reaped_and_leaves_no_descriptor() -> None:
    gc.collect()  # descriptors of earlier tests that are still to be closed must not hide one that is left open here
    before = num_fds()
    for argv, code in ((("true",), 0), (("false",), 1), (("sh", "-c", "kill -9 $$"), -9)):
        process = WorkerProcess(argv=argv, pass_fds=())
        assert await asyncio.wait_for(process.exited, 10) == code
        process.kill()  # of one that is over: nothing
    assert num_fds() <= before


async def test_a_process_that_does_not_end_is_killed_with_what_it_started() -> None:
    process = WorkerProcess(argv=("sh", "-c", "sleep 1000 & wait"), pass_fds=())
    began = time.monotonic()
    assert await process.end(patience_s=0.2) == -9
    assert 0.2 <= time.monotonic() - began < 5


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (0, 3, -11, -9)] == [
        "exit code 0",
        "exit code 3",
        "signal SIGSEGV",
        "signal SIGKILL",
    ]

"""When a worker counts as stuck, and what becomes of one that is."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from chairlift_service.child_process import ChildProcess, describe_exit
from chairlift_service.workers.supervisor import STUCK_PER_TOKEN_S, stuck_for
from chairlift_worker.ipc.status import Phase, Status
from support.served import num_fds

NOW = 10**15
TIMEOUT_S = 60.0


def status(
    *, phase: Phase = Phase.RUNNING, silent_s: float = 0.0, planned_tokens: int = 0, beat: bool = True
) -> Status:
    others = dict.fromkeys(set(Status.__struct_fields__) - {"phase", "heartbeat_ns", "planned_tokens"}, 0)
    heartbeat_ns = NOW - round(silent_s * 1e9) if beat else 0
    return Status(phase=phase, heartbeat_ns=heartbeat_ns, planned_tokens=planned_tokens, **others)


def silence(seen: Status) -> float | None:
    return stuck_for(seen, now_ns=NOW, step_timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.RUNNING])
def test_a_worker_is_stuck_after_a_bound_that_grows_with_the_planned_tokens(phase: Phase) -> None:
    for tokens in (0, 1, 8192):
        bound = TIMEOUT_S + tokens * STUCK_PER_TOKEN_S
        assert silence(status(phase=phase, silent_s=bound - 0.1, planned_tokens=tokens)) is None
        late = silence(status(phase=phase, silent_s=bound + 0.1, planned_tokens=tokens))
        assert late == pytest.approx(bound + 0.1)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING, Phase.WARMING])
def test_loading_may_take_long(phase: Phase) -> None:
    assert silence(status(phase=phase, silent_s=1e5)) is None


def test_a_worker_that_has_not_begun_to_beat_is_not_stuck() -> None:
    assert silence(status(beat=False)) is None


async def test_a_process_is_reaped_and_leaves_no_descriptor() -> None:
    gc.collect()  # descriptors of earlier tests that are still to be closed must not hide one that is left open here
    before = num_fds()
    for argv, code in ((("true",), 0), (("false",), 1), (("sh", "-c", "kill -9 $$"), -9)):
        process = ChildProcess(argv=argv, pass_fds=())
        assert await asyncio.wait_for(process.exited, 10) == code
        process.kill()  # of one that is over: nothing
    assert num_fds() <= before


async def test_a_process_that_does_not_end_is_killed_with_what_it_started() -> None:
    process = ChildProcess(argv=("sh", "-c", "sleep 1000 & wait"), pass_fds=())
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

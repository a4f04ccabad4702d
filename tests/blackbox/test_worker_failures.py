"""The worker dies, or one request's own processing fails: what callers, health and the exit code say."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time

import pytest
from chairlift_client import Client, HealthStatus, InternalError, UnavailableError
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import generate_ids, tiny_model

GREEDY = {"temperature": 0.0, "ignore_eos": True}
BOUND_S = 5.0


def stream_to_the_end(server: LiveServer, prompt: list[int]) -> Exception | None:
    """Reads a long answer; the error that ended it."""
    try:
        with Client(server.target) as client, client.generate(prompt, max_new_tokens=400, **GREEDY) as events:
            for _ in events:
                pass
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return error
    return None


def expect_all_end_unavailable(server: LiveServer, futures: list[concurrent.futures.Future]) -> None:
    """Running and queued calls alike, in bounded time, and the service ends by itself with an error."""
    began = time.monotonic()
    for future in futures:
        error = future.result(timeout=BOUND_S)
        assert isinstance(error, UnavailableError), error
        assert error.reason == "WORKER_LOST"
    assert time.monotonic() - began < BOUND_S
    assert server.process.wait(BOUND_S * 2) not in {0, None}


@pytest.fixture
def callers():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("fault", ["kill -9", "exception in forward"])
def test_a_dead_worker_that_is_not_to_be_replaced_ends_every_call_at_once_and_the_service(callers, fault: str) -> None:
    args = {
        "kill -9": (),
        "exception in forward": ("--fault-injection", "forward:40"),
    }
    with live_server(
        tiny_model("llama"),
        *("--dtype", "float32", "--max-requests-per-batch", "2", "--worker-restart-limit", "0", *args[fault]),
        expect_exit=None,
    ) as server:
        futures = [callers.submit(stream_to_the_end, server, [5 + i] * 4) for i in range(4)]  # two of them queued
        if fault == "kill -9":
            with Client(server.target) as client:
                while client.get_server().statistics["generated_tokens"] < 20:
                    time.sleep(0.01)
                (pid,) = client.get_server().worker_pids
            os.kill(pid, signal.SIGKILL)
        expect_all_end_unavailable(server, futures)


def test_a_failure_in_one_requests_sampling_ends_that_request_alone() -> None:
    with live_server(tiny_model("llama"), "--dtype", "float32", "--fault-injection", "sample:2") as server:
        with Client(server.target) as client:
            first = client.add_request([5, 6, 7], max_new_tokens=60, **GREEDY)
            second = client.add_request([8, 9], max_new_tokens=60, **GREEDY)
            with pytest.raises(InternalError) as caught:
                list(client.result(second.request_id, timeout=20))
            assert caught.value.reason == "POISONED_REQUEST"
            assert "made to fail" in str(caught.value) or "sampling" in str(caught.value)
            events = [event.event for event in client.result(first.request_id, timeout=20)]
            ids = [token for event in events for token in getattr(event, "token_ids", ())]
            assert ids == generate_ids(tiny_model("llama"), [5, 6, 7], 60).ids
            assert client.health() is HealthStatus.SERVING
            client.cancel(first.request_id, second.request_id)
        assert_idle(server)

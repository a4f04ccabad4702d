"""However the service ends, no worker outlives it and nothing is left behind; the next start works at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from chairlift_client import Client, HealthStatus, ServerState
from support.live_server import LiveServer, live_server
from support.tiny_models import tiny_model

GREEDY = {"temperature": 0.0, "ignore_eos": True}
BOUND_S = 5.0


def expect_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert not alive, f"still there after {BOUND_S} s: {alive}"


def leftovers() -> set[str]:
    """Names in shared memory and the temp folder that are ours."""
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
    return found | {str(path) for path in Path(tempfile.gettempdir()).glob("*chairlift-worker*")}


CRAMPED = (
    *("--dtype", "float32", "--max-prefill-chunk", "1", "--page-size", "4", "--num-blocks", "128"),
    *("--cpu-offload-space", "0.01", "--fault-injection", "slow:3"),
)
LONG = [5 + i % 300 for i in range(240)]


def until(client: Client, statistic: str, least: int) -> None:
    deadline = time.monotonic() + 60
    while client.get_server().statistics[statistic] < least:
        assert time.monotonic() < deadline, client.get_server().statistics
        time.sleep(0.002)


def bring_about(state: str, server: LiveServer, client: Client) -> None:
    """Has the service in this state."""
    if state == "prefilling":
        client.add_request(LONG, max_new_tokens=100, **GREEDY)
        until(client, "computed_tokens", 20)
    elif state == "swapped":
        for number in range(3):
            client.add_request([9 + number, *LONG], max_new_tokens=100, **GREEDY)
        until(client, "requests_swapped", 1)
    elif state != "idle":
        client.add_request([5, 6], max_new_tokens=400, **GREEDY)
        until(client, "generated_tokens", 5)
    if state == "draining":
        server.process.send_signal(signal.SIGTERM)
        while client.health() is not HealthStatus.NOT_SERVING:
            time.sleep(0.002)
    if state in {"replacing its worker", "dead workers"}:
        os.kill(client.get_server().worker_pids[0], signal.SIGKILL)
    if state == "replacing its worker":
        while client.get_server().state is not ServerState.RECOVERING or not client.get_server().worker_pids:
            time.sleep(0.002)


FULL = ("idle", "prefilling", "swapped", "draining", "dead workers")


@pytest.mark.parametrize(
    "state",
    ["decoding", "replacing its worker", *(pytest.param(state, marks=pytest.mark.full) for state in FULL)],
)
def test_kill_9_of_the_service_takes_the_worker_with_it(state: str) -> None:
    before = leftovers()
    with live_server(tiny_model("llama"), *CRAMPED, expect_exit=None) as server, Client(server.target) as client:
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert len(workers) == 1
        bring_about(state, server, client)
        workers += psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGKILL)
        expect_gone(workers)
    assert leftovers() <= before
    if state == "decoding":
        with live_server(tiny_model("llama"), *CRAMPED) as server, Client(server.target) as client:
            assert client.complete([5, 6], max_new_tokens=3, **GREEDY).usage.generated_tokens == 3


@pytest.mark.parametrize(
    "after_s", [1.0, *(pytest.param(after_s, marks=pytest.mark.full) for after_s in (0.1, 3.0))]
)  # starting, importing torch, loading or warming
def test_kill_9_while_the_model_is_loaded_takes_the_worker_with_it(after_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("chairlift-serve")),
                *("--model", str(tiny_model("llama")), "--listen", f"unix:{folder}/s"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        family = psutil.Process(process.pid)
        while not (workers := family.children(recursive=True)):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(after_s)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(BOUND_S)
        expect_gone(workers)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_to_every_process_drains_and_ends_well(number: signal.Signals) -> None:
    """As service managers send it: systemd stops a unit with SIGTERM to all of its processes."""
    with live_server(tiny_model("llama"), "--dtype", "float32") as server:
        workers = psutil.Process(server.process.pid).children(recursive=True)
        with Client(server.target) as client, client.generate([5, 6], max_new_tokens=150, **GREEDY) as events:
            next(events)
            server.process.send_signal(number)
            for worker in workers:
                worker.send_signal(number)
            received = sum(len(getattr(event, "token_ids", ())) for event in events)
        assert received == 150, "an open stream goes on"
        assert server.process.wait(30) == 0
        expect_gone(workers)
        assert "Traceback" not in server.log()

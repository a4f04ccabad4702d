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
from chairlift_client import Client
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


def put_to_work(server: LiveServer, state: str) -> Client | None:
    if state == "idle":
        return None
    client = Client(server.target)
    prompt = [5] * 400 if state == "prefilling" else [5, 6]
    client.add_request(prompt, max_new_tokens=100, **GREEDY)
    statistic = "computed_tokens" if state == "prefilling" else "generated_tokens"
    before = client.get_server().statistics[statistic]
    while client.get_server().statistics[statistic] <= before:
        time.sleep(0.002)
    return client


@pytest.mark.parametrize("state", ["idle", "prefilling", "decoding"])
def test_kill_9_of_the_service_takes_the_worker_with_it(state: str) -> None:
    before = leftovers()
    args = ("--dtype", "float32", "--max-prefill-chunk", "1")
    with live_server(tiny_model("llama"), *args, expect_exit=None) as server:
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert len(workers) == 1
        client = put_to_work(server, state)
        server.process.send_signal(signal.SIGKILL)
        expect_gone(workers)
        if client is not None:
            client.close()
    assert leftovers() <= before
    with live_server(tiny_model("llama"), *args) as server, Client(server.target) as client:
        assert client.complete([5, 6], max_new_tokens=3, **GREEDY).usage.generated_tokens == 3


def test_kill_9_while_the_model_is_loaded_takes_the_worker_with_it() -> None:
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
        time.sleep(1.0)  # importing torch, as a rule
        os.kill(process.pid, signal.SIGKILL)
        process.wait(BOUND_S)
        expect_gone(workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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

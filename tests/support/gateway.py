"""The gateway `smg` in a process of its own, in front of services."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.live_server import LiveServer

START_TIMEOUT = 30.0  # seconds, until every service is registered, its tokenizer included
STOP_TIMEOUT = 10.0
ATTEMPTS = 3  # at ports that nobody else has: it takes no port 0


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that routes. `url` is the base of its API in OpenAI's shape."""

    url: str
    log_path: Path

    def log(self) -> str:
        """What it has written so far."""
        return self.log_path.read_text(errors="replace")


def tcp_target(server: LiveServer) -> str:
    """The address of a service that was started with `--listen 127.0.0.1:0`."""
    found = re.search(r"127\.0\.0\.1:\d+", server.first_line)
    assert found is not None, server.first_line
    return found[0]


@contextlib.contextmanager
def gateway(*servers: LiveServer) -> Iterator[Gateway]:
    """Start `smg launch` before these services and wait until it routes to all of them."""
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        log_path = Path(folder, "log")
        for attempt in range(ATTEMPTS):
            port, process = _start(servers, log_path)
            try:
                if not _routes(process, port, log_path, num=len(servers)):
                    assert attempt + 1 < ATTEMPTS, log_path.read_text()[-4000:]
                    continue
                yield Gateway(f"http://127.0.0.1:{port}/v1", log_path)
                return
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(STOP_TIMEOUT)


def _start(servers: tuple[LiveServer, ...], log_path: Path) -> tuple[int, subprocess.Popen[bytes]]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, metrics_port = (each.getsockname()[1] for each in sockets)
    command = [
        *(str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-urls", *(f"grpc://{tcp_target(server)}" for server in servers)),
        *("--policy", "round_robin", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
    ]
    with log_path.open("wb") as log:
        # No hub: the tokenizer is the services'.
        environ = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
        return port, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)


def _routes(process: subprocess.Popen[bytes], port: int, log_path: Path, *, num: int) -> bool:
    """Whether it comes to route to `num` services; False if it ends before. Fails if it takes too long."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=5) as answer:
                body = answer.read().decode()
            log = log_path.read_text(errors="replace")
            if body.count('"is_healthy":true') == num and "Successfully loaded tokenizer" in log:
                return True
        time.sleep(0.1)
    raise AssertionError(f"not routing after {START_TIMEOUT} s:\n{log_path.read_text()[-4000:]}")

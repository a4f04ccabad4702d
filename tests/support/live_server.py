"""The real service in a process of its own, for tests that look from outside."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT = 180.0  # seconds, a model's first download included
STOP_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A service that runs. `target` and `admin_target` are addresses for clients."""

    target: str
    admin_target: str
    process: subprocess.Popen[str]
    first_line: str
    log_path: Path

    def log(self) -> str:
        """What it has written to standard error so far."""
        return self.log_path.read_text(errors="replace")


@contextlib.contextmanager
def live_server(
    model: str | Path, *args: str, env: dict[str, str] | None = None, expect_exit: int | None = 0
) -> Iterator[LiveServer]:
    """Start `chairlift-serve --model MODEL` on Unix sockets (admin included) and wait until it can serve.

    On leaving it gets SIGTERM, and must end with `expect_exit` (None: however it likes) and leave no child behind.
    Nothing is left running if the test fails.
    """
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:  # short: a Unix socket's path has 107 bytes
        target, admin = f"unix:{folder}/s", f"unix:{folder}/a"
        log_path = Path(folder, "log")
        command = [
            str(Path(sys.executable).with_name("chairlift-serve")),
            *("--model", str(model), "--listen", target, "--admin-listen", admin, *args),
        ]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}
            )
        try:
            line = _first_line(process, log_path)
            assert re.fullmatch(r"chairlift: serving .+ on .+", line), f"unexpected first line: {line!r}"
            yield LiveServer(target, admin, process, line, log_path)
            process.terminate()
            exit_code = process.wait(STOP_TIMEOUT)
            if expect_exit is not None:
                assert exit_code == expect_exit, f"exit code {exit_code}:\n{log_path.read_text()[-4000:]}"
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(STOP_TIMEOUT)
            assert process.stdout is not None
            process.stdout.close()


def _first_line(process: subprocess.Popen[str], log_path: Path) -> str:
    """The line that says that it serves. Fails, showing the log, if the process ends first or takes too long."""
    lines: queue.Queue[str] = queue.Queue(maxsize=1)
    assert process.stdout is not None
    stdout = process.stdout
    threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=0.5)
            if line:
                return line.rstrip("\n")
            raise AssertionError(f"it ended with {process.wait(STOP_TIMEOUT)}:\n{log_path.read_text()[-4000:]}")
    raise AssertionError(f"not serving after {START_TIMEOUT} s:\n{log_path.read_text()[-4000:]}")

"""What `make demo` shows: the service, its worker and a real model, from a standing start to a streamed answer.

usage: demo.py FOLDER_WITH_THE_PROGRAMS
"""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TextIO

from chairlift_client import Client, Delta, Finished

START_TIMEOUT = 900.0  # seconds; the first run downloads 130 MB
STOP_TIMEOUT = 60.0
QUESTION = "Tell me a short story about a chairlift that never stops."
# SmolLM2's chat format, written out.
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def main() -> int:
    """Run the demo; 0 if an answer came."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="chairlift-") as folder:
        target, log_path = f"unix:{folder}/demo.sock", Path(folder, "log")
        with log_path.open("w") as log:
            server = subprocess.Popen(
                [Path(sys.argv[1], "chairlift-serve"), "--model", "demo", "--listen", target],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            line = wait_until_serving(server)
            if not line:
                print(f"the service did not start:\n{log_path.read_text()[-4000:]}", file=sys.stderr)
                return 1
            print(line)
            print(f"\n> {QUESTION}\n")
            num_tokens, seconds = stream_answer(target)
            print(f"\n\ndemo: {num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s) over gRPC")
        finally:
            stop(server)
    return 0


def wait_until_serving(server: subprocess.Popen[str]) -> str:
    """The service's line that says that it serves; empty if it ended before, or took too long."""
    lines: queue.Queue[str] = queue.Queue(maxsize=1)
    stdout = server.stdout
    assert stdout is not None
    threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
    began = time.monotonic()
    line = ""
    while time.monotonic() - began < START_TIMEOUT:
        try:
            line = lines.get(timeout=0.5)
            break
        except queue.Empty:
            show_waiting(sys.stderr, time.monotonic() - began)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return line.strip()


def show_waiting(stream: TextIO, seconds: float) -> None:
    """Tell that something goes on: a line that counts in a terminal, else a line every ten seconds."""
    text = f"loading SmolLM2-135M (the first time, fetching it): {seconds:.0f} s"
    if stream.isatty():
        stream.write(f"\r{text}\x1b[K")
        stream.flush()
    elif seconds % 10 < 0.5:
        print(text, file=stream, flush=True)


def stream_answer(target: str) -> tuple[int, float]:
    """Print the answer as it comes. Returns the generated tokens and the seconds from asking to the last of them."""
    began = time.monotonic()
    num_tokens = 0
    with Client(target) as client, client.generate(PROMPT, max_new_tokens=128, temperature=0, timeout=300) as events:
        for event in events:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                num_tokens = event.usage.generated_tokens
    return num_tokens, time.monotonic() - began


def stop(server: subprocess.Popen[str]) -> None:
    """End the service, gently if it lets us."""
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(STOP_TIMEOUT)


if __name__ == "__main__":
    sys.exit(main())

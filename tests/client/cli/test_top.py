"""`chairlift top`: figures worked out by hand, lines of JSON, and the view in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from chairlift_client import ServerState, ServerStats
from chairlift_client.cli._top import figures, lines
from chairlift_client.testing import FakeServer
from support.program import chairlift
from support.served import generate, rest, serving

PROGRAM = str(Path(sys.executable).with_name("chairlift"))
NOTHING = dict.fromkeys(
    (
        *("requests_waiting", "requests_running", "requests_swapped", "requests_held"),
        *("blocks_total", "blocks_free", "blocks_cached", "swap_blocks_used", "swap_blocks_total"),
        *("steps", "busy_ns", "generated_tokens", "prompt_tokens", "cached_prompt_tokens"),
        *("preemptions_swap", "preemptions_recompute", "worker_restarts"),
    ),
    0,
)


def look(uptime: float, **statistics: int) -> ServerStats:
    return ServerStats(state=ServerState.SERVING, uptime=uptime, statistics={**NOTHING, **statistics})


def test_rates_are_what_was_added_between_two_looks() -> None:
    before = look(10.0, generated_tokens=100, prompt_tokens=50, cached_prompt_tokens=10, steps=20, busy_ns=10**9)
    after = look(
        12.0,
        generated_tokens=400,
        prompt_tokens=90,
        cached_prompt_tokens=40,
        steps=60,
        busy_ns=2 * 10**9,
        blocks_total=200,
        blocks_free=90,
        blocks_cached=10,
        swap_blocks_used=3,
        swap_blocks_total=4,
    )
    shown = figures(before, after)
    assert (shown.generated_tokens_per_s, shown.prompt_tokens_per_s) == (150, 20)
    assert (shown.steps_per_s, shown.step_ms) == (20, 25)
    assert (shown.cache_use, shown.prefix_pages, shown.swap_use) == (0.5, 0.05, 0.75)
    assert shown.prefix_hits == 0.75
    text = "\n".join(lines(shown))
    assert "SERVING, up 0:00:12" in text
    assert "[###############...............]  50%" in text
    assert "step      25.0 ms, 20.0 a second" in text


def test_where_nothing_happened_there_is_no_step_time_and_no_share_of_prompts() -> None:
    shown = figures(look(1.0, steps=5), look(2.0, steps=5))
    assert (shown.step_ms, shown.prefix_hits, shown.generated_tokens_per_s, shown.cache_use) == (None, None, 0, 0)
    assert "no steps" in "\n".join(lines(shown))


def test_counters_that_begin_anew_are_no_negative_rates() -> None:
    shown = figures(look(1.0, generated_tokens=500, steps=9), look(2.0, generated_tokens=3, steps=1))
    assert (shown.generated_tokens_per_s, shown.steps_per_s) == (0, 0)


def test_json_is_one_line_each_and_ends_after_the_count(server: FakeServer) -> None:
    began = time.monotonic()
    done = chairlift("top", "--json", "--count", "3", "--interval", "0.1", "--target", server.target)
    assert done.returncode == 0
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [look["state"] for look in looks] == ["SERVING"] * 3
    assert looks[0]["uptime_s"] < looks[1]["uptime_s"] < looks[2]["uptime_s"]
    assert time.monotonic() - began >= 0.3


async def test_top_sees_the_tokens_that_a_service_generates() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        flags = ("--json", "--count", "4", "--interval", "0.1", "--target", served.target)
        call = served.generation.Generate(generate(5, 6, 7, max_new_tokens=500))
        await call.read()
        done = await asyncio.to_thread(chairlift, "top", *flags)
        call.cancel()
        looks = [json.loads(line) for line in done.stdout.splitlines()]
        assert [look["requests_running"] for look in looks] == [1] * 4
        # A step takes 10 ms at least and brings one token.
        assert all(0 < look["generated_tokens_per_s"] <= 101 for look in looks)
        assert all(look["steps_per_s"] == pytest.approx(look["generated_tokens_per_s"]) for look in looks)
        assert len(await rest(served.generation.Generate(generate(5, max_new_tokens=1)))) == 3


def test_outside_of_terminals_there_are_paragraphs_without_control_characters(server: FakeServer) -> None:
    done = chairlift("top", "--count", "2", "--interval", "0.05", "--target", server.target)
    assert done.returncode == 0
    assert done.stdout.count("requests  0 waiting, 0 running") == 2
    assert "\x1b" not in done.stdout


def test_in_a_terminal_the_view_stays_in_its_place_until_an_interrupt(server: FakeServer) -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 40, 0, 0))
    with subprocess.Popen(
        [PROGRAM, "top", "--interval", "0.05", "--target", server.target], stdout=terminal, stderr=subprocess.PIPE
    ) as process:
        os.close(terminal)
        output = b""
        while output.count(b"requests  ") < 3:
            output += os.read(controller, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
            while True:
                output += os.read(controller, 65536)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(controller)
    text = output.decode()
    assert text.startswith("\x1b[?1049h")
    assert text.endswith("\x1b[?1049l")
    frames = text.split("\x1b[H")[1:]
    assert len(frames) >= 3
    for frame in frames:
        rows = frame.split("\x1b[J")[0].split("\r\n")
        assert len(rows) == 6  # the terminal's, not all of the view's
        assert all(len(row.replace("\x1b[K", "")) <= 40 for row in rows)
        assert rows[0].startswith("SERVING, up 0:00:0")


def test_a_service_that_is_not_there_and_wrong_use_are_told(tmp_path: Path) -> None:
    done = chairlift("top", "--json", "--target", f"unix:{tmp_path}/none")
    assert (done.returncode, json.loads(done.stderr)["status"]) == (1, "UNAVAILABLE")
    assert chairlift("top", "--count", "0").returncode == 2
    assert chairlift("top", "--interval", "-1").returncode == 2

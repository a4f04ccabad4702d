"""`chairlift chat`: from a pipe, as JSON, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from chairlift_client.testing import FakeServer
from support.program import chairlift

PROGRAM = str(Path(sys.executable).with_name("chairlift"))


def test_what_a_pipe_brings_is_one_message(server: FakeServer) -> None:
    args = ["chat", "--max-new-tokens", "18", "--system", "Be brief.", "--target", server.target]
    done = chairlift(*args, stdin="two\nlines\n")
    # The fake repeats its prompt.
    assert (done.returncode, done.stdout, done.stderr) == (0, "system: Be brief.\n\n", "")
    args[2] = "60"
    assert "user: two\nlines\nassistant: " in chairlift(*args, stdin="two\nlines\n").stdout


def test_answers_end_at_a_stop(server: FakeServer) -> None:
    args = ["chat", "--max-new-tokens", "60", "--stop", "lines", "--target", server.target]
    assert chairlift(*args, stdin="two\nlines\n").stdout == "user: two\n\n"
    assert chairlift(*args, "--include-stop", stdin="two\nlines\n").stdout == "user: two\nlines\n"


def test_each_line_of_json_is_answered_and_remembered(server: FakeServer) -> None:
    lines = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        [{"role": "user", "content": "new"}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "c"}],
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in lines)
    done = chairlift("chat", "--json", "--max-new-tokens", "99", "--target", server.target, stdin=stdin)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    prompts = [event["accepted"]["prompt_tokens"] for event in events if "accepted" in event]
    first = "user: a\nassistant: "
    answer = (first * 99)[:99]
    second = f"{first}{answer}\nuser: b\nassistant: "
    third = "user: new\nassistant: ok\nuser: c\nassistant: "
    assert prompts == [len(first), len(second), len(third)]
    assert [event["finished"]["reason"] for event in events if "finished" in event] == ["FINISH_REASON_LENGTH"] * 3
    assert events[1]["delta"]["token_ids"] == [ord("u")]


@pytest.mark.parametrize(
    ("stdin", "words"), [("{\n", "line 1"), ('"text"\n', "line 1"), ('{"role": "user"}\n[]\n', "line 2")]
)
def test_json_that_is_no_message_is_wrong_use(server: FakeServer, stdin: str, words: str) -> None:
    done = chairlift("chat", "--json", "--target", server.target, stdin=stdin)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize("argument", ["novalue", "=1", "a={"])
def test_template_arguments_are_names_and_json(server: FakeServer, argument: str) -> None:
    assert chairlift("chat", "--template-argument", argument, "--target", server.target).returncode == 2


def test_every_flag_of_chat_reaches_its_field(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    server.allow_tokens(0)
    flags = (
        "--max-new-tokens 3 --temperature 0.5 --top-k 7 --top-p 0.25 --min-p 0.125 --seed 11 --template tool_use "
        f"--template-argument enable_thinking=false --template-argument x=[1] --tools {tmp_path}/tools.json"
    )
    with subprocess.Popen(
        [PROGRAM, "chat", *flags.split(), "--target", server.target], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"Hi")
        process.stdin.close()
        deadline = time.monotonic() + 30
        while not server.request_ids and time.monotonic() < deadline:
            time.sleep(0.01)
        (request,) = server._engine.requests.values()
        server.allow_tokens(None)
        assert process.wait(30) == 0
    message = request.message
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (message.max_new_tokens, message.seed) == (3, 11)
    assert (message.chat.template, list(message.chat.tools_json)) == ("tool_use", ['{"name": "f"}'])
    assert dict(message.chat.template_arguments_json) == {"enable_thinking": "false", "x": "[1]"}


def test_a_refusal_is_exit_code_1_where_nobody_types(server: FakeServer) -> None:
    server.fail_next("Generate", grpc.StatusCode.INVALID_ARGUMENT, "no such role", reason="TEMPLATE_ERROR")
    done = chairlift("chat", "--target", server.target, stdin="x")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no such role" in done.stderr


# Makes its standard input the terminal that Ctrl-C comes from, and becomes the program.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._fd, theirs = pty.openpty()
        command = [sys.executable, "-c", IN_TERMINAL, PROGRAM, *args]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Until `text` is shown after what was waited for before."""
        deadline = time.monotonic() + 30
        while text not in self._shown:
            readable, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"not shown: {text!r}; but: {self._shown!r}"
            self._shown += os.read(self._fd, 4096).decode(errors="replace").replace("\r", "")
        self._shown = self._shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._fd)


@pytest.fixture
def terminal(server: FakeServer) -> Iterator[Terminal]:
    made = Terminal("chat", "--max-new-tokens", "60", "--target", server.target)
    try:
        made.wait_for("> ")
        yield made
    finally:
        made.close()


def test_a_conversation_in_a_terminal(server: FakeServer, terminal: Terminal) -> None:
    def say(line: str, shown: str) -> None:
        terminal.type(line)
        terminal.wait_for(shown)
        terminal.wait_for("> ")

    say("one\n", "user: one\nassistant: user: one\n")  # the fake repeats its prompt
    say("/system Be brief.\n", "Be brief.")
    say("two\n", "system: Be brief.\nuser: one\nassistant: user: one\n")
    say("/reset\n", "/reset")
    say("three\n", "system: Be brief.\nuser: three\nassistant: ")
    say("/system\n", "/system")
    say("/reset\n", "/reset")
    # Ctrl-C stops the answer; what was heard of it stays in the conversation, and the program goes on.
    server.allow_tokens(7)
    terminal.type("four\n")
    terminal.wait_for("user: f")
    terminal.type("\x03")
    terminal.wait_for("> ")
    server.allow_tokens(None)
    say("five\n", "user: four\nassistant: user: f\nuser: five\nassistant: ")
    # At the prompt it drops the line.
    terminal.type("half a line")
    terminal.wait_for("half a line")
    time.sleep(0.3)  # Python's line editor sees a signal while it waits for a key, and not just after one
    say("\x03", "\n")
    server.fail_next("Generate", grpc.StatusCode.INVALID_ARGUMENT, "too long", reason="PROMPT_TOO_LONG")
    say("six\n", "too long")
    say("/unknown\n", "/exit")
    # A line is edited: a letter is taken back.
    terminal.type("/exitt\x7f\n")
    assert terminal.process.wait(30) == 0


def test_the_end_of_input_ends_a_conversation(terminal: Terminal) -> None:
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0

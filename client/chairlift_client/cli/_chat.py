"""`chairlift chat`: a conversation with the model, in a terminal or from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from typing import Any

from chairlift_client._errors import ChairliftError
from chairlift_client.cli import _input
from chairlift_client.cli._constraint_options import add_constraint
from chairlift_client.cli._conversation import Conversation
from chairlift_client.cli._output import Commands, WrongUseError, add_command, print_error
from chairlift_client.cli._sampling import add_sampling

_PROMPT = "> "
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_HELP = "/reset begins anew, /system TEXT sets the system message (without TEXT: none), /exit or Ctrl-D ends"
_DESCRIPTION = (
    "Talk with the model. In a terminal: a line is a message, Ctrl-C stops the answer, "
    f"{_HELP}. From a pipe: all of standard input is one message, its answer is printed. With --json: each line of "
    "standard input is a message, or a list of messages that begins anew; each answer comes as one event a line."
)


def add_chat(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = add_command(commands, common, "chat", run, "Talk with the model.")
    parser.description = _DESCRIPTION
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--template", metavar="NAME", help="one of the model's chat templates")
    parser.add_argument(
        "--template-argument",
        type=_argument,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a variable of the template, such as enable_thinking=false; repeatable",
    )
    parser.add_argument("--tools", metavar="FILE", help="JSON list of the tools that the model may call")
    add_sampling(parser)
    add_constraint(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    tools = _input.read_tools(options.tools) if options.tools else []
    with Conversation.open(options, tools=tools) as conversation:
        if options.json:
            _answer_lines(conversation)
        elif sys.stdin.isatty():
            _talk(conversation)
        else:
            content = sys.stdin.read().removesuffix("\n")
            if not content:
                raise WrongUseError("there is no message on standard input")
            conversation.answer({"role": "user", "content": content})
    return 0


def _talk(conversation: Conversation) -> None:
    """Until /exit or the end of the input. An error ends an answer, not the conversation."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # makes input() edit lines and remember them
    print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input(_PROMPT).strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line == "/exit":
            return
        if line.startswith("/"):
            _obey(conversation, line)
        elif line:
            try:
                conversation.answer({"role": "user", "content": line})
            except KeyboardInterrupt:
                continue
            except ChairliftError as error:
                print_error(error, as_json=False)


def _obey(conversation: Conversation, line: str) -> None:
    command, _, text = line.partition(" ")
    if command == "/reset" and not text:
        conversation.reset()
    elif command == "/system":
        conversation.system = text.strip() or None
    else:
        print(_HELP, file=sys.stderr)


def _answer_lines(conversation: Conversation) -> None:
    """Answers each line of standard input. Raises WrongUseError for one that is neither a message nor a list."""
    for number, line in enumerate(sys.stdin, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise WrongUseError(f"line {number} of standard input is no JSON, such as {_EXAMPLE}: {error}") from None
        messages = value if isinstance(value, list) else [value]
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise WrongUseError(f"line {number} of standard input is neither a message nor a list of messages")
        if isinstance(value, list):
            conversation.reset()
        conversation.answer(*messages)


def _argument(text: str) -> tuple[str, Any]:
    """Argument type: a name and its value in JSON."""
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, json.loads(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"not NAME=JSON: {text!r}")

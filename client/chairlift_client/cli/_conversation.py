"""What `chairlift chat` has said and heard so far."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chairlift.v1 import generation_service_pb2

from chairlift_client import _requests
from chairlift_client._access import Connection
from chairlift_client._chat import Chat
from chairlift_client._streams import EventStream
from chairlift_client._stubs import Stubs
from chairlift_client.cli._constraint_options import read_constraint
from chairlift_client.cli._output import print_json, to_dict, write_text
from chairlift_client.cli._sampling import read_sampling

Message = Mapping[str, object]


class Conversation:
    """The messages, and the way to the model. Answers are shown as they come, and remembered."""

    def __init__(self, *, stubs: Stubs, options: argparse.Namespace, tools: Sequence[Message]) -> None:
        self._stubs = stubs
        self._options = options
        self._tools = tools
        self._constraint = read_constraint(options)
        self._messages: list[Message] = []
        self.system: str | None = options.system

    @classmethod
    @contextlib.contextmanager
    def open(cls, options: argparse.Namespace, *, tools: Sequence[Message]) -> Iterator[Conversation]:
        """A conversation over a connection of its own."""
        connection = Connection.resolve(options.target, options.access)
        with contextlib.closing(connection.open()) as channel:
            yield cls(stubs=Stubs(channel, metadata=connection.metadata), options=options, tools=tools)

    def reset(self) -> None:
        """Forgets what was said, but for the system message."""
        self._messages.clear()

    def answer(self, *messages: Message) -> None:
        """Shows the answer to these messages.

        What was heard of it is remembered, also where it was interrupted; the messages are forgotten if that is
        nothing. Raises ChairliftError, KeyboardInterrupt.
        """
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        chat = Chat(
            [*system, *self._messages, *messages],
            tools=self._tools,
            template=self._options.template,
            template_arguments=dict(self._options.template_argument),
        )
        request = generation_service_pb2.GenerateRequest(
            request=_requests.generation_request(
                chat,
                {
                    **read_sampling(self._options),
                    "constraint": self._constraint,
                    "return_token_ids": self._options.json,
                },
            )
        )
        heard: list[str] = []
        try:
            call = self._stubs.generation.Generate(request, timeout=self._options.deadline)
            with EventStream[Any](call, lambda message: message) as events:
                for event in events:
                    heard.append(event.delta.text)
                    self._show(event)
        finally:
            if any(heard):
                self._messages += [*messages, {"role": "assistant", "content": "".join(heard)}]
            if any(heard) and not self._options.json:
                print(flush=True)

    def _show(self, event: generation_service_pb2.GenerateResponse) -> None:
        if self._options.json:
            print_json(to_dict(event))
        elif event.delta.text:
            write_text(event.delta.text)

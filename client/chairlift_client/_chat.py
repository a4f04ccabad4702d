"""Conversations, as they are given to every call that takes a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chairlift.v1 import chat_pb2


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which the model's own chat template makes a prompt of.

    `messages` are dicts with `role`, `content` and whatever else the template reads (`tool_calls`, `tool_call_id`,
    `name`, `reasoning_content`); `tools` are JSON schemas of functions, `documents` dicts. `template` names one of the
    model's templates, `template_arguments` are further variables of it. `continue_final_message` lets the model go on
    with the last message. Text of control tokens inside a message is ordinary text unless `allow_special_tokens`.

    >>> with Client(target) as client:
    ...     client.complete(Chat([{"role": "user", "content": "Hi"}]), max_new_tokens=8).text
    'user: Hi'
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = field(default=(), kw_only=True)
    documents: Sequence[Mapping[str, object]] = field(default=(), kw_only=True)
    template: str | None = field(default=None, kw_only=True)
    template_arguments: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    add_generation_prompt: bool | None = field(default=None, kw_only=True)
    continue_final_message: bool = field(default=False, kw_only=True)
    allow_special_tokens: bool = field(default=False, kw_only=True)

    def message(self) -> chat_pb2.Chat:
        """The API's message.

        Raises TypeError for what is no JSON or has no role that is a string. Every other judgement is the service's.
        """
        return chat_pb2.Chat(
            messages=[_message(each, f"messages[{i}]") for i, each in enumerate(self.messages)],
            tools_json=[_json(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            documents_json=[_json(document, f"documents[{i}]") for i, document in enumerate(self.documents)],
            template=self.template or "",
            template_arguments_json={
                name: _json(value, f"template_arguments[{name!r}]") for name, value in self.template_arguments.items()
            },
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            allow_special_tokens=self.allow_special_tokens,
        )


def _message(message: Mapping[str, object], where: str) -> chat_pb2.ChatMessage:
    further = dict(message)
    role, content = further.pop("role", ""), further.pop("content", None)
    if not isinstance(role, str):
        raise TypeError(f"{where}: its role is no string: {role!r}")
    if content is not None and not isinstance(content, str):
        further["content"], content = content, None
    return chat_pb2.ChatMessage(role=role, content=content, fields_json=_json(further, where) if further else "")


def _json(value: object, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} is no JSON: {error}") from None

"""From a caller's Chat message to a `Conversation`, every fault named by its field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from chairlift.v1 import chat_pb2

from chairlift_service.errors import Reason
from chairlift_service.faults import Faults
from chairlift_service.text.chat import Conversation
from chairlift_service.text.chat_templates import ChatTemplates

MAX_MESSAGES: Final = 4096
MAX_CHAT_BYTES: Final = 4 * 2**20
MAX_ENTRIES: Final = 1024  # tools, documents, arguments: of each
MAX_DEPTH: Final = 64  # of JSON
_TAKEN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# The names under which templates look for a message's reasoning; transformers gives it under the first two.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


def conversation(message: chat_pb2.Chat, *, path: str, templates: ChatTemplates, faults: Faults) -> Conversation | None:
    """What the message says; None where a fault was found."""
    before = len(faults.violations)
    num_bytes = message.ByteSize()
    if not 0 < len(message.messages) <= MAX_MESSAGES:
        reason = Reason.INVALID_VALUE if message.messages else Reason.MISSING_INPUT
        faults.add(f"{path}.messages", f"1 to {MAX_MESSAGES} messages, not {len(message.messages)}", reason)
    elif num_bytes > MAX_CHAT_BYTES:
        faults.add(path, f"has {num_bytes} bytes, at most {MAX_CHAT_BYTES}")
    for name in ("tools_json", "documents_json", "template_arguments_json"):
        if (num_entries := len(getattr(message, name))) > MAX_ENTRIES:
            faults.add(f"{path}.{name}", f"has {num_entries} entries, at most {MAX_ENTRIES}")
    if len(faults.violations) > before:
        return None
    continued = message.continue_final_message
    prompted = message.add_generation_prompt if message.HasField("add_generation_prompt") else not continued
    if continued and prompted:
        faults.add(f"{path}.add_generation_prompt", "cannot be set together with continue_final_message")
    if templates.choose(message.template, with_tools=bool(message.tools_json)) is None:
        named = ", ".join(sorted(templates.by_name))
        faults.add(f"{path}.template", f"must be one of the model's templates: {named}")
    messages = [_message(each, path=f"{path}.messages[{i}]", faults=faults) for i, each in enumerate(message.messages)]
    if continued and not messages[-1].get("content"):
        faults.add(f"{path}.messages[{len(messages) - 1}].content", "must be there to be continued")
    tools = _objects(message.tools_json, path=f"{path}.tools_json", faults=faults)
    documents = _objects(message.documents_json, path=f"{path}.documents_json", faults=faults)
    arguments = _arguments(message.template_arguments_json, path=f"{path}.template_arguments_json", faults=faults)
    if len(faults.violations) > before:
        return None
    return Conversation(
        messages=messages,
        tools=tools,
        documents=documents,
        arguments=arguments,
        template=message.template,
        add_generation_prompt=prompted,
        continue_final_message=continued,
        allow_special_tokens=message.allow_special_tokens,
    )


def _message(message: chat_pb2.ChatMessage, *, path: str, faults: Faults) -> dict[str, Any]:
    """One message, as transformers prepares it: without nulls, its reasoning under each name that templates read."""
    if not message.role:
        faults.add(f"{path}.role", "must be set")
    fields: dict[str, Any] = {"role": message.role}
    if message.HasField("content"):
        fields["content"] = message.content
    if message.fields_json:
        further = _object(message.fields_json, path=f"{path}.fields_json", faults=faults)
        for name in further.keys() & fields.keys():
            faults.add(f"{path}.fields_json", f"{name!r} has a field of its own")
        fields |= {name: value for name, value in further.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _objects(texts: Sequence[str], *, path: str, faults: Faults) -> list[dict[str, Any]]:
    return [_object(text, path=f"{path}[{i}]", faults=faults) for i, text in enumerate(texts)]


def _object(text: str, *, path: str, faults: Faults) -> dict[str, Any]:
    value = _json(text, path=path, faults=faults)
    if value is not None and not isinstance(value, dict):
        faults.add(path, "must be a JSON object")
    return value if isinstance(value, dict) else {}


def _arguments(texts: Mapping[str, str], *, path: str, faults: Faults) -> dict[str, Any]:
    for name in _TAKEN & texts.keys():
        faults.add(f'{path}["{name}"]', "has a field of its own")
    # In an order that does not change, which the map does not have.
    return {name: _json(texts[name], path=f'{path}["{name}"]', faults=faults) for name in sorted(texts)}


def _json(text: str, *, path: str, faults: Faults) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        depth = _depth(value)
    except (ValueError, RecursionError) as error:
        faults.add(path, f"is not JSON: {error}")
        return None
    if depth > MAX_DEPTH:
        faults.add(path, f"has lists and objects {depth} deep, at most {MAX_DEPTH}")
        return None
    return value


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner)) if inner else 0


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found

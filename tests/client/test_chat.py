"""Conversations: from dicts to the API's message, and through every kind of client."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from chairlift.v1 import chat_pb2
from chairlift_client import AsyncClient, Chat, Client, InvalidRequestError, connect
from chairlift_client.testing import FakeServer

CALL = {"id": "c", "function": {"name": "f", "arguments": {"z": 1, "a": 1.0}}}


def test_every_field_reaches_the_message() -> None:
    chat = Chat(
        [
            {"role": "user", "content": "ř"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "", "tool_call_id": "c"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        tools=[{"name": "f"}],
        documents=[{"title": "ž"}],
        template="tool_use",
        template_arguments={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        allow_special_tokens=True,
    )
    assert chat.message() == chat_pb2.Chat(
        messages=[
            {"role": "user", "content": "ř"},
            {"role": "assistant", "fields_json": json.dumps({"tool_calls": [CALL]})},
            {"role": "tool", "content": "", "fields_json": '{"tool_call_id": "c"}'},
            {"role": "user", "fields_json": '{"content": [{"type": "text", "text": "x"}]}'},
        ],
        tools_json=['{"name": "f"}'],
        documents_json=['{"title": "ž"}'],
        template="tool_use",
        template_arguments_json={"enable_thinking": "false"},
        add_generation_prompt=False,
        continue_final_message=True,
        allow_special_tokens=True,
    )
    assert {field.name for field, _ in chat.message().ListFields()} == {f.name for f in chat_pb2.Chat.DESCRIPTOR.fields}
    assert not Chat([{"role": "user"}]).message().HasField("add_generation_prompt")
    assert not Chat([{"role": "user"}]).message().messages[0].HasField("content")


@pytest.mark.parametrize(
    ("chat", "where"),
    [
        (Chat([{"role": 3}]), r"messages\[0\]"),
        (Chat([{"role": "a"}, {"role": "a", "x": math.nan}]), r"messages\[1\]"),
        (Chat([], tools=[{"a": {1, 2}}]), r"tools\[0\]"),
        (Chat([], template_arguments={"when": object()}), "when"),
    ],
)
def test_what_is_no_json_is_refused_before_it_is_sent(chat: Chat, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        chat.message()


MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
PROMPT = b"user: Hi\nassistant: "


def test_every_call_takes_a_conversation(server: FakeServer) -> None:
    with Client(server.target) as client:
        assert client.complete(Chat(MESSAGES), max_new_tokens=25).text == (PROMPT * 2)[:25].decode()
        with client.generate(Chat(MESSAGES), max_new_tokens=4) as events:
            assert "".join(getattr(event, "text", "") for event in events) == "user"
        assert client.add_request(Chat(MESSAGES)).prompt_tokens == len(PROMPT)
        assert client.add_requests([(Chat(MESSAGES), {}), ("x", {})])[0].prompt_tokens == len(PROMPT)
        assert client.render_chat(Chat(MESSAGES)).token_ids == tuple(PROMPT)
        opened = Chat([*MESSAGES, {"role": "assistant", "content": "So"}], continue_final_message=True)
        assert client.render_chat(opened).text == "user: Hi\nassistant: So"
        assert client.get_model().has_chat_template


def test_the_asyncio_client_does_the_same(server: FakeServer) -> None:
    async def main() -> None:
        async with AsyncClient(server.target) as client:
            assert (await client.complete(Chat(MESSAGES), max_new_tokens=4)).text == "user"
            assert (await client.render_chat(Chat(MESSAGES))).text == PROMPT.decode()
            with pytest.raises(InvalidRequestError) as caught:
                await client.render_chat(Chat([]))
            assert caught.value.field_violations[0].field == "chat.messages"

    asyncio.run(main())


def test_a_refused_conversation_names_its_field(server: FakeServer) -> None:
    with Client(server.target) as client, pytest.raises(InvalidRequestError) as caught:
        client.add_requests([("x", {}), (Chat([]), {})])
    assert caught.value.field_violations[0].field == "requests[1].chat.messages"


def test_a_remote_model_makes_the_prompts_that_its_batches_take(server: FakeServer) -> None:
    model = connect(server.target)
    prompt = model.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert prompt == list(PROMPT)
    assert model.apply_chat_template(MESSAGES) == list(b"user: Hi\n")
    (output,) = model.generate_batch([prompt], max_new_tokens=4).values()
    assert output.generated_tokens == list(b"user")

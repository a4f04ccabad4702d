"""Conversations over gRPC: as the input of every kind of request, rendered, and refused by field and reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from chairlift.v1 import chat_pb2, generation_service_pb2, info_service_pb2, text_service_pb2
from chairlift_service import conversation as limits
from support import chat_templates as made
from support.served import Served, echo, eventually, refusal, rest, serving

_pb = generation_service_pb2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "fox"}, {"role": "user", "content": "é"}]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    folder = made.chat_folder(
        tmp_path,
        template=[{"name": "default", "template": made.CHATML}, {"name": "tool_use", "template": made.MISTRAL}],
    )
    async with serving(script={"tokenizer_dir": str(folder)}) as running:
        yield running


def ids_of(folder: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, **options}
    ids: list[int] = made.reference(folder).apply_chat_template(messages, return_dict=False, **options)
    return ids


def asked(chat: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"chat": chat, "max_new_tokens": 12, "stop": {"ignore_eos": True}, **fields}


async def test_every_way_to_add_a_request_takes_a_conversation(served: Served, tmp_path: Path) -> None:
    ids = ids_of(tmp_path, TALK)
    request = asked({"messages": TALK})
    events = await rest(served.generation.Generate(_pb.GenerateRequest(request=request)))
    assert events[0].accepted.prompt_tokens == len(ids)
    assert [i for event in events for i in event.delta.token_ids] == echo(ids, 12)
    done = await served.generation.Complete(_pb.CompleteRequest(request=request))
    assert list(done.choices[0].output.token_ids) == echo(ids, 12)
    assert done.choices[0].finished.usage.prompt_tokens == len(ids)
    await served.generation.AddRequest(_pb.AddRequestRequest(request=asked({"messages": TALK}, request_id="a")))
    mixed = [asked({"messages": TALK}, request_id="b"), {"token_ids": {"ids": [5]}, "max_new_tokens": 1}]
    await served.generation.AddRequests(_pb.AddRequestsRequest(requests=mixed))
    for name in ("a", "b"):
        results = await rest(served.generation.Result(_pb.ResultRequest(request_id=name)))
        assert [i for event in results for i in event.delta.token_ids] == echo(ids, 12)
    rendered = await served.text.RenderChat(text_service_pb2.RenderChatRequest(chat={"messages": TALK}))
    assert list(rendered.token_ids) == ids
    assert rendered.text == made.reference(tmp_path).apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=True
    )
    assert (await served.info.GetModel(info_service_pb2.GetModelRequest())).has_chat_template
    await served.idle()


async def test_tools_choose_their_template_and_reach_it_with_order_and_numbers_kept(served, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "z", "b": 1, "a": 1.0, "parameters": {}}}
    call = {"id": "c1", "type": "function", "function": {"name": "z", "arguments": {"y": 2, "x": "ř"}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "more"},
    ]
    chat = {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "fields_json": json.dumps({"content": None, "tool_calls": [call]})},
            {"role": "tool", "content": "7", "fields_json": '{"tool_call_id": "c1"}'},
            {"role": "assistant", "content": "seven"},
            {"role": "user", "content": "more"},
        ],
        "tools_json": [json.dumps(tool)],
    }
    rendered = await served.text.RenderChat(text_service_pb2.RenderChatRequest(chat=chat))
    assert list(rendered.token_ids) == ids_of(tmp_path, messages, tools=[tool])
    chat["template"] = "default"
    chat["messages"] = TALK
    rendered = await served.text.RenderChat(text_service_pb2.RenderChatRequest(chat=chat))
    assert list(rendered.token_ids) == ids_of(tmp_path, TALK)


async def test_an_answer_is_continued_without_a_new_turn(served: Served, tmp_path: Path) -> None:
    chat = {"messages": TALK[:2], "continue_final_message": True}
    rendered = await served.text.RenderChat(text_service_pb2.RenderChatRequest(chat=chat))
    assert rendered.text.endswith("<|im_start|>assistant\nfox")
    assert list(rendered.token_ids) == ids_of(
        tmp_path, TALK[:2], add_generation_prompt=False, continue_final_message=True
    )


ONE = [{"role": "user", "content": "x"}]
BAD = {
    "no messages": ({}, "MISSING_INPUT", "messages"),
    "no role": ({"messages": [*ONE, *ONE, {"content": "x"}]}, "INVALID_VALUE", "messages[2].role"),
    "too many messages": ({"messages": ONE * 4097}, "INVALID_VALUE", "messages"),
    "too large": ({"messages": [{"role": "user", "content": "x" * (4 * 2**20)}]}, "INVALID_VALUE", ""),
    "fields that are no JSON": (
        {"messages": [*ONE, {"role": "a", "fields_json": "{"}]}, "INVALID_VALUE", "messages[1].fields_json",
    ),
    "fields that are a list": (
        {"messages": [{"role": "a", "fields_json": "[1]"}]}, "INVALID_VALUE", "messages[0].fields_json",
    ),
    "a role in fields": (
        {"messages": [{"role": "a", "fields_json": '{"role": "b"}'}]}, "INVALID_VALUE", "messages[0].fields_json",
    ),
    "content twice": (
        {"messages": [{"role": "a", "content": "x", "fields_json": '{"content": "y"}'}]},
        "INVALID_VALUE",
        "messages[0].fields_json",
    ),
    "NaN": ({"messages": ONE, "tools_json": ["{}", '{"a": NaN}']}, "INVALID_VALUE", "tools_json[1]"),
    "a name twice": ({"messages": ONE, "tools_json": ['{"a": 1, "a": 2}']}, "INVALID_VALUE", "tools_json[0]"),
    "half a character": (
        {"messages": ONE, "documents_json": ['{"a": "\\ud800"}']}, "INVALID_VALUE", "documents_json[0]",
    ),
    "a number as a tool": ({"messages": ONE, "tools_json": ["1"]}, "INVALID_VALUE", "tools_json[0]"),
    "deep JSON": (
        {"messages": ONE, "tools_json": ['{"a":' * 65 + "1" + "}" * 65]}, "INVALID_VALUE", "tools_json[0]",
    ),
    "endlessly deep JSON": ({"messages": ONE, "tools_json": ["[" * 100_000]}, "INVALID_VALUE", "tools_json[0]"),
    "a taken name": (
        {"messages": ONE, "template_arguments_json": {"messages": "1"}},
        "INVALID_VALUE",
        'template_arguments_json["messages"]',
    ),
    "an unknown template": ({"messages": ONE, "template": "other"}, "INVALID_VALUE", "template"),
    "both ends": (
        {"messages": ONE, "add_generation_prompt": True, "continue_final_message": True},
        "INVALID_VALUE",
        "add_generation_prompt",
    ),
    "nothing to continue": (
        {"messages": [*ONE, {"role": "assistant"}], "continue_final_message": True},
        "INVALID_VALUE",
        "messages[1].content",
    ),
    "a role that the template does not know": (
        {"messages": [*ONE, {"role": "critic", "content": "x"}], "template": "tool_use"}, "TEMPLATE_ERROR", "",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "TEMPLATE_ERROR", ""),
    "a conversation over the context": (
        {"messages": [{"role": "user", "content": "x" * 3000}]}, "PROMPT_TOO_LONG", "",
    ),
    "a conversation over any context": (
        {"messages": [{"role": "user", "content": "x" * 300_000}]}, "PROMPT_TOO_LONG", "",
    ),
}  # fmt: skip


async def test_bad_conversations_are_refused_by_reason_and_field_and_leave_nothing_behind(
    served: Served, tmp_path: Path
) -> None:
    request = asked({"messages": TALK}, max_new_tokens=500)
    neighbour = served.generation.Generate(_pb.GenerateRequest(request=request))
    await neighbour.read()
    for name, (chat, reason, field) in BAD.items():
        where = f"chat.{field}".removesuffix(".")
        refused = await refusal(served.generation.Complete(_pb.CompleteRequest(request=asked(chat))))
        assert (refused.code, refused.reason, refused.fields) == (INVALID, reason, (f"request.{where}",)), name
        assert refused.initial_metadata == ()
        assert len(refused.message.encode()) <= 1024
        if reason != "PROMPT_TOO_LONG":
            call = served.text.RenderChat(text_service_pb2.RenderChatRequest(chat=chat))
            refused = await refusal(call)
            assert (refused.reason, refused.fields) == (reason, (where,)), name
    batch = _pb.AddRequestsRequest(requests=[asked({"messages": TALK}), asked({"messages": [{"content": "x"}]})])
    refused = await refusal(served.generation.AddRequests(batch))
    assert refused.fields == ("requests[1].chat.messages[0].role",)
    await rest(neighbour)
    assert served.status.prompt_tokens == len(ids_of(tmp_path, TALK))  # nobody else's
    await served.idle()


async def test_a_template_says_why_it_refuses_in_its_own_words(served: Served) -> None:
    chat = {"messages": [*ONE, {"role": "critic", "content": "x"}], "template": "tool_use"}
    refused = await refusal(served.generation.Complete(_pb.CompleteRequest(request=asked(chat))))
    assert "Only user, assistant and tool roles are supported, got critic" in refused.message


async def test_a_model_without_a_template_refuses_conversations_and_nothing_else() -> None:
    async with serving() as served:
        calls = [
            served.generation.Complete(_pb.CompleteRequest(request=asked({"messages": ONE}))),
            served.text.RenderChat(text_service_pb2.RenderChatRequest(chat={"messages": ONE})),
        ]
        for call in calls:
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")
        assert not (await served.info.GetModel(info_service_pb2.GetModelRequest())).has_chat_template
        done = await served.generation.Complete(_pb.CompleteRequest(request={"text": "x", "max_new_tokens": 1}))
        assert done.accepted.prompt_tokens == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [("", "EMPTY_PROMPT"), ("{{ messages[0].content }}", "EMPTY_PROMPT"), ("{{ 1 / 0 }}", "TEMPLATE_ERROR")],
)
async def test_a_template_that_writes_nothing_gives_no_prompt(tmp_path: Path, template: str, reason: str) -> None:
    made.chat_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    async with serving(script={"tokenizer_dir": str(tmp_path)}) as served:
        chat = {"messages": [{"role": "user", "content": ""}]}
        refused = await refusal(served.generation.Complete(_pb.CompleteRequest(request=asked(chat))))
        assert (refused.reason, refused.fields) == (reason, ("request.chat",))
        assert not served.core.registry.num_live


async def test_a_template_without_an_end_holds_nobody_else_up(tmp_path: Path) -> None:
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    template = "{% if messages[0].content == 'hang' %}" + loop + "{% endif %}" + made.CHATML
    folder = made.chat_folder(tmp_path, template=template)
    async with serving(script={"tokenizer_dir": str(folder)}) as served:
        hang = asked({"messages": [{"role": "user", "content": "hang"}]})
        held = served.generation.Complete(_pb.CompleteRequest(request=hang))
        abandoned = served.generation.Complete(_pb.CompleteRequest(request=hang), timeout=0.3)
        done = await served.generation.Complete(_pb.CompleteRequest(request={"text": "x", "max_new_tokens": 1}))
        assert done.accepted.prompt_tokens == 2
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await abandoned
        done = await served.generation.Complete(_pb.CompleteRequest(request=asked({"messages": ONE})))
        assert len(done.choices[0].output.token_ids) == 12
        refused = await refusal(held)
        assert (refused.reason, refused.fields) == ("TEMPLATE_ERROR", ("request.chat",))
        assert "processor time" in refused.message
        await served.idle()


def test_the_limits_are_those_that_the_api_tells() -> None:
    comments = (Path(__file__).parents[3] / "protos/chairlift/v1/chat.proto").read_text()
    assert f"1 to {limits.MAX_MESSAGES:,} of them, at most {limits.MAX_CHAT_BYTES // 2**20} MiB" in comments
    assert chat_pb2.Chat.DESCRIPTOR.fields_by_name["messages"].number == 1


async def test_the_processes_that_render_end_with_the_service(tmp_path: Path) -> None:
    folder = made.chat_folder(tmp_path, template=made.CHATML)
    async with serving(script={"tokenizer_dir": str(folder)}) as served:
        await served.text.RenderChat(text_service_pb2.RenderChatRequest(chat={"messages": ONE}))
        chat = served.core.lifecycle.model().chat
        assert chat is not None
        (helper,) = chat._renderer._helpers
        pid = helper._process.pid
    await eventually(lambda: not Path(f"/proc/{pid}").exists())

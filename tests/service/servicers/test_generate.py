"""Generate and Complete: what a caller is told, in which order, and nothing after the ending."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from chairlift.v1 import event_pb2, generation_service_pb2, info_service_pb2
from support.fake_worker import CACHE_LEN, CACHED_TOKENS, CONTEXT_LEN, EOS_ID, logprob
from support.served import echo, eventually, generate, ids_request, refusal, rest, serving
from support.tokenizer_files import byte_level

PROMPT = [40, 41, 42, 43]


async def events_of(call: Any) -> list[tuple[str, Any]]:
    return [(which := event.WhichOneof("event"), getattr(event, which)) for event in await rest(call)]


def joined(events: list[tuple[str, Any]]) -> tuple[str, list[int]]:
    """Text and ids of all deltas, whose indices must follow each other and none of which may be empty."""
    text, ids, index = "", [], 0
    for kind, delta in events:
        if kind == "delta":
            assert delta.text or delta.token_ids or delta.logprobs
            assert delta.index == index
            index += delta.num_tokens
            text += delta.text
            ids += delta.token_ids
    return text, ids


async def test_a_stream_is_accepted_then_deltas_then_one_ending() -> None:
    async with serving() as served:
        call = served.generation.Generate(generate(*PROMPT, max_new_tokens=10, request_id="mine", seed=7))
        events = await events_of(call)
        kinds = [kind for kind, _ in events]
        assert kinds[0] == "accepted"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"delta"}
        accepted, finished = events[0][1], events[-1][1]
        assert (accepted.request_id, accepted.prompt_tokens, accepted.cached_tokens) == ("mine", 4, CACHED_TOKENS)
        assert (accepted.max_new_tokens, accepted.seed, accepted.lowered_by) == (10, 7, 0)
        assert joined(events)[1] == echo(PROMPT, 10)
        assert finished.reason == event_pb2.FINISH_REASON_LENGTH
        assert finished.limit == event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS
        assert finished.usage == event_pb2.Usage(prompt_tokens=4, cached_tokens=CACHED_TOKENS, generated_tokens=10)
        timings = finished.timings
        assert [t.ToMilliseconds() for t in (timings.queued, timings.prefill, timings.decode)] == [1, 2, 3]
        assert dict(await call.initial_metadata())["chairlift-request-id"] == "mine"
        await served.idle()


@pytest.mark.parametrize("request_id", ["žluť", " padded "])
async def test_an_id_that_no_header_can_carry_comes_in_the_binary_one(request_id: str) -> None:
    async with serving() as served:
        call = served.generation.Generate(generate(*PROMPT, request_id=request_id))
        assert dict(await call.initial_metadata())["chairlift-request-id-bin"] == request_id.encode()
        assert (await events_of(call))[0][1].request_id == request_id


async def test_the_request_id_comes_before_the_request_has_started() -> None:
    async with serving(script={"max_running": 1, "step_s": 0.01}) as served:
        first = served.generation.Generate(generate(*PROMPT, max_new_tokens=500))
        await first.read()
        queued = served.generation.Generate(generate(*PROMPT, request_id="queued"))
        assert dict(await queued.initial_metadata())["chairlift-request-id"] == "queued"
        assert served.status.requests_running == 1
        first.cancel()
        assert (await events_of(queued))[-1][0] == "finished"


@pytest.mark.parametrize("count", [1, 2, 3, CACHE_LEN - len(PROMPT) + 1])
async def test_exactly_as_many_tokens_as_asked_come_in_stream_and_unary_answer(count: int) -> None:
    async with serving(script={"step_s": 0}) as served:
        events = await events_of(served.generation.Generate(generate(*PROMPT, max_new_tokens=count)))
        text, ids = joined(events)
        assert ids == echo(PROMPT, count)
        answer = await served.generation.Complete(
            generation_service_pb2.CompleteRequest(request=ids_request(*PROMPT, max_new_tokens=count))
        )
        (choice,) = answer.choices
        assert list(choice.output.token_ids) == ids
        assert choice.output.text == text == byte_level().decode(ids)
        assert choice.finished.usage.generated_tokens == count
        assert choice.output.num_tokens == count
        assert answer.accepted.cached_tokens == CACHED_TOKENS


async def test_a_length_that_does_not_fit_is_lowered_and_said_so() -> None:
    async with serving(script={"step_s": 0}) as served:
        events = await events_of(served.generation.Generate(generate(*PROMPT, max_new_tokens=10**6)))
        accepted, finished = events[0][1], events[-1][1]
        assert CACHE_LEN < CONTEXT_LEN
        assert accepted.max_new_tokens == CACHE_LEN - len(PROMPT) + 1
        assert accepted.lowered_by == finished.limit == event_pb2.LENGTH_LIMIT_CACHE
        assert len(joined(events)[1]) == accepted.max_new_tokens


async def test_a_stop_token_is_the_last_id_and_a_special_one_shows_in_no_text() -> None:
    async with serving() as served:
        request = generate(50, 51, EOS_ID, max_new_tokens=30, stop={})
        events = await events_of(served.generation.Generate(request))
        text, ids = joined(events)
        assert ids == [50, 51, EOS_ID]
        assert text == byte_level().decode([50, 51])
        finished = events[-1][1]
        assert finished.reason == event_pb2.FINISH_REASON_STOP
        assert finished.stop.token_id == EOS_ID
        assert finished.usage.generated_tokens == 3


async def test_text_alone_comes_without_empty_deltas_and_with_indices_that_add_up() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("kůň 日本 👨‍👩‍👧").ids
    async with serving() as served:
        request = generate(*ids, max_new_tokens=len(ids), output={"token_ids": False})
        events = await events_of(served.generation.Generate(request))
        text, no_ids = joined(events)
        assert no_ids == []
        assert text == tokenizer.decode(ids)
        assert any(delta.num_tokens > 1 for kind, delta in events if kind == "delta")


async def test_ids_alone_come_without_text() -> None:
    async with serving() as served:
        events = await events_of(served.generation.Generate(generate(*PROMPT, output={"text": False})))
        assert joined(events) == ("", echo(PROMPT, 8))


async def test_a_character_cut_off_by_the_limit_is_flushed_once_at_the_end() -> None:
    ids = byte_level().encode("\U0001f9ff").ids[:-1]  # without its last byte
    assert len(ids) > 1
    async with serving() as served:
        for output in ({}, {"token_ids": False}):
            events = await events_of(served.generation.Generate(generate(*ids, max_new_tokens=len(ids), output=output)))
            assert joined(events)[0] == byte_level().decode(ids) == "\ufffd"


async def test_every_token_has_its_log_probability_where_asked() -> None:
    async with serving() as served:
        request = generate(*PROMPT, max_new_tokens=6, logprobs={"top_n": 1}, output={"text": False, "token_ids": True})
        events = await events_of(served.generation.Generate(request))
        entries = [entry for kind, delta in events if kind == "delta" for entry in delta.logprobs]
        assert [entry.chosen for entry in entries] == [logprob(i) for i in range(6)]
        assert [entry.top[0].token_id for entry in entries] == echo(PROMPT, 6)
        for kind, delta in events:
            assert kind != "delta" or len(delta.logprobs) == delta.num_tokens == len(delta.token_ids)


async def test_a_request_that_fails_ends_with_its_status_after_the_tokens_it_had() -> None:
    async with serving() as served:
        call = served.generation.Generate(generate(500, 60, 61))
        assert (await call.read()).WhichOneof("event") == "accepted"
        ids: list[int] = []
        while len(ids) < 2:  # in one delta or in two
            ids += (await call.read()).delta.token_ids
        assert ids == [500, 60]
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR")
        assert "not finite" in refused.message
        await served.idle()


async def test_a_slow_reader_gets_joined_deltas_and_holds_nobody_up() -> None:
    async with serving(script={"step_s": 0}) as served:
        (channel,) = [grpc.aio.insecure_channel(served.target, options=[("grpc.http2.lookahead_bytes", 1024)])]
        async with channel:
            slow = type(served.generation)(channel).Generate(generate(*PROMPT, max_new_tokens=1000))
            await eventually(lambda: served.core.registry.num_live == 0)
            events = await events_of(slow)
            deltas = [event for kind, event in events if kind == "delta"]
            assert joined(events)[1] == echo(PROMPT, 1000)
            assert len(deltas) < 1000


async def test_server_and_model_describe_themselves() -> None:
    async with serving() as served:
        model = await served.info.GetModel(info_service_pb2.GetModelRequest())
        assert (model.name, model.context_len, list(model.eos_token_ids)) == ("fake", CONTEXT_LEN, [EOS_ID])
        await events_of(served.generation.Generate(generate(*PROMPT, max_new_tokens=5)))
        await served.idle()
        server = await served.info.GetServer(info_service_pb2.GetServerRequest())
        assert server.state == info_service_pb2.SERVER_STATE_SERVING
        assert list(server.worker_pids) == [served.worker_pid]
        assert server.statistics.generated_tokens == 5
        assert server.statistics.prompt_tokens == 4
        config = {setting.name: (setting.value, setting.reason) for setting in server.config}
        assert config["page_size"] == ("16", "the fake's own")
        assert config["drain_timeout"] == ("1.0", "--drain-timeout")

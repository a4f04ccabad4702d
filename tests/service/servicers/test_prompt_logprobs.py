"""Log-probabilities of prompts as callers are told them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from chairlift.v1 import event_pb2, generation_service_pb2, request_pb2
from chairlift_service.requests.cursor import MAX_DELTA_TOKENS
from support.fake_worker import logprob
from support.served import Served, echo, refusal, rest, serving

PROMPT = list(range(40, 300)) * 3
_pb = generation_service_pb2


def asking(top_n: int, count: int = 4, prompt: Sequence[int] = PROMPT, **fields: Any) -> request_pb2.GenerationRequest:
    return request_pb2.GenerationRequest(
        token_ids={"ids": prompt}, max_new_tokens=count, logprobs={"prompt_top_n": top_n}, **fields
    )


def expect_prompt(deltas: Sequence[event_pb2.Delta], top_n: int, prompt: Sequence[int] = PROMPT) -> None:
    """An entry for each token in order; the first one's is empty."""
    entries = []
    for delta in deltas:
        if delta.prompt_logprobs:
            assert delta.prompt_index == len(entries)
            assert len(delta.prompt_logprobs) <= MAX_DELTA_TOKENS
            entries += delta.prompt_logprobs
    assert len(entries) == len(prompt)
    assert (entries[0].chosen, len(entries[0].top)) == (0, 0)
    for i, entry in enumerate(entries[1:], start=1):
        assert entry.chosen == logprob(i) - 2
        tops = [(prompt[i] + place, logprob(i) - 2 - place) for place in range(max(1, top_n))]
        assert [(top.token_id, top.logprob) for top in entry.top] == tops


async def deltas_of(served: Served, request: request_pb2.GenerationRequest) -> list[event_pb2.Delta]:
    events = await rest(served.generation.Generate(_pb.GenerateRequest(request=request)))
    assert [event.WhichOneof("event") for event in (events[0], events[-1])] == ["accepted", "finished"]
    return [event.delta for event in events[1:-1]]


@pytest.mark.parametrize("top_n", [1, 2, 128])
async def test_they_come_before_the_output_in_every_form_of_answer(top_n: int) -> None:
    async with serving(script={"step_s": 0}) as served:
        for fields in ({}, {"output": {"text": False, "token_ids": False}}, {"output": {"stream_interval": 3}}):
            deltas = await deltas_of(served, asking(top_n, **fields))
            expect_prompt(deltas, top_n)
            kinds = [bool(delta.prompt_logprobs) for delta in deltas]
            assert kinds == sorted(kinds, reverse=True)
        whole = await served.generation.Complete(_pb.CompleteRequest(request=asking(top_n)))
        (choice,) = whole.choices
        assert list(choice.output.token_ids) == echo(PROMPT, 4)
        assert len(choice.output.prompt_logprobs) == len(PROMPT)
        assert [entry.chosen for entry in choice.output.prompt_logprobs[1:3]] == [logprob(1) - 2, logprob(2) - 2]


@pytest.mark.parametrize("prompt", [[7], [7, 8], PROMPT])
async def test_a_prompt_is_scored_and_nothing_generated(prompt: list[int]) -> None:
    async with serving() as served:
        deltas = await deltas_of(served, asking(2, 0, prompt))
        expect_prompt(deltas, 2, prompt)
        assert not any(delta.num_tokens or delta.text for delta in deltas)
        whole = await served.generation.Complete(_pb.CompleteRequest(request=asking(1, 0, prompt)))
        (choice,) = whole.choices
        assert (choice.finished.reason, choice.finished.limit) == (
            event_pb2.FINISH_REASON_LENGTH,
            event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS,
        )
        assert (whole.accepted.max_new_tokens, choice.finished.usage.generated_tokens) == (0, 0)
        assert len(choice.output.prompt_logprobs) == len(prompt)
        await served.idle()


async def test_of_several_choices_the_first_has_them() -> None:
    async with serving() as served:
        deltas = [
            event.delta
            for event in await rest(
                served.generation.Generate(_pb.GenerateRequest(request=asking(1, num_choices=3, seed=5)))
            )
            if event.WhichOneof("event") == "delta"
        ]
        expect_prompt([delta for delta in deltas if delta.choice == 0], 1)
        assert not any(delta.prompt_logprobs for delta in deltas if delta.choice)


async def test_who_comes_back_with_tokens_has_had_them() -> None:
    async with serving() as served:
        await served.generation.AddRequest(_pb.AddRequestRequest(request=asking(1, request_id="a")))
        for index in (0, 0, 2, 4):
            events = await rest(served.generation.Result(_pb.ResultRequest(request_id="a", from_index=index)))
            deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
            assert [token for delta in deltas for token in delta.token_ids] == echo(PROMPT, 4)[index:]
            if index:
                assert not any(delta.prompt_logprobs for delta in deltas)
            else:
                expect_prompt(deltas, 1)


@pytest.mark.parametrize("count", [0, 30])
async def test_a_worker_that_takes_over_loses_and_doubles_none(count: int) -> None:
    async with serving(script={"step_s": 0.05}) as served:
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(3, count)))
        before = [] if not count else [await call.read() for _ in range(4)]
        os.kill(served.worker_pid, signal.SIGKILL)
        events = [*before, *await rest(call)]
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        expect_prompt(deltas, 3)
        assert [token for delta in deltas for token in delta.token_ids] == echo(PROMPT, count)
        await served.idle()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"logprobs": {"prompt_top_n": 129}}, "request.logprobs.prompt_top_n"),
        ({"max_new_tokens": 0}, "request.max_new_tokens"),
        ({"max_new_tokens": 0, "logprobs": {"top_n": 1}}, "request.max_new_tokens"),
        (
            {"max_new_tokens": 0, "logprobs": {"prompt_top_n": 1}, "stop": {"min_new_tokens": 1}},
            "request.stop.min_new_tokens",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    async with serving() as served:
        request = request_pb2.GenerationRequest(token_ids={"ids": [1, 2]}, **fields)
        refused = await refusal(served.generation.Generate(_pb.GenerateRequest(request=request)))
        assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (path,))

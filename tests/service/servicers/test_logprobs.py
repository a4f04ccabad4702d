"""Log-probabilities as callers are told them. The fake worker calls the ids from the chosen one on the likeliest."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from chairlift.v1 import event_pb2, generation_service_pb2, request_pb2
from support.fake_worker import logprob
from support.served import Served, echo, rest, serving

PROMPT = [10, 20, 30]
NUM = 7
_pb = generation_service_pb2


def asking(top_n: int, count: int = NUM, **fields: Any) -> request_pb2.GenerationRequest:
    request = request_pb2.GenerationRequest(max_new_tokens=count, **fields)
    request.token_ids.ids.extend(PROMPT)
    request.logprobs.top_n = top_n
    return request


def entries_of(deltas: Sequence[event_pb2.Delta]) -> list[tuple[float, list[tuple[int, float]]]]:
    for delta in deltas:
        assert len(delta.logprobs) == delta.num_tokens, "as many entries as tokens in each delta"
    return [
        (entry.chosen, [(top.token_id, top.logprob) for top in entry.top])
        for delta in deltas
        for entry in delta.logprobs
    ]


def expected(top_n: int, count: int = NUM) -> list[tuple[float, list[tuple[int, float]]]]:
    num_top = max(1, top_n)
    return [
        (logprob(i), [(token + place, logprob(i) - place) for place in range(num_top)])
        for i, token in enumerate(echo(PROMPT, count))
    ]


async def deltas_of(served: Served, request: request_pb2.GenerationRequest) -> list[event_pb2.Delta]:
    events = await rest(served.generation.Generate(_pb.GenerateRequest(request=request)))
    return [event.delta for event in events if event.WhichOneof("event") == "delta"]


@pytest.mark.parametrize("top_n", [1, 2, 128])
async def test_each_token_has_its_entry_in_every_form_of_answer(top_n: int) -> None:
    async with serving(script={"step_s": 0}) as served:
        for fields in ({}, {"output": {"text": False, "token_ids": False}}, {"output": {"stream_interval": 3}}):
            assert entries_of(await deltas_of(served, asking(top_n, **fields))) == expected(top_n)
        whole = await served.generation.Complete(_pb.CompleteRequest(request=asking(top_n)))
        assert entries_of([whole.choices[0].output]) == expected(top_n)
        await served.generation.AddRequest(_pb.AddRequestRequest(request=asking(top_n, request_id="mine")))
        for index in (0, 3, NUM - 1):
            events = await rest(served.generation.Result(_pb.ResultRequest(request_id="mine", from_index=index)))
            deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
            assert entries_of(deltas) == expected(top_n)[index:]
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["mine"]))
        await served.idle()


async def test_who_asks_for_none_gets_none_beside_those_who_do() -> None:
    async with serving() as served:
        asked = served.generation.Generate(_pb.GenerateRequest(request=asking(5, count=40)))
        await asked.read()
        assert entries_of(await deltas_of(served, asking(1))) == expected(1)
        plain = asking(0)
        for request in (plain, request_pb2.GenerationRequest(token_ids={"ids": PROMPT}, max_new_tokens=3)):
            assert all(not delta.logprobs for delta in await deltas_of(served, request))
        events = await rest(asked)
        assert entries_of([event.delta for event in events if event.WhichOneof("event") == "delta"]) == expected(5, 40)


async def test_a_worker_that_takes_over_loses_and_doubles_none() -> None:
    async with serving(script={"step_s": 0.02}) as served:
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(3, count=30)))
        before = [await call.read() for _ in range(6)]
        os.kill(served.worker_pid, signal.SIGKILL)
        events = [*before, *await rest(call)]
        assert entries_of([event.delta for event in events if event.WhichOneof("event") == "delta"]) == expected(3, 30)


async def test_what_is_told_of_processors_is_what_holds() -> None:
    config = {"repetition_penalty": 1.5, "suppress_tokens": [4], "bad_words_ids": [[5, 6]], "min_new_tokens": 2}
    async with serving(script={"step_s": 0, "generation_config": config}) as served:
        request = asking(1, sampling={"presence_penalty": 0.5, "logit_bias": {7: -1.5}}, stop={"min_new_tokens": 3})
        whole = await served.generation.Complete(_pb.CompleteRequest(request=request))
        told = whole.accepted.sampling
        assert (told.repetition_penalty, told.presence_penalty, told.frequency_penalty) == (1.5, 0.5, 0)
        assert told.HasField("frequency_penalty")
        assert (dict(told.logit_bias), list(told.banned_token_ids)) == ({7: -1.5}, [4])
        assert [list(banned.ids) for banned in told.banned_sequences] == [[5, 6]]
        assert whole.accepted.min_new_tokens == 3
        assert all(math.isfinite(entry.chosen) for entry in whole.choices[0].output.logprobs)

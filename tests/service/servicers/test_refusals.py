"""Every refusal: its status, its details, and that it comes before any initial metadata and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from chairlift.v1 import admin_service_pb2, admin_service_pb2_grpc, generation_service_pb2, text_service_pb2
from chairlift_client import AsyncClient, InvalidRequestError, OverloadedError
from chairlift_service.servicers.generation import MAX_CANCELLED_IDS
from chairlift_service.servicers.text import ANSWER_BYTES
from support.fake_worker import CACHE_LEN, VOCAB_SIZE
from support.served import Served, eventually, generate, ids_request, refusal, rest, serving

_pb = generation_service_pb2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
TINY_RING = 64 * 1024  # half of it holds records, 16 KiB of that is left for cancellations: 16 KiB for requests

BAD = {
    "no input": (_pb.GenerateRequest(), "MISSING_INPUT", "request"),
    "no ids": (generate(), "EMPTY_PROMPT", "request.token_ids"),
    "empty text": (_pb.GenerateRequest(request={"text": ""}), "EMPTY_PROMPT", "request.text"),
    "negative id": (generate(5, -1), "UNKNOWN_TOKEN_ID", "request.token_ids.ids[1]"),
    "id past the end": (generate(VOCAB_SIZE), "UNKNOWN_TOKEN_ID", "request.token_ids.ids[0]"),
    "id past 31 bits": (generate(2**31), "UNKNOWN_TOKEN_ID", "request.token_ids.ids[0]"),
    "stop id": (generate(5, stop={"token_ids": [10**9]}), "UNKNOWN_TOKEN_ID", "request.stop.token_ids[0]"),
    "prompt over the cache": (generate(*[5] * (CACHE_LEN + 1)), "PROMPT_TOO_LONG", "request.token_ids"),
    "no tokens asked": (generate(5, max_new_tokens=0), "INVALID_VALUE", "request.max_new_tokens"),
    "top_p": (generate(5, sampling={"top_p": 0}), "INVALID_VALUE", "request.sampling.top_p"),
    "temperature": (generate(5, sampling={"temperature": -1}), "INVALID_VALUE", "request.sampling.temperature"),
    "logprobs": (generate(5, logprobs={"top_n": 129}), "INVALID_VALUE", "request.logprobs.top_n"),
    "bias past the end": (
        generate(5, sampling={"logit_bias": {VOCAB_SIZE: 1}}),
        *("UNKNOWN_TOKEN_ID", f"request.sampling.logit_bias[{VOCAB_SIZE}]"),
    ),
    "negative bias": (
        generate(5, sampling={"logit_bias": {-1: 100}}),
        *("UNKNOWN_TOKEN_ID", "request.sampling.logit_bias[-1]"),
    ),
    "stop id with a minimum": (
        generate(5, stop={"token_ids": [10**9], "min_new_tokens": 4}, max_new_tokens=4),
        *("UNKNOWN_TOKEN_ID", "request.stop.token_ids[0]"),
    ),
    "id of 129 characters": (generate(5, request_id="x" * 129), "INVALID_VALUE", "request.request_id"),
}


@pytest.fixture
async def served() -> Any:
    async with serving() as running:
        yield running


async def test_bad_requests_are_refused_with_reason_and_field_and_never_reach_the_worker(served: Served) -> None:
    neighbour = served.generation.Generate(generate(5, 6, max_new_tokens=500))
    await neighbour.read()
    for name, (request, reason, field) in BAD.items():
        calls = [
            served.generation.Generate(request),
            served.generation.Complete(_pb.CompleteRequest(request=request.request)),
            served.generation.AddRequest(_pb.AddRequestRequest(request=request.request)),
        ]
        for call in calls:
            refused = await refusal(call)
            assert (refused.code, refused.reason, refused.fields) == (INVALID, reason, (field,)), name
            assert refused.initial_metadata == (), name
            assert len(refused.message.encode()) <= 1024
            assert refused.retry_s is None
    neighbour.cancel()
    await served.idle()
    assert served.status.prompt_tokens == 2  # the neighbour's, nobody else's


async def test_a_batch_with_one_bad_request_is_refused_whole(served: Served) -> None:
    requests = [ids_request(5), ids_request(), ids_request(7)]
    refused = await refusal(served.generation.AddRequests(_pb.AddRequestsRequest(requests=requests)))
    assert (refused.code, refused.reason, refused.fields) == (INVALID, "EMPTY_PROMPT", ("requests[1].token_ids",))
    assert len(served.core.registry) == 0
    await served.idle()


async def test_the_id_of_a_live_request_is_refused_and_free_again_afterwards() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        first = served.generation.Generate(generate(5, request_id="same", max_new_tokens=500))
        await first.read()
        refused = await refusal(served.generation.Generate(generate(6, request_id="same")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        assert refused.initial_metadata == ()
        twice = [ids_request(5, request_id="twin"), ids_request(6, request_id="twin")]
        refused = await refusal(served.generation.AddRequests(_pb.AddRequestsRequest(requests=twice)))
        assert refused.reason == "DUPLICATE_REQUEST_ID"
        first.cancel()
        await served.idle()
        again = served.generation.Generate(generate(6, request_id="same"))
        assert [event.WhichOneof("event") for event in await rest(again)][-1] == "finished"


async def test_results_of_unknown_ids_are_not_found(served: Served) -> None:
    refused = await refusal(served.generation.Result(_pb.ResultRequest(request_id="nobody")))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    assert refused.initial_metadata == ()
    refused = await refusal(served.generation.Result(_pb.ResultRequest()))
    assert (refused.code, refused.reason) == (INVALID, "MISSING_INPUT")
    refused = await refusal(served.generation.Result(_pb.ResultRequest(session="s", from_index=1)))
    assert (refused.code, refused.fields) == (INVALID, ("from_index",))


async def test_surplus_requests_are_refused_at_once_and_the_accepted_ones_end_in_order() -> None:
    async with serving(script={"max_running": 1, "step_s": 0.01}, max_waiting_requests=4) as served:
        first = served.generation.Generate(generate(5, request_id="first", max_new_tokens=1000))
        await first.read()
        waiting = []
        for i in range(4):
            waiting.append(served.generation.Generate(generate(5, request_id=f"w{i}")))
            await waiting[-1].initial_metadata()
        for _ in range(3):
            refused = await refusal(served.generation.Generate(generate(6)))
            assert (refused.code, refused.reason) == (EXHAUSTED, "QUEUE_FULL")
            assert refused.retry_s == 1.0
            assert refused.pushback_ms == "1000"
            assert refused.initial_metadata == ()
        first.cancel()
        ended: list[str] = []

        async def drain(call: Any) -> None:
            events = await rest(call)
            ended.append(events[0].accepted.request_id)

        await asyncio.gather(*map(drain, waiting))
        assert ended == ["w0", "w1", "w2", "w3"]
        await served.idle()


async def test_waiting_prompt_tokens_are_bounded_but_one_long_prompt_is_let_in() -> None:
    async with serving(script={"max_running": 1, "step_s": 0.005}, max_waiting_tokens=100) as served:
        first = served.generation.Generate(generate(*[5] * 200, max_new_tokens=800))  # more than the bound, but alone
        await first.read()
        second = served.generation.Generate(generate(*[5] * 60))
        await second.initial_metadata()
        refused = await refusal(served.generation.Generate(generate(*[5] * 41)))
        assert (refused.code, refused.reason) == (EXHAUSTED, "QUEUE_FULL")
        third = served.generation.Generate(generate(*[5] * 40))
        await third.initial_metadata()
        for call in (first, second, third):
            call.cancel()
        await served.idle()


async def test_a_full_ring_refuses_new_requests_and_loses_no_cancellation() -> None:
    async with serving(script={"deaf": True}, ring_bytes=TINY_RING) as served:
        calls, refused = [], None
        for _ in range(200):
            call = served.generation.Generate(generate(*[5] * 200))
            waiter = asyncio.ensure_future(call.initial_metadata())
            await waiter
            if await _is_over(call):
                refused = await refusal(call)
                break
            calls.append(call)
        assert refused is not None
        assert (refused.code, refused.reason) == (EXHAUSTED, "QUEUE_FULL")
        assert 10 < len(calls) < 100
        used = served.worker.channel.requests.used_bytes
        for call in calls:
            call.cancel()
        await eventually(lambda: served.worker.channel.requests.used_bytes >= used + len(calls) * 32)
        assert served.core.registry.num_live == len(calls)  # kept until the worker confirms, which it never does


async def _is_over(call: Any) -> bool:
    await asyncio.sleep(0.01)
    return bool(call.done())


async def test_what_could_never_fit_the_ring_is_too_large() -> None:
    async with serving(ring_bytes=TINY_RING) as served:
        batch = [ids_request(*[5] * 1000) for _ in range(8)]
        refused = await refusal(served.generation.AddRequests(_pb.AddRequestsRequest(requests=batch)))
        assert (refused.code, refused.reason) == (EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert refused.retry_s is None
        assert refused.pushback_ms == "-1"
        await served.idle()


async def test_a_message_over_the_limit_is_refused_in_both_directions() -> None:
    async with serving(max_message_bytes=64 * 1024) as small:
        refused = await refusal(small.generation.Generate(_pb.GenerateRequest(request={"text": "x" * 66_000})))
        assert refused.code is EXHAUSTED
        ends = text_service_pb2.DetokenizeRequest(token_ids=[0] * 40_000, skip_special_tokens=False)  # <|end|>
        refused = await refusal(small.text.Detokenize(ends))
        assert (refused.code, refused.reason, refused.pushback_ms) == (EXHAUSTED, "MESSAGE_TOO_LARGE", "-1")
        assert refused.message == f"the answer has {40_000 * 7 + 4} bytes; a message has at most 65536"
        await small.idle()


async def test_messages_over_grpcs_own_limit_of_4_mib_arrive_and_those_over_16_mib_do_not(served: Served) -> None:
    async with AsyncClient(served.target) as client:
        for prompt in ("word " * 1_000_000, [300] * 2_000_000):  # 5 MB, and 4 MB: what is wrong is said by name
            with pytest.raises(InvalidRequestError) as caught:
                await client.complete(prompt)
            assert caught.value.reason == "PROMPT_TOO_LONG"
        with pytest.raises(OverloadedError):
            await client.complete("word " * 4_000_000)
        tokens = await client.tokenize("\n" * 800_000)
        assert len(tokens.token_ids) == len(tokens.tokens) == 800_000
        answer = text_service_pb2.TokenizeResponse(token_ids=tokens.token_ids, tokens=tokens.tokens)
        assert answer.ByteSize() > 4 * 2**20


async def test_a_text_whose_tokens_might_not_fit_an_answer_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(max_message_bytes=64 * 1024) as small:
        answer = await small.text.Tokenize(text_service_pb2.TokenizeRequest(text="\n" * 4096))
        assert len(answer.tokens) == 4096
        monkeypatch.setattr(small.core.lifecycle.model().tokenizer, "encode_async", None)
        for text in ("x" * 4097, "é" * 2049):
            refused = await refusal(small.text.Tokenize(text_service_pb2.TokenizeRequest(text=text)))
            assert (refused.code, refused.reason) == (EXHAUSTED, "MESSAGE_TOO_LARGE")
            assert "at most 4096 are tokenised" in refused.message
            assert refused.retry_s is None


def test_a_token_for_each_byte_with_the_largest_id_fits_what_is_set_aside_for_it() -> None:
    worst = text_service_pb2.TokenizeResponse(token_ids=[2**31 - 1] * 1000, tokens=["<0x0A>"] * 1000)
    assert worst.ByteSize() <= 1000 * ANSWER_BYTES


async def test_more_ids_than_one_turn_can_cancel_are_refused_and_none_of_them_is_cancelled(served: Served) -> None:
    call = served.generation.Generate(generate(5, request_id="mine", max_new_tokens=1000))
    await call.read()
    ids = ["mine", *(str(i) for i in range(MAX_CANCELLED_IDS))]
    refused = await refusal(served.generation.Cancel(_pb.CancelRequest(request_ids=ids)))
    assert (refused.code, refused.reason, refused.fields) == (INVALID, "INVALID_VALUE", ("request_ids",))
    answer = await served.generation.Cancel(_pb.CancelRequest(request_ids=ids[1:]))
    assert len(answer.outcomes) == MAX_CANCELLED_IDS
    assert (await rest(call))[-1].finished.usage.generated_tokens == 1000


async def test_a_client_that_retries_by_itself_gets_in_after_the_time_that_the_refusal_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client's own service config, in gRPC's own core: it may retry, since the refusal came first."""
    async with serving(script={"max_running": 1, "step_s": 0.001}, max_waiting_requests=1) as served:
        attempts: list[float] = []
        own = served.core.intake.own

        async def counted(*args: Any, **kwargs: Any) -> Any:
            attempts.append(time.monotonic())
            return await own(*args, **kwargs)

        monkeypatch.setattr(served.core.intake, "own", counted)
        first = served.generation.Generate(generate(5, max_new_tokens=1000))
        await first.read()
        second = served.generation.Generate(generate(6))
        await second.initial_metadata()
        assert len(attempts) == 2
        async with AsyncClient(served.target) as client, client.generate([7], max_new_tokens=3) as events:
            third = asyncio.ensure_future(anext(events))
            await eventually(lambda: len(attempts) == 3)
            first.cancel()
            assert (await third).prompt_tokens == 1
        assert len(attempts) == 4
        assert attempts[3] - attempts[2] == pytest.approx(1.0, abs=0.3)  # not the client's own 0.1 s
        second.cancel()
        await served.idle()


async def test_a_fault_in_a_handler_is_internal_and_its_text_stays_in_the_log(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret " + "ž" * 20_000)

    for fault in (fail, _cancel):
        monkeypatch.setattr(served.worker.link, "add", fault)
        refused = await refusal(served.generation.Generate(generate(5)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "secret" not in refused.message
        assert refused.initial_metadata == ()
    await served.idle()


def _cancel(*_: object) -> None:
    raise asyncio.CancelledError


async def test_bytes_that_are_no_message_are_internal_as_from_grpcs_other_servers(served: Served) -> None:
    for method in ("GenerationService/Generate", "GenerationService/Complete", "TextService/Tokenize"):
        kind = served.channel.unary_stream if method.endswith("/Generate") else served.channel.unary_unary
        refused = await refusal(kind(f"/chairlift.v1.{method}")(b"\xff\xff"))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "UNREADABLE_REQUEST")
        assert refused.initial_metadata == ()
    await served.idle()


async def test_tokens_outside_the_vocabulary_are_not_turned_into_text(served: Served) -> None:
    refused = await refusal(served.text.Detokenize(text_service_pb2.DetokenizeRequest(token_ids=[1, VOCAB_SIZE])))
    assert (refused.code, refused.reason, refused.fields) == (INVALID, "UNKNOWN_TOKEN_ID", ("token_ids[1]",))


async def test_admin_calls_work_on_the_admin_address_only() -> None:
    async with serving(admin=True) as served:
        here = admin_service_pb2_grpc.AdminServiceStub(served.channel)
        refused = await refusal(here.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest()))
        assert refused.code is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(served.target.removesuffix("/s") + "/admin") as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest())
            assert answer.num_blocks == 7
            generation = type(served.generation)(channel)
            assert (await refusal(generation.Generate(generate(5)))).code is grpc.StatusCode.UNIMPLEMENTED

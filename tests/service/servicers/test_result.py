"""Results of detached requests: kept, re-read from any index, let go; sessions; one reader at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from chairlift.v1 import event_pb2, generation_service_pb2
from support.served import Served, echo, eventually, ids_request, refusal, rest, serving
from support.tokenizer_files import byte_level

_pb = generation_service_pb2


async def add(served: Served, request_id: str, *ids: int, **fields: Any) -> Any:
    request = ids_request(*(ids or (40, 41, 42)), request_id=request_id, **fields)
    return (await served.generation.AddRequest(_pb.AddRequestRequest(request=request))).accepted


async def result(served: Served, request_id: str, from_index: int = 0) -> list[Any]:
    call = served.generation.Result(_pb.ResultRequest(request_id=request_id, from_index=from_index))
    return await rest(call)


def ids_of(events: list[Any]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def test_adding_answers_at_once_and_the_result_can_be_read_again_from_any_index() -> None:
    prompt = byte_level().encode("kůň žere 日本 🚀").ids
    text = byte_level().decode(prompt)
    async with serving() as served:
        accepted = await add(served, "a", *prompt, max_new_tokens=len(prompt))
        assert (accepted.state, accepted.HasField("cached_tokens")) == (event_pb2.REQUEST_STATE_WAITING, False)
        assert accepted.prompt_tokens == len(prompt)
        whole = await result(served, "a")
        assert [event.WhichOneof("event") for event in (whole[0], whole[-1])] == ["accepted", "finished"]
        assert ids_of(whole) == prompt
        pieces = [(event.delta.index, event.delta.text) for event in whole if event.WhichOneof("event") == "delta"]
        for index in range(len(prompt) + 1):
            again = await result(served, "a", index)
            assert ids_of(again) == prompt[index:]
            assert text.endswith(told := "".join(event.delta.text for event in again))
            before = "".join(piece for start, piece in pieces if start < index)
            if index in {start for start, _ in pieces} or index == len(prompt):
                assert before + told == text
        refused = await refusal(served.generation.Result(_pb.ResultRequest(request_id="a", from_index=len(prompt) + 1)))
        assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("from_index",))
        await served.idle()


async def test_a_reader_that_comes_back_loses_and_doubles_nothing() -> None:
    async with serving(script={"step_s": 0.005}) as served:
        await add(served, "a", max_new_tokens=100)
        got: list[int] = []
        while len(got) < 100:
            call = served.generation.Result(_pb.ResultRequest(request_id="a", from_index=len(got)))
            for _ in range(8):
                event = await call.read()
                if event is grpc.aio.EOF:
                    break
                assert event.WhichOneof("event") != "delta" or event.delta.index == len(got)
                got += event.delta.token_ids
            call.cancel()
        assert got == echo([40, 41, 42], 100)
        await served.idle()


async def test_a_second_reader_takes_over_and_the_first_is_aborted() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        await add(served, "a", max_new_tokens=60)
        first = served.generation.Result(_pb.ResultRequest(request_id="a"))
        await first.read()
        second = asyncio.ensure_future(result(served, "a"))
        refused = await refusal(first)
        assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "READER_REPLACED")
        assert ids_of(await second) == echo([40, 41, 42], 60)
        await served.idle()


async def test_a_request_that_is_read_by_its_own_call_has_no_other_reader() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        request = _pb.GenerateRequest(request=ids_request(5, request_id="own", max_new_tokens=50))
        call = served.generation.Generate(request)
        await call.read()
        refused = await refusal(served.generation.Result(_pb.ResultRequest(request_id="own")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        assert (await rest(call))[-1].finished.usage.generated_tokens == 50


async def test_kept_results_expire_by_age() -> None:
    async with serving(result_ttl=0.3) as served:
        await add(served, "a")
        assert len(ids_of(await result(served, "a"))) == 8
        assert len(ids_of(await result(served, "a"))) == 8
        await asyncio.sleep(0.35)
        refused = await refusal(served.generation.Result(_pb.ResultRequest(request_id="a")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.OUT_OF_RANGE, "RESULT_EXPIRED")
        assert refused.initial_metadata == ()
        await add(served, "b")
        await eventually(lambda: len(served.core.registry) == 0)  # without being asked for


async def test_kept_results_are_bounded_in_memory_and_the_oldest_go_first() -> None:
    async with serving(result_memory=20_000) as served:  # some four small results
        for i in range(12):
            await add(served, f"r{i}")
            await eventually(lambda: served.core.registry.num_live == 0)
        kept = [i for i in range(12) if served.core.registry.find(f"r{i}") is not None]
        assert 1 <= len(kept) < 6
        assert kept == list(range(12 - len(kept), 12))
        assert served.core.registry._kept.num_bytes <= 20_000
        assert (await refusal(served.generation.Result(_pb.ResultRequest(request_id="r0")))).reason == "RESULT_EXPIRED"


async def test_cancelling_a_finished_request_lets_its_result_go() -> None:
    async with serving() as served:
        await add(served, "a")
        await result(served, "a")
        answer = await served.generation.Cancel(_pb.CancelRequest(request_ids=["a"]))
        assert answer.outcomes[0].status == _pb.CANCEL_STATUS_ALREADY_FINISHED
        assert len(served.core.registry) == 0
        assert (await refusal(served.generation.Result(_pb.ResultRequest(request_id="a")))).reason == "RESULT_EXPIRED"


async def test_the_id_of_a_kept_result_can_be_used_again() -> None:
    async with serving() as served:
        await add(served, "a", 40)
        await result(served, "a")
        await add(served, "a", 50)
        assert ids_of(await result(served, "a")) == [50] * 8
        assert len(served.core.registry) == 1
        await served.idle()


async def test_a_session_is_followed_with_its_failures_and_with_what_is_added_later() -> None:
    async with serving() as served:
        await add(served, "before", session="s")
        await eventually(lambda: served.core.registry.num_live == 0)
        call = served.generation.Result(_pb.ResultRequest(session="s"))
        await call.initial_metadata()
        await add(served, "fails", 500, 60, session="s")  # the fake's token for a failure
        await add(served, "other", session="t")
        await add(served, "later", 44, 45, session="s")
        events: dict[str, list[Any]] = {}
        while (
            sum(event.WhichOneof("event") in ("finished", "failed") for each in events.values() for event in each) < 3
        ):
            event = await asyncio.wait_for(call.read(), 5)
            events.setdefault(event.request_id, []).append(event)
        assert set(events) == {"before", "fails", "later"}
        assert {name: each[0].WhichOneof("event") for name, each in events.items()} == dict.fromkeys(events, "accepted")
        assert ids_of(events["later"]) == echo([44, 45], 8)
        failed = events["fails"][-1].failed.status
        assert failed.code == grpc.StatusCode.INTERNAL.value[0]
        assert "not finite" in failed.message
        assert not call.done()
        call.cancel()
        await served.idle()


async def test_a_session_without_requests_is_followed_until_the_caller_ends_it() -> None:
    async with serving() as served:
        call = served.generation.Result(_pb.ResultRequest(session="empty"))
        await asyncio.wait_for(call.initial_metadata(), 2)
        await add(served, "first", session="empty")
        assert (await asyncio.wait_for(call.read(), 2)).accepted.request_id == "first"
        call.cancel()
        await served.idle()


async def test_a_batch_answers_in_its_order_and_starts_where_prefixes_meet() -> None:
    async with serving(script={"max_running": 1}) as served:
        prompts = [[60, 61], [40, 41], [60, 61, 62], [40, 41, 42]]
        batch = [ids_request(*ids, request_id=f"r{i}", session="s") for i, ids in enumerate(prompts)]
        follow = served.generation.Result(_pb.ResultRequest(session="s"))
        await follow.initial_metadata()
        answer = await served.generation.AddRequests(_pb.AddRequestsRequest(requests=batch))
        assert [accepted.request_id for accepted in answer.accepted] == ["r0", "r1", "r2", "r3"]
        assert [accepted.prompt_tokens for accepted in answer.accepted] == [2, 2, 3, 3]
        order: list[str] = []
        while len(order) < 4:
            event = await asyncio.wait_for(follow.read(), 5)
            if event.WhichOneof("event") == "finished":
                order.append(event.request_id)
        assert order == ["r1", "r3", "r0", "r2"]
        follow.cancel()

"""Requests with several choices, in every form of answer. The fake worker tells each choice's seed by its output."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from chairlift.v1 import event_pb2, generation_service_pb2, request_pb2
from chairlift_service.sampling import choice_seed
from support.fake_worker import ERROR_TOKEN
from support.served import eventually, refusal, rest, serving

PROMPT = list(range(50, 81))
SEED = 77
_pb = generation_service_pb2


def asking(num: int, count: int = 9, prompt: list[int] = PROMPT, **fields: Any) -> request_pb2.GenerationRequest:
    fields = {"token_ids": {"ids": prompt}, "seed": SEED, "max_new_tokens": count, "num_choices": num, **fields}
    return request_pb2.GenerationRequest(**fields)


def wanted(choice: int, count: int = 9) -> list[int]:
    first = choice_seed(SEED, choice) if choice else 0
    return [PROMPT[(first + i) % len(PROMPT)] for i in range(count)]


def expect_whole(events: Iterable[Any], num: int, count: int = 9, *, index: int = 0) -> None:
    """One `accepted`, then each choice's tokens in order and without a gap, and one ending for each."""
    accepted, *others = events
    assert accepted.WhichOneof("event") == "accepted"
    assert (accepted.accepted.num_choices, accepted.accepted.seed) == (num, SEED)
    ids: dict[int, list[int]] = {choice: [] for choice in range(num)}
    texts: dict[int, str] = dict.fromkeys(ids, "")
    ended: list[int] = []
    for event in others:
        match event.WhichOneof("event"):
            case "delta":
                delta = event.delta
                assert delta.choice not in ended
                assert delta.index == index + len(ids[delta.choice])
                ids[delta.choice] += delta.token_ids
                texts[delta.choice] += delta.text
            case "finished":
                assert event.finished.reason == event_pb2.FINISH_REASON_LENGTH
                assert event.finished.usage.generated_tokens == count
                ended.append(event.finished.choice)
            case kind:
                raise AssertionError(kind)
    assert sorted(ended) == list(range(num))
    assert ids == {choice: wanted(choice, count)[index:] for choice in range(num)}
    if not index:
        assert len(set(texts.values())) == len({tuple(each) for each in ids.values()})


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        # The reference implementation's (Vigna, splitmix64.c).
        (
            1234567,
            [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
        ),
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
    ],
)
def test_seeds_are_the_published_outputs_of_splitmix64(seed: int, outputs: list[int]) -> None:
    assert [choice_seed(seed, choice) for choice in range(1, len(outputs) + 1)] == outputs
    assert choice_seed(seed, 0) == seed


@pytest.mark.parametrize("num", [1, 2, 8, 128])
async def test_each_choice_has_its_own_output_in_every_form_of_answer(num: int) -> None:
    async with serving(script={"max_running": 50}) as served:
        expect_whole(await rest(served.generation.Generate(_pb.GenerateRequest(request=asking(num)))), num)
        whole = await served.generation.Complete(_pb.CompleteRequest(request=asking(num)))
        assert whole.accepted.num_choices == num
        assert [list(choice.output.token_ids) for choice in whole.choices] == [wanted(i) for i in range(num)]
        assert [choice.output.choice for choice in whole.choices] == list(range(num))
        assert [choice.finished.choice for choice in whole.choices] == list(range(num))
        await served.generation.AddRequest(_pb.AddRequestRequest(request=asking(num, request_id="a")))
        for index in (0, 4, 9):
            call = served.generation.Result(_pb.ResultRequest(request_id="a", from_index=index))
            expect_whole(await rest(call), num, index=index)
        assert (await refusal(served.generation.Result(_pb.ResultRequest(request_id="a", from_index=10)))).fields == (
            "from_index",
        )
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["a"]))
        await served.idle()


async def test_a_session_tells_each_request_with_all_its_choices() -> None:
    async with serving() as served:
        await served.generation.AddRequest(_pb.AddRequestRequest(request=asking(3, request_id="a", session="s")))
        await asyncio.sleep(0.02)
        call = served.generation.Result(_pb.ResultRequest(session="s"))
        await served.generation.AddRequests(
            _pb.AddRequestsRequest(requests=[asking(2, request_id=name, session="s") for name in "bc"])
        )
        events = [await call.read() for _ in range(1)]
        while sum(event.WhichOneof("event") == "finished" for event in events) < 7:
            events.append(await call.read())
        call.cancel()
        for name, num in (("a", 3), ("b", 2), ("c", 2)):
            expect_whole([event for event in events if event.request_id == name], num)


async def test_a_cancel_ends_all_choices_that_go_on() -> None:
    async with serving(script={"step_s": 0.005}) as served:
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(4, 1000, request_id="a")))
        for _ in range(9):
            await call.read()
        response = await served.generation.Cancel(_pb.CancelRequest(request_ids=["a"]))
        assert [(each.request_id, each.status) for each in response.outcomes] == [("a", _pb.CANCEL_STATUS_CANCELLED)]
        endings = [event.finished for event in await rest(call) if event.WhichOneof("event") == "finished"]
        assert sorted(ending.choice for ending in endings) == [0, 1, 2, 3]
        assert {ending.reason for ending in endings} == {event_pb2.FINISH_REASON_CANCELLED}
        await served.idle()


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_call_that_is_left_takes_all_its_choices_along(method: str) -> None:
    async with serving(script={"step_s": 0.005}) as served:
        message = getattr(_pb, f"{method}Request")(request=asking(5, 1000))
        call = getattr(served.generation, method)(message)
        await eventually(lambda: served.status.requests_running == 5)
        call.cancel()
        await served.idle()


async def test_a_deadline_ends_all_of_them() -> None:
    async with serving(script={"step_s": 0.01}) as served:
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(3, 1000)), timeout=0.3)
        assert (await refusal(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.idle()


async def test_a_choice_that_fails_takes_the_others_along_and_is_told_once() -> None:
    failing = [ERROR_TOKEN, *PROMPT]
    async with serving(script={"step_s": 0.005}) as served:
        request = asking(3, 1000, prompt=failing, request_id="a", session="s")
        refused = await refusal(served.generation.Generate(_pb.GenerateRequest(request=request)))
        assert refused.reason == "NUMERICAL_ERROR"
        await served.idle()
        assert (
            await refusal(served.generation.Complete(_pb.CompleteRequest(request=request)))
        ).reason == refused.reason
        await served.idle()
        call = served.generation.Result(_pb.ResultRequest(session="s"))
        await asyncio.sleep(0.02)
        await served.generation.AddRequest(_pb.AddRequestRequest(request=request))
        await served.generation.AddRequest(_pb.AddRequestRequest(request=asking(1, request_id="b", session="s")))
        kinds = []
        while not kinds or kinds[-1] != ("b", "finished"):
            event = await call.read()
            kinds.append((event.request_id, event.WhichOneof("event")))
        call.cancel()
        assert kinds.count(("a", "failed")) == 1
        assert kinds.count(("a", "accepted")) == 1
        assert (await refusal(served.generation.Result(_pb.ResultRequest(request_id="a")))).reason == refused.reason


async def test_a_worker_that_takes_over_loses_and_doubles_no_choice() -> None:
    async with serving(script={"step_s": 0.02, "max_running": 3}) as served:  # others wait
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(5, 30)))
        before = [await call.read() for _ in range(12)]
        os.kill(served.worker_pid, signal.SIGKILL)
        expect_whole([*before, *await rest(call)], 5, 30)
        await served.idle()


async def test_choices_that_come_while_there_is_no_worker_wait_for_it() -> None:
    async with serving(script={"start_s": 0.3}) as served:
        pid = served.worker_pid
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: served.core.succession.pids != (pid,))
        expect_whole(await rest(served.generation.Generate(_pb.GenerateRequest(request=asking(3)))), 3)
        await served.idle()


async def test_each_choice_takes_a_place_among_those_that_wait() -> None:
    async with serving(max_waiting_requests=4, script={"deaf": True}) as served:
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(3)))
        await eventually(lambda: served.core.registry.num_live == 3)
        refused = await refusal(served.generation.Generate(_pb.GenerateRequest(request=asking(2))))
        assert refused.reason == "QUEUE_FULL"
        assert (await refusal(served.generation.Generate(_pb.GenerateRequest(request=asking(5))))).reason == (
            "MESSAGE_TOO_LARGE"
        )
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"num_choices": 0}, "request.num_choices"),
        ({"num_choices": 129}, "request.num_choices"),
        ({"num_choices": 2**32 - 1}, "request.num_choices"),
        ({"num_choices": 2, "max_new_tokens": 0, "logprobs": {"prompt_top_n": 1}}, "request.num_choices"),
    ],
)
async def test_other_numbers_are_refused_by_name(fields: dict[str, Any], path: str) -> None:
    async with serving() as served:
        refused = await refusal(served.generation.Generate(_pb.GenerateRequest(request=asking(1, **fields))))
        assert (refused.code, refused.reason, refused.fields) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_VALUE",
            (path,),
        )


async def test_a_slow_reader_of_choices_loses_nothing() -> None:
    async with serving(reader_buffer_tokens=16) as served:
        call = served.generation.Generate(_pb.GenerateRequest(request=asking(4, 900)))
        events = [await call.read()]
        await asyncio.sleep(0.3)
        expect_whole([*events, *await rest(call)], 4, 900)
        await served.idle()


async def test_what_is_kept_counts_all_choices() -> None:
    async with serving() as served:
        for name, num in (("one", 1), ("many", 20)):
            await served.generation.AddRequest(_pb.AddRequestRequest(request=asking(num, 500, request_id=name)))
            await rest(served.generation.Result(_pb.ResultRequest(request_id=name)))
        kept = served.core.registry._kept
        sizes = [served.core.registry.find(name).size for name in ("one", "many")]  # type: ignore[union-attr] # both are there
        assert sizes[1] > 15 * sizes[0]
        assert kept.num_bytes == sum(sizes)
        await served.generation.Cancel(_pb.CancelRequest(request_ids=["one", "many"]))
        assert kept.num_bytes == 0

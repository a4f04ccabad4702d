"""Stop strings, echo and stream_interval, asked of the whole service: the fake worker repeats the prompt's ids."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from chairlift.v1 import event_pb2, generation_service_pb2, request_pb2
from support.served import Served, echo, eventually, refusal, rest, serving
from support.tokenizer_files import byte_level

TEXT = "the quick brown fox + žluťoučký 🦊👩‍👩‍👧 jumps.\n"
TOKENIZER = byte_level()
PROMPT: list[int] = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
NUM = 2 * len(PROMPT)
WHOLE = TEXT + TEXT


def a_request(count: int = NUM, prompt: list[int] = PROMPT, **fields: Any) -> request_pb2.GenerationRequest:
    request = request_pb2.GenerationRequest(max_new_tokens=count, **fields)
    request.token_ids.ids.extend(prompt)
    return request


async def streamed(served: Served, request: request_pb2.GenerationRequest) -> tuple[str, list[int], Any, list[Any]]:
    """Text, ids and ending of a stream, and its deltas."""
    events = await rest(served.generation.Generate(generation_service_pb2.GenerateRequest(request=request)))
    deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
    assert [event.WhichOneof("event") for event in events] == ["accepted", *["delta"] * len(deltas), "finished"]
    index = 0
    for delta in deltas:
        assert delta.index == index
        assert delta.text or delta.token_ids
        index += delta.num_tokens
    text, ids = "".join(delta.text for delta in deltas), [i for delta in deltas for i in delta.token_ids]
    whole = await served.generation.Complete(generation_service_pb2.CompleteRequest(request=request))
    (choice,) = whole.choices
    assert (choice.output.text, list(choice.output.token_ids)) == (text, ids), "stream and unary answer differ"
    assert choice.finished.stop == events[-1].finished.stop
    return text, ids, events[-1].finished, deltas


def completing(stop: str, whole: str = WHOLE) -> int:
    """Number of tokens whose text has the stop complete, by the tokenizer's decoding of longer and longer outputs."""
    end, ids = whole.index(stop) + len(stop), echo(PROMPT, NUM)
    return next(n for n in range(1, NUM + 1) if len(TOKENIZER.decode(ids[:n]).rstrip("\ufffd")) >= end)


STOPS = ["ck bro", "ox + ž", "🦊", "👩‍👧", "ps.\nthe q", "\n"]


@pytest.mark.parametrize("include", [False, True])
async def test_the_text_ends_at_the_first_stop_also_across_tokens(*, include: bool) -> None:
    async with serving(script={"step_s": 0}) as served:
        for stop in STOPS:
            for others in ([], ["nowhere", stop + "!", stop[:-1] + "?"]):
                params = request_pb2.StopParams(strings=[*others, stop], include_stop=include)
                text, ids, finished, _ = await streamed(served, a_request(stop=params))
                cut = WHOLE.index(stop) + (len(stop) if include else 0)
                assert text == WHOLE[:cut]
                assert ids == echo(PROMPT, completing(stop))
                assert (finished.reason, finished.stop.text) == (event_pb2.FINISH_REASON_STOP, stop)
                assert finished.usage.generated_tokens == len(ids)
        await served.idle()


async def test_a_stop_in_the_last_token_is_a_stop_and_a_beginning_of_one_is_told() -> None:
    async with serving(script={"step_s": 0}) as served:
        for stop in STOPS:
            count = completing(stop)
            params = request_pb2.StopParams(strings=[stop])
            text, _, finished, _ = await streamed(served, a_request(count, stop=params))
            assert (text, finished.stop.text) == (WHOLE[: WHOLE.index(stop)], stop)
            text, ids, finished, _ = await streamed(served, a_request(count - 1, stop=params))
            assert text == TOKENIZER.decode(ids)
            assert (finished.reason, len(ids)) == (event_pb2.FINISH_REASON_LENGTH, count - 1)


async def test_the_prompt_and_its_echo_have_no_stops() -> None:
    async with serving(script={"step_s": 0}) as served:
        params = request_pb2.StopParams(strings=["quick"])
        output = request_pb2.OutputParams(echo=True)
        text, ids, finished, _ = await streamed(served, a_request(stop=params, output=output))
        assert (text, finished.stop.text) == (TEXT + "the ", "quick")
        assert ids == echo(PROMPT, completing("quick"))


@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_a_stop_that_is_complete_before_min_new_tokens_is_let_be(beyond: int) -> None:
    """One that comes again, as the prompt does, ends the text then."""
    first = completing("fox")
    async with serving(script={"step_s": 0}) as served:
        params = request_pb2.StopParams(strings=["fox"], min_new_tokens=first + beyond)
        text, ids, finished, _ = await streamed(served, a_request(stop=params))
        again = beyond > 0
        assert text == (TEXT if again else "") + "the quick brown "
        assert ids == echo(PROMPT, first + (len(PROMPT) if again else 0))
        assert finished.stop.text == "fox"


async def test_a_session_tells_texts_up_to_their_stops() -> None:
    async with serving(script={"step_s": 0.001}) as served:
        stops = {"a": "quick", "b": "fox", "c": "nowhere"}
        requests = [
            a_request(session="s", request_id=name, stop=request_pb2.StopParams(strings=[stop]))
            for name, stop in stops.items()
        ]
        call = served.generation.Result(generation_service_pb2.ResultRequest(session="s"))
        await served.generation.AddRequests(generation_service_pb2.AddRequestsRequest(requests=requests))
        texts, ended = dict.fromkeys(stops, ""), {}
        while len(ended) < len(stops):
            event = await call.read()
            texts[event.request_id] += event.delta.text
            if event.WhichOneof("event") == "finished":
                ended[event.request_id] = event.finished.stop.text
        call.cancel()
        assert texts == {"a": "the ", "b": "the quick brown ", "c": WHOLE}
        assert ended == {"a": "quick", "b": "fox", "c": ""}


async def test_a_cancel_after_the_stop_is_kept_and_the_text_still_ends_there() -> None:
    """The worker has not confirmed the stop, so that the request counts as live."""
    async with serving(script={"step_s": 0.1}) as served:
        request = a_request(400, stop=request_pb2.StopParams(strings=["quick"]), request_id="mine")
        call = served.generation.Generate(generation_service_pb2.GenerateRequest(request=request))
        await call.read()
        (generation,) = served.core.registry.all_live()
        await eventually(lambda: generation.output.stop is not None)
        outcome = (await served.generation.Cancel(generation_service_pb2.CancelRequest(request_ids=["mine"]))).outcomes
        events = await rest(call)
        assert "".join(event.delta.text for event in events) == "the "
        cancelled = outcome[0].status == generation_service_pb2.CANCEL_STATUS_CANCELLED
        assert events[-1].finished.reason == (
            event_pb2.FINISH_REASON_CANCELLED if cancelled else event_pb2.FINISH_REASON_STOP
        )


async def test_without_text_stops_are_found_too() -> None:
    async with serving(script={"step_s": 0}) as served:
        params, output = request_pb2.StopParams(strings=["fox"]), request_pb2.OutputParams(text=False)
        text, ids, finished, _ = await streamed(served, a_request(stop=params, output=output))
        assert (text, ids, finished.stop.text) == ("", echo(PROMPT, completing("fox")), "fox")


async def test_a_stop_ends_the_request_in_the_worker() -> None:
    """Also of a detached one that nobody reads; it can be read from any index."""
    async with serving(script={"step_s": 0.002}) as served:
        request = a_request(400, stop=request_pb2.StopParams(strings=["brown"]), request_id="mine")
        await served.generation.AddRequest(generation_service_pb2.AddRequestRequest(request=request))
        await eventually(lambda: served.core.registry.num_live == 0)
        await served.idle()
        assert served.status.generated_tokens < 100
        for index in range(completing("brown") + 1):
            follow = generation_service_pb2.ResultRequest(request_id="mine", from_index=index)
            events = await rest(served.generation.Result(follow))
            text = "".join(event.delta.text for event in events)
            assert "the quick ".endswith(text)
            assert events[-1].finished.stop.text == "brown"


async def test_a_stop_that_the_worker_has_not_heard_of_outlives_it() -> None:
    """The worker stands still with the stop just found: the next one is not sent the request."""
    async with serving(script={"step_s": 0.05}) as served:
        request = a_request(400, stop=request_pb2.StopParams(strings=["brown"]))
        call = served.generation.Generate(generation_service_pb2.GenerateRequest(request=request))
        pid, text = served.worker_pid, ""
        while "quick" not in text:
            text += (await call.read()).delta.text
        (generation,) = served.core.registry.all_live()
        await eventually(lambda: generation.output.stop is not None or generation.ending is not None)
        os.kill(pid, signal.SIGKILL)
        events = await rest(call)
        assert text + "".join(event.delta.text for event in events) == "the quick "
        assert events[-1].finished.stop.text == "brown"


@pytest.mark.parametrize("skip", [False, True])
async def test_echo_is_the_decoding_of_prompt_and_output(*, skip: bool) -> None:
    """Also where the prompt ends inside a character, and where it has special tokens."""
    prompts = [PROMPT, PROMPT[:1], *(PROMPT[:n] for n in range(20, 30))]
    async with serving(script={"step_s": 0}) as served:
        for prompt in prompts:
            output = request_pb2.OutputParams(echo=True, skip_special_tokens=skip)
            text, ids, _, _ = await streamed(served, a_request(7, prompt, output=output))
            assert text == TOKENIZER.decode([*prompt, *ids], skip_special_tokens=skip)


async def test_who_reads_on_gets_the_prompts_text_with_the_first_token_alone() -> None:
    async with serving(script={"step_s": 0}) as served:
        request = a_request(6, output=request_pb2.OutputParams(echo=True), request_id="mine")
        await served.generation.AddRequest(generation_service_pb2.AddRequestRequest(request=request))
        await eventually(lambda: served.core.registry.num_live == 0)
        for index in range(7):
            follow = generation_service_pb2.ResultRequest(request_id="mine", from_index=index)
            events = await rest(served.generation.Result(follow))
            text = "".join(event.delta.text for event in events)
            before = TEXT if index == 0 else ""
            assert text == before + TOKENIZER.decode(PROMPT[index:6])


async def test_as_many_stops_as_may_be_of_any_length_are_taken() -> None:
    async with serving(script={"step_s": 0}) as served:
        stops = ["f", *("f" + str(i).zfill(1023) for i in range(62)), "🦊" * 1024]
        text, _, finished, _ = await streamed(served, a_request(stop=request_pb2.StopParams(strings=stops)))
        assert (text, finished.stop.text) == ("the quick brown ", "f")


@pytest.mark.parametrize(("interval", "count"), [(1, 9), (4, 9), (4, 8), (50, 9), (9, 9), (512, 520), (511, 511)])
async def test_deltas_have_as_many_tokens_as_asked_but_the_last(interval: int, count: int) -> None:
    async with serving(script={"step_s": 0.002}) as served:
        output = request_pb2.OutputParams(stream_interval=interval)
        _, ids, _, deltas = await streamed(served, a_request(count, output=output))
        assert ids == echo(PROMPT, count)
        assert all(delta.num_tokens >= interval for delta in deltas[:-1])
        assert len(deltas) <= -(-count // interval) + 1


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"stop": request_pb2.StopParams(strings=["a", ""])}, "request.stop.strings[1]"),
        ({"stop": request_pb2.StopParams(strings=["a" * 1025])}, "request.stop.strings[0]"),
        ({"stop": request_pb2.StopParams(strings=["a"] * 65)}, "request.stop.strings"),
        ({"output": request_pb2.OutputParams(stream_interval=0)}, "request.output.stream_interval"),
        ({"output": request_pb2.OutputParams(stream_interval=513)}, "request.output.stream_interval"),
        ({"output": request_pb2.OutputParams(echo=True, text=False)}, "request.output.echo"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    async with serving() as served:
        request = generation_service_pb2.GenerateRequest(request=a_request(**fields))
        refused = await refusal(served.generation.Generate(request))
        assert (refused.reason, refused.fields) == ("INVALID_VALUE", (path,))

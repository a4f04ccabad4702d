"""Both clients do the same: each test runs with the blocking one and with the asyncio one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chairlift_client as cl
import grpc
import pytest
from chairlift_client.testing import EOS_TOKEN_ID, FakeServer


class Either:
    """One face for both clients: calls return their result, streams the list of their events."""

    def __init__(self, client_type: type, target: str) -> None:
        self._type = client_type
        self._target = target

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._type is cl.Client:
            with cl.Client(self._target) as client:
                answer = getattr(client, method)(*args, **kwargs)
                return list(answer) if isinstance(answer, cl.EventStream) else answer

        async def run() -> Any:
            async with cl.AsyncClient(self._target) as client:
                answer = getattr(client, method)(*args, **kwargs)
                if isinstance(answer, cl.AsyncEventStream):
                    return [event async for event in answer]
                return await answer

        return asyncio.run(run())


@pytest.fixture(params=[cl.Client, cl.AsyncClient], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, server: FakeServer) -> Either:
    return Either(request.param, server.target)


def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def test_a_stream_is_accepted_then_deltas_then_one_ending(client: Either) -> None:
    events = client.call("generate", [10, 11, 12], max_new_tokens=4, logprobs=1, request_id="r", seed=9)
    accepted, *deltas, finished = events
    assert isinstance(accepted, cl.Accepted)
    assert (accepted.request_id, accepted.prompt_tokens, accepted.max_new_tokens, accepted.seed) == ("r", 3, 4, 9)
    assert [d.index for d in deltas] == [0, 1, 2, 3]
    assert [d.token_ids for d in deltas] == [(10,), (11,), (12,), (10,)]
    assert [d.logprobs[0].chosen for d in deltas] == [0, -0.125, -0.25, -0.375]
    assert deltas[1].logprobs[0].top == ((11, -0.125),)
    assert isinstance(finished, cl.Finished)
    assert (finished.reason, finished.limit) == (cl.FinishReason.LENGTH, cl.LengthLimit.MAX_NEW_TOKENS)
    assert finished.usage == cl.Usage(prompt_tokens=3, cached_tokens=0, generated_tokens=4)


def test_text_is_streamed_in_whole_characters(client: Either) -> None:
    events = client.call("generate", "žluť", max_new_tokens=6, return_token_ids=False)
    deltas = [event for event in events if isinstance(event, cl.Delta)]
    assert "".join(delta.text for delta in deltas) == "žluť"
    assert all(delta.token_ids == () for delta in deltas)


def test_a_stop_token_ends_it_and_is_named(client: Either) -> None:
    result = client.call("complete", [5, EOS_TOKEN_ID, 6], max_new_tokens=9)
    assert (result.token_ids, result.reason) == ((5, EOS_TOKEN_ID), cl.FinishReason.STOP)
    assert result.choices[0].finished.stop_token_id == EOS_TOKEN_ID
    ignoring = client.call("complete", [5, EOS_TOKEN_ID, 6], max_new_tokens=9, ignore_eos=True, stop_token_ids=[6])
    assert ignoring.token_ids == (5, EOS_TOKEN_ID, 6)


def test_a_refusal_is_raised_with_its_field(client: Either) -> None:
    with pytest.raises(cl.InvalidRequestError) as caught:
        client.call("generate", [1, 300])
    assert caught.value.reason == "UNKNOWN_TOKEN_ID"
    assert caught.value.field_violations[0].field == "request.token_ids.ids[1]"
    with pytest.raises(cl.InvalidRequestError) as caught:
        client.call("add_requests", [([1], {}), ([], {})])
    assert caught.value.field_violations[0].field == "requests[1].token_ids"


def test_an_id_in_use_is_refused(client: Either, server: FakeServer) -> None:
    server.allow_tokens(0)
    client.call("add_request", "a", request_id="x")
    with pytest.raises(cl.DuplicateRequestError):
        client.call("add_request", "b", request_id="x")


def test_an_added_request_is_read_from_any_index_and_let_go(client: Either, server: FakeServer) -> None:
    client.call("add_request", [1, 2, 3], request_id="x", max_new_tokens=5)
    whole = client.call("result", "x")
    assert [e.event.token_ids[0] for e in whole if isinstance(e.event, cl.Delta)] == [1, 2, 3, 1, 2]
    rest = client.call("result", "x", from_index=3)
    assert [e.event.token_ids[0] for e in rest if isinstance(e.event, cl.Delta)] == [1, 2]
    assert client.call("cancel", "x", "y") == {"x": cl.CancelStatus.ALREADY_FINISHED, "y": cl.CancelStatus.NOT_FOUND}
    with pytest.raises(cl.NotFoundError):
        client.call("result", "x")
    assert server.request_ids == []


def test_a_deadline_is_an_error_of_its_own(client: Either, server: FakeServer) -> None:
    server.allow_tokens(1)
    for method in ("generate", "complete"):
        with pytest.raises(cl.DeadlineExceededError):
            client.call(method, "abc", timeout=0.2)
    eventually(lambda: server.request_ids == [])


def test_text_and_ids_turn_into_each_other(client: Either) -> None:
    tokens = client.call("tokenize", "Hi")
    assert tokens == cl.Tokens(token_ids=(72, 105), tokens=("<0x48>", "<0x69>"))
    assert client.call("detokenize", [72, 105, EOS_TOKEN_ID]) == "Hi"


def test_server_model_and_health_are_told(client: Either, server: FakeServer) -> None:
    assert client.call("get_model").vocab_size == 257
    info = client.call("get_server")
    assert (info.state, info.statistics["requests_held"]) == (cl.ServerState.SERVING, 0)
    assert client.call("health") is cl.HealthStatus.SERVING
    server.set_serving(serving=False)
    assert client.call("health") is cl.HealthStatus.NOT_SERVING


@pytest.mark.parametrize("method", ["generate", "get_model", "health"])
def test_safe_calls_are_repeated_when_refused_for_a_while(client: Either, server: FakeServer, method: str) -> None:
    name = {"generate": "Generate", "get_model": "GetModel", "health": "Check"}[method]
    for _ in range(2):
        server.fail_next(name, grpc.StatusCode.UNAVAILABLE, "not yet", retry_after=0.01)
    client.call(method, *(["a"] if method == "generate" else []))


@pytest.mark.parametrize("method", ["add_request", "complete"])
def test_calls_that_could_run_twice_are_never_repeated(client: Either, server: FakeServer, method: str) -> None:
    name = {"add_request": "AddRequest", "complete": "Complete"}[method]
    server.fail_next(name, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after=2)
    with pytest.raises(cl.OverloadedError) as caught:
        client.call(method, "a")
    assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 2.0)


def test_nobody_at_the_address_is_unavailable(tmp_path: Any) -> None:
    with cl.Client(f"unix:{tmp_path}/none") as client, pytest.raises(cl.UnavailableError):
        client.complete("a", timeout=10)


def test_leaving_a_blocking_stream_cancels_its_request(server: FakeServer) -> None:
    server.allow_tokens(2)
    with cl.Client(server.target) as client:
        with client.generate("abc", request_id="left") as events:
            assert [type(next(events)) for _ in range(3)] == [cl.Accepted, cl.Delta, cl.Delta]
            assert server.request_ids == ["left"]
        eventually(lambda: server.request_ids == [])
        assert list(events) == []


def test_dropping_a_blocking_stream_cancels_its_request(server: FakeServer) -> None:
    server.allow_tokens(1)
    with cl.Client(server.target) as client:
        events = client.generate("abc", request_id="dropped")
        next(events)
        del events
        eventually(lambda: server.request_ids == [])


def test_leaving_an_async_stream_and_cancelling_its_task_cancel_the_request(server: FakeServer) -> None:
    server.allow_tokens(1)

    async def run() -> None:
        async with cl.AsyncClient(server.target) as client:
            async with client.generate("abc") as events:
                await anext(events)
                assert len(server.request_ids) == 1
            await asyncio.to_thread(eventually, lambda: server.request_ids == [])

            task = asyncio.create_task(client.complete("abc"))
            await asyncio.to_thread(eventually, lambda: len(server.request_ids) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(eventually, lambda: server.request_ids == [])

    asyncio.run(run())


def test_one_request_of_a_session_can_fail_while_the_others_go_on(client: Either, server: FakeServer) -> None:
    server.allow_tokens(1)
    for name in ("good", "bad"):
        client.call("add_request", "ab", request_id=name, session="s", max_new_tokens=2)
    server.fail_request("bad", grpc.StatusCode.INTERNAL, "NaN", reason="NUMERICAL_ERROR")
    server.allow_tokens(None)
    events = []
    with cl.Client(server.target) as blocking, blocking.result(session="s") as stream:
        for event in stream:
            events.append(event)
            if {e.request_id for e in events if isinstance(e.event, cl.Finished | cl.Failed)} == {"good", "bad"}:
                break
    (failed,) = (e for e in events if isinstance(e.event, cl.Failed))
    assert failed.request_id == "bad"
    assert isinstance(failed.event.error, cl.NumericalError)


class EitherAdmin:
    """Calls of the blocking or of the asyncio admin client."""

    def __init__(self, kind: str, target: str) -> None:
        self._kind = kind
        self._target = target

    def call(self, method: str, *args: Any) -> Any:
        if self._kind == "blocking":
            with cl.AdminClient(self._target) as admin:
                return getattr(admin, method)(*args, timeout=10)

        async def run() -> Any:
            async with cl.AsyncAdminClient(self._target) as admin:
                return await getattr(admin, method)(*args, timeout=10)

        return asyncio.run(run())


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_the_admin_calls_have_clients_of_their_own(kind: str, server: FakeServer) -> None:
    admin = EitherAdmin(kind, server.target)
    assert admin.call("flush_prefix_cache") == 0
    server.allow_tokens(1)
    with cl.Client(server.target) as client:
        client.add_request("abc", max_new_tokens=3, request_id="r")
        assert admin.call("pause") == 1
        assert client.get_server().state is cl.ServerState.PAUSED
        server.allow_tokens(None)
        client.add_request("abc", request_id="queued")
        assert admin.call("update_weights", Path("/new")) == cl.WeightsUpdate(0, 2, 0)
        with pytest.raises(cl.PreconditionError) as caught:
            admin.call("pause")
        assert caught.value.reason == "WRONG_STATE"
        with pytest.raises(cl.InvalidRequestError):
            admin.call("update_weights", "relative")
        admin.call("resume")
        assert client.get_server().state is cl.ServerState.SERVING
        assert [e.event.index for e in client.result("r") if isinstance(e.event, cl.Delta)] == [0, 1, 2]
        client.complete("abc")
        client.cancel("r", "queued")
        server.allow_tokens(0)
        client.add_request("abc", request_id="stopped")
        assert admin.call("stop") == 1
        with pytest.raises(cl.UnavailableError) as caught_stop:
            list(client.result("stopped"))
        assert caught_stop.value.reason == "STOPPED"
        with pytest.raises(cl.UnavailableError):
            client.add_request("abc")
        admin.call("resume")
        server.allow_tokens(None)
        admin.call("drain")
        with pytest.raises(cl.PreconditionError) as caught:
            client.add_request("abc")
        assert caught.value.reason == "DRAINING"


def test_several_choices_come_in_one_stream_and_in_one_answer(client: Either) -> None:
    accepted, *events = client.call("generate", [10, 11, 12], max_new_tokens=4, num_choices=3, temperature=1.0)
    assert accepted.num_choices == 3
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        if isinstance(event, cl.Delta):
            assert event.index == len(outputs[event.choice])
            outputs[event.choice] += event.token_ids
    assert sorted(event.choice for event in events if isinstance(event, cl.Finished)) == [0, 1, 2]
    assert outputs == {0: [10, 11, 12, 10], 1: [11, 12, 10, 11], 2: [12, 10, 11, 12]}
    whole = client.call("complete", [10, 11, 12], max_new_tokens=4, num_choices=3)
    assert [list(choice.token_ids) for choice in whole.choices] == list(outputs.values())
    assert whole.token_ids == (10, 11, 12, 10)
    with pytest.raises(cl.InvalidRequestError) as refused:
        client.call("complete", [10], num_choices=129)
    assert [violation.field for violation in refused.value.field_violations] == ["request.num_choices"]


@pytest.mark.parametrize("count", [0, 2])
def test_a_prompt_has_log_probabilities_but_for_its_first_token(client: Either, count: int) -> None:
    whole = client.call("complete", [10, 11, 12], max_new_tokens=count, prompt_logprobs=2)
    first, second, third = whole.choices[0].prompt_logprobs
    assert first is None
    assert (second, third.chosen) == (cl.TokenLogprobs(chosen=-0.125, top=((11, -0.125), (12, -8.125))), -0.25)
    assert len(whole.token_ids) == count
    deltas = list(client.call("generate", [10, 11], max_new_tokens=count, prompt_logprobs=1))[1:-1]
    assert deltas[0].prompt_logprobs == (None, cl.TokenLogprobs(chosen=-0.125, top=((11, -0.125),)))
    assert (deltas[0].num_tokens, deltas[0].prompt_index) == (0, 0)
    assert not any(delta.prompt_logprobs for delta in deltas[1:])


def test_choices_of_an_added_request_are_read_from_any_index(client: Either) -> None:
    client.call("add_request", [10, 11, 12], max_new_tokens=4, num_choices=2, request_id="r", session="s")
    for index in (0, 3, 4):
        events = [each.event for each in client.call("result", "r", from_index=index)]
        deltas = [event for event in events if isinstance(event, cl.Delta)]
        ids = {n: [t for d in deltas if d.choice == n for t in d.token_ids] for n in (0, 1)}
        assert ids == {0: [10, 11, 12, 10][index:], 1: [11, 12, 10, 11][index:]}

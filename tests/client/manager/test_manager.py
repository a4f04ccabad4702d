from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import chairlift_client as cl
import grpc
import pytest
from chairlift_client import GenerationConfig, RequestStatus, connect
from chairlift_client.manager import _session
from chairlift_client.testing import EOS_TOKEN_ID, FakeServer


@pytest.fixture
def model(server: FakeServer) -> cl.RemoteModel:
    return connect(server.target)


@pytest.fixture
def manager(model: cl.RemoteModel) -> Iterator[cl.ContinuousBatchingManager]:
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=4))
    manager.start()
    yield manager
    if manager.is_running():
        manager.stop(hard_stop=True)
    manager.destroy()


def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def test_a_batch_comes_back_whole_and_in_order(model: cl.RemoteModel, server: FakeServer) -> None:
    inputs = [[3, 2, 1], [7], [5, 6]]
    outputs = model.generate_batch(inputs, GenerationConfig(max_new_tokens=4))
    assert [o.prompt_ids for o in outputs.values()] == inputs
    assert [o.generated_tokens for o in outputs.values()] == [[3, 2, 1, 3], [7, 7, 7, 7], [5, 6, 5, 6]]
    assert all(o.request_id == key and o.status == RequestStatus.FINISHED for key, o in outputs.items())
    eventually(lambda: server.request_ids == [])


def test_an_empty_batch_calls_nobody() -> None:
    assert connect("127.0.0.1:1").generate_batch([]) == {}


def test_a_batch_with_an_invalid_prompt_is_refused_whole(model: cl.RemoteModel, server: FakeServer) -> None:
    with pytest.raises(cl.InvalidRequestError) as caught:
        model.generate_batch([[1], [999]])
    assert caught.value.field_violations[0].field == "requests[1].token_ids.ids[0]"
    assert server.request_ids == []


def test_a_batch_waits_for_room_in_a_full_service(model: cl.RemoteModel, server: FakeServer) -> None:
    full = {"reason": "QUEUE_FULL", "retry_after": 0.05}
    for method in ("AddRequests", "AddRequests", "AddRequest"):
        server.fail_next(method, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", **full)
    outputs = model.generate_batch([[i] for i in range(5)], max_new_tokens=1)
    assert [o.generated_tokens for o in outputs.values()] == [[0], [1], [2], [3], [4]]


def test_a_message_too_large_for_any_wait_is_an_error_at_once(model: cl.RemoteModel, server: FakeServer) -> None:
    server.fail_next("AddRequest", grpc.StatusCode.RESOURCE_EXHAUSTED, "too large")
    with pytest.raises(cl.OverloadedError):
        model.generate_batch([[1]])


def test_iteration_hands_out_everything_and_then_ends(manager: cl.ContinuousBatchingManager) -> None:
    ids = [manager.add_request([1], request_id="mine"), *manager.add_requests([[2], [3]], max_new_tokens=1)]
    results = {result.request_id: result.generated_tokens for result in manager}
    assert results == dict(zip(ids, [[1, 1, 1, 1], [2], [3]], strict=True))
    assert list(manager) == []


def test_ids_of_two_managers_never_meet(model: cl.RemoteModel) -> None:
    with model.continuous_batching_context_manager() as one, model.continuous_batching_context_manager() as other:
        assert set(one.add_requests([[1], [2]])).isdisjoint(other.add_requests([[1], [2]]))


def test_get_result_of_one_request_leaves_the_others(manager: cl.ContinuousBatchingManager) -> None:
    for name in ("a", "b", "c"):
        manager.add_request([ord(name)], request_id=name)
    found = manager.get_result(request_id="c", timeout=5)
    assert found is not None
    assert (found.request_id, found.generated_tokens) == ("c", [99] * 4)
    assert {r.request_id for r in manager} == {"a", "b"}
    assert manager.get_result(request_id="c") is None
    assert manager.get_result(request_id="never added") is None


def test_get_result_gives_up_after_its_timeout(manager: cl.ContinuousBatchingManager, server: FakeServer) -> None:
    server.allow_tokens(0)
    manager.add_request([1], request_id="slow")
    for kwargs in ({}, {"request_id": "slow"}):
        began = time.monotonic()
        assert manager.get_result(timeout=0.2, **kwargs) is None
        assert 0.2 <= time.monotonic() - began < 2
    server.allow_tokens(None)
    assert manager.get_result(timeout=5) is not None


def test_a_streaming_request_gives_each_token_once_and_ends_with_the_last(
    manager: cl.ContinuousBatchingManager, server: FakeServer
) -> None:
    server.allow_tokens(2)
    manager.add_request([1, 2, 3], request_id="s", streaming=True, record_timestamps=True)
    chunks = manager.request_id_iter("s")
    first = [next(chunks), next(chunks)]
    assert [c.generated_tokens for c in first] == [[1], [1, 2]]
    assert all(c.status == RequestStatus.DECODING for c in first)
    server.allow_tokens(None)
    rest = list(chunks)
    assert [c.generated_tokens for c in rest] == [[1, 2, 3], [1, 2, 3, 1]]
    assert [c.status for c in rest] == [RequestStatus.DECODING, RequestStatus.FINISHED]
    assert rest[-1].finish_reason is cl.FinishReason.LENGTH
    assert rest[-1].timestamps is not None
    assert len(rest[-1].timestamps) == 4


def test_a_stream_that_ends_with_eos_gives_that_token_once(manager: cl.ContinuousBatchingManager) -> None:
    manager.add_request([1, EOS_TOKEN_ID], request_id="s", streaming=True)
    chunks = [(c.generated_tokens, c.status) for c in manager.request_id_iter("s")]
    assert chunks == [([1], RequestStatus.DECODING), ([1, EOS_TOKEN_ID], RequestStatus.FINISHED)]


def test_a_stream_that_ends_with_a_stop_string_gives_its_last_token_once(model: cl.RemoteModel) -> None:
    config = GenerationConfig(max_new_tokens=9, stop_strings=["bc"])
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        manager.add_request(list(b"abcd"), request_id="s", streaming=True)
        chunks = [(bytes(c.generated_tokens), c.status) for c in manager.request_id_iter("s")]
    assert chunks == [
        (b"a", RequestStatus.DECODING),
        (b"ab", RequestStatus.DECODING),
        (b"abc", RequestStatus.FINISHED),
    ]


def test_eos_of_the_configuration_replaces_the_models(model: cl.RemoteModel) -> None:
    inputs = [[1, EOS_TOKEN_ID, 2]]

    def generated(eos: int | list[int] | None) -> list[int]:
        outputs = model.generate_batch(inputs, GenerationConfig(max_new_tokens=5, eos_token_id=eos))
        return next(iter(outputs.values())).generated_tokens

    assert generated(None) == [1, EOS_TOKEN_ID]
    assert generated(2) == [1, EOS_TOKEN_ID, 2]
    assert generated([2, EOS_TOKEN_ID]) == [1, EOS_TOKEN_ID]
    assert generated(-1) == [1, EOS_TOKEN_ID, 2, 1, EOS_TOKEN_ID]


def test_a_cancelled_request_is_handed_out_with_what_it_had(
    manager: cl.ContinuousBatchingManager, server: FakeServer
) -> None:
    server.allow_tokens(2)
    manager.add_request([1, 2, 3], request_id="x", streaming=True)
    chunks = manager.request_id_iter("x")
    assert [next(chunks).generated_tokens, next(chunks).generated_tokens] == [[1], [1, 2]]
    manager.cancel_request(request_id="x")
    (last,) = list(chunks)
    assert (last.generated_tokens, last.status) == ([1, 2], RequestStatus.FINISHED)
    assert last.finish_reason is cl.FinishReason.CANCELLED


def test_stop_refuses_new_requests_and_finishes_those_added(
    manager: cl.ContinuousBatchingManager, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.allow_tokens(0)
    manager.add_request([1], request_id="before")
    threading.Timer(0.3, server.allow_tokens, [None]).start()
    stopping = threading.Thread(target=manager.stop)
    stopping.start()
    eventually(lambda: manager._submitter.refusal is not None)
    with caplog.at_level(logging.WARNING):
        assert manager.add_request([2]) is None
        assert manager.add_requests([[2]]) == []
    assert "stopped" in caplog.text
    stopping.join(10)
    assert not manager.is_running()
    assert [r.generated_tokens for r in manager] == [[1, 1, 1, 1]]
    assert manager.get_result() is None


def test_stop_that_does_not_block_lets_the_rest_finish_behind_it(
    manager: cl.ContinuousBatchingManager, server: FakeServer
) -> None:
    server.allow_tokens(0)
    manager.add_request([1])
    manager.stop(block=False)
    assert manager.is_running()
    manager.stop(timeout=0.1)
    assert manager.is_running()
    server.allow_tokens(None)
    eventually(lambda: not manager.is_running())
    assert [r.generated_tokens for r in manager] == [[1, 1, 1, 1]]


def test_a_hard_stop_fails_what_is_under_way(manager: cl.ContinuousBatchingManager, server: FakeServer) -> None:
    server.allow_tokens(1)
    manager.add_request([1], request_id="x", streaming=True)
    assert manager.get_result(timeout=5) is not None
    manager.stop(hard_stop=True)
    assert not manager.is_running()
    result = manager.get_result()
    assert result is not None
    assert (result.status, result.generated_tokens) == (RequestStatus.FAILED, [1])
    assert "RuntimeError" in (result.error or "")
    manager.destroy()
    assert server.request_ids == []


def test_a_manager_starts_again_after_stop_and_never_after_destroy(manager: cl.ContinuousBatchingManager) -> None:
    for _ in range(3):
        assert manager.add_request([1], request_id="again") == "again"
        assert [r.request_id for r in manager] == ["again"]
        manager.stop()
        manager.start()
    manager.destroy()
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()
    assert manager.add_request([1]) is None


def test_stop_and_start_in_the_wrong_state_only_warn(model: cl.RemoteModel, caplog: pytest.LogCaptureFixture) -> None:
    manager = model.init_continuous_batching()
    with caplog.at_level(logging.WARNING):
        manager.stop()
        manager.start()
        manager.start()
    assert [r.message for r in caplog.records] == ["Manager not started.", "Manager thread is already running."]
    manager.destroy()


def test_requests_added_before_start_are_received_after_it(model: cl.RemoteModel) -> None:
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=2))
    manager.add_request([4], request_id="early")
    assert manager.get_result() is None
    manager.start()
    assert [r.generated_tokens for r in manager] == [[4, 4]]
    manager.destroy()


def test_destroy_leaves_nothing_in_the_service_and_the_service_alone(model: cl.RemoteModel, server: FakeServer) -> None:
    with model.continuous_batching_context_manager() as manager:
        manager.add_requests([[1], [2]])
    assert server.request_ids == []
    assert model.generate_batch([[1]], max_new_tokens=1)


def test_a_persistent_manager_serves_the_next_session(model: cl.RemoteModel) -> None:
    with model.continuous_batching_context_manager(persistent_manager=True) as first:
        pass
    with model.continuous_batching_context_manager(persistent_manager=True) as second:
        assert second is first
        second.add_request([1], max_new_tokens=1)
        assert [r.generated_tokens for r in second] == [[1]]
    model.destroy_cached_continuous_batching_manager()
    with model.continuous_batching_context_manager() as third:
        assert third is not first


def test_an_id_in_use_is_refused_and_leaves_the_first_alone(
    manager: cl.ContinuousBatchingManager, server: FakeServer
) -> None:
    server.allow_tokens(0)
    manager.add_request([1], request_id="x")
    with pytest.raises(ValueError, match="'x' is in use"):
        manager.add_request([2], request_id="x")
    with cl.Client(server.target) as other:
        other.add_request("a", request_id="theirs")
    with pytest.raises(cl.DuplicateRequestError):
        manager.add_request([2], request_id="theirs")
    server.allow_tokens(None)
    assert [(r.request_id, r.generated_tokens) for r in manager] == [("x", [1, 1, 1, 1])]


def test_a_request_that_fails_shows_the_services_reason(
    manager: cl.ContinuousBatchingManager, server: FakeServer
) -> None:
    server.allow_tokens(1)
    manager.add_requests([[1], [2]])
    bad = server.request_ids[0]
    server.fail_request(bad, grpc.StatusCode.INTERNAL, "not a number", reason="NUMERICAL_ERROR")
    server.allow_tokens(None)
    results = {r.request_id: r for r in manager}
    assert results[bad].status == RequestStatus.FAILED
    assert results[bad].error == "INTERNAL (NUMERICAL_ERROR): not a number"
    assert sum(r.status == RequestStatus.FINISHED for r in results.values()) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_broken_stream_loses_and_doubles_no_token(
    manager: cl.ContinuousBatchingManager, server: FakeServer, times: int
) -> None:
    server.allow_tokens(0)
    manager.add_request([1, 2, 3], request_id="s", streaming=True, max_new_tokens=2 * times + 2)
    manager.add_request([8, 9], request_id="t", max_new_tokens=2 * times + 2)
    chunks = manager.request_id_iter("s")
    seen = []
    for i in range(times):
        server.allow_tokens(2 * i + 2)
        seen += [next(chunks).generated_tokens[-1], next(chunks).generated_tokens[-1]]
        server.break_streams()
    server.allow_tokens(None)
    seen += [c.generated_tokens[-1] for c in chunks]
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2][: 2 * times + 2]
    (other,) = list(manager)
    assert other.generated_tokens == [8, 9] * (times + 1)


def test_a_service_that_comes_back_without_its_requests_fails_them(
    manager: cl.ContinuousBatchingManager, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_session, "_REPLAY_TIMEOUT", 0.3)
    server.allow_tokens(1)
    manager.add_request([1], request_id="x")
    eventually(lambda: server.request_ids == ["x"])
    server.forget_requests()
    server.break_streams()
    (result,) = list(manager)
    assert (result.status, "no longer knows" in (result.error or "")) == (RequestStatus.FAILED, True)
    server.allow_tokens(None)
    assert manager.add_request([2], request_id="next") == "next"
    assert [r.generated_tokens for r in manager] == [[2, 2, 2, 2]]


def test_a_service_that_stays_away_ends_the_session(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    model = cl.RemoteModel(server.target, reconnect_timeout=0.5)
    manager = model.init_continuous_batching()
    manager.start()
    server.allow_tokens(1)
    manager.add_request([1], request_id="x")
    server.stop()
    (result,) = list(manager)
    assert result.status == RequestStatus.FAILED
    eventually(lambda: not manager.is_running())
    assert manager.add_request([1]) is None
    assert manager.get_result() is None
    manager.destroy()


def test_a_second_reader_ends_the_session(manager: cl.ContinuousBatchingManager, server: FakeServer) -> None:
    server.allow_tokens(1)
    manager.add_request([1])
    server.fail_next("Result", grpc.StatusCode.ABORTED, "taken over", reason="READER_REPLACED")
    server.break_streams()
    (result,) = list(manager)
    assert "READER_REPLACED" in (result.error or "")


def test_an_id_is_free_again_once_it_was_handed_out(manager: cl.ContinuousBatchingManager) -> None:
    for i in range(20):
        assert manager.add_request([i], request_id="same", max_new_tokens=1) == "same"
        result = manager.get_result(request_id="same", timeout=5)
        assert result is not None
        assert (result.generated_tokens, result.status) == ([i], RequestStatus.FINISHED)


def test_many_threads_share_a_manager(manager: cl.ContinuousBatchingManager) -> None:
    wrong: list[object] = []

    def one(i: int) -> None:
        for j in range(5):
            name = f"{i}-{j}"
            manager.add_request([i, j], request_id=name, streaming=j % 2 == 0)
            last = list(manager.request_id_iter(name))[-1]
            if last.generated_tokens != [i, j, i, j]:
                wrong.append(last)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong

from __future__ import annotations

import pytest
from chairlift.v1 import event_pb2
from chairlift_client import FinishReason, RequestStatus
from chairlift_client.manager._request import TrackedRequest


def tracked(*, streaming: bool = True, stops: tuple[int, ...] = (9,)) -> TrackedRequest:
    return TrackedRequest(
        request_id="r", prompt_ids=[1], streaming=streaming, record_timestamps=False, stop_token_ids=stops
    )


def delta(index: int, *ids: int, state: int = event_pb2.REQUEST_STATE_DECODING) -> event_pb2.Delta:
    return event_pb2.Delta(index=index, num_tokens=len(ids), token_ids=ids, state=state)


def drain(request: TrackedRequest) -> list[list[int]]:
    outputs = []
    while request.has_output() and not (outputs and outputs[-1].is_finished()):
        outputs.append(request.next_output())
    return [output.generated_tokens for output in outputs]


def test_tokens_that_come_again_are_dropped_by_their_index() -> None:
    request = tracked()
    request.extend(delta(0, 1, 2, 3))
    request.extend(delta(0, 1))
    request.extend(delta(1, 2, 3, 4))
    request.extend(delta(4, 5))
    assert drain(request)[-1] == [1, 2, 3, 4, 5]


def test_a_gap_is_an_error_rather_than_a_shorter_answer() -> None:
    request = tracked()
    request.extend(delta(0, 1))
    with pytest.raises(ValueError, match="missing"):
        request.extend(delta(2, 3))


def test_a_joined_delta_is_handed_out_token_by_token() -> None:
    request = tracked()
    request.extend(delta(0, 1, 2, 3))
    assert drain(request) == [[1], [1, 2], [1, 2, 3]]


def test_only_a_token_that_may_be_the_last_is_held_back() -> None:
    request = tracked(stops=(9,))
    request.accept(event_pb2.Accepted(max_new_tokens=4))
    request.extend(delta(0, 1))
    assert drain(request) == [[1]]
    request.extend(delta(1, 9))  # a stop
    assert drain(request) == []
    request.extend(delta(2, 3))  # not obeyed, so it was none
    assert drain(request) == [[1, 9], [1, 9, 3]]
    request.extend(delta(3, 4))  # the fourth of four
    assert drain(request) == []
    request.finish(event_pb2.Finished(reason=event_pb2.FINISH_REASON_LENGTH))
    assert drain(request) == [[1, 9, 3, 4]]


def test_the_ending_alone_ends_it_whatever_state_the_last_tokens_tell() -> None:
    request = tracked(streaming=False)
    request.extend(delta(0, 1, state=event_pb2.REQUEST_STATE_FINISHED))
    assert not request.is_over
    request.finish(event_pb2.Finished(reason=event_pb2.FINISH_REASON_STOP))
    output = request.next_output()
    assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, FinishReason.STOP)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (event_pb2.REQUEST_STATE_WAITING, RequestStatus.PENDING),
        (event_pb2.REQUEST_STATE_PREFILLING, RequestStatus.PREFILLING),
        (event_pb2.REQUEST_STATE_DECODING, RequestStatus.DECODING),
        (event_pb2.REQUEST_STATE_SWAPPED, RequestStatus.PENDING),
    ],
)
def test_states_are_shown_in_the_documents_words(state: int, status: RequestStatus) -> None:
    request = tracked()
    request.accept(event_pb2.Accepted(max_new_tokens=4, state=state))
    assert request._status == status


def test_an_ending_stays_what_it_was() -> None:
    request = tracked(streaming=False)
    request.fail("first")
    request.finish(event_pb2.Finished(reason=event_pb2.FINISH_REASON_STOP))
    request.fail("second")
    output = request.next_output()
    assert (output.status, output.error) == (RequestStatus.FAILED, "first")

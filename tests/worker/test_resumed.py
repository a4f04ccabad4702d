"""A request whose worker is gone, in the next one: its state is what that of an evicted request would be."""

from __future__ import annotations

from array import array

from chairlift_worker.ipc.messages import AddRequestMsg, ResumedMsg, SamplingMsg, decode_request, encode
from chairlift_worker.request import Request, RequestState

SAMPLING = SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def message(resumed: ResumedMsg | None) -> AddRequestMsg:
    return AddRequestMsg(
        uid=7,
        prompt=array("i", [5, 6, 7]).tobytes(),
        max_new_tokens=10,
        sampling=SAMPLING,
        stop_ids=(2,),
        logprobs=False,
        arrival_ns=100,
        deadline_ns=0,
        resumed=resumed,
    )


def test_tokens_so_far_are_output_that_is_yet_to_be_computed_again() -> None:
    before = ResumedMsg(
        generated=array("i", [8, 9]).tobytes(), cached_tokens=1, started_ns=200, first_token_ns=300, preemptions=2
    )
    sent = message(before)
    assert decode_request(encode(sent)) == sent
    request = Request(sent)
    assert (list(request.tokens), request.prompt_len, request.num_generated) == ([5, 6, 7, 8, 9], 3, 2)
    assert (request.computed, request.state) == (0, RequestState.WAITING)
    assert request.max_total == 3 + 10 - 1  # as it was
    progress = request.progress
    assert (progress.started_ns, progress.first_token_ns, progress.cached_tokens) == (200, 300, 1)
    assert progress.preemptions == 2
    assert progress.announced  # the service knows


def test_one_that_had_not_started_is_announced_when_it_does() -> None:
    before = ResumedMsg(generated=b"", cached_tokens=0, started_ns=0, first_token_ns=0, preemptions=0)
    assert not Request(message(before)).progress.announced
    assert not Request(message(None)).progress.announced

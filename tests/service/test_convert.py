"""Conversions between the API's messages and the worker's."""

from __future__ import annotations

import math
import struct
from array import array

import msgspec
import pytest
from chairlift.v1 import event_pb2, info_service_pb2
from chairlift_service import convert
from chairlift_service.errors import Reason
from chairlift_service.validate import ValidRequest
from chairlift_worker.ipc.messages import (
    NO_DEADLINE,
    EndingMsg,
    EndingReason,
    ModelCardMsg,
    SamplingMsg,
    SettingMsg,
    decode_request,
    encode,
)

DECODING = event_pb2.REQUEST_STATE_DECODING


def request(**changes: object) -> ValidRequest:
    fields = {
        "request_id": "mine",
        "session": None,
        "prompt_ids": array("i", [5, 2**31 - 1]),
        "max_new_tokens": 10,
        "limit": event_pb2.LENGTH_LIMIT_CACHE,
        "lowered_by": event_pb2.LENGTH_LIMIT_CACHE,
        "sampling": SamplingMsg(temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, seed=2**64 - 1),
        "stop_ids": (7, 8),
        "want_text": True,
        "want_ids": True,
        "want_logprobs": True,
        "skip_special_tokens": True,
    }
    return ValidRequest(**(fields | changes))


def ending(reason: EndingReason, **changes: object) -> EndingMsg:
    message = EndingMsg(
        uid=1,
        reason=reason,
        error="",
        queued_ns=1_500_000_000,
        prefill_ns=2,
        decode_ns=3_000_000_001,
        swapped_ns=0,
        preemptions=2,
        cached_tokens=1,
    )
    return msgspec.structs.replace(message, **changes)


def test_a_request_reaches_the_worker_whole() -> None:
    sent = convert.add_request_msg(request(priority=-7), uid=9, arrival_ns=11, deadline_ns=12)
    got = decode_request(encode(sent))
    assert struct.unpack("=2i", got.prompt) == (5, 2**31 - 1)
    assert (got.uid, got.max_new_tokens, got.stop_ids, got.logprobs) == (9, 10, (7, 8), True)
    assert (got.arrival_ns, got.deadline_ns, got.priority) == (11, 12, -7)
    assert got.sampling == SamplingMsg(temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, seed=2**64 - 1)


def test_accepted_tells_what_holds() -> None:
    got = convert.accepted(request(), state=event_pb2.REQUEST_STATE_WAITING)
    assert (got.request_id, got.prompt_tokens, got.max_new_tokens, got.seed) == ("mine", 2, 10, 2**64 - 1)
    assert (got.lowered_by, got.state) == (event_pb2.LENGTH_LIMIT_CACHE, event_pb2.REQUEST_STATE_WAITING)
    s = got.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p) == (0.5, 4, 0.75, 0.25)
    assert not got.HasField("cached_tokens"), "it has not started"


def test_no_cached_tokens_are_told_from_not_started() -> None:
    got = convert.accepted(request(), state=DECODING, cached_tokens=0)
    assert got.HasField("cached_tokens")


def test_greedy_sampling_is_told_as_zero_and_not_left_unset() -> None:
    greedy = SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    got = convert.accepted(request(sampling=greedy), state=DECODING).sampling
    assert got.HasField("temperature")
    assert got.temperature == 0


def delta(**changes: object) -> event_pb2.Delta:
    return convert.delta(
        request(**changes), index=3, token_ids=[1, 2], text="ab", logprobs=[-0.5, -1.0], state=DECODING
    )


def test_a_delta_has_the_forms_that_were_asked_for() -> None:
    full = delta()
    assert (full.index, full.num_tokens, full.text, list(full.token_ids), full.state) == (3, 2, "ab", [1, 2], DECODING)
    assert [(entry.chosen, entry.top[0].token_id, entry.top[0].logprob) for entry in full.logprobs] == [
        (-0.5, 1, -0.5),
        (-1.0, 2, -1.0),
    ]
    assert delta(want_text=False).text == ""
    assert list(delta(want_ids=False).token_ids) == []
    assert delta(want_ids=False).num_tokens == 2
    assert list(delta(want_logprobs=False).logprobs) == []


def test_a_delta_needs_as_many_logprobs_as_tokens() -> None:
    with pytest.raises(ValueError, match="shorter"):
        convert.delta(request(), index=0, token_ids=[1, 2], text="", logprobs=[-0.5], state=DECODING)


def test_a_stop_is_told_with_its_token() -> None:
    got = convert.finished(request(), ending(EndingReason.STOP), generated_tokens=4, last_token_id=7)
    assert (got.reason, got.stop.token_id) == (event_pb2.FINISH_REASON_STOP, 7)
    assert got.limit == event_pb2.LENGTH_LIMIT_UNSPECIFIED
    usage, timings = got.usage, got.timings
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (2, 1, 4)
    assert (timings.queued.seconds, timings.queued.nanos) == (1, 500_000_000)
    assert timings.prefill.ToNanoseconds() == 2
    assert (timings.decode.seconds, timings.decode.nanos) == (3, 1)
    assert timings.HasField("swapped")
    assert timings.preemptions == 2


def test_a_full_length_is_told_with_its_limit() -> None:
    got = convert.finished(request(), ending(EndingReason.LENGTH), generated_tokens=10, last_token_id=7)
    assert (got.reason, got.limit) == (event_pb2.FINISH_REASON_LENGTH, event_pb2.LENGTH_LIMIT_CACHE)
    assert not got.HasField("stop")


def test_a_cancelled_request_may_have_no_tokens() -> None:
    got = convert.finished(request(), ending(EndingReason.CANCELLED), generated_tokens=0, last_token_id=None)
    assert got.reason == event_pb2.FINISH_REASON_CANCELLED
    assert convert.ending_error(ending(EndingReason.CANCELLED)) is None


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (ending(EndingReason.DEADLINE), Reason.DEADLINE_EXCEEDED),
        (ending(EndingReason.ERROR, error="NUMERICAL_ERROR: NaN"), Reason.NUMERICAL_ERROR),
        (ending(EndingReason.ERROR, error="?"), Reason.INTERNAL),
    ],
)
def test_a_bad_ending_is_an_error_and_never_finished(end: EndingMsg, reason: Reason) -> None:
    error = convert.ending_error(end)
    assert error is not None
    assert error.reason is reason
    with pytest.raises(ValueError, match=end.reason.name):
        convert.finished(request(), end, generated_tokens=1, last_token_id=1)


@pytest.mark.parametrize(
    ("remaining", "expected"),
    [
        (None, NO_DEADLINE),
        (math.inf, NO_DEADLINE),
        (1.5, 1_500_000_100),
        (0.0, 100),
        (-1.0, 1),  # passed: no more than "none" would be wrong
        (1e12, 2**63 - 1),
    ],
)
def test_a_deadline_is_a_time_of_the_clock_that_both_processes_share(remaining: float | None, expected: int) -> None:
    assert convert.deadline_ns(now_ns=100, time_remaining=remaining) == expected


def test_statistics_take_every_counter_by_name() -> None:
    names = [f.name for f in info_service_pb2.Statistics.DESCRIPTOR.fields]
    counters = {name: i for i, name in enumerate(names) if name not in ("worker_restarts", "requests_held")}
    got = convert.statistics(counters, worker_restarts=70, requests_held=71)
    assert all(getattr(got, name) == value for name, value in counters.items())
    assert (got.worker_restarts, got.requests_held) == (70, 71)
    with pytest.raises(ValueError, match="nonsense"):
        convert.statistics({"nonsense": 1}, worker_restarts=0, requests_held=0)


def test_the_model_is_told_as_its_card_says() -> None:
    card = ModelCardMsg("m", "LlamaForCausalLM", "/d", 100, 16, 64, (7, 8), "bfloat16", 135_000_000_000, {})
    got = convert.model_response(card, has_chat_template=True)
    assert (got.name, got.architecture, got.vocab_size, got.context_len) == ("m", "LlamaForCausalLM", 100, 16)
    assert (list(got.eos_token_ids), got.dtype, got.num_parameters) == ([7, 8], "bfloat16", 135_000_000_000)
    assert got.has_chat_template


def test_settings_keep_name_value_and_reason() -> None:
    (got,) = convert.settings([SettingMsg("page_size", "16", "default")])
    assert (got.name, got.value, got.reason) == ("page_size", "16", "default")

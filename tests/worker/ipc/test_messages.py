"""Bytes that are no message are an error of the decoder and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
import pytest
from chairlift_worker.ipc import messages
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    CancelMsg,
    DoneMsg,
    EndingMsg,
    EndingReason,
    FlushedMsg,
    FlushPrefixCacheMsg,
    HoldMsg,
    ModelCardMsg,
    PauseMsg,
    ProcessorsMsg,
    ReadyMsg,
    ResumeMsg,
    SamplingMsg,
    SettingMsg,
    ShutdownMsg,
    StartedMsg,
    StartFailedMsg,
    StepMsg,
    UpdateWeightsMsg,
    WeightsMsg,
)
from hypothesis import example, given, settings

REQUESTS = [
    AddRequestMsg(
        uid=1,
        prompt=b"\1\0\0\0",
        max_new_tokens=3,
        sampling=SamplingMsg(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, seed=2**64 - 1),
        stop_ids=(2, 3),
        logprobs=True,
        arrival_ns=2**62,
        deadline_ns=0,
        priority=-10,
    ),
    AddRequestMsg(
        uid=2,
        prompt=b"\1\0\0\0",
        max_new_tokens=3,
        sampling=SamplingMsg(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=1,
            processors=ProcessorsMsg(bias_ids=bytes(4), biases=bytes(4), repetition_penalty=1.5, banned_ids=bytes(8)),
        ),
        stop_ids=(),
        logprobs=True,
        arrival_ns=1,
        deadline_ns=0,
        top_logprobs=128,
        raw_logprobs=True,
    ),
    CancelMsg(uid=7),
    HoldMsg(uid=7, held=True),
    FlushPrefixCacheMsg(op=1),
    PauseMsg(op=2),
    ResumeMsg(op=3),
    UpdateWeightsMsg(op=4, folder="/weights"),
    ShutdownMsg(),
]
RESULTS = [
    ReadyMsg(
        model=ModelCardMsg("m", "a", "d", 10, 20, 30, (1,), "float32", 5, {"eos_token_id": [1, 2], "top_p": 0.5}),
        settings=(SettingMsg("page_size", "16", "default"),),
    ),
    StartFailedMsg(message="no such model"),
    StepMsg(
        step=4,
        uids=bytes(8),
        token_ids=bytes(4),
        logprobs=b"",
        started=(StartedMsg(1, 16),),
        endings=(EndingMsg(1, EndingReason.STOP, "", 1, 2, 3, 4, 5, 6),),
    ),
    StepMsg(
        step=5,
        uids=bytes(8),
        token_ids=bytes(4),
        logprobs=bytes(4),
        started=(),
        endings=(),
        num_tops=b"\2",
        top_ids=bytes(8),
        top_logprobs=bytes(8),
    ),
    FlushedMsg(op=1, num_pages=2),
    DoneMsg(op=2),
    WeightsMsg(op=4, error="INVALID_WEIGHTS: no", num_tensors=1, num_requests=2, num_pages=3),
]
DECODERS = [messages.decode_request, messages.decode_worker]
DEEP = b"\x91" * 100_000


def decode_or_refuse(decode: Callable[[bytes], object], record: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode(record)


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_survives_the_crossing(message: messages.RequestMsg) -> None:
    assert messages.decode_request(messages.encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        messages.decode_worker(messages.encode(message))


@pytest.mark.parametrize("message", RESULTS, ids=lambda message: type(message).__name__)
def test_a_worker_message_survives_the_crossing(message: messages.WorkerMsg) -> None:
    assert messages.decode_worker(messages.encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        messages.decode_request(messages.encode(message))


def test_a_generation_config_that_is_nested_too_deeply_is_a_decode_error() -> None:
    record = messages.encode(RESULTS[0])
    at = record.index(b"\xcb\x3f\xe0")  # top_p, the float 0.5
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        messages.decode_worker(record[:at] + DEEP)


@pytest.mark.parametrize("decode", DECODERS)
@given(record=st.binary(max_size=300))
@example(record=b"")
@example(record=DEEP)
@example(record=b"\x95\xa4step" + DEEP)
@settings(max_examples=500, deadline=None)
def test_random_bytes_raise_nothing_but_decode_errors(decode: Callable[[bytes], object], record: bytes) -> None:
    decode_or_refuse(decode, record)


@pytest.mark.parametrize("decode", DECODERS)
@given(
    message=st.sampled_from(REQUESTS + RESULTS),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 400),
)
@settings(max_examples=500, deadline=None)
def test_damaged_messages_raise_nothing_but_decode_errors(
    decode: Callable[[bytes], object],
    message: messages.RequestMsg | messages.WorkerMsg,
    edits: list[tuple[int, int]],
    cut: int,
) -> None:
    record = bytearray(messages.encode(message))
    for place, value in edits:
        record[place % len(record)] = value
    decode_or_refuse(decode, bytes(record[: len(record) - cut % len(record)]))

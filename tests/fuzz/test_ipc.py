"""What crosses between the processes, damaged: rings, status page, messages, settings."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from chairlift.v1 import info_service_pb2
from chairlift_worker.ipc.messages import (
    AddRequestMsg,
    CancelMsg,
    EndingMsg,
    EndingReason,
    FlushPrefixCacheMsg,
    HoldMsg,
    ModelCardMsg,
    ProcessorsMsg,
    ReadyMsg,
    RequestMsg,
    SamplingMsg,
    SettingMsg,
    ShutdownMsg,
    StartedMsg,
    StartFailedMsg,
    StepMsg,
    UpdateWeightsMsg,
    WeightsMsg,
    WorkerMsg,
    decode_request,
    decode_worker,
    encode,
)
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.ipc.status import PAGE_BYTES, Status, StatusReader, create_page
from support.mutation import Mutator

ROOT = Path(__file__).parents[2]
MAX_DECODE_S = 5.0  # a thousand times what it takes
MAX_GROWTH_KB = 200 * 1024

SAMPLING = SamplingMsg(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, seed=2**64 - 1)
REQUESTS = [
    AddRequestMsg(
        uid=1,
        prompt=b"\1\0\0\0",
        max_new_tokens=3,
        sampling=SAMPLING,
        stop_ids=(2, 3),
        logprobs=True,
        arrival_ns=2**62,
        deadline_ns=0,
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
    UpdateWeightsMsg(op=4, folder="/weights"),
    ShutdownMsg(),
]
CARD = ModelCardMsg(
    "m", "a", "d", 10, 20, 30, (1,), "float32", 5, {"eos_token_id": [1, 2], "top_p": 0.5, "x": {"y": 1}}
)
RESULTS = [
    ReadyMsg(model=CARD, settings=(SettingMsg("page_size", "16", "default"),)),
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
    WeightsMsg(op=4, error="INVALID_WEIGHTS: no", num_tensors=1, num_requests=2, num_pages=3),
]
# What a length or a depth of MessagePack may be said to be.
LENGTHS = [kind + b"\xff" * 4 for kind in (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")]
DEPTHS = [b"\x91" * 50_000, b"\x81\xa1a" * 20_000, b"\xdd\0\0\0\1" * 10_000]


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fuzz(
    decode: Callable[[bytes], object], source: Mutator, *, seconds: float, allowed: type | tuple[type, ...]
) -> int:
    """Decodes damaged records: a value, or one of these errors, in bounded time and memory. How many it took."""
    before, accepted, end = peak_kb(), 0, time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        record = source.one()
        try:
            decode(record)
            accepted += 1
        except allowed:
            pass
        except BaseException as error:
            raise AssertionError(f"{decode.__name__}({record!r}) raised {error!r}") from error
        assert time.monotonic() - began < MAX_DECODE_S, record
    assert peak_kb() - before < MAX_GROWTH_KB
    return accepted


def mutator(messages: list[RequestMsg] | list[WorkerMsg], *, seed: int) -> Mutator:
    return Mutator([*map(encode, messages), *LENGTHS], seed=seed)


@pytest.mark.parametrize("decode", [decode_request, decode_worker])
@pytest.mark.parametrize("tail", LENGTHS + DEPTHS, ids=lambda tail: tail[:6].hex())
def test_lengths_and_depths_that_are_lies_cost_nothing(decode: Callable[[bytes], object], tail: bytes) -> None:
    before = peak_kb()
    for message in REQUESTS + RESULTS:
        record = encode(message)
        for at in range(len(record)):
            with contextlib.suppress(msgspec.DecodeError):  # now and then it is another good message
                decode(record[:at] + tail)
    assert peak_kb() - before < MAX_GROWTH_KB


def test_damaged_requests_are_decode_errors(share_s: float, seed: int) -> None:
    source = mutator(REQUESTS, seed=seed)
    assert fuzz(decode_request, source, seconds=share_s, allowed=msgspec.DecodeError) > 100


def test_damaged_messages_of_the_worker_are_decode_errors(share_s: float, seed: int) -> None:
    source = mutator(RESULTS, seed=seed)
    assert fuzz(decode_worker, source, seconds=share_s, allowed=msgspec.DecodeError) > 100


def test_damaged_settings_are_decode_errors(share_s: float, seed: int) -> None:
    def decode_settings(record: bytes) -> WorkerSettings:
        return msgspec.json.decode(record, type=WorkerSettings)

    valid = [
        msgspec.json.encode(each)
        for each in (
            WorkerSettings(model="demo"),
            WorkerSettings(
                model="/m\u2028\n", use_cuda_graph=(True, False), model_config=("a=1", "b=[]"), num_blocks=9
            ),
        )
    ]
    source = Mutator([*valid, b"[" * 3000, b'{"model":' * 500, b"1e999", b'"\\ud800"'], seed=seed)
    assert fuzz(decode_settings, source, seconds=share_s, allowed=(msgspec.DecodeError, UnicodeDecodeError)) > 100


def test_rings_and_status_page_hold_whatever_stands_in_them(share_s: float, seed: int) -> None:
    """worker/native/tests/ipc_fuzz.cpp, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    build = ROOT / "build" / "native-address-undefined"
    configure = ["cmake", "-S", str(ROOT / "worker/native"), "-B", str(build), "-DCHAIRLIFT_NATIVE_TESTS=ON"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCHAIRLIFT_SANITIZE=address,undefined"]
    configure += ["-DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all"]
    program = [str(build / "tests" / "ipc_fuzz"), str(max(1, round(share_s))), str(seed)]
    for command in (configure, ["cmake", "--build", str(build), "--target", "ipc_fuzz"], program):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240 + share_s, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    print(done.stdout)


def test_a_page_of_noise_is_figures_that_can_be_told(seed: int) -> None:
    noise = random.Random(seed)
    told = {field.name for field in info_service_pb2.Statistics.DESCRIPTOR.fields} & set(Status.__struct_fields__)
    with closing(create_page()) as page:
        reader = StatusReader(memory=page)
        for _ in range(300):
            os.pwrite(page.fd, noise.randbytes(PAGE_BYTES - 64), 64)  # all but what says that it is a page
            status = reader.read()
            info_service_pb2.Statistics(**{name: getattr(status, name) for name in told})
        os.pwrite(page.fd, noise.randbytes(PAGE_BYTES), 0)
        reader.read()
        with pytest.raises(ValueError, match="no status page"):
            StatusReader(memory=page)

"""The native row sampler, by ctypes. See worker/native/include/chairlift/sampling.hpp."""

from __future__ import annotations

import ctypes
import enum
import math
from dataclasses import dataclass
from functools import cache

from chairlift_worker.native.library import load
from chairlift_worker.plan import SampleSpec

MAX_TOP_K = 2**31 - 1  # more than any vocabulary has


class SampleStatus(enum.IntEnum):
    """What the native sampler made of a row."""

    OK = 0
    NOT_FINITE = 1
    NOTHING = 2
    NO_MEMORY = 3


class _Params(ctypes.Structure):
    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("want_logprob", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's outcome; `token_id` and `logprob` mean something only with OK."""

    status: SampleStatus
    token_id: int
    logprob: float | None


@cache
def _library() -> ctypes.CDLL:
    library = load()
    library.chairlift_sample_row.restype = ctypes.c_int32
    library.chairlift_sample_row.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.POINTER(_Params),
        ctypes.POINTER(ctypes.c_int32),
        ctypes.POINTER(ctypes.c_float),
    )
    library.chairlift_philox4x32.restype = None
    library.chairlift_philox4x32.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library


def sample_row(address: int, num_logits: int, spec: SampleSpec) -> Choice:
    """Choose from `num_logits` contiguous float32 at `address`, which are left as they are. Raises MemoryError."""
    params = _Params(
        temperature=spec.temperature,
        top_p=spec.top_p,
        min_p=spec.min_p,
        seed=spec.seed,
        index=spec.index,
        top_k=min(spec.top_k, MAX_TOP_K),
        want_logprob=spec.logprob,
    )
    token, logprob = ctypes.c_int32(-1), ctypes.c_float(math.nan)
    status = _library().chairlift_sample_row(
        address, num_logits, ctypes.byref(params), ctypes.byref(token), ctypes.byref(logprob)
    )
    if status == SampleStatus.NO_MEMORY:
        raise MemoryError("no memory for the scratch space of sampling")
    return Choice(status=SampleStatus(status), token_id=token.value, logprob=logprob.value if spec.logprob else None)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """One Philox4x32-10 block."""
    out = (ctypes.c_uint32 * 4)()
    _library().chairlift_philox4x32((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    return tuple(out)

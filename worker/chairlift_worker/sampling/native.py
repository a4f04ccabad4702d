"""The native row sampler, by ctypes. See worker/native/include/chairlift/sampling.hpp."""

from __future__ import annotations

import ctypes
import enum
import math
from dataclasses import dataclass
from functools import cache

from chairlift_worker.native.library import load
from chairlift_worker.plan import SampleSpec, TopTokens

MAX_TOP_K = 2**31 - 1  # more than any vocabulary has


class SampleStatus(enum.IntEnum):
    """What the native sampler made of a row."""

    OK = 0
    NOT_FINITE = 1
    NOTHING = 2
    NO_MEMORY = 3
    UNKNOWN_ID = 4


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


class _Top(ctypes.Structure):
    _fields_ = (
        ("capacity", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's outcome; all else means something only with OK."""

    status: SampleStatus
    token_id: int
    logprob: float | None
    top: TopTokens | None = None


class _Room:
    """Room for the most likely tokens of a row."""

    def __init__(self, num_tokens: int) -> None:
        self._ids, self._logprobs = (ctypes.c_int32 * num_tokens)(), (ctypes.c_float * num_tokens)()
        self.structure = _Top(num_tokens, 0, ctypes.addressof(self._ids), ctypes.addressof(self._logprobs))

    def tokens(self) -> TopTokens:
        """What was written there."""
        num_bytes = self.structure.size * ctypes.sizeof(ctypes.c_int32)
        return TopTokens(ids=bytes(self._ids)[:num_bytes], logprobs=bytes(self._logprobs)[:num_bytes])


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
        ctypes.POINTER(_Top),
    )
    library.chairlift_row_logprobs.restype = ctypes.c_int32
    library.chairlift_row_logprobs.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_float),
        ctypes.POINTER(_Top),
    )
    library.chairlift_philox4x32.restype = None
    library.chairlift_philox4x32.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library


def sample_row(address: int, num_logits: int, spec: SampleSpec) -> Choice:
    """Choose from `num_logits` contiguous float32 at `address`, which are left as they are. Raises MemoryError.

    Log-probabilities, where asked, are those of the distribution that is chosen from.
    """
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
    room = _Room(spec.num_top) if spec.num_top else None
    status = _checked(
        _library().chairlift_sample_row(
            address,
            num_logits,
            ctypes.byref(params),
            ctypes.byref(token),
            ctypes.byref(logprob),
            None if room is None else ctypes.byref(room.structure),
        )
    )
    return Choice(
        status=status,
        token_id=token.value,
        logprob=logprob.value if spec.logprob else None,
        top=None if room is None else room.tokens(),
    )


def row_logprobs(address: int, num_logits: int, token_id: int, *, num_top: int) -> Choice:
    """A token's log-probability, and the `num_top` most likely ones, by the log-softmax of a row as it is.

    The token is always among them. NOTHING where it has no probability. Raises MemoryError.
    """
    logprob = ctypes.c_float(math.nan)
    room = _Room(num_top) if num_top else None
    status = _checked(
        _library().chairlift_row_logprobs(
            address,
            num_logits,
            token_id,
            ctypes.byref(logprob),
            None if room is None else ctypes.byref(room.structure),
        )
    )
    return Choice(
        status=status,
        token_id=token_id,
        logprob=logprob.value,
        top=None if room is None else room.tokens(),
    )


def _checked(status: int) -> SampleStatus:
    if status == SampleStatus.NO_MEMORY:
        raise MemoryError("no memory for the scratch space of sampling")
    return SampleStatus(status)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """One Philox4x32-10 block."""
    out = (ctypes.c_uint32 * 4)()
    _library().chairlift_philox4x32((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    return tuple(out)

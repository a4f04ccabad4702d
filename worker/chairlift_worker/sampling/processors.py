"""The native processors, by ctypes: what changes or excludes a row's tokens before one is chosen.

See worker/native/include/chairlift/processors.hpp.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from functools import cache, lru_cache

from chairlift_worker.ipc.messages import ProcessorsMsg
from chairlift_worker.native.library import load
from chairlift_worker.sampling.native import SampleStatus

_INT_BYTES = 4
_MAX_NGRAM = 2**62  # more tokens than any request has
_KEPT = 256  # requests whose values are kept in native form


class _Ids(ctypes.Structure):
    _fields_ = (("ids", ctypes.c_void_p), ("size", ctypes.c_int64))


class _Processors(ctypes.Structure):
    _fields_ = (
        ("bias_ids", _Ids),
        ("biases", ctypes.c_void_p),
        ("repetition_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("no_repeat_ngram", ctypes.c_int64),
        ("banned_sequences", _Ids),
        ("early_stops", _Ids),
        ("min_new_tokens", ctypes.c_int64),
        ("allowed", _Ids),
        ("banned", _Ids),
    )


class _Context(ctypes.Structure):
    _fields_ = (("tokens", _Ids), ("num_output", ctypes.c_int64))


@dataclass(frozen=True, slots=True, eq=False)
class _Native:
    """A request's processors as native code takes them; `message` owns the numbers that the structure points to."""

    structure: _Processors
    message: ProcessorsMsg


@cache
def _library() -> ctypes.CDLL:
    library = load()
    library.chairlift_process_row.restype = ctypes.c_int32
    library.chairlift_process_row.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.POINTER(_Processors),
        ctypes.POINTER(_Context),
        ctypes.c_void_p,
    )
    library.chairlift_mask_row.restype = ctypes.c_int32
    library.chairlift_mask_row.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return library


def process_row(
    address: int, num_logits: int, processors: ProcessorsMsg, *, tokens: array[int], num_output: int, out: int
) -> SampleStatus:
    """Writes to `out` what becomes of `num_logits` contiguous float32 at `address`, which are left as they are.

    `tokens` are the row's so far, int32, of which the last `num_output` are output. With a status other than OK what is
    at `out` means nothing. Raises MemoryError; ValueError for a token id outside the row.
    """
    place, size = tokens.buffer_info()
    context = _Context(tokens=_Ids(place, size), num_output=num_output)
    native = _native(processors)
    status = _library().chairlift_process_row(
        address, num_logits, ctypes.byref(native.structure), ctypes.byref(context), out
    )
    if status == SampleStatus.NO_MEMORY:
        raise MemoryError("no memory for the scratch space of the processors")
    if status == SampleStatus.UNKNOWN_ID:
        raise ValueError(f"a token id is outside the {num_logits} logits")
    return SampleStatus(status)


def mask_row(address: int, num_logits: int, allowed: int, *, out: int) -> SampleStatus:
    """Writes to `out` the `num_logits` contiguous float32 at `address`, minus infinity where `allowed` has no bit.

    That is where uint32 words stand; token i is bit i % 32 of word i // 32. `out` may be `address`. With a status other
    than OK what is at `out` means nothing.
    """
    return SampleStatus(_library().chairlift_mask_row(address, num_logits, allowed, out))


@lru_cache(maxsize=_KEPT)
def _native(message: ProcessorsMsg) -> _Native:
    structure = _Processors(
        bias_ids=_ids(message.bias_ids),
        biases=_address(message.biases),
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        no_repeat_ngram=min(message.no_repeat_ngram_size, _MAX_NGRAM),
        banned_sequences=_ids(message.banned_sequences),
        early_stops=_ids(message.early_stop_ids),
        min_new_tokens=message.min_new_tokens,
        allowed=_ids(message.allowed_ids),
        banned=_ids(message.banned_ids),
    )
    return _Native(structure, message)


def _ids(values: bytes) -> _Ids:
    return _Ids(_address(values), len(values) // _INT_BYTES)


def _address(values: bytes) -> int | None:
    return ctypes.cast(ctypes.c_char_p(values), ctypes.c_void_p).value

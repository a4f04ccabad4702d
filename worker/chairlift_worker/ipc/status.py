"""The status page: what the worker shows of itself, in a memory of its own. The worker writes, the service reads.

Reading never waits and never sees half a value. See worker/native/include/chairlift/status.hpp.
"""

from __future__ import annotations

import ctypes
import enum
import time
from typing import Final, TypedDict, Unpack

import msgspec

from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.native import load_brief

PAGE_BYTES: Final = 4096


class Phase(enum.IntEnum):
    """What the worker does."""

    STARTING = 0
    LOADING = 1
    WARMING = 2
    IDLE = 3
    RUNNING = 4
    PAUSED = 5


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the worker. Gauges and counters mean what `Statistics` of info_service.proto says."""

    phase: Phase
    heartbeat_ns: int  # CLOCK_MONOTONIC; 0 until the worker's first sign of life
    step: int  # number of the running step, or of the last one
    planned_tokens: int  # query tokens of the running step
    requests_waiting: int
    requests_running: int
    requests_swapped: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    swap_blocks_used: int
    steps: int
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions_swap: int
    preemptions_recompute: int
    computed_tokens: int
    busy_ns: int
    swap_blocks_total: int
    draft_tokens: int
    accepted_draft_tokens: int


class StatusChange(TypedDict, total=False):
    """Fields of `Status` that the worker sets; heartbeat_ns it cannot, for every change is a heartbeat."""

    phase: Phase
    step: int
    planned_tokens: int
    requests_waiting: int
    requests_running: int
    requests_swapped: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    swap_blocks_used: int
    steps: int
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions_swap: int
    preemptions_recompute: int
    computed_tokens: int
    busy_ns: int
    swap_blocks_total: int
    draft_tokens: int
    accepted_draft_tokens: int


_FIELDS: Final = Status.__struct_fields__
_INDEX: Final = {name: index for index, name in enumerate(_FIELDS)}
_HEARTBEAT: Final = _INDEX["heartbeat_ns"]
_PHASES: Final = tuple(Phase)
_Values = ctypes.c_uint64 * len(_FIELDS)

_library = load_brief()
_library.chairlift_status_format.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
_library.chairlift_status_check.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
_library.chairlift_status_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
_library.chairlift_status_write.restype = None
_library.chairlift_status_store.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
_library.chairlift_status_store.restype = None
_library.chairlift_status_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]


def create_page() -> SharedMemory:
    """A status page of zeros: STARTING, no heartbeat."""
    memory = SharedMemory.create(name="chairlift-status", size=PAGE_BYTES)
    _library.chairlift_status_format(memory.address, memory.size, len(_FIELDS))
    return memory


def _checked(memory: SharedMemory) -> SharedMemory:
    if not _library.chairlift_status_check(memory.address, memory.size, len(_FIELDS)):
        raise ValueError("the memory holds no status page of this version")
    return memory


class StatusWriter:
    """The worker's side. Any thread may call, one at a time. Raises ValueError where the memory is no status page."""

    def __init__(self, *, memory: SharedMemory) -> None:
        self._memory = _checked(memory)
        self._values = _Values()

    def set(self, **changes: Unpack[StatusChange]) -> None:
        """Change these fields at one moment, and the heartbeat with them. Numbers are not negative."""
        values = self._values
        for name, value in changes.items():
            values[_INDEX[name]] = value  # type: ignore[call-overload]  # a TypedDict's items are objects to mypy
        values[_HEARTBEAT] = time.monotonic_ns()
        if not self._memory.closed:
            _library.chairlift_status_write(self._memory.address, ctypes.addressof(values), len(_FIELDS))

    def beat(self) -> None:
        """A sign of life, nothing else."""
        if not self._memory.closed:
            _library.chairlift_status_store(self._memory.address, _HEARTBEAT, time.monotonic_ns())


class StatusReader:
    """The service's side; after the memory is closed it repeats the last look. ValueError as for StatusWriter."""

    def __init__(self, *, memory: SharedMemory) -> None:
        self._memory = _checked(memory)
        self._values = _Values()

    def read(self) -> Status:
        """The values now: of one moment, unless the writer died in the middle of changing them."""
        if not self._memory.closed:
            _library.chairlift_status_read(self._memory.address, ctypes.addressof(self._values), len(_FIELDS))
        fields = dict(zip(_FIELDS, self._values, strict=True))
        phase = _PHASES[min(fields.pop("phase"), len(_PHASES) - 1)]
        return Status(phase=phase, **fields)

"""A ring of records in shared memory, from one sender to one receiver. See worker/native/include/chairlift/ring.hpp.

Neither end ever blocks: a full ring is the value False, an empty one None. Waiting is the doorbell's matter.
Each end belongs to one thread, the first that uses it; another gets a RuntimeError instead of a corrupt ring.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import get_ident
from typing import Final, NoReturn

from chairlift_worker.ipc.doorbell import Doorbell
from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.native import load_brief

HEADER_BYTES: Final = 256
RECORD_HEADER_BYTES: Final = 16
MIN_CAPACITY: Final = 64
MAX_CAPACITY: Final = 1 << 30

# SendOutcome and ReceiveOutcome of ring.hpp
_FULL, _SENT, _SENT_WAKE, _TOO_LARGE, _SEND_CORRUPT = 0, 1, 2, -1, -2
_EMPTY, _RECEIVE_CORRUPT, _RECEIVE_CLOSED = -1, -2, -3

_library = load_brief()


def _function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function = getattr(_library, name)
    function.restype = result
    function.argtypes = arguments
    return function  # type: ignore[no-any-return]  # getattr of a library is Any


_pointer, _u64, _i64, _i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
_format = _function("chairlift_ring_format", _i32, _pointer, _u64, _u64)
_sender_open = _function("chairlift_sender_open", _pointer, _pointer, _u64)
_sender_close = _function("chairlift_sender_close", None, _pointer)
_sender_send = _function("chairlift_sender_send", _i32, _pointer, ctypes.c_char_p, _u64, _u64)
_sender_stage = _function("chairlift_sender_stage", _i32, _pointer, ctypes.c_char_p, _u64, _u64)
_sender_commit = _function("chairlift_sender_commit", _i32, _pointer)
_sender_abort = _function("chairlift_sender_abort", None, _pointer)
_sender_used = _function("chairlift_sender_used", _u64, _pointer)
_receiver_open = _function("chairlift_receiver_open", _pointer, _pointer, _u64)
_receiver_close = _function("chairlift_receiver_close", None, _pointer)
_receive = _function("chairlift_receiver_receive", _i64, _pointer, _pointer, _u64)
_readable = _function("chairlift_receiver_readable", _i32, _pointer)
_arm = _function("chairlift_receiver_arm", _i32, _pointer)
_disarm = _function("chairlift_receiver_disarm", None, _pointer)
_receiver_used = _function("chairlift_receiver_used", _u64, _pointer)


class RingError(Exception):
    """Something is wrong with a ring or with what it was asked."""


class RecordTooLargeError(RingError):
    """These records would not even fit an empty ring."""


class CorruptRecordError(RingError):
    """The shared memory was overwritten; this ring is of no use any more."""


class RingClosedError(RingError):
    """The end was closed."""


def framed_bytes(record_len: int) -> int:
    """Bytes of the ring that a record of `record_len` bytes takes, padding at the wrap apart."""
    return RECORD_HEADER_BYTES + -(-record_len // 16) * 16


class RingMemory:
    """The memory of one ring. Owns it. The ends that use it are closed first, else `close` raises BufferError."""

    def __init__(self, *, memory: SharedMemory) -> None:
        self._memory = memory
        self.capacity = memory.size - HEADER_BYTES  # bytes

    @classmethod
    def create(cls, *, capacity: int) -> RingMemory:
        """An empty ring of `capacity` bytes: a power of two in [64, 2**30], else ValueError. OSError without memory."""
        if not MIN_CAPACITY <= capacity <= MAX_CAPACITY or capacity.bit_count() != 1:
            raise ValueError(f"capacity {capacity} is not a power of two in [{MIN_CAPACITY}, {MAX_CAPACITY}]")
        memory = SharedMemory.create(name="chairlift-ring", size=HEADER_BYTES + capacity)
        _format(memory.address, memory.size, capacity)
        return cls(memory=memory)

    @classmethod
    def attach(cls, fd: int) -> RingMemory:
        """The ring behind a descriptor, which is owned from now on. What is no ring is refused by the ends."""
        return cls(memory=SharedMemory(fd=fd))

    @property
    def fd(self) -> int:
        """The descriptor, to hand to another process."""
        return self._memory.fd

    @property
    def shared(self) -> SharedMemory:
        """The memory itself."""
        return self._memory

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        self._memory.close()


class Sender:
    """The end that writes. `doorbell` is rung when the receiver sleeps."""

    def __init__(self, *, memory: RingMemory, doorbell: Doorbell | None = None) -> None:
        self._handle: int | None = _sender_open(memory.shared.address, memory.shared.size)
        if self._handle is None:
            raise RingError("the memory holds no ring")
        self._hold: object = memory.shared.hold()
        self._doorbell = doorbell
        self._thread: int | None = None
        self.capacity = memory.capacity
        self.max_record_bytes = memory.capacity // 2 - RECORD_HEADER_BYTES  # with leave=0; see ring.hpp for the half

    def try_send(self, record: bytes, *, leave: int = 0) -> bool:
        """Publish a record, or say False if it does not fit now with `leave` bytes of the ring free afterwards.

        Raises RecordTooLargeError if framed_bytes(len(record)) + leave is over capacity / 2, CorruptRecordError,
        RingClosedError.
        """
        if get_ident() != self._thread:
            self._thread = _claim(self._thread)
        outcome = _sender_send(self._handle, record, len(record), leave)
        if outcome == _SENT_WAKE and self._doorbell is not None:
            self._doorbell.ring()
        elif outcome < 0:
            self._refuse(outcome, len(record), leave)
        return bool(outcome)

    def try_send_all(self, records: Sequence[bytes], *, leave: int = 0) -> bool:
        """Publish all of the records at one moment, or none and say False. Raises as `try_send` does, for their sum."""
        if get_ident() != self._thread:
            self._thread = _claim(self._thread)
        for record in records:
            outcome = _sender_stage(self._handle, record, len(record), leave)
            if outcome != _SENT:
                _sender_abort(self._handle)
                if outcome < 0:
                    self._refuse(outcome, sum(map(len, records)), leave)
                return False
        if _sender_commit(self._handle) == _SENT_WAKE and self._doorbell is not None:
            self._doorbell.ring()
        return True

    @property
    def used_bytes(self) -> int:
        """Bytes that the receiver has not freed yet, headers and padding included."""
        return int(_sender_used(self._handle)) if self._handle is not None else 0

    @property
    def free_bytes(self) -> int:
        """The rest of the capacity."""
        return self.capacity - self.used_bytes

    def close(self) -> None:
        """Let go of the ring; a second call does nothing."""
        handle, self._handle, self._hold = self._handle, None, None
        _sender_close(handle)

    def _refuse(self, outcome: int, num_bytes: int, leave: int) -> NoReturn:
        if outcome == _TOO_LARGE:
            limit = self.max_record_bytes
            raise RecordTooLargeError(f"{num_bytes} bytes to send and {leave} to leave free, of {limit} at most")
        if outcome == _SEND_CORRUPT:
            raise CorruptRecordError("the receiver's index cannot be")
        raise RingClosedError("the sender is closed")


class Receiver:
    """The end that reads."""

    def __init__(self, *, memory: RingMemory) -> None:
        self._handle: int | None = _receiver_open(memory.shared.address, memory.shared.size)
        if self._handle is None:
            raise RingError("the memory holds no ring")
        self._hold: object = memory.shared.hold()
        self._thread: int | None = None
        self.capacity = memory.capacity
        # One buffer for all records; its pages cost nothing until a record is that large.
        self._buffer_bytes = memory.capacity // 2
        self._buffer = ctypes.create_string_buffer(self._buffer_bytes)
        self._view = memoryview(self._buffer).cast("B")
        self._address = ctypes.addressof(self._buffer)

    def receive(self) -> bytes | None:
        """The next record, taken off the ring; None if there is none. Raises CorruptRecordError, RingClosedError."""
        if get_ident() != self._thread:
            self._thread = _claim(self._thread)
        length = _receive(self._handle, self._address, self._buffer_bytes)
        if length >= 0:
            return self._view[:length].tobytes()
        if length == _EMPTY:
            return None
        if length == _RECEIVE_CLOSED:
            raise RingClosedError("the receiver is closed")
        raise CorruptRecordError("a record's position, length or checksum is wrong, or the sender's index cannot be")

    def readable(self) -> bool:
        """Whether `receive` would bring a record (or raise CorruptRecordError)."""
        return bool(_readable(self._handle))

    def arm(self) -> bool:
        """Announce sleep (doorbell.py). True: there is something to read after all, the receiver counts as awake."""
        return bool(_arm(self._handle))

    def disarm(self) -> None:
        """Announce being awake: senders stop ringing."""
        _disarm(self._handle)

    @property
    def used_bytes(self) -> int:
        """Bytes published and not received yet, headers and padding included."""
        return int(_receiver_used(self._handle)) if self._handle is not None else 0

    @property
    def free_bytes(self) -> int:
        """The rest of the capacity."""
        return self.capacity - self.used_bytes

    def close(self) -> None:
        """Let go of the ring; a second call does nothing."""
        handle, self._handle, self._hold = self._handle, None, None
        _receiver_close(handle)


def _claim(owner: int | None) -> int:
    """The calling thread, which takes an end that nobody uses yet."""
    if owner is not None:
        raise RuntimeError("an end of a ring belongs to one thread, and another one uses this")
    return get_ident()

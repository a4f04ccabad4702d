"""Both ends of a ring in one process."""

from __future__ import annotations

import gc
import mmap
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from chairlift_worker.ipc.doorbell import Doorbell
from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.ipc.ring import (
    CorruptRecordError,
    Receiver,
    RecordTooLargeError,
    RingClosedError,
    RingError,
    RingMemory,
    Sender,
    framed_bytes,
)

CAPACITY = 4096
MAX_RECORD = 2032  # half the capacity less a header of 16


@dataclass
class Ring:
    memory: RingMemory
    sender: Sender
    receiver: Receiver


@pytest.fixture
def ring() -> Iterator[Ring]:
    with ExitStack() as stack:
        memory = stack.enter_context(closing(RingMemory.create(capacity=CAPACITY)))
        sender = stack.enter_context(closing(Sender(memory=memory)))
        receiver = stack.enter_context(closing(Receiver(memory=memory)))
        yield Ring(memory, sender, receiver)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, MAX_RECORD - 1, MAX_RECORD])
def test_a_record_up_to_the_limit_arrives_intact_at_every_offset(ring: Ring, length: int) -> None:
    record = random.Random(length).randbytes(length)
    for _ in range(CAPACITY // 16):
        assert ring.sender.try_send(record)
        assert ring.receiver.receive() == record
        assert ring.receiver.receive() is None
        assert ring.sender.try_send(b"")  # moves on by 16
        assert ring.receiver.receive() == b""


@pytest.mark.parametrize("length", [MAX_RECORD + 1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 10 * CAPACITY])
def test_a_record_over_the_limit_is_refused_and_the_ring_goes_on(ring: Ring, length: int) -> None:
    assert ring.sender.max_record_bytes == MAX_RECORD
    with pytest.raises(RecordTooLargeError, match=f"{length} bytes .* of 2032 at most"):
        ring.sender.try_send(bytes(length))
    assert ring.receiver.receive() is None
    assert ring.sender.try_send(b"next")
    assert ring.receiver.receive() == b"next"


def test_a_full_ring_says_false_and_loses_nothing(ring: Ring) -> None:
    sent = []
    while ring.sender.try_send(record := str(len(sent)).encode()):
        sent.append(record)
    assert len(sent) == CAPACITY // 32  # a header and at most 16 bytes each
    assert (ring.sender.used_bytes, ring.sender.free_bytes) == (CAPACITY, 0)
    assert (ring.receiver.used_bytes, ring.receiver.free_bytes) == (CAPACITY, 0)
    assert [ring.receiver.receive() for _ in sent] == sent
    assert (ring.sender.used_bytes, ring.sender.free_bytes) == (0, CAPACITY)


def test_room_that_is_to_be_left_is_there_for_the_records_it_is_left_for(ring: Ring) -> None:
    cancel, leave = b"c" * 16, 10 * framed_bytes(16)
    while ring.sender.try_send(b"request", leave=leave):
        pass
    assert ring.sender.free_bytes >= leave
    assert all(ring.sender.try_send(cancel) for _ in range(10))
    with pytest.raises(RecordTooLargeError):
        ring.sender.try_send(bytes(MAX_RECORD), leave=16)
    with pytest.raises(RecordTooLargeError):
        ring.sender.try_send(b"", leave=CAPACITY)


def test_several_records_are_sent_all_or_none(ring: Ring) -> None:
    block = bytes(1000)
    assert ring.sender.try_send_all([b"a", b"b", block])
    assert ring.sender.try_send(block)
    assert not ring.sender.try_send_all([b"fits", block, b"does not"], leave=900)
    assert ring.sender.try_send_all([])
    assert [ring.receiver.receive() for _ in range(5)] == [b"a", b"b", block, block, None]


def test_records_that_are_too_large_together_are_refused_together(ring: Ring) -> None:
    assert ring.sender.try_send_all([bytes(1008), bytes(1008)])
    assert ring.receiver.receive() == bytes(1008)
    assert ring.receiver.receive() == bytes(1008)
    with pytest.raises(RecordTooLargeError):
        ring.sender.try_send_all([bytes(1008), bytes(1009)])
    assert ring.sender.try_send(b"next")
    assert ring.receiver.receive() == b"next"


def test_an_overwritten_record_is_an_error_and_never_a_record(ring: Ring) -> None:
    assert ring.sender.try_send(b"x" * 40)
    with mmap.mmap(ring.memory.fd, 0) as bytes_:
        place = bytes_.find(b"x" * 40)
        bytes_[place + 20] ^= 1
    for _ in range(2):
        with pytest.raises(CorruptRecordError):
            ring.receiver.receive()
    assert ring.receiver.readable()  # so that nobody parks on it


def test_an_index_that_cannot_be_is_an_error_at_the_sender(ring: Ring) -> None:
    with mmap.mmap(ring.memory.fd, 0) as bytes_:
        bytes_[128:136] = (1 << 40).to_bytes(8, "little")  # head, by the diagram in ring.hpp
    assert all(ring.sender.try_send(bytes(1008)) for _ in range(CAPACITY // 1024))  # as it has not looked yet
    with pytest.raises(CorruptRecordError):
        ring.sender.try_send(b"")


@pytest.mark.parametrize("capacity", [0, 1, 32, 63, 100, 4095, 4097, 1 << 31])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity {capacity} is not a power of two"):
        RingMemory.create(capacity=capacity)


def test_memory_that_holds_no_ring_is_refused() -> None:
    with closing(RingMemory(memory=SharedMemory.create(name="zeros", size=4096))) as memory:
        with pytest.raises(RingError):
            Sender(memory=memory)
        with pytest.raises(RingError):
            Receiver(memory=memory)


def test_the_memory_is_reserved_and_cannot_be_cut_off() -> None:
    with closing(RingMemory.create(capacity=1 << 20)) as memory:
        assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 20
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, 0)


def test_a_closed_end_says_so(ring: Ring) -> None:
    for end in (ring.sender, ring.receiver):
        end.close()
        end.close()
        assert end.used_bytes == 0
    with pytest.raises(RingClosedError):
        ring.sender.try_send(b"x")
    with pytest.raises(RingClosedError):
        ring.sender.try_send_all([b"x"])
    with pytest.raises(RingClosedError):
        ring.receiver.receive()


def test_memory_in_use_is_not_given_back(ring: Ring) -> None:
    with pytest.raises(BufferError):
        ring.memory.close()
    assert ring.sender.try_send(b"still there")
    assert ring.receiver.receive() == b"still there"


def test_an_end_keeps_its_memory_alive() -> None:
    memory = RingMemory.create(capacity=CAPACITY)
    with closing(Sender(memory=memory)) as sender:
        attached = RingMemory.attach(os.dup(memory.fd))
        receiver = Receiver(memory=attached)
        del attached
        gc.collect()
        assert sender.try_send(b"x")
        assert receiver.receive() == b"x"
        receiver.close()
    memory.close()


def test_a_second_thread_at_one_end_is_an_error(ring: Ring) -> None:
    errors = []

    def use() -> None:
        for call in (lambda: ring.sender.try_send(b"x"), ring.receiver.receive):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    assert ring.sender.try_send(b"first")
    assert ring.receiver.receive() == b"first"
    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert len(errors) == 2
    assert ring.receiver.receive() is None


def test_a_sender_rings_only_for_a_receiver_that_sleeps() -> None:
    with ExitStack() as stack:
        memory = stack.enter_context(closing(RingMemory.create(capacity=CAPACITY)))
        doorbell = stack.enter_context(closing(Doorbell.create()))
        sender = stack.enter_context(closing(Sender(memory=memory, doorbell=doorbell)))
        receiver = stack.enter_context(closing(Receiver(memory=memory)))
        assert sender.try_send(b"awake")
        assert not doorbell.clear()
        assert receiver.arm()  # something is there: still awake
        assert sender.try_send(b"awake")
        assert not doorbell.clear()
        assert receiver.receive() == receiver.receive() == b"awake"
        assert not receiver.arm()
        assert sender.try_send_all([b"asleep"])
        assert doorbell.clear()
        receiver.disarm()
        assert sender.try_send(b"awake")
        assert not doorbell.clear()

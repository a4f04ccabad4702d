"""A ring against a deque, and against the arithmetic of the diagram in ring.hpp."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from chairlift_worker.ipc import ring
from chairlift_worker.ipc.ring import Receiver, RecordTooLargeError, RingMemory, Sender
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

RECORD = st.binary(max_size=140)
LEAVE = st.sampled_from([0, 0, 0, 16, 48, 100])


class RingMachine(RuleBasedStateMachine):
    """Sends, receives and deaths in any order. `records` holds (bytes, end position) of what is on the ring."""

    @initialize(log2=st.integers(min_value=6, max_value=9))
    def create(self, log2: int) -> None:
        self.memory = RingMemory.create(capacity=1 << log2)
        self.sender = Sender(memory=self.memory)
        self.receiver = Receiver(memory=self.memory)
        self.records: deque[tuple[bytes, int]] = deque()
        self.tail = self.head = 0

    def end_of(self, record: bytes, start: int) -> int:
        size = 16 + (len(record) + 15) // 16 * 16
        rest = self.memory.capacity - start % self.memory.capacity
        return start + size + (rest if size > rest else 0)

    def expect(self, records: list[bytes], leave: int) -> bool | None:
        """Whether they fit now; None if they never do."""
        if (
            sum(16 + (len(record) + 15) // 16 * 16 for record in records) + leave > self.memory.capacity // 2
            and records
        ):
            return None
        end = self.tail
        for record in records:
            end = self.end_of(record, end)
        return end - self.head <= self.memory.capacity - leave or not records

    def note(self, records: list[bytes]) -> None:
        for record in records:
            self.tail = self.end_of(record, self.tail)
            self.records.append((record, self.tail))

    @rule(record=RECORD, leave=LEAVE)
    def send(self, record: bytes, leave: int) -> None:
        expected = self.expect([record], leave)
        try:
            outcome: bool | None = self.sender.try_send(record, leave=leave)
        except RecordTooLargeError:
            outcome = None
        assert outcome == expected
        if outcome:
            self.note([record])

    @rule(records=st.lists(RECORD, max_size=5), leave=LEAVE)
    def send_all(self, records: list[bytes], leave: int) -> None:
        expected = self.expect(records, leave)
        try:
            outcome: bool | None = self.sender.try_send_all(records, leave=leave)
        except RecordTooLargeError:
            outcome = None
        # Where they never fit, the ring may be found full before that is noticed.
        assert outcome == expected or (expected is None and outcome is False)
        if outcome:
            self.note(records)

    @rule(count=st.integers(min_value=1, max_value=20))
    def receive(self, count: int) -> None:
        for _ in range(count):
            if not self.records:
                assert self.receiver.receive() is None
                assert not self.receiver.readable()
                break
            record, end = self.records.popleft()
            assert self.receiver.receive() == record
            self.head = end

    @rule(records=st.lists(RECORD, max_size=3))
    def sender_dies_with_records_staged(self, records: list[bytes]) -> None:
        for record in records:
            ring._sender_stage(self.sender._handle, record, len(record), 0)
        self.sender.close()
        self.sender = Sender(memory=self.memory)

    @rule()
    def receiver_dies(self) -> None:
        self.receiver.close()
        self.receiver = Receiver(memory=self.memory)

    @rule()
    def arm(self) -> None:
        assert self.receiver.arm() == bool(self.records)
        self.receiver.disarm()

    @invariant()
    def used_and_free_add_up(self) -> None:
        if hasattr(self, "memory"):
            assert self.sender.used_bytes == self.receiver.used_bytes == self.tail - self.head
            assert self.sender.free_bytes == self.memory.capacity - (self.tail - self.head)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.sender.close()
            self.receiver.close()
            self.memory.close()


RingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_a_ring_is_a_deque_with_bounds = RingMachine.TestCase

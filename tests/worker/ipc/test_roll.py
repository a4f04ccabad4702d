"""The roll: who was in the batch when the worker died."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing

import pytest
from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.ipc.roll import MAX_UIDS, ROLL_BYTES, RollReader, RollWriter, create_roll


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with closing(create_roll()) as memory:
        yield memory


def test_a_roll_names_nobody_then_who_was_in_the_last_step(memory: SharedMemory) -> None:
    with closing(RollWriter(memory=memory)) as writer, closing(RollReader(memory=memory)) as reader:
        assert reader.read() == frozenset()
        writer.note(7, [1, 2**64 - 1, 3], depth=1)
        assert reader.read() == {1, 2**64 - 1, 3}
        writer.note(8, [3], depth=1)
        assert reader.read() == {3}
        writer.note(9, [], depth=1)
        assert reader.read() == frozenset()


def test_of_two_steps_in_flight_both_count(memory: SharedMemory) -> None:
    with closing(RollWriter(memory=memory)) as writer, closing(RollReader(memory=memory)) as reader:
        writer.note(1, [1, 2], depth=2)
        writer.note(2, [2, 3], depth=2)
        assert reader.read() == {1, 2, 3}
        writer.note(3, [4], depth=2)
        assert reader.read() == {2, 3, 4}


def test_more_than_it_has_room_for_are_left_out(memory: SharedMemory) -> None:
    with closing(RollWriter(memory=memory)) as writer, closing(RollReader(memory=memory)) as reader:
        writer.note(1, range(1, MAX_UIDS + 100), depth=2)
        assert reader.read() == set(range(1, MAX_UIDS + 1))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_it_holds_it_can_be_read(seed: int) -> None:
    content = random.Random(seed).randbytes(ROLL_BYTES) if seed else b"\xff" * ROLL_BYTES
    with closing(create_roll()) as memory, closing(RollReader(memory=memory)) as reader:
        os.pwrite(memory.fd, content, 0)
        assert len(reader.read()) <= 2 * MAX_UIDS


def test_memory_of_another_size_is_refused() -> None:
    with closing(SharedMemory.create(name="other", size=4096)) as memory:
        for kind in (RollReader, RollWriter):
            with pytest.raises(ValueError, match="no roll"):
                kind(memory=memory)

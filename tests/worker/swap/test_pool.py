import pytest
from chairlift_worker.swap.pool import SwapPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def test_full_is_a_value_and_takes_nothing() -> None:
    pool = SwapPool(num_slots=3)
    assert pool.take(4) is None
    assert pool.num_free == 3
    slots = pool.take(2)
    assert slots is not None
    assert len(set(slots)) == 2
    assert pool.take(2) is None
    pool.give_back(slots)
    assert (pool.num_free, pool.num_used) == (3, 0)


def test_a_pool_of_nothing_gives_nothing() -> None:
    assert SwapPool(num_slots=0).take(1) is None


def test_a_slot_cannot_be_given_back_twice() -> None:
    pool = SwapPool(num_slots=2)
    slots = pool.take(1)
    assert slots is not None
    pool.give_back(slots)
    with pytest.raises(ValueError, match="given back but not used"):
        pool.give_back(slots)


def test_the_check_finds_a_slot_that_is_free_and_used() -> None:
    pool = SwapPool(num_slots=2)
    slots = pool.take(1)
    assert slots is not None
    pool._free.append(slots[0])
    with pytest.raises(AssertionError, match="free and used"):
        pool.check()


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool against a list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SwapPool(num_slots=10)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        taken = {slot for slots in self.held for slot in slots}
        slots = self.pool.take(count)
        if count > 10 - len(taken):
            assert slots is None
            return
        assert slots is not None
        assert len(set(slots)) == count
        assert not set(slots) & taken, "a slot is given to two"
        self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """All of somebody's, or only some."""
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        count = data.draw(st.integers(0, len(slots)))
        self.pool.give_back(slots[:count])
        if slots[count:]:
            self.held.append(slots[count:])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_used == sum(map(len, self.held))
        assert self.pool.num_free == 10 - self.pool.num_used


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

import pytest
from chairlift_worker.swap.pool import SwapPool
from hypothesis import given
from hypothesis import strategies as st


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


@given(st.lists(st.integers(0, 6), max_size=30))
def test_no_slot_is_ever_given_to_two(sizes: list[int]) -> None:
    pool, held = SwapPool(num_slots=10), []
    for size in sizes:
        slots = pool.take(size)
        pool.check()
        if slots is None:
            assert size > 10 - sum(map(len, held))
            pool.give_back(held.pop(0))
            continue
        assert not set(slots) & {slot for other in held for slot in other}
        held.append(slots)
    assert pool.num_used == sum(map(len, held))

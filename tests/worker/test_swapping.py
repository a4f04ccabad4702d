"""Evicted requests whose pages go to the swap pool, over a device that computes hashes through the page tables."""

import pytest
from chairlift_worker.ipc.messages import EndingReason, Turn
from support.fake_device import solo_run
from support.scheduling import Bench


def tokens(start: int, num: int) -> list[int]:
    return list(range(start, start + num))


def crowded(**kwargs) -> Bench:
    """Two requests that fit alone, not together: the second is evicted while the first grows."""
    bench = Bench(num_pages=6, page_size=4, **kwargs)
    bench.add(1, tokens(0, 7), 16)
    bench.add(2, tokens(100, 8), 12)
    return bench


def expect_solo(bench: Bench) -> None:
    assert bench.outputs[1] == solo_run(tokens(0, 7), max_new_tokens=16)
    assert bench.outputs[2] == solo_run(tokens(100, 8), max_new_tokens=12)
    bench.assert_idle()


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_swapped_is_not_computed_again(sharing: bool, depth: int) -> None:
    bench = crowded(sharing=sharing, depth=depth, swap_slots=10)
    bench.run()
    expect_solo(bench)
    counters = bench.roster.counters
    assert counters.preemptions_swap >= 1
    assert counters.preemptions_recompute == 0
    assert bench.device.num_computed == 7 + 15 + 8 + 11, "each token once, the last of each request never"
    assert bench.endings[2].swapped_ns > 0
    assert bench.endings[1].swapped_ns == 0
    told = bench.endings[2].turns
    assert [turn for turn, _ in told] == [Turn.SWAPPED, Turn.RESUMED] * counters.preemptions_swap
    times = [at_ns for _, at_ns in told]
    assert times == sorted(times)
    assert sum(times[1::2]) - sum(times[::2]) == bench.endings[2].swapped_ns
    assert bench.endings[1].turns == ()


def test_a_full_pool_falls_back_to_computing_again() -> None:
    bench = crowded(swap_slots=1, sharing=False)
    bench.run()
    expect_solo(bench)
    assert bench.roster.counters.preemptions_swap == 0
    assert bench.roster.counters.preemptions_recompute >= 1
    assert [turn for turn, _ in bench.endings[2].turns[:2]] == [Turn.PREEMPTED, Turn.RESUMED]


def swapped_bench() -> Bench:
    bench = crowded(swap_slots=10, sharing=False)
    while not bench.roster.num_swapped:
        bench.step()
    return bench


def test_a_request_cancelled_while_swapped_gives_its_slots_back_at_once() -> None:
    bench = swapped_bench()
    bench.roster.cancel(2, bench.now)
    bench.roster.check()
    assert bench.swap.pool.num_used == 0
    bench.run()
    assert bench.endings[2].reason is EndingReason.CANCELLED
    assert bench.outputs[1] == solo_run(tokens(0, 7), max_new_tokens=16)
    bench.assert_idle()


def test_a_deadline_passes_in_the_pool_too() -> None:
    bench = Bench(num_pages=6, page_size=4, swap_slots=10)
    bench.add(1, tokens(0, 7), 16)
    bench.add(2, tokens(100, 8), 12, deadline_ns=13)
    while not bench.roster.num_swapped:
        bench.step()
    assert bench.now < 13
    bench.run()
    assert bench.endings[2].reason is EndingReason.DEADLINE
    bench.assert_idle()


def test_other_weights_make_what_is_swapped_worthless() -> None:
    bench = swapped_bench()
    assert bench.roster.give_up_computed(bench.now) == 2
    bench.roster.check()
    assert bench.swap.pool.num_used == 0
    bench.run()
    expect_solo(bench)


def test_pages_that_others_share_stay_theirs() -> None:
    bench = Bench(num_pages=9, page_size=4, swap_slots=20)
    prefix = tokens(0, 8)
    for uid, tail in ((1, [50]), (2, [60]), (3, [70])):
        bench.add(uid, [*prefix, *tail], 16)
    bench.run()
    for uid, tail in ((1, [50]), (2, [60]), (3, [70])):
        assert bench.outputs[uid] == solo_run([*prefix, *tail], max_new_tokens=16)
    assert bench.roster.counters.preemptions_swap >= 1
    bench.assert_idle()


def test_with_windows_only_what_the_window_reaches_goes_and_comes_back() -> None:
    windows = (None, 6)
    bench = Bench(num_pages=24, page_size=2, sharing=False, windows=windows, swap_slots=50)
    for uid in (1, 2, 3):
        bench.add(uid, tokens(100 * uid, 9), 20)
    bench.run()
    for uid in (1, 2, 3):
        assert bench.outputs[uid] == solo_run(
            tokens(100 * uid, 9), max_new_tokens=20, windows=[group.window for group in bench.layout.groups]
        )
    assert bench.roster.counters.preemptions_swap >= 1
    bench.assert_idle()

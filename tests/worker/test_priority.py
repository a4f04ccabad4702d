"""Priorities in the scheduler's own time: the urgent come first, and nobody waits for ever."""

from __future__ import annotations

import pytest
from support.fake_device import solo_run
from support.scheduling import Bench

SECOND = 1_000_000_000
ONE_AT_A_TIME = {"max_requests_per_batch": 1, "max_batch_tokens": 1, "max_prefill_chunk": 1}


def starts(bench: Bench) -> list[int]:
    """Requests by their first step."""
    return list(dict.fromkeys(row.uid for plan in bench.plans for row in plan.rows))


def test_the_urgent_start_first_and_equals_in_order_of_arrival() -> None:
    bench = Bench(limits=ONE_AT_A_TIME)
    for uid, priority in enumerate([0, -1, 2, 0, 2, 10, -10], start=1):
        bench.add(uid, [uid], 1, priority=priority)
    bench.run()
    assert starts(bench) == [6, 3, 5, 1, 4, 2, 7]


@pytest.mark.parametrize(("ahead", "seconds"), [(1, 10), (10, 100), (20, 200)])
def test_a_request_waits_for_urgent_newcomers_so_many_times_ten_seconds_and_no_longer(ahead: int, seconds: int) -> None:
    """The worker is kept busy by urgent requests alone: each second one comes, and one is computed."""
    bench = Bench(limits=ONE_AT_A_TIME)
    bench.add(1, [1], 1, arrival_ns=SECOND, priority=-10)
    for second in range(1, 300):
        bench.add(second + 1, [2], 1, arrival_ns=second * SECOND + 1, priority=ahead - 10)
        bench.step()
        if 1 in starts(bench):
            break
    assert starts(bench)[-1] == 1
    assert len(starts(bench)) - 1 == seconds  # so many urgent ones came in that time, and no later one overtook it


def test_without_priorities_nobody_is_overtaken() -> None:
    bench = Bench(limits=ONE_AT_A_TIME)
    for uid in range(1, 30):
        bench.add(uid, [uid], 1, arrival_ns=uid * SECOND)
    bench.run()
    assert starts(bench) == list(range(1, 30))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("swap_slots", [0, 30])
def test_where_pages_are_scarce_the_less_urgent_give_way_however_early_they_came(swap_slots: int, depth: int) -> None:
    bench = Bench(num_pages=12, page_size=4, sharing=False, swap_slots=swap_slots, depth=depth)
    requests = {uid: (list(range(1000 * uid, 1000 * uid + 6)), 30) for uid in range(1, 6)}
    for uid in (1, 2, 3, 4):
        bench.add(uid, *requests[uid])
    for _ in range(3):
        bench.step()
    bench.add(5, *requests[5], priority=1)
    bench.run()
    assert bench.endings[5].preemptions == 0
    assert sum(ending.preemptions for ending in bench.endings.values()) >= 2
    for uid, (prompt, max_new_tokens) in requests.items():
        assert bench.outputs[uid] == solo_run(prompt, max_new_tokens=max_new_tokens)
        assert bench.endings[uid].preemptions <= 4
    bench.assert_idle()

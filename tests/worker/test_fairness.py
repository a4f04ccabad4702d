"""Crowds that could keep a worker busy without end: all finish, in order, each giving way a few times at most."""

from __future__ import annotations

import itertools

import pytest
from support.fake_device import solo_run
from support.scheduling import Bench

MAX_PREEMPTIONS = 4


def tokens(start: int, num: int) -> list[int]:
    return list(range(start, start + num))


def check(bench: Bench, requests: dict[int, tuple[list[int], int]]) -> None:
    """Everybody got what they would alone, in order of arrival, and little was done in vain."""
    for uid, (prompt, max_new_tokens) in requests.items():
        assert bench.outputs[uid] == solo_run(prompt, max_new_tokens=max_new_tokens)
        assert bench.endings[uid].preemptions <= MAX_PREEMPTIONS
    first_steps: dict[int, int] = {}
    for plan in bench.plans:
        for row in plan.rows:
            first_steps.setdefault(row.uid, plan.step)
    by_arrival = [first_steps[uid] for uid in sorted(requests)]
    assert by_arrival == sorted(by_arrival), "nobody starts before one who came earlier"
    needed = sum(len(prompt) + max_new_tokens - 1 for prompt, max_new_tokens in requests.values())
    lost = sum(
        bench.endings[uid].preemptions * (len(prompt) + max_new_tokens)
        for uid, (prompt, max_new_tokens) in requests.items()
    )
    assert bench.device.num_computed <= needed + lost + len(requests) * (bench.depth - 1)
    bench.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("swap_slots", [0, 30, 1000])
@pytest.mark.parametrize("kind", ["fifo", "prefill_first"])
def test_six_of_most_of_the_cache_and_short_ones_all_the_time(kind: str, swap_slots: int, depth: int) -> None:
    """Six that need 60 % of the cache each in the end, 100 tokens of it generated; every third step a short one."""
    bench = Bench(
        num_pages=60, page_size=4, sharing=False, swap_slots=swap_slots, depth=depth, limits={"scheduler_type": kind}
    )
    requests = {uid: (tokens(1000 * uid, 44), 100) for uid in range(1, 7)}
    for uid, (prompt, max_new_tokens) in requests.items():
        bench.add(uid, prompt, max_new_tokens)
    for step in itertools.count():
        if step % 3 == 0 and step < 600:
            uid = len(requests) + 1
            requests[uid] = (tokens(1000 * uid, 5), 6)
            bench.add(uid, *requests[uid])
        if bench.step() is None:
            break
    check(bench, requests)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("swap_slots", [0, 100])
@pytest.mark.parametrize("chunk", [3, 64])
def test_two_that_each_need_the_whole_cache(chunk: int, swap_slots: int, depth: int) -> None:
    bench = Bench(
        num_pages=16,
        page_size=4,
        sharing=False,
        swap_slots=swap_slots,
        depth=depth,
        limits={"max_prefill_chunk": chunk},
    )
    requests = {1: (tokens(0, 40), 25), 2: (tokens(1000, 60), 5)}
    for uid, (prompt, max_new_tokens) in requests.items():
        bench.add(uid, prompt, max_new_tokens)
    bench.run()
    check(bench, requests)


def test_two_thousand_short_ones_behind_a_long_prompt() -> None:
    bench = Bench(num_pages=64, page_size=4, sharing=False, limits={"max_batch_tokens": 16, "max_prefill_chunk": 8})
    requests = {1: (tokens(0, 200), 20)} | {uid: ([uid], 2) for uid in range(2, 2002)}
    for uid, (prompt, max_new_tokens) in requests.items():
        bench.outputs[uid] = []
        bench.add(uid, prompt, max_new_tokens)
    check_every_step = bench.roster.check
    bench.roster.check = lambda: None  # of two thousand requests, in every step: too slow
    bench.run()
    check_every_step()
    check(bench, requests)
    assert len(bench.plans) <= 2000 / 8 * 3


def test_the_oldest_gives_way_to_nobody() -> None:
    bench = Bench(num_pages=12, page_size=4, sharing=False)
    for uid in range(1, 6):
        bench.add(uid, tokens(1000 * uid, 6), 40)
    while bench.roster._requests:
        oldest = min(bench.roster._requests)
        plan = bench.step()
        assert plan is not None
        assert oldest in {row.uid for row in plan.rows}, "the oldest gets a token in every step"
    assert bench.endings[1].preemptions == 0
    assert sum(ending.preemptions for ending in bench.endings.values()) >= 3

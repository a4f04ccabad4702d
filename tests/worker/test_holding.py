"""Requests that are held: no tokens for them, everything for their neighbours. Virtual time, a device of hashes."""

from __future__ import annotations

import pytest
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.request import RequestState
from support.fake_device import solo_run
from support.scheduling import Bench


def tokens(start: int, num: int) -> list[int]:
    return list(range(start, start + num))


def steps(bench: Bench, num: int) -> None:
    for _ in range(num):
        bench.step()


def expect_solo(bench: Bench, uid: int, prompt: list[int], max_new_tokens: int) -> None:
    assert bench.outputs[uid] == solo_run(prompt, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_held_request_stands_still_while_its_neighbour_goes_on_and_then_ends_as_if_alone(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add(1, tokens(0, 6), 20)
    bench.add(2, tokens(100, 6), 20)
    steps(bench, 5)
    bench.roster.hold(1, held=True)
    steps(bench, depth)  # what was in flight still comes
    before, at = list(bench.outputs[1]), bench.device.num_computed
    bench.run()
    assert bench.outputs[1] == before
    expect_solo(bench, 2, tokens(100, 6), 20)
    assert set(bench.endings) == {2}
    assert bench.roster.active.keys() == {1}, "nobody wants its pages: it keeps them"
    held_until = bench.device.num_computed
    assert held_until > at
    bench.roster.hold(1, held=False)
    bench.run()
    expect_solo(bench, 1, tokens(0, 6), 20)
    assert bench.endings[1].preemptions == 0
    assert bench.device.num_computed == 2 * (6 + 19), "each token once, the last of each request never"
    bench.assert_idle()


def test_where_all_are_held_there_is_nothing_to_do() -> None:
    bench = Bench()
    for uid in (1, 2):
        bench.add(uid, tokens(100 * uid, 6), 20)
    steps(bench, 3)
    for uid in (1, 2):
        bench.roster.hold(uid, held=True)
    assert [bench.step() for _ in range(3)] == [None] * 3
    for uid in (1, 2):
        bench.roster.hold(uid, held=False)
    bench.run()
    for uid in (1, 2):
        expect_solo(bench, uid, tokens(100 * uid, 6), 20)
    bench.assert_idle()


@pytest.mark.parametrize("swap_slots", [0, 20])
def test_a_held_request_makes_way_for_one_that_finds_no_place_in_the_batch(swap_slots: int) -> None:
    bench = Bench(sharing=False, limits={"max_requests_per_batch": 1}, swap_slots=swap_slots)
    bench.add(1, tokens(0, 6), 10)
    steps(bench, 4)
    bench.roster.hold(1, held=True)
    bench.add(2, tokens(100, 6), 10)
    bench.run()
    expect_solo(bench, 2, tokens(100, 6), 10)
    request = bench.roster.get(1)
    assert request is not None
    assert request.state is (RequestState.SWAPPED if swap_slots else RequestState.WAITING)
    bench.roster.hold(1, held=False)
    bench.run()
    expect_solo(bench, 1, tokens(0, 6), 10)
    assert bench.endings[1].preemptions == 1
    again = 0 if swap_slots else 6 + 3  # the prompt, and what of the four tokens had been computed
    assert bench.device.num_computed == 2 * (6 + 9) + again
    bench.assert_idle()


def test_pages_are_taken_from_a_held_request_before_others_although_it_came_first() -> None:
    bench = Bench(num_pages=6, page_size=4, sharing=False)
    bench.add(1, tokens(0, 7), 16)
    bench.add(2, tokens(100, 8), 12)
    steps(bench, 2)
    bench.roster.hold(1, held=True)
    bench.run()
    expect_solo(bench, 2, tokens(100, 8), 12)
    assert bench.endings[2].preemptions == 0
    bench.roster.hold(1, held=False)
    bench.run()
    expect_solo(bench, 1, tokens(0, 7), 16)
    assert bench.endings[1].preemptions == 1
    bench.assert_idle()


def test_a_request_that_is_held_before_its_start_keeps_nobody_waiting_and_starts_when_let_go() -> None:
    bench = Bench(limits={"max_requests_per_batch": 1})
    bench.add(1, tokens(0, 6), 3)
    bench.roster.hold(1, held=True)
    bench.add(2, tokens(100, 6), 3)
    bench.run()
    assert set(bench.endings) == {2}
    assert 1 not in bench.started
    bench.roster.hold(1, held=False)
    bench.run()
    expect_solo(bench, 1, tokens(0, 6), 3)
    bench.assert_idle()


def test_a_prefix_that_a_held_request_was_computing_is_not_waited_for() -> None:
    bench = Bench(limits={"max_prefill_chunk": 4})
    prefix = tokens(0, 16)
    bench.add(1, [*prefix, 50], 4)
    bench.step()
    assert bench.memory.index.num_promised > 0
    bench.roster.hold(1, held=True)
    bench.add(2, [*prefix, 60], 4)
    bench.run()
    expect_solo(bench, 2, [*prefix, 60], 4)
    bench.roster.hold(1, held=False)
    bench.run()
    expect_solo(bench, 1, [*prefix, 50], 4)
    bench.assert_idle()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_held_request_can_be_cancelled_and_its_deadline_goes_on(swapped: bool) -> None:
    bench = Bench(limits={"max_requests_per_batch": 2}, swap_slots=20, sharing=False)
    bench.add(1, tokens(0, 6), 30)
    bench.add(2, tokens(50, 6), 30, deadline_ns=40)
    steps(bench, 3)
    for uid in (1, 2):
        bench.roster.hold(uid, held=True)
    if swapped:
        bench.add(3, tokens(100, 6), 3)
        bench.run()
    assert bench.roster.num_swapped == (2 if swapped else 0)
    bench.roster.cancel(1, bench.now)
    bench.roster.check()
    steps(bench, 40)
    assert bench.endings[1].reason is EndingReason.CANCELLED
    assert bench.endings[2].reason is EndingReason.DEADLINE
    assert not bench.roster.held
    bench.assert_idle()


def test_other_weights_let_a_held_request_stay_held_and_end_as_if_alone() -> None:
    bench = Bench()
    bench.add(1, tokens(0, 6), 12)
    steps(bench, 4)
    bench.roster.hold(1, held=True)
    assert bench.roster.give_up_computed(bench.now) == 1
    assert bench.step() is None
    bench.roster.hold(1, held=False)
    bench.run()
    expect_solo(bench, 1, tokens(0, 6), 12)
    bench.assert_idle()


def test_holding_what_is_over_or_holding_twice_does_nothing_more() -> None:
    bench = Bench()
    bench.roster.hold(7, held=True)
    bench.add(1, tokens(0, 6), 4)
    bench.roster.hold(1, held=False)
    for held in (True, True, False, False):
        bench.roster.hold(1, held=held)
        bench.roster.check()
    bench.run()
    expect_solo(bench, 1, tokens(0, 6), 4)
    bench.roster.hold(1, held=True)
    assert not bench.roster.held
    bench.assert_idle()

"""Prompts beside requests that generate: how much of a step they get."""

from __future__ import annotations

import pytest
from chairlift_worker.pace import LEAST_TOKENS, Pace, pace_of
from support.scheduling import Bench


def test_a_step_with_that_many_prompt_tokens_takes_about_as_many_times_as_long_as_without() -> None:
    pace = Pace(step_ns=8e6, token_ns=0.5e6, max_stretch=4.0)
    for num_decoding in (1, 8, 32, 200):
        usual = 8e6 + num_decoding * 0.5e6
        longest = usual + pace.prompt_tokens(num_decoding) * 0.5e6
        assert longest <= 4 * usual < longest + 0.5e6


def test_tokens_behind_a_long_context_count_more() -> None:
    pace = Pace(step_ns=8e6, token_ns=0.5e6, max_stretch=4.0, context_ns=500.0)
    assert pace.weight(0) == 1.0
    assert pace.weight(2000) == 3.0  # 0.5 ms for itself and 1 ms for those before it


def test_a_prompts_pieces_get_smaller_as_it_goes_on() -> None:
    pace = Pace(step_ns=3.0, token_ns=1.0, max_stretch=4.0, context_ns=0.02)
    limits = {"pace": pace, "max_batch_tokens": 200, "max_prefill_chunk": 200}
    bench = Bench(num_pages=200, page_size=4, sharing=False, limits=limits)
    for uid in range(5):
        bench.add(uid, [1, 2, 3], 40)
    while any(not bench.outputs[uid] for uid in range(5)):
        bench.step()
    bench.add(7, list(range(1, 151)), 3)
    sizes: list[int] = []
    while not bench.outputs[7]:
        sizes += [row.num_tokens for row in bench.step().rows if row.uid == 7]
    assert sizes[:3] == [24, int(24 / (1 + 24 * 0.02)), int(24 / (1 + 40 * 0.02))]
    bench.run()
    bench.assert_idle()


def test_prompts_go_on_however_slow_the_machine_is() -> None:
    assert Pace(step_ns=0.0, token_ns=1e9, max_stretch=1.0).prompt_tokens(1) == LEAST_TOKENS


def test_the_parts_of_a_step_are_those_of_two_measured_ones() -> None:
    pace = pace_of(one_token_ns=8.5e6, many_tokens_ns=72e6, num_tokens=128, max_stretch=4.0)
    assert pace.token_ns == pytest.approx(0.5e6)
    assert pace.step_ns == pytest.approx(8e6)
    noisy = pace_of(one_token_ns=9e6, many_tokens_ns=8e6, num_tokens=128, max_stretch=4.0)  # a stray measurement
    assert noisy.prompt_tokens(1) >= LEAST_TOKENS


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_a_long_prompt_comes_in_pieces_while_others_generate_and_whole_when_nobody_does(scheduler_type: str) -> None:
    pace = Pace(step_ns=3.0, token_ns=1.0, max_stretch=4.0)  # (4 - 1) * (3 + 5) = 24 tokens beside 5 requests
    limits = {"pace": pace, "max_batch_tokens": 200, "max_prefill_chunk": 200, "scheduler_type": scheduler_type}
    bench = Bench(num_pages=200, page_size=4, sharing=False, limits=limits)
    bench.add(9, list(range(1, 151)), 3)
    alone = bench.step()
    assert [row.num_tokens for row in alone.rows] == [150]
    bench.run()
    for uid in range(5):
        bench.add(uid, [1, 2, 3], 30)
    while any(uid not in bench.outputs or not bench.outputs[uid] for uid in range(5)):
        bench.step()
    bench.add(7, list(range(1, 151)), 3)
    sizes = []
    while 7 not in bench.outputs or not bench.outputs[7]:
        plan = bench.step()
        sizes += [row.num_tokens for row in plan.rows if row.uid == 7]
        assert len([row for row in plan.rows if row.uid < 5]) == 5  # nobody waits
    assert sizes == [24] * 6 + [6]
    bench.run()
    bench.assert_idle()

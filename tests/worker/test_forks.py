"""Further choices of a request begin with the pages of the first one's prompt, or else compute it like anybody."""

from __future__ import annotations

import pytest
from chairlift_worker.ipc.messages import EndingReason
from support.fake_device import solo_judgements, solo_run
from support.scheduling import Bench

PAGE = 16
ROOMY = {"max_batch_tokens": 2048, "max_prefill_chunk": 2048, "max_requests_per_batch": 200}


def prompt_of(num_tokens: int) -> list[int]:
    return [(7 * i) % 900 for i in range(num_tokens)]


def bench_of(**changes: object) -> Bench:
    return Bench(**{"num_pages": 400, "page_size": PAGE, "limits": ROOMY, **changes})


def forks(num: int) -> tuple[tuple[int, int], ...]:
    return tuple((uid, 1000 + uid) for uid in range(2, num + 2))


def expect_outputs(bench: Bench, prompt: list[int], max_new_tokens: int, seeds: dict[int, int]) -> None:
    windows = [group.window for group in bench.layout.groups]
    for uid, seed in seeds.items():
        assert bench.outputs[uid] == solo_run(prompt, max_new_tokens=max_new_tokens, seed=seed, windows=windows), uid
        assert bench.endings[uid].reason is EndingReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sharing", [True, False])
def test_eight_choices_cost_one_prefill_and_fewer_than_eight_pages_more(sharing: bool, depth: int) -> None:
    bench, prompt = bench_of(sharing=sharing, depth=depth), prompt_of(1000)
    bench.add(1, prompt, 5, forks=forks(7))
    while len(bench.started) < 8:
        bench.step()
    source_pages, pool = -(-1005 // PAGE), bench.memory.pool
    assert bench.device.num_computed <= 1000 + 7 + depth * 8
    assert pool.num_pages - pool.num_free - pool.num_kept < source_pages + 8
    bench.run()
    assert bench.roster.counters.computed_tokens == bench.device.num_computed
    assert 1000 + 7 + 8 * 4 <= bench.device.num_computed <= 1000 + 7 + 8 * 4 + (depth - 1) * 8
    assert [bench.endings[uid].cached_tokens for uid in range(1, 9)] == [0] + [999] * 7
    expect_outputs(bench, prompt, 5, {1: 0, **dict(forks(7))})
    bench.assert_idle()


@pytest.mark.parametrize("num_tokens", [1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 3 * PAGE, 3 * PAGE + 1])
@pytest.mark.parametrize("sharing", [True, False])
def test_prompts_around_a_page(num_tokens: int, sharing: bool) -> None:
    bench, prompt = bench_of(sharing=sharing), prompt_of(num_tokens)
    bench.add(1, prompt, 20, forks=forks(3))
    bench.run()
    assert bench.device.num_computed == num_tokens + 3 + 4 * 19
    expect_outputs(bench, prompt, 20, {1: 0, **dict(forks(3))})
    bench.assert_idle()


@pytest.mark.parametrize("windows", [(5,), (None, 5), (None, 40, 40, 3), (PAGE,)])
def test_layers_with_a_window(windows: tuple[int | None, ...]) -> None:
    bench, prompt = bench_of(windows=windows, sharing=False), prompt_of(3 * PAGE + 5)
    bench.add(1, prompt, 30, forks=forks(4))
    bench.run()
    assert bench.device.num_computed == len(prompt) + 4 + 5 * 29
    expect_outputs(bench, prompt, 30, {1: 0, **dict(forks(4))})
    bench.assert_idle()


def test_a_source_whose_window_has_moved_on_has_nothing_to_give() -> None:
    limits = {**ROOMY, "max_requests_per_batch": 2}
    bench, prompt = bench_of(windows=(5,), sharing=False, limits=limits), prompt_of(3 * PAGE + 5)
    bench.add(1, prompt, 60, forks=forks(2))
    bench.add(50, [1], 40)
    bench.run()
    expect_outputs(bench, prompt, 60, {1: 0, **dict(forks(2))})
    assert bench.device.num_computed > 2 * len(prompt) + 2 * 59
    bench.assert_idle()


@pytest.mark.parametrize("sharing", [True, False])
def test_forks_of_a_source_that_goes_in_the_midst_of_its_prompt_compute_it(sharing: bool) -> None:
    limits = {**ROOMY, "max_batch_tokens": 16, "max_prefill_chunk": 16, "max_requests_per_batch": 16}
    bench, prompt = bench_of(sharing=sharing, limits=limits), prompt_of(50)
    bench.add(1, prompt, 3, forks=forks(2))
    for _ in range(2):
        bench.step()
    assert bench.roster.forks.resting == {2, 3}
    assert not bench.started.keys() & {2, 3}
    bench.roster.cancel(1, bench.now)
    bench.run()
    assert bench.endings[1].reason is EndingReason.CANCELLED
    expect_outputs(bench, prompt, 3, dict(forks(2)))
    bench.assert_idle()


def test_forks_of_a_source_that_is_held_go_on_without_it() -> None:
    bench, prompt = bench_of(sharing=False), prompt_of(50)
    bench.add(1, prompt, 3, forks=forks(2))
    bench.roster.hold(1, held=True)
    bench.run()
    expect_outputs(bench, prompt, 3, dict(forks(2)))
    bench.roster.hold(1, held=False)
    bench.run()
    expect_outputs(bench, prompt, 3, {1: 0})
    bench.assert_idle()


def test_forks_that_are_cancelled_while_they_rest_leave_nothing() -> None:
    bench = bench_of()
    bench.add(1, prompt_of(50), 3, forks=forks(3))
    bench.roster.cancel(3, bench.now)
    bench.run()
    expect_outputs(bench, prompt_of(50), 3, {uid: seed for uid, seed in [(1, 0), *forks(3)] if uid != 3})
    bench.assert_idle()


@pytest.mark.parametrize("swap_slots", [0, 1000])
@pytest.mark.parametrize(("windows", "num_pages"), [((None,), 14), ((None, 6), 24)])
def test_more_choices_than_the_cache_holds_at_once(swap_slots: int, windows: tuple, num_pages: int) -> None:
    bench = bench_of(num_pages=num_pages, page_size=4, swap_slots=swap_slots, windows=windows, sharing=False)
    prompt = prompt_of(21)
    bench.add(1, prompt, 20, forks=forks(6))
    bench.run()
    counters = bench.roster.counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0
    expect_outputs(bench, prompt, 20, {1: 0, **dict(forks(6))})
    bench.assert_idle()


def test_nobody_waits_behind_choices_that_rest() -> None:
    limits = {**ROOMY, "max_batch_tokens": 200, "max_prefill_chunk": 16}
    bench = bench_of(limits=limits)
    bench.add(1, prompt_of(100), 2, forks=forks(127))
    bench.add(500, [5, 6, 7], 2)
    bench.step()
    assert {row.uid for row in bench.plans[0].rows} == {1, 500}
    bench.run()
    expect_outputs(bench, prompt_of(100), 2, {1: 0, **dict(forks(127))})
    bench.assert_idle()


def test_a_request_without_output_ends_once_its_prompt_is_judged() -> None:
    bench = bench_of(limits={**ROOMY, "max_prefill_chunk": 16})
    for uid, num_tokens in enumerate([1, 2, PAGE, 300], start=1):
        bench.add(uid, prompt_of(num_tokens), 0, prompt_logprobs=1)
    bench.run()
    for uid, num_tokens in enumerate([1, 2, PAGE, 300], start=1):
        assert bench.outputs[uid] == []
        assert bench.judged[uid] == solo_judgements(prompt_of(num_tokens))
        assert bench.endings[uid].reason is EndingReason.LENGTH
    assert bench.device.num_computed == 1 + 2 + PAGE + 300
    bench.assert_idle()


def test_a_prompt_that_the_cache_has_is_judged_all_the_same() -> None:
    bench, prompt = bench_of(sharing=True), prompt_of(100)
    for uid in (1, 2):
        bench.add(uid, prompt, 3, prompt_logprobs=1)
        bench.run()
        assert bench.judged[uid] == solo_judgements(prompt)
        assert bench.endings[uid].cached_tokens == 0
    bench.add(3, prompt, 3)
    bench.run()
    assert bench.endings[3].cached_tokens == 96
    expect_outputs(bench, prompt, 3, dict.fromkeys((1, 2, 3), 0))
    bench.assert_idle()


def test_no_step_judges_more_than_so_many_tokens() -> None:
    bench = bench_of()
    for uid in (1, 2, 3):
        bench.add(uid, prompt_of(300), 2, prompt_logprobs=1)
    bench.run()
    judged = [sum(row.num_scored for row in plan.rows) for plan in bench.plans]
    assert max(judged) == 128
    assert sum(judged) == 3 * 299
    bench.assert_idle()

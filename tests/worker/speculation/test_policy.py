"""When drafts are checked, and when they are left: by made-up costs."""

from __future__ import annotations

import itertools

import pytest
from chairlift_worker.speculation.policy import (
    ALWAYS_DRAFT,
    FIRST_REST,
    LAST_REST,
    Acceptance,
    DraftPolicy,
    Offer,
    StepCosts,
)

# A step of up to 4 tokens reads the weights and is done; from then on each token costs as much as the fourth part.
MEMORY_BOUND = StepCosts(sizes=(1, 4, 8, 32), costs_ns=(100.0, 104.0, 200.0, 800.0))
BY_TOKEN = StepCosts(sizes=(1, 2), costs_ns=(100.0, 200.0))


def shares(costs: StepCosts, *offers: Offer, num_tokens: int | None = None, room: int = 100) -> list[int]:
    rows = len(offers)
    return DraftPolicy(costs=costs).share_out(offers, num_tokens=num_tokens or rows, num_rows=rows, room=room)


def best_rate(costs: StepCosts, offers: list[Offer]) -> float:
    """Tokens a nanosecond of the best of all ways to share."""
    rows = len(offers)
    return max(
        (rows + sum(offer.chance**j for offer, count in zip(offers, counts, strict=True) for j in range(1, count + 1)))
        / costs.of(rows + sum(counts))
        for counts in itertools.product(*(range(offer.num_tokens + 1) for offer in offers))
    )


def test_costs_between_and_beyond_what_was_measured_lie_on_lines() -> None:
    assert [MEMORY_BOUND.of(n) for n in (1, 4, 6, 8, 20, 32, 64)] == [100, 104, 152, 200, 500, 800, 1600]


def test_tokens_that_cost_nothing_are_all_checked() -> None:
    assert shares(ALWAYS_DRAFT, Offer(5, 0.1), Offer(3, 0.9)) == [5, 3]


def test_tokens_that_cost_what_they_bring_at_best_are_not_checked() -> None:
    assert shares(BY_TOKEN, Offer(5, 0.99)) == [0]


def test_a_likely_draft_fills_what_costs_little_and_an_unlikely_one_is_left() -> None:
    assert shares(MEMORY_BOUND, Offer(8, 0.8)) == [3]
    assert shares(MEMORY_BOUND, Offer(8, 0.05)) == [0]


def test_a_full_batch_is_left_alone_where_a_single_stream_is_not() -> None:
    assert shares(MEMORY_BOUND, *[Offer(4, 0.7)] * 32) == [0] * 32
    assert shares(MEMORY_BOUND, Offer(4, 0.7)) == [3]


def test_the_likelier_of_two_is_served_first() -> None:
    assert shares(MEMORY_BOUND, Offer(3, 0.5), Offer(3, 0.9)) == [0, 2]


def test_no_more_is_given_out_than_there_is_room_for() -> None:
    assert shares(ALWAYS_DRAFT, Offer(5, 0.5), Offer(5, 0.9), room=4) == [0, 4]
    assert shares(ALWAYS_DRAFT, Offer(5, 0.5), room=0) == [0]


@pytest.mark.parametrize("chances", [(0.9, 0.9), (0.3, 0.95), (0.6, 0.6, 0.6), (0.99,), (0.8, 0.1, 0.5)])
def test_no_other_way_to_share_promises_more(chances: tuple[float, ...]) -> None:
    offers = [Offer(3, chance) for chance in chances]
    counts = shares(MEMORY_BOUND, *offers)
    rows = len(offers)
    gained = sum(offer.chance**j for offer, count in zip(offers, counts, strict=True) for j in range(1, count + 1))
    rate = (rows + gained) / MEMORY_BOUND.of(rows + sum(counts))
    assert rate == pytest.approx(best_rate(MEMORY_BOUND, offers)) or not any(counts)
    assert any(counts) or best_rate(MEMORY_BOUND, offers) < 1.1 * rows / MEMORY_BOUND.of(rows)


def test_to_begin_takes_more_than_to_go_on() -> None:
    policy = DraftPolicy(costs=MEMORY_BOUND)

    def share(chance: float) -> int:
        return policy.share_out([Offer(1, chance)], num_tokens=1, num_rows=1, room=9)[0]

    assert [share(0.08), share(0.3), share(0.08), share(0.02), share(0.08)] == [0, 1, 1, 0, 0]


def test_the_chance_is_learned_from_what_was_tested() -> None:
    good, bad = Acceptance(), Acceptance()
    assert good.chance == bad.chance == 0.5
    for _ in range(40):
        good.note(num_drafts=4, num_held=3)  # the first three held, the fourth did not
        bad.note(num_drafts=4, num_held=0)
    assert good.chance == pytest.approx(0.75, abs=0.01)
    assert bad.chance < 0.01
    good.note(num_drafts=4, num_held=4)
    assert good.chance < 1


def test_a_request_passed_over_is_tried_again_after_rests_that_get_longer() -> None:
    acceptance, rests = Acceptance(), []
    for _ in range(8):
        for _ in range(30):
            acceptance.note(num_drafts=4, num_held=0)
        count = 0
        while acceptance.chance < 0.5:
            acceptance.pass_over()
            count += 1
        rests.append(count)
    assert rests == [min(FIRST_REST * 2**n, LAST_REST) for n in range(8)]
    for _ in range(30):
        acceptance.note(num_drafts=4, num_held=4)
    for _ in range(60):
        acceptance.note(num_drafts=4, num_held=0)
    for _ in range(FIRST_REST):
        assert acceptance.chance < 0.1
        acceptance.pass_over()
    assert acceptance.chance == 0.5, "after drafts that held, rests are short again"

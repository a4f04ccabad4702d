"""What steps cost is measured within the bounds that steps have, also in the smallest cache and on captured passes."""

from __future__ import annotations

import itertools

import pytest
from support.engine import Rig, Shape, loaded
from support.runners import PLAIN
from support.tiny_models import tiny_model
from support.workloads import captured


@pytest.mark.parametrize("passes", [PLAIN, captured(varlen=True, decode=True)], ids=["plain", "captured"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "sizes"),
    [(64, 16, (1, 2, 4, 8, 16, 32)), (9, 16, (1, 2, 4, 8)), (64, 1, (1, 2, 4)), (1, 1, (1, 2))],
)
def test_steps_of_few_tokens_are_measured_up_to_the_largest_that_there_may_be(
    kind: str, passes, max_tokens: int, max_rows: int, sizes: tuple[int, ...]
) -> None:
    model = loaded(tiny_model(kind))
    layout = Shape(page_size=4).layout(model)
    rig = Rig(model, Shape(page_size=4, num_sectors=len(layout.groups), passes=passes))
    costs = rig.executor._executor.measure_step_costs(max_tokens=max_tokens, max_rows=max_rows)
    assert costs.sizes == sizes
    assert costs.costs_ns[0] > 0
    assert all(small <= large for small, large in itertools.pairwise(costs.costs_ns))
    rig.close()


def test_a_step_with_drafts_of_several_rows_is_tried_where_a_page_is_shorter() -> None:
    rig = Rig(loaded(tiny_model("llama")), Shape(page_size=5, num_sectors=1))
    executor = rig.executor._executor
    plans = []
    forward = executor._runner.forward
    executor._runner.forward = lambda plan: plans.append(plan) or forward(plan)
    executor.measure_step_costs(max_tokens=16, max_rows=16)
    assert {plan.num_tokens for plan in plans} == {1, 2, 4, 8, 16}
    assert [row.num_tokens for row in plans[-1].rows] == [1, 5, 5, 5]
    assert all(row.num_sampled == row.num_tokens for plan in plans for row in plan.rows)

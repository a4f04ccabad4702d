"""In which order a step's copies and the forward passes around it have to be done, where they could overlap.

| copy              | waits for the steps in flight that | the step waits for it if                          |
|-------------------|------------------------------------|---------------------------------------------------|
| out of a sector   | write to the sector                | it writes to the sector, or a later step does     |
| into a sector     | look at the sector, or write to it | always: a request that it was made for goes on    |

Copies themselves are done one after the other, so slots need no order of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import Moves, StepPlan

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Copies that wait for the same step."""

    moves: Moves
    after: int  # place of that step among those in flight; NO_STEP: they wait for none


def written(plan: StepPlan, layout: CacheLayout) -> set[int]:
    """The sectors that a step writes to."""
    found: set[int] = set()
    for row in plan.rows:
        last = row.start + row.num_tokens - 1
        for group, table in zip(layout.groups, row.tables, strict=True):
            found.update(table[row.start // group.sector_len : last // group.sector_len + 1])
    return found


def touched(plan: StepPlan, layout: CacheLayout) -> set[int]:
    """The sectors that a step may write to or look at."""
    found: set[int] = set()
    for row in plan.rows:
        last = row.start + row.num_tokens - 1
        for group, table in zip(layout.groups, row.tables, strict=True):
            found.update(table[: last // group.sector_len + 1])
    return found


def in_order(moves: Moves, in_flight: Sequence[StepPlan], layout: CacheLayout) -> list[CopyBatch]:
    """The copies in the order in which to make them, those first that wait for the earliest step, outs before ins."""
    by_step: dict[int, list[tuple[int, int]]] = {}
    writers = [written(plan, layout) for plan in in_flight]
    for sector, slot in moves.outs:
        by_step.setdefault(_last(writers, (sector,)), []).append((sector, slot))
    batches = [CopyBatch(Moves(outs=tuple(by_step[step]), ins=()), step) for step in sorted(by_step)]
    if moves.ins:
        users = [touched(plan, layout) for plan in in_flight]
        after = _last(users, [sector for _, sector in moves.ins])
        batches.append(CopyBatch(Moves(outs=(), ins=moves.ins), after))
    return batches


def _last(sets: Sequence[set[int]], sectors: Iterable[int]) -> int:
    """The last of the sets that has any of the sectors."""
    wanted = set(sectors)
    return max([place for place, found in enumerate(sets) if found & wanted], default=NO_STEP)

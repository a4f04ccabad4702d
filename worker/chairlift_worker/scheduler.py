"""Which requests get how many tokens in the next step, and what follows from the step's result.

`plan` and `apply` are the only ones that move requests on. No tensors here, and no clock: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

import msgspec

from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.pace import Pace
from chairlift_worker.plan import RowPlan, RowResult, StepPlan, StepResult
from chairlift_worker.request import Request, RequestState
from chairlift_worker.roster import Roster
from chairlift_worker.speculation.speculator import Candidate, Speculator

# A request that lost its pages this often comes back only when nobody active can take them again.
CAREFUL_AFTER: Final = 2
# Waiting requests that are passed over in one step because somebody computes their prefix right now.
MAX_PASSED_OVER: Final = 64
_RANK: Final = attrgetter("rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What one step may hold; see the settings of the same names."""

    max_batch_tokens: int
    max_prefill_chunk: int
    max_requests_per_batch: int  # at most max_batch_tokens, so that every active request can get a token
    scheduler_type: Literal["fifo", "prefill_first"]
    safety_margin: float
    pace: Pace | None = None  # bounds prompts in steps of generating requests; None: nothing does


class Scheduler:
    """Plans steps over the requests of a roster and applies their results to them."""

    def __init__(self, *, limits: StepLimits, roster: Roster, speculator: Speculator | None = None) -> None:
        """With a speculator each result has to be applied before the next plan: that depends on what held."""
        self._limits = limits
        self._speculator = speculator
        self._roster = roster
        self._memory = roster.memory
        self._step = 0
        self._prompt_room = 0  # tokens that prompts may still have in the step that is being planned

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step; None if there is nothing to compute. Reserves the pages that it names."""
        rows: dict[int, RowPlan] = {}
        self._prompt_room = self._find_prompt_room()
        self._plan_active(rows, now_ns)
        self._plan_waiting(rows, now_ns)
        if self._roster.make_way(now_ns):
            self._plan_waiting(rows, now_ns)
        if not rows:
            return None
        if self._speculator is not None:
            self._plan_drafts(rows, self._speculator)
        self._step += 1
        singles = [row for row in rows.values() if row.num_tokens == 1]
        longer = [row for row in rows.values() if row.num_tokens > 1]
        return StepPlan(step=self._step, rows=(*singles, *longer), moves=self._roster.swap.take_moves())

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        """Moves the requests on by what the step computed and sampled, in the order of the plans.

        Rows of requests that are over are dropped; of those that lost their pages meanwhile the token counts, for it
        is right, but not what was computed.
        """
        sampled: dict[int, list[RowResult]] = {}
        for outcome in result.rows:
            sampled.setdefault(outcome.uid, []).append(outcome)
        roster = self._roster
        roster.swap.commit(plan.moves)
        roster.counters.computed_tokens += plan.num_tokens
        for row in plan.rows:
            request = roster.get(row.uid)
            if request is None:
                continue
            total, outcomes = request.total, sampled.get(row.uid, [])
            request.pending -= row.sample is not None
            self._apply_row(request, row, outcomes, now_ns)
            if row.drafts:
                self._settle_drafts(request, row, num_held=max(0, request.total - total - 1))

    def _apply_row(self, request: Request, row: RowPlan, outcomes: Sequence[RowResult], now_ns: int) -> None:
        """One token after the other, as if each had come in a step of its own."""
        for number, outcome in enumerate(outcomes or (None,)):
            if outcome is not None and outcome.error is not None:
                self._roster.end(request, EndingReason.ERROR, now_ns, outcome.error)  # new pages are not published
                return
            if row.tables is request.table.sectors:
                request.computed = row.start + row.num_known + number
                self._memory.commit(request)
            if not request.progress.announced:
                request.progress.announced = True
                self._roster.outbox.started(request)
            if outcome is not None:
                self._append(request, outcome, now_ns)
            if request.state is RequestState.FINISHED:
                return

    def _settle_drafts(self, request: Request, row: RowPlan, *, num_held: int) -> None:
        """Counts a row's drafts, and takes back those that did not hold."""
        counters = self._roster.counters
        counters.draft_tokens += len(row.drafts)
        counters.accepted_draft_tokens += num_held
        if request.state is RequestState.FINISHED:
            return
        assert request.drafter is not None, "drafts come from drafters"
        assert request.planned == row.start + row.num_tokens, "nothing is planned behind drafts"
        request.drafter.acceptance.note(num_drafts=len(row.drafts), num_held=num_held)
        request.planned = request.computed
        self._memory.shrink(request, request.total)

    def _plan_active(self, rows: dict[int, RowPlan], now_ns: int) -> None:
        """Gives active requests their tokens, first served first; by rank among equals."""
        active = self._roster.active
        first = RequestState.PREFILLING if self._limits.scheduler_type == "prefill_first" else RequestState.DECODING
        budget = self._limits.max_batch_tokens
        by_rank = sorted(self._roster.going_on, key=_RANK)
        preferred = [request for request in by_rank if request.state is first]
        for request in (*preferred, *(request for request in by_rank if request.state is not first)):
            if request.uid not in active:  # gave its pages to one before it
                continue
            num_tokens = self._share(request, budget)
            if num_tokens == 0:
                continue
            end = request.planned + num_tokens
            if end <= request.table.room or self._make_room(request, end, rows, now_ns):
                rows[request.uid] = self._take_row(request, num_tokens)
                budget -= num_tokens

    def _plan_waiting(self, rows: dict[int, RowPlan], now_ns: int) -> None:
        """Starts waiting requests, in order of rank, as long as there is room for them.

        One whose prefix an active request computes right now is passed over: a step later it need not compute it.
        """
        roster = self._roster
        budget = self._limits.max_batch_tokens - sum(row.num_tokens for row in rows.values())
        passed_over: list[Request] = []
        if not budget or not roster.waiting or len(roster.active) >= self._limits.max_requests_per_batch:
            return
        owed = self._memory.demand(roster.active.values(), self._limits.max_prefill_chunk)
        while (
            budget
            and self._prompt_room > 0
            and len(roster.active) < self._limits.max_requests_per_batch
            and len(passed_over) < MAX_PASSED_OVER
        ):
            request = roster.waiting.first()
            if request is None or self._is_scarce():
                break
            match = self._memory.match(request)
            if match.being_computed or self._share(request, budget) == 0:
                passed_over.append(roster.waiting.pop())
                continue
            wanted = self._wanted(request, owed) - match.num_pages
            if roster.active and wanted > self._memory.num_available_after(match):
                break
            roster.start(request, match, now_ns)
            num_tokens = self._share(request, budget)
            if not self._memory.grow(request, request.planned + num_tokens):
                raise RuntimeError("the cache has less room than was counted")
            owed += self._memory.demand((request,), self._limits.max_prefill_chunk)
            rows[request.uid] = self._take_row(request, num_tokens)
            budget -= num_tokens
        for request in passed_over:
            roster.waiting.push(request)

    def _plan_drafts(self, rows: dict[int, RowPlan], speculator: Speculator) -> None:
        """Lets drafts follow rows of one token, with what tokens and pages all others have left."""
        limits, active = self._limits, self._roster.active
        num_tokens = sum(row.num_tokens for row in rows.values())
        room, num_rows = limits.max_batch_tokens - num_tokens, 0
        candidates: list[Candidate] = []
        for uid, row in rows.items():
            request = active[uid]
            num_rows += row.sample is not None
            if row.sample is None or row.num_tokens > 1:
                speculator.follow(request, row.num_tokens)
                continue
            most = min(room, limits.max_prefill_chunk - 1, request.max_total - request.total)
            if most > 0:
                candidates.append(Candidate(request, most))
        drafted = speculator.draft(candidates, num_tokens=num_tokens, num_rows=num_rows, room=room)
        for request, drafts in drafted:
            if self._memory.grow(request, request.planned + len(drafts)):
                request.planned += len(drafts)
                row = rows[request.uid]
                rows[request.uid] = msgspec.structs.replace(row, num_tokens=1 + len(drafts), drafts=drafts)

    def _wanted(self, request: Request, owed: int) -> int:
        """Pages that must be available for a waiting request to start, beside the `owed` ones of active requests."""
        if request.progress.preemptions < CAREFUL_AFTER:
            return owed + self._memory.demand((request,), self._limits.max_prefill_chunk)
        return self._memory.demand_at_most((*self._roster.active.values(), request), self._limits.max_prefill_chunk)

    def _share(self, request: Request, budget: int) -> int:
        """Tokens that the request gets in a step with this budget left; 0 if steps in flight bring its last one."""
        expected = request.expected
        if expected > request.max_total:
            return 0
        num_tokens = expected - request.planned
        if num_tokens == 1 and budget:  # most rows of most steps
            return 1
        room = max(1, int(self._prompt_room / _weight(self._limits.pace, request))) if self._prompt_room > 0 else 0
        return min(num_tokens, budget, self._limits.max_prefill_chunk, room)

    def _find_prompt_room(self) -> int:
        """Tokens that prompts may have in this step: so few that generating requests get their tokens in time."""
        pace = self._limits.pace
        decoding = RequestState.DECODING
        num_decoding = sum(request.state is decoding for request in self._roster.going_on)
        return pace.prompt_tokens(num_decoding) if pace and num_decoding else self._limits.max_batch_tokens

    def _take_row(self, request: Request, num_tokens: int) -> RowPlan:
        if num_tokens > 1:
            self._prompt_room -= int(num_tokens * _weight(self._limits.pace, request))
        return _row_of(request, num_tokens)

    def _is_scarce(self) -> bool:
        """Whether so little is free that only what is active goes on."""
        pool = self._memory.pool
        return bool(self._roster.active) and pool.num_available < self._limits.safety_margin * pool.num_pages

    def _make_room(self, request: Request, num_tokens: int, rows: dict[int, RowPlan], now_ns: int) -> bool:
        """Grows the request's pages, if need be by taking those of requests that are held, then that rank after it."""
        held = self._roster.held
        while not self._memory.grow(request, num_tokens):
            victim = max(self._roster.active.values(), key=lambda other: (other.uid in held, other.rank))
            if victim is request and len(self._roster.active) == 1:
                if request.computed < request.planned:
                    return False  # the step in flight lets its window move on, which gives room
                raise RuntimeError(f"request {request.uid} alone does not fit the cache; it should have been refused")
            if (row := rows.pop(victim.uid, None)) is not None:
                _give_row_back(victim, row)
            self._roster.preempt(victim, now_ns)
            if victim is request:
                return False
        return True

    def _append(self, request: Request, outcome: RowResult, now_ns: int) -> None:
        """The request's next token; ends the request if it was the last."""
        roster, token_id = self._roster, outcome.token_id
        request.tokens.append(token_id)
        if request.state is RequestState.PREFILLING:
            request.become(RequestState.DECODING)
            request.progress.first_token_ns = request.progress.first_token_ns or now_ns
        roster.counters.generated_tokens += 1
        roster.outbox.token(request, outcome)
        if token_id in request.stop_ids:
            roster.end(request, EndingReason.STOP, now_ns)
        elif request.total > request.max_total:
            roster.end(request, EndingReason.LENGTH, now_ns)


def _weight(pace: Pace | None, request: Request) -> float:
    """What the request's next token costs beside one with nothing before it."""
    return 1.0 if pace is None else pace.weight(request.planned)


def _give_row_back(request: Request, row: RowPlan) -> None:
    """Undoes `_row_of`: the step will not have this row."""
    request.planned = row.start
    request.pending -= row.sample is not None


def _row_of(request: Request, num_tokens: int) -> RowPlan:
    """The request's share of a step: its next num_tokens tokens."""
    spec = None
    start, total = request.planned, request.total
    request.planned = end = start + num_tokens
    if end == total + request.pending:
        spec = request.sample_spec(end - request.prompt_len)
        request.pending += 1
    return RowPlan(
        uid=request.uid,
        tokens=request.tokens,
        start=start,
        num_tokens=num_tokens,
        tables=request.table.sectors,
        sample=spec,
        carry=end > total,
    )

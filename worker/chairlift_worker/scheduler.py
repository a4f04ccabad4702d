"""Which requests get how many tokens in the next step, and what follows from the step's result.

`plan` and `apply` are the only ones that move requests on. No tensors here, and no clock: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import msgspec

from chairlift_worker.forks import Fork
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.kv.sharing import PrefixMatch
from chairlift_worker.plan import RowPlan, RowResult, StepPlan, StepResult
from chairlift_worker.request import Request, RequestState
from chairlift_worker.roster import Roster
from chairlift_worker.speculation.speculator import Candidate, Speculator
from chairlift_worker.step_budget import StepBudget, StepLimits

# A request that lost its pages this often comes back only when nobody active can take them again.
CAREFUL_AFTER: Final = 2
# Waiting requests that are passed over in one step because somebody computes their prefix right now.
MAX_PASSED_OVER: Final = 64
_RANK: Final = attrgetter("rank")


class Scheduler:
    """Plans steps over the requests of a roster and applies their results to them."""

    def __init__(self, *, limits: StepLimits, roster: Roster, speculator: Speculator | None = None) -> None:
        """With a speculator each result has to be applied before the next plan: that depends on what held."""
        self._limits = limits
        self._speculator = speculator
        self._roster = roster
        self._memory = roster.memory
        self._step = 0

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step; None if there is nothing to compute. Reserves the pages that it names."""
        rows: dict[int, RowPlan] = {}
        decoding = RequestState.DECODING
        num_decoding = sum([request.state is decoding for request in self._roster.going_on])
        budget = StepBudget(limits=self._limits, num_decoding=num_decoding)
        self._plan_active(rows, budget, now_ns)
        self._plan_waiting(rows, budget, now_ns)
        if self._roster.make_way(now_ns):
            self._plan_waiting(rows, budget, now_ns)
        if not rows:
            return None
        if self._speculator is not None:
            self._plan_drafts(rows, budget, self._speculator)
        self._step += 1
        singles = [row for row in rows.values() if row.num_tokens == 1]
        longer = [row for row in rows.values() if row.num_tokens > 1]
        moves = self._roster.forks.take_copies(self._roster.swap.take_moves())
        return StepPlan(step=self._step, rows=(*singles, *longer), moves=moves)

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
        """One token after the other, as if each had come in a step of its own; before them what judges the prompt."""
        roster = self._roster
        judged = [outcome.prompt for outcome in outcomes if outcome.prompt is not None]
        for number, outcome in enumerate(outcomes[len(judged) :] or (None,)):
            if outcome is not None and outcome.error is not None:
                roster.end(request, EndingReason.ERROR, now_ns, outcome.error)  # new pages are not published
                return
            if row.tables is request.table.sectors:
                request.computed = row.start + row.num_known + number
                self._memory.commit(request)
                if request.computed >= request.prompt_len - 1:
                    roster.forks.wake(request.uid, roster.waiting)
            if not request.progress.announced:
                request.progress.announced = True
                roster.outbox.started(request)
            for prompt in judged if number == 0 else ():
                roster.outbox.prompt(prompt)
            if outcome is not None:
                self._append(request, outcome, now_ns)
            if request.state is RequestState.FINISHED:
                return
        if not request.generates and row.start + row.num_tokens >= request.prompt_len:
            roster.end(request, EndingReason.LENGTH, now_ns)

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

    def _plan_active(self, rows: dict[int, RowPlan], budget: StepBudget, now_ns: int) -> None:
        """Gives active requests their tokens, first served first; by rank among equals."""
        active = self._roster.active
        first = RequestState.PREFILLING if self._limits.scheduler_type == "prefill_first" else RequestState.DECODING
        by_rank = sorted(self._roster.going_on, key=_RANK)
        preferred = [request for request in by_rank if request.state is first]
        for request in (*preferred, *(request for request in by_rank if request.state is not first)):
            if request.uid not in active:  # gave its pages to one before it
                continue
            num_tokens = budget.share(request)
            if num_tokens == 0:
                continue
            end = request.planned + num_tokens
            if end <= request.table.room or self._make_room(request, end, rows, budget, now_ns):
                rows[request.uid] = budget.take(request, num_tokens)

    def _plan_waiting(self, rows: dict[int, RowPlan], budget: StepBudget, now_ns: int) -> None:
        """Starts waiting requests, in order of rank, as long as there is room for them.

        One whose prefix an active request computes right now is passed over: a step later it need not compute it.
        """
        roster = self._roster
        passed_over: list[Request] = []
        if not budget.num_left or not roster.waiting or len(roster.active) >= self._limits.max_requests_per_batch:
            return
        owed = self._memory.demand(roster.active.values(), self._limits.max_prefill_chunk)
        while (
            budget.num_left
            and budget.prompt_room > 0
            and len(roster.active) < self._limits.max_requests_per_batch
            and len(passed_over) < MAX_PASSED_OVER
        ):
            request = roster.waiting.first()
            if request is None or self._is_scarce():
                break
            match = self._match(request)
            if match.being_computed or budget.share(request) == 0:
                passed_over.append(roster.waiting.pop())
                continue
            wanted = self._wanted(request, owed) - match.num_pages
            if roster.active and wanted > self._memory.num_available_after(match.pages):
                break
            roster.start(request, match, now_ns)
            num_tokens = budget.share(request)
            if not self._memory.grow(request, request.planned + num_tokens):
                raise RuntimeError("the cache has less room than was counted")
            owed += self._memory.demand((request,), self._limits.max_prefill_chunk)
            rows[request.uid] = budget.take(request, num_tokens)
        for request in passed_over:
            roster.waiting.push(request)

    def _match(self, request: Request) -> PrefixMatch | Fork:
        """What need not be computed for a waiting request: what its source has of it, or else the cache."""
        source = request.params.fork_of
        fork = self._roster.forks.find(request, self._roster.get(source)) if source else None
        return fork or self._memory.match(request)

    def _plan_drafts(self, rows: dict[int, RowPlan], budget: StepBudget, speculator: Speculator) -> None:
        """Lets drafts follow rows of one token, with what tokens and pages all others have left."""
        limits, active = self._limits, self._roster.active
        num_tokens = sum(row.num_tokens for row in rows.values())
        room, num_rows = budget.num_left, 0
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

    def _is_scarce(self) -> bool:
        """Whether so little is free that only what is active goes on."""
        pool = self._memory.pool
        return bool(self._roster.active) and pool.num_available < self._limits.safety_margin * pool.num_pages

    def _make_room(
        self, request: Request, num_tokens: int, rows: dict[int, RowPlan], budget: StepBudget, now_ns: int
    ) -> bool:
        """Grows the request's pages, if need be by taking those of requests that are held, then that rank after it."""
        held = self._roster.held
        while not self._memory.grow(request, num_tokens):
            victim = max(self._roster.active.values(), key=lambda other: (other.uid in held, other.rank))
            if victim is request and len(self._roster.active) == 1:
                if request.computed < request.planned:
                    return False  # the step in flight lets its window move on, which gives room
                raise RuntimeError(f"request {request.uid} alone does not fit the cache; it should have been refused")
            if (row := rows.pop(victim.uid, None)) is not None:
                budget.give_back(victim, row)
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
        if token_id in request.stop_ids or outcome.is_complete:
            roster.end(request, EndingReason.STOP, now_ns)
        elif request.total > request.max_total:
            roster.end(request, EndingReason.LENGTH, now_ns)

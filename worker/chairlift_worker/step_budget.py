"""What a step that is being planned may still hold, and the rows that take their share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from chairlift_worker.pace import Pace
from chairlift_worker.plan import RowPlan
from chairlift_worker.request import Request

# Tokens of prompts that one step judges: each takes a row of logits.
MAX_JUDGED: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What one step may hold; see the settings of the same names."""

    max_batch_tokens: int
    max_prefill_chunk: int
    max_requests_per_batch: int  # at most max_batch_tokens, so that every active request can get a token
    scheduler_type: Literal["fifo", "prefill_first"]
    safety_margin: float
    pace: Pace | None = None  # bounds prompts in steps of generating requests; None: nothing does


class StepBudget:
    """Shares a step out. Only here rows are made, and only here a request's `planned`, `pending` and `judged` go up."""

    def __init__(self, *, limits: StepLimits, num_decoding: int) -> None:
        """Prompts get so little that the `num_decoding` generating requests get their tokens in time."""
        self._limits = limits
        self._pace = limits.pace
        self.num_left = limits.max_batch_tokens
        self.prompt_room = limits.max_batch_tokens  # tokens that prompts may still have
        if self._pace is not None and num_decoding:
            self.prompt_room = self._pace.prompt_tokens(num_decoding)
        self._judged_room = MAX_JUDGED

    def share(self, request: Request) -> int:
        """Tokens that the request would get now; 0 if steps in flight bring its last one."""
        expected = request.expected
        if expected > request.max_total:
            return 0
        num_tokens = expected - request.planned
        if num_tokens == 1 and self.num_left:  # most rows of most steps
            return 1
        room = max(1, int(self.prompt_room / self._weight(request))) if self.prompt_room > 0 else 0
        if request.params.prompt_logprobs and request.progress.judged < request.prompt_len:
            room = min(room, request.first_wanted - request.planned + self._judged_room)
        return min(num_tokens, self.num_left, self._limits.max_prefill_chunk, room)

    def take(self, request: Request, num_tokens: int) -> RowPlan:
        """The request's next so many tokens."""
        if num_tokens > 1:
            self.prompt_room -= int(num_tokens * self._weight(request))
        self.num_left -= num_tokens
        start, total = request.planned, request.total
        request.planned = end = start + num_tokens
        spec = None
        if end == total + request.pending and request.generates:
            spec = request.sample_spec(end - request.prompt_len)
            request.pending += 1
        row = RowPlan(
            uid=request.uid,
            tokens=request.tokens,
            start=start,
            num_tokens=num_tokens,
            tables=request.table.sectors,
            sample=spec,
            carry=end > total,
            scored=request.judge(start, end) if request.params.prompt_logprobs else None,
        )
        self._judged_room -= row.num_scored
        return row

    def give_back(self, request: Request, row: RowPlan) -> None:
        """Undoes `take`: the step will not have this row."""
        request.planned = row.start
        request.pending -= row.sample is not None
        if row.scored is not None:
            request.progress.judged = row.scored.index
        self.num_left += row.num_tokens
        self._judged_room += row.num_scored

    def _weight(self, request: Request) -> float:
        """What the request's next token costs beside one with nothing before it."""
        return 1.0 if self._pace is None else self._pace.weight(request.planned)

"""What the scheduler has to tell the service since the last time it was asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from chairlift_worker.ipc.messages import EndingMsg, EndingReason, PromptLogprobsMsg, StartedMsg, StepMsg
from chairlift_worker.plan import RowResult
from chairlift_worker.request import Request

# Endings in one message: about 100 KB.
MAX_ENDINGS: Final = 1000
# Likeliest tokens in one message, but for those of its last token: about 500 KB.
MAX_TOPS: Final = 65_536
# Of prompts' log-probabilities in one message.
MAX_PROMPT_BYTES: Final = 500_000
_INT_BYTES: Final = 4


class _Tokens:
    """Columns of a `StepMsg` that have an entry for each token."""

    def __init__(self) -> None:
        self.uids: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.num_tops: list[int] = []
        self.top_ids: list[bytes] = []
        self.top_logprobs: list[bytes] = []
        self.any_logprob = False
        self.total_tops = 0

    def add(self, uid: int, outcome: RowResult) -> None:
        self.uids.append(uid)
        self.token_ids.append(outcome.token_id)
        self.logprobs.append(math.nan if outcome.logprob is None else outcome.logprob)
        self.any_logprob |= outcome.logprob is not None
        num_top = 0
        if outcome.top is not None:
            num_top = len(outcome.top.ids) // _INT_BYTES
            self.top_ids.append(outcome.top.ids)
            self.top_logprobs.append(outcome.top.logprobs)
        self.num_tops.append(num_top)
        self.total_tops += num_top

    def message(self, step: int) -> StepMsg:
        """All of them."""
        return StepMsg(
            step=step,
            uids=array("Q", self.uids).tobytes(),
            token_ids=array("i", self.token_ids).tobytes(),
            logprobs=array("f", self.logprobs).tobytes() if self.any_logprob else b"",
            started=(),
            endings=(),
            num_tops=bytes(self.num_tops) if self.total_tops else b"",
            top_ids=b"".join(self.top_ids),
            top_logprobs=b"".join(self.top_logprobs),
        )


class Outbox:
    """Collects tokens, prompts' log-probabilities, starts and endings, to be told in the columns of a `StepMsg`.

    Or of several, where one would be too large.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._tokens = [_Tokens()]
        self._prompts: list[PromptLogprobsMsg] = []
        self._started: list[StartedMsg] = []
        self._endings: list[EndingMsg] = []

    def token(self, request: Request, outcome: RowResult) -> None:
        """A request's next token."""
        if self._tokens[-1].total_tops >= MAX_TOPS:
            self._tokens.append(_Tokens())
        self._tokens[-1].add(request.uid, outcome)

    def prompt(self, judged: PromptLogprobsMsg) -> None:
        """Log-probabilities of a request's prompt."""
        self._prompts.append(judged)

    def started(self, request: Request) -> None:
        """A request's first tokens are computed."""
        self._started.append(StartedMsg(uid=request.uid, cached_tokens=request.progress.cached_tokens))

    def ending(self, request: Request, reason: EndingReason, now_ns: int, error: str = "") -> None:
        """A request is over."""
        started = request.progress.started_ns or now_ns
        first = request.progress.first_token_ns or now_ns
        self._endings.append(
            EndingMsg(
                uid=request.uid,
                reason=reason,
                error=error,
                queued_ns=max(0, started - request.params.arrival_ns),
                prefill_ns=max(0, first - started),
                decode_ns=max(0, now_ns - first),
                swapped_ns=request.progress.swapped_ns,
                preemptions=request.progress.preemptions,
                cached_tokens=request.progress.cached_tokens,
                turns=tuple(request.progress.turns),
            )
        )

    def take(self, step: int) -> list[StepMsg]:
        """Everything collected, which is forgotten here; no message if there is nothing.

        Tokens and starts fit one record, for they are bounded by the rows of a step; with many of the likeliest tokens
        beside each they may take several. So may endings: any number of waiting requests may be cancelled at once. What
        is told of prompts comes before the tokens.
        """
        if not (self._tokens[0].uids or self._started or self._endings or self._prompts):
            return []
        messages = [
            *(_nothing(step, prompts=prompts) for prompts in _packed(self._prompts)),
            *(tokens.message(step) for tokens in self._tokens),
        ]
        messages[0] = msgspec.structs.replace(messages[0], started=tuple(self._started))
        messages[-1] = msgspec.structs.replace(messages[-1], endings=tuple(self._endings[:MAX_ENDINGS]))
        messages += [
            _nothing(step, endings=tuple(self._endings[start : start + MAX_ENDINGS]))
            for start in range(MAX_ENDINGS, len(self._endings), MAX_ENDINGS)
        ]
        self._clear()
        return messages


def _nothing(step: int, *, endings: tuple[EndingMsg, ...] = (), prompts: tuple[PromptLogprobsMsg, ...] = ()) -> StepMsg:
    """A message without tokens."""
    return StepMsg(step=step, uids=b"", token_ids=b"", logprobs=b"", started=(), endings=endings, prompts=prompts)


def _packed(prompts: Sequence[PromptLogprobsMsg]) -> Iterator[tuple[PromptLogprobsMsg, ...]]:
    """They, as many together as one message takes."""
    together: list[PromptLogprobsMsg] = []
    num_bytes = 0
    for judged in prompts:
        size = len(judged.logprobs) + len(judged.top_ids) + len(judged.top_logprobs)
        if together and num_bytes + size > MAX_PROMPT_BYTES:
            yield tuple(together)
            together, num_bytes = [], 0
        together.append(judged)
        num_bytes += size
    if together:
        yield tuple(together)

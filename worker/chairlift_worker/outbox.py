"""What the scheduler has to tell the service since the last time it was asked."""

from __future__ import annotations

import math
from array import array
from typing import Final

from chairlift_worker.ipc.messages import EndingMsg, EndingReason, StartedMsg, StepMsg
from chairlift_worker.request import Request

# Endings in one message: about 100 KB.
MAX_ENDINGS: Final = 1000


class Outbox:
    """Collects tokens, starts and endings in the columns of a `StepMsg`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._uids: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._any_logprob = False
        self._started: list[StartedMsg] = []
        self._endings: list[EndingMsg] = []

    def token(self, request: Request, token_id: int, logprob: float | None) -> None:
        """A request's next token."""
        self._uids.append(request.uid)
        self._token_ids.append(token_id)
        if logprob is None:
            self._logprobs.append(math.nan)
        else:
            self._logprobs.append(logprob)
            self._any_logprob = True

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

        Tokens and starts fit one record, for they are bounded by the rows of a step. Endings are not: any number of
        waiting requests may be cancelled at once, so many of them take several messages.
        """
        if not (self._uids or self._started or self._endings):
            return []
        first, rest = self._endings[:MAX_ENDINGS], self._endings[MAX_ENDINGS:]
        messages = [
            StepMsg(
                step=step,
                uids=array("Q", self._uids).tobytes(),
                token_ids=array("i", self._token_ids).tobytes(),
                logprobs=array("f", self._logprobs).tobytes() if self._any_logprob else b"",
                started=tuple(self._started),
                endings=tuple(first),
            )
        ]
        for start in range(0, len(rest), MAX_ENDINGS):
            endings = tuple(rest[start : start + MAX_ENDINGS])
            messages.append(StepMsg(step=step, uids=b"", token_ids=b"", logprobs=b"", started=(), endings=endings))
        self._clear()
        return messages

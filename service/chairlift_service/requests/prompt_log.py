"""The log-probabilities of a prompt's tokens, as far as the worker has told them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from chairlift_worker.ipc.messages import PromptLogprobsMsg

from chairlift_service.requests.top_logprobs import Top, TopLogprobs


class PromptEntry(NamedTuple):
    """What is known of a token's place in a prompt."""

    logprob: float | None  # None: of the first token, which nothing stands before
    top: Top = ()  # the likeliest tokens there; empty where only the token's own was asked


class PromptLog:
    """An entry for each token of the prompt, from the first on, whose own is empty. Append-only."""

    __slots__ = ("_logprobs", "_tops")

    def __init__(self) -> None:
        self._logprobs = array("f")
        self._tops: TopLogprobs | None = None  # None: the worker sent none

    def __len__(self) -> int:
        return 1 + len(self._logprobs)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self._logprobs) * self._logprobs.itemsize + (0 if self._tops is None else self._tops.num_bytes)

    def extend(self, told: PromptLogprobsMsg) -> None:
        """Adds what the worker told. Raises ValueError if that does not begin where the log ends."""
        if told.index != len(self):
            raise ValueError(f"log-probabilities of token {told.index} of a prompt come where {len(self)} is due")
        self._logprobs.frombytes(told.logprobs)
        if told.num_tops:
            self._tops = TopLogprobs() if self._tops is None else self._tops
            ids, logprobs = memoryview(told.top_ids).cast("i"), memoryview(told.top_logprobs).cast("f")
            begin = 0
            for num in told.num_tops:
                self._tops.append(ids[begin : begin + num], logprobs[begin : begin + num])
                begin += num

    def slice(self, index: int, stop: int) -> Sequence[PromptEntry]:
        """Entries of tokens `[index, stop)`."""
        first = [PromptEntry(None)] if index == 0 < stop else []
        begin, end = max(index, 1) - 1, max(stop, 1) - 1
        logprobs = self._logprobs[begin:end]
        tops: Sequence[Top] = ((),) * len(logprobs) if self._tops is None else self._tops.slice(begin, end)
        return first + [PromptEntry(logprob, top) for logprob, top in zip(logprobs, tops, strict=True)]

"""The likeliest tokens beside each token of an output."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

Top = Sequence[tuple[int, float]]
"""Token ids and log-probabilities, likeliest first; empty where the worker sent none."""

_NUM_ENTRY_BYTES = 8  # id and log-probability


class TopLogprobs:
    """One `Top` for each token, in columns; those of token i are entries `[ends[i - 1], ends[i])`."""

    __slots__ = ("_ends", "_ids", "_logprobs")

    def __init__(self) -> None:
        self._ends = array("Q")
        self._ids = array("i")
        self._logprobs = array("f")

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return len(self._ids) * _NUM_ENTRY_BYTES + len(self._ends) * self._ends.itemsize

    def append(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds those of the next token."""
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)
        self._ends.append(len(self._ids))

    def slice(self, index: int, stop: int) -> list[Top]:
        """Those of tokens `[index, stop)`."""
        ends = self._ends[index:stop]
        begins = [self._ends[index - 1] if index else 0, *ends[:-1]]
        return [
            list(zip(self._ids[begin:end], self._logprobs[begin:end], strict=True))
            for begin, end in zip(begins, ends, strict=True)
        ]

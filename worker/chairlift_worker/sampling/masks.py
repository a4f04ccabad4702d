"""What sampling asks of the grammars that requests are constrained to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from chairlift_worker.plan import RowPlan


class Masks(Protocol):
    """Which tokens the grammars of constrained requests allow."""

    def prepare(self, rows: Iterable[RowPlan]) -> None:
        """Begins to compute the masks that a step needs first; each row's tokens so far are known."""
        ...

    def mask(self, uid: int, index: int) -> int | None:
        """Where a bit for each token stands, set if it may be output token number `index`; None: all may be.

        uint32 words, token i is bit i % 32 of word i // 32; they stay until the next call for the same request.
        """
        ...

    def chosen(self, uid: int, token_id: int) -> bool:
        """Notes that a token was chosen; whether nothing can follow it."""
        ...

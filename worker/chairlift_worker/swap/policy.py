"""Whether an evicted request's pages are copied away or given up to be computed again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """What either way costs on this machine, measured when the worker warms up."""

    token_ns: float  # computing a prompt token again, in a step of many
    sector_ns: float  # copying a sector, one way

    def prefers_swap(self, *, num_tokens: int, num_sectors: int) -> bool:
        """Whether copying these sectors away and back is cheaper than computing the tokens again."""
        return 2 * num_sectors * self.sector_ns < num_tokens * self.token_ns


ALWAYS_SWAP = SwapCosts(token_ns=1.0, sector_ns=0.0)
NEVER_SWAP = SwapCosts(token_ns=0.0, sector_ns=1.0)

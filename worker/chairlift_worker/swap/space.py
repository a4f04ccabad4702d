"""What evicted requests keep in the swap pool, and the copies that bring it there and back.

Reserve -> commit | abort: `save` reserves slots and plans the copies there; `restore` plans the copies back, and the
slots stay taken until `commit` says that the step which made those copies is done; `drop` aborts.
"""

from __future__ import annotations

from collections.abc import Iterable

from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.kv.sharing import PrefixMatch
from chairlift_worker.plan import NO_MOVES, Moves
from chairlift_worker.request import Request, SavedPages
from chairlift_worker.swap.policy import SwapCosts
from chairlift_worker.swap.pool import SwapPool


class SwapSpace:
    """Owns the pool; alone writes a request's `saved`. The scheduler takes the planned copies with each plan."""

    def __init__(self, *, pool: SwapPool, costs: SwapCosts) -> None:
        self.pool = pool
        self._costs = costs
        self._outs: list[tuple[int, int]] = []  # (sector, slot), for the next plan
        self._ins: list[tuple[int, int]] = []  # (slot, sector)
        self._num_leaving = 0  # slots that planned copies, or those of steps in flight, read for the last time

    def save(self, request: Request, memory: PagedMemory) -> bool:
        """Plans to copy what the request has computed; False if that does not pay, or the pool is too full.

        What steps in flight compute is there by the time of the copies. Call it before the request's pages are
        released. Pages that other requests share are copied too: the sharers may be gone before this one comes back.
        """
        table, num_tokens = request.table, request.planned
        held = [
            sectors[first : group.sectors_for(num_tokens)]
            for group, sectors, first in zip(memory.layout.groups, table.sectors, table.first, strict=True)
        ]
        num_sectors = sum(map(len, held))
        if not num_sectors or not self._costs.prefers_swap(num_tokens=num_tokens, num_sectors=num_sectors):
            return False
        slots = self.pool.take(num_sectors)
        if slots is None:
            return False
        self._outs += zip((sector for sectors in held for sector in sectors), slots, strict=True)
        by_group, begin = [], 0
        for sectors in held:
            by_group.append(slots[begin : begin + len(sectors)])
            begin += len(sectors)
        request.saved = SavedPages(computed=num_tokens, first=list(table.first), slots=by_group)
        return True

    def restore(self, request: Request, match: PrefixMatch, memory: PagedMemory) -> None:
        """Gives the request pages for what it had computed, and plans to copy back all that the cache has not.

        The pages must be available. They are published like any others once the step is done, not before.
        """
        memory.reattach(request, match)
        saved, table = request.saved, request.table
        assert saved is not None, "only what was saved can be restored"
        for first, slots, sectors, needed in zip(saved.first, saved.slots, table.sectors, table.first, strict=True):
            for place, slot in enumerate(slots, start=first):
                if place >= max(needed, match.num_pages):
                    self._ins.append((slot, sectors[place]))
                    self._num_leaving += 1
                else:
                    self.pool.give_back([slot])  # the cache has it still, or no later token looks there
        request.saved = None

    def drop(self, request: Request) -> None:
        """Forgets what was saved: the request is over, or its pages are of no use any more."""
        if request.saved is not None:
            self.pool.give_back([slot for slots in request.saved.slots for slot in slots])
            request.saved = None

    def take_moves(self) -> Moves:
        """The copies planned since the last time."""
        if not self._outs and not self._ins:
            return NO_MOVES
        moves = Moves(outs=tuple(self._outs), ins=tuple(self._ins))
        self._outs, self._ins = [], []
        return moves

    def commit(self, moves: Moves) -> None:
        """The step that made these copies is done: slots that were read are free."""
        self.pool.give_back([slot for slot, _ in moves.ins])
        self._num_leaving -= len(moves.ins)

    def check(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless every used slot is some request's, or about to be read for the last time."""
        self.pool.check()
        saved = sum(len(slots) for request in requests if request.saved for slots in request.saved.slots)
        assert self.pool.num_used == saved + self._num_leaving, "slots that nobody will read"

"""The copies between the cache's sectors and the swap pool's slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from chairlift_worker.plan import NO_MOVES, Moves


class SwapMover:
    """Owns the pool's bytes: (slots, elements of a sector), allocated once and written once, so that they are there."""

    def __init__(
        self, *, sectors: torch.Tensor, num_slots: int, on_move: Callable[[Moves], None] | None = None
    ) -> None:
        """`sectors` is the cache's memory, (sectors, elements). Pinned where that means something.

        `on_move` is told of what is about to be copied.
        """
        self._sectors = sectors
        self._on_move = on_move
        pinned = sectors.device.type == "cuda"
        self._slots = torch.empty((num_slots, sectors.shape[1]), dtype=sectors.dtype, pin_memory=pinned)
        self._slots.zero_()

    def move(self, moves: Moves) -> None:
        """Copies out, then in, a run of neighbours at a time, and from sector to sector.

        That is before the step writes anything. On a GPU the copies are done in the order of the stream, and nobody has
        waited for them afterwards.
        """
        if self._on_move is not None and moves != NO_MOVES:
            self._on_move(moves)
        for sector, slot, length in contiguous_runs(moves.outs):
            self._slots[slot : slot + length].copy_(self._sectors[sector : sector + length], non_blocking=True)
        for slot, sector, length in contiguous_runs(moves.ins):
            self._sectors[sector : sector + length].copy_(self._slots[slot : slot + length], non_blocking=True)
        self.copy(moves.copies)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies from sector to sector."""
        for source, target in copies:
            self._sectors[target].copy_(self._sectors[source], non_blocking=True)


def contiguous_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target) pairs as (source, target, length): both sides of a run go up by one each time."""
    begin = 0
    for place in range(1, len(pairs) + 1):
        source, target = pairs[begin]
        if place < len(pairs) and pairs[place] == (source + place - begin, target + place - begin):
            continue
        yield source, target, place - begin
        begin = place

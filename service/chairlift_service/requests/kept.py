"""Results of detached requests, kept for a while after their ending, and what is remembered of those that are gone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from chairlift_service.requests.generation import Generation

MAX_DEPARTED: Final = 10_000
"""How many of the last gone ids are remembered, to tell one that is over from one that never was."""

_NS_PER_S: Final = 1_000_000_000


class KeptResults:
    """Finished detached requests, by their heads, oldest ending first, bounded in age and in memory."""

    def __init__(self, *, ttl_s: float, max_bytes: int) -> None:
        self._ttl_ns = int(ttl_s * _NS_PER_S)
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, tuple[Generation, int]] = OrderedDict()  # by uid, with the time of its expiry
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that all of them take."""
        return self._num_bytes

    def __contains__(self, generation: Generation) -> bool:
        return generation.uid in self._kept

    def keep(self, generation: Generation, *, now_ns: int) -> None:
        """Keeps a request that has just ended, with all its choices."""
        generation.size = sum(choice.num_bytes for choice in generation.choices)
        self._num_bytes += generation.size
        self._kept[generation.uid] = (generation, now_ns + self._ttl_ns)

    def let_go(self, generation: Generation) -> None:
        """Keeps it no longer. Does nothing if it is not kept."""
        if self._kept.pop(generation.uid, None) is not None:
            self._num_bytes -= generation.size

    def take_surplus(self, *, now_ns: int) -> list[Generation]:
        """Lets go of what is too old, and of the oldest while all together are too large, and returns it."""
        surplus: list[Generation] = []
        while self._kept:
            generation, expiry_ns = next(iter(self._kept.values()))
            if expiry_ns > now_ns and self._num_bytes <= self._max_bytes:
                break
            self.let_go(generation)
            surplus.append(generation)
        return surplus


class Departed:
    """The last ids that are gone, and whether a result was kept under each."""

    def __init__(self, *, capacity: int = MAX_DEPARTED) -> None:
        self._capacity = capacity
        self._was_kept: OrderedDict[str, bool] = OrderedDict()

    def add(self, generation: Generation) -> None:
        """Remembers a generation that the registry forgets."""
        self._was_kept[generation.request_id] = generation.detached
        self._was_kept.move_to_end(generation.request_id)
        if len(self._was_kept) > self._capacity:
            self._was_kept.popitem(last=False)

    def was_kept(self, request_id: str) -> bool | None:
        """Whether a result was kept under this id; None for an id that is not remembered."""
        return self._was_kept.get(request_id)

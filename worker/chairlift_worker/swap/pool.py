"""Slots of the swap pool; each holds one sector."""

from __future__ import annotations


class SwapPool:
    """Every slot is free or used. Full is a value: `take` gives nothing then."""

    def __init__(self, *, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"a pool cannot have {num_slots} slots")
        self.num_slots = num_slots
        # Handed out in order, so that a request's slots lie in one run where they can and are copied at once.
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return len(self._used)

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many slots, or None if there are not as many."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._used.update(slots)
        return slots

    def give_back(self, slots: list[int]) -> None:
        """Frees slots. Raises ValueError for one that is not used."""
        for slot in slots:
            if slot not in self._used:
                raise ValueError(f"slot {slot} is given back but not used")
            self._used.remove(slot)
        self._free.extend(reversed(slots))

    def check(self) -> None:
        """Raises AssertionError unless free + used = all."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & self._used, "a slot is free and used"
        assert len(free) + len(self._used) == self.num_slots, "slots are lost"

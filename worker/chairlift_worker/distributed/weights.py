"""Other weights for all ranks, or for none."""

from __future__ import annotations

from chairlift_worker.distributed.group import RankGroup
from chairlift_worker.distributed.leader import Leader
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.model.weights import LiveWeights


class SplitWeights:
    """One rank's part of the weights. Every rank calls `update` at the same time."""

    def __init__(self, *, group: RankGroup, weights: LiveWeights) -> None:
        self._group = group
        self._weights = weights

    def update(self, folder: str) -> int:
        """As `LiveWeights.update`: what one rank cannot take none takes."""
        fault, read = "", None
        try:
            read = self._weights.read(folder)
        except WeightsError as error:
            fault = str(error)
        with self._group.unhurried():
            faults = [fault for fault in self._group.gather(fault) if fault]
        if faults or read is None:
            raise WeightsError(faults[0])
        return self._weights.put(folder, read)


class LedWeights:
    """The weights of all ranks, to rank 0."""

    def __init__(self, *, leader: Leader, weights: SplitWeights) -> None:
        self._leader = leader
        self._weights = weights

    def update(self, folder: str) -> int:
        """As `SplitWeights.update`; has the others do it, too."""
        with self._leader.in_update(folder):
            return self._weights.update(folder)

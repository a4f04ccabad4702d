"""Rank 0's side: what it is about to do, told to the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from chairlift_worker.distributed.errors import RanksApartError
from chairlift_worker.distributed.group import RankGroup
from chairlift_worker.distributed.messages import (
    RankBeatMsg,
    RankEndMsg,
    RankMovesMsg,
    RankMsg,
    RankReadyMsg,
    RankWeightsMsg,
    encode,
    step_message,
)
from chairlift_worker.kv.layout import CacheLayout
from chairlift_worker.plan import Moves, StepPlan


class Leader:
    """Tells the other ranks of each step before it begins. Steps, weights and beats may come from different threads.

    Once the others have begun something there is no way back: what fails from then on is a RanksApartError.
    """

    def __init__(self, *, group: RankGroup, layout: CacheLayout) -> None:
        self._group = group
        self._sector_lens = tuple(layer_group.sector_len for layer_group in layout.groups)
        self._turn = threading.Lock()  # held from a message until all that belongs to it is over

    @contextlib.contextmanager
    def in_step(self, plan: StepPlan, carried: Mapping[int, int]) -> Iterator[None]:
        """Has the others compute the plan, which the caller does inside."""
        message = step_message(plan, carried, sector_lens=self._sector_lens)
        with self._turn:
            self._tell(message)
            with _no_way_back():
                yield

    def move(self, moves: Moves) -> None:
        """Has the others make these copies."""
        with self._turn:
            self._tell(RankMovesMsg(moves=moves))

    @contextlib.contextmanager
    def in_update(self, folder: str) -> Iterator[None]:
        """Has the others take the weights of a folder, which the caller does inside."""
        with self._turn:
            self._tell(RankWeightsMsg(folder=folder))
            yield

    def ready(self, timeout_s: float | None) -> None:
        """Ends the preparations: from now on no rank waits longer than that for another."""
        with self._turn:
            self._tell(RankReadyMsg(timeout_s=timeout_s))
            self._group.set_timeout(timeout_s)

    def beat(self) -> None:
        """Has the others show that they are there, unless they are busy. To be called where there is nothing to do."""
        if self._turn.acquire(blocking=False):
            try:
                self._tell(RankBeatMsg())
            finally:
                self._turn.release()

    def end(self) -> None:
        """Ends the others."""
        with self._turn:
            self._tell(RankEndMsg())

    def _tell(self, message: RankMsg) -> None:
        self._group.share(encode(message))


@contextlib.contextmanager
def _no_way_back() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RanksApartError(f"a step that all ranks had begun failed: {type(error).__name__}: {error}") from error

"""The other ranks' side: they do what rank 0 tells them, in its order."""

from __future__ import annotations

import threading
from typing import Final

from chairlift_worker.distributed.group import RankGroup
from chairlift_worker.distributed.messages import (
    RankBeatMsg,
    RankEndMsg,
    RankMovesMsg,
    RankReadyMsg,
    RankStepMsg,
    RankWeightsMsg,
    decode,
    step_plan,
)
from chairlift_worker.distributed.weights import SplitWeights
from chairlift_worker.ipc.status import Phase, StatusWriter
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.runner import Runner
from chairlift_worker.swap.mover import SwapMover

BEAT_S: Final = 0.25  # between signs of life while weights are read


class Follower:
    """Computes with rank 0, and throws the logits away: rank 0 alone samples, its tokens come with the next step."""

    def __init__(
        self, *, group: RankGroup, runner: Runner, mover: SwapMover, weights: SplitWeights, status: StatusWriter
    ) -> None:
        self._group = group
        self._runner = runner
        self._mover = mover
        self._weights = weights
        self._status = status

    def run(self) -> None:
        """Until it is told to end. Whatever is raised means that the worker cannot go on."""
        phase = Phase.WARMING
        while True:
            self._status.set(phase=phase, planned_tokens=0)
            match decode(self._group.share()):
                case RankStepMsg() as message:
                    plan = step_plan(message)
                    running = Phase.RUNNING if phase is Phase.IDLE else phase
                    self._status.set(phase=running, planned_tokens=plan.num_tokens, step=plan.step)
                    self._runner.forward(plan)
                case RankMovesMsg(moves):
                    self._mover.move(moves)
                case RankWeightsMsg(folder):
                    self._update(folder)
                case RankReadyMsg(timeout_s):
                    self._group.set_timeout(timeout_s)
                    phase = Phase.IDLE
                case RankBeatMsg():
                    pass
                case RankEndMsg():
                    return

    def _update(self, folder: str) -> None:
        """Takes other weights in a thread, so that the heartbeat goes on."""
        failed: list[BaseException] = []

        def take() -> None:
            try:
                self._weights.update(folder)
            except WeightsError:  # rank 0 answers
                pass
            except BaseException as error:  # noqa: BLE001 - raised again below
                failed.append(error)

        thread = threading.Thread(target=take, name="weights", daemon=True)
        thread.start()
        while thread.is_alive():
            self._status.beat()
            thread.join(BEAT_S)
        if failed:
            raise failed[0]

"""How long requests take, and how they end."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from chairlift_worker.ipc.messages import EndingMsg, EndingReason

from chairlift_service.requests.generation import Generation
from chairlift_service.requests.histogram import Histogram

_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5),
)
_REQUEST_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

_COMPLETE: Final = frozenset({EndingReason.STOP, EndingReason.LENGTH})


class RequestRecorder:
    """Durations, as the service sees them unless said otherwise, and endings that the worker told.

    `first_token` and `inter_token` count every request, the others those that came to their end (STOP, LENGTH): what a
    caller cut short says nothing about the service. Tokens that one step brings together are 0 apart.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(bounds_s=_REQUEST_BOUNDS_S)
        self.inter_token = Histogram(bounds_s=_TOKEN_BOUNDS_S)
        self.whole = Histogram(bounds_s=_REQUEST_BOUNDS_S)
        self.queued = Histogram(bounds_s=_REQUEST_BOUNDS_S)  # this one and the next three by the worker's clock
        self.prefill = Histogram(bounds_s=_REQUEST_BOUNDS_S)
        self.decode = Histogram(bounds_s=_REQUEST_BOUNDS_S)
        self.swapped = Histogram(bounds_s=_REQUEST_BOUNDS_S)
        self.endings: Counter[EndingReason] = Counter()

    def token(self, generation: Generation, now_ns: int) -> None:
        """The next token of a generation has come."""
        if generation.last_token_ns:
            self.inter_token.observe(now_ns - generation.last_token_ns)
        else:
            self.first_token.observe(now_ns - generation.received_ns)
        generation.last_token_ns = now_ns

    def ended(self, generation: Generation, ending: EndingMsg) -> None:
        """The worker told a generation's ending."""
        self.endings[ending.reason] += 1
        if ending.reason in _COMPLETE:
            self.whole.observe(time.monotonic_ns() - generation.received_ns)
            self.queued.observe(ending.queued_ns)
            self.prefill.observe(ending.prefill_ns)
            self.decode.observe(ending.decode_ns)
            self.swapped.observe(ending.swapped_ns)

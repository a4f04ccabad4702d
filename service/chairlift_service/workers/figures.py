"""What workers show of themselves, counted over all that there were."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec
from chairlift_worker.ipc.status import StatusReader

from chairlift_service.workers.line import WorkerLine

COUNTERS: Final = frozenset(
    {
        *("steps", "busy_ns", "computed_tokens", "generated_tokens", "prompt_tokens", "cached_prompt_tokens"),
        *("preemptions_swap", "preemptions_recompute", "draft_tokens", "accepted_draft_tokens"),
    }
)
_GAUGES: Final = frozenset(
    {
        *("requests_waiting", "requests_running", "requests_swapped", "swap_blocks_used", "swap_blocks_total"),
        *("blocks_total", "blocks_free", "blocks_cached"),
    }
)


class WorkerFigures:
    """Counters go on over the replacement of a worker; gauges are those of the one there is."""

    def __init__(self, *, line: WorkerLine) -> None:
        self._line = line
        self._status: StatusReader | None = None
        self._past: Counter[str] = Counter()
        self.num_lost = 0  # workers that were ready once

    def watch(self, status: StatusReader) -> None:
        """The status page of the worker that there is now, or will be."""
        self._status = status

    def bury(self) -> None:
        """That worker is gone; what it has counted stays."""
        self._past.update(self._counted())
        self._status = None
        self.num_lost += 1

    @property
    def has_stepped(self) -> bool:
        """Whether the worker there is has finished a step."""
        return self._status is not None and self._status.read().computed_tokens > 0

    def read(self) -> dict[str, int]:
        """Counters and gauges now, by their names in `Statistics`."""
        gauges = dict.fromkeys(_GAUGES, 0)
        if self._status is not None:
            status = msgspec.structs.asdict(self._status.read())
            gauges = {name: status[name] for name in _GAUGES}
        gauges["requests_waiting"] += self._line.num_waiting
        counted = self._counted()
        return {**gauges, **{name: self._past[name] + counted.get(name, 0) for name in COUNTERS}}

    def _counted(self) -> dict[str, int]:
        if self._status is None:
            return {}
        status = msgspec.structs.asdict(self._status.read())
        return {name: status[name] for name in COUNTERS}

"""A whole batch through a manager, in as many parts as the service has room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from chairlift_client import _errors
from chairlift_client.manager._manager import ContinuousBatchingManager
from chairlift_client.manager._output import GenerationOutput

_PATIENCE: Final = 60.0  # seconds without any progress after which a full service is an error


def run_batch(
    manager: ContinuousBatchingManager,
    inputs: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None,
    record_timestamps: bool,
    on_result: Callable[[], None],
) -> dict[str, GenerationOutput]:
    """Add all prompts and wait for all results; returns them by id, in the order of `inputs`.

    Where the service has no room for all at once, adds what fits and the rest as results come. Raises
    OverloadedError if it has no room for any for a minute, UnavailableError if the session is lost on the way.
    """
    ids: list[str] = []
    results: dict[str, GenerationOutput] = {}
    waiting = list(inputs)
    part = len(waiting)
    last_progress = time.monotonic()
    while waiting or len(results) < len(ids):
        pause = 1.0
        if waiting:
            try:
                added = manager.add_requests(
                    waiting[:part], max_new_tokens=max_new_tokens, record_timestamps=record_timestamps
                )
                if not added:
                    raise _errors.UnavailableError("the session is over before all of the batch was added")
                ids += added
                del waiting[:part]
                last_progress = time.monotonic()
            except _errors.OverloadedError as error:
                cannot_help = part == 1 and error.retry_after is None
                if cannot_help or time.monotonic() - last_progress > _PATIENCE:
                    raise
                # Without a time to wait, the message was too large rather than the queue full.
                pause = 0.0 if error.retry_after is None else min(max(error.retry_after, 0.05), _PATIENCE)
                part = max(1, part // 2)
                if len(results) == len(ids):
                    time.sleep(pause)
                    continue
        result = manager.get_result(timeout=pause)
        if result is not None and result.is_finished():
            results[result.request_id] = result
            last_progress = time.monotonic()
            on_result()
        elif result is None and not manager.is_running():
            break
    return {request_id: results[request_id] for request_id in ids if request_id in results}

"""What a step may hold: shares of prompts, and what is kept back; each with its reason."""

from __future__ import annotations

from typing import Final

from chairlift_worker.attention.choice import Chosen

FIFO_MARGIN: Final = 0.15
FIFO_STRETCH: Final = 4.0


def choose_chunk(asked: int | None, *, max_batch_tokens: int) -> Chosen[int]:
    """The largest share of a step that one request gets, in tokens."""
    if asked is None:
        return Chosen(max_batch_tokens, "default: max_batch_tokens")
    if asked > max_batch_tokens:
        return Chosen(max_batch_tokens, f"{asked} lowered to max_batch_tokens")
    return Chosen(asked, "as set")


def choose_margin(asked: float | None, scheduler_type: str) -> Chosen[float]:
    """The share of free cache below which no new request is started."""
    if asked is not None:
        return Chosen(asked, "as set")
    if scheduler_type == "fifo":
        return Chosen(FIFO_MARGIN, "default of fifo")
    return Chosen(0.0, "default of prefill_first")


def choose_stretch(asked: float | None, scheduler_type: str) -> Chosen[float]:
    """How many times as long as one without prompts a step may take while requests generate; 0: no bound.

    Raises ValueError for a bound that no step can keep.
    """
    if asked is None:
        if scheduler_type == "fifo":
            return Chosen(FIFO_STRETCH, "default of fifo: streams go on while prompts come in")
        return Chosen(0.0, "default of prefill_first: no bound")
    if 0 < asked < 1:
        raise ValueError(
            f"max_step_stretch = {asked}: no step with prompts is shorter than one without: 0, or from 1 on"
        )
    return Chosen(asked, "as set" if asked else "as set: no bound")


def choose_threads(asked: int | None, cores: int) -> Chosen[int]:
    """Threads of a forward pass, on a machine with so many cores."""
    if asked:
        return Chosen(asked, "as set")
    return Chosen(cores, "all cores of this process, or as many as its cgroup pays for")

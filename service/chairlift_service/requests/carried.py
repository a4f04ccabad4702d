"""A live request whose worker is gone, as the next one gets it."""

from __future__ import annotations

import time

from chairlift_worker.ipc.messages import AddRequestMsg, EndingMsg, EndingReason, ResumedMsg

from chairlift_service import convert
from chairlift_service.requests.generation import Generation


def resumed_message(generation: Generation) -> AddRequestMsg:
    """The request with all that it has generated so far: the next worker computes that again, and goes on."""
    resumed = ResumedMsg(
        generated=generation.output.slice(0, len(generation.output)).token_ids.tobytes(),
        cached_tokens=generation.cached_tokens or 0,
        started_ns=generation.course.started_ns,
        first_token_ns=generation.course.first_token_ns,
        preemptions=generation.course.losses,
        prompt_logprobs=0 if generation.prompt_log is None else len(generation.prompt_log),
    )
    return convert.add_request_msg(
        generation.request,
        uid=generation.uid,
        arrival_ns=generation.sent_ns,
        deadline_ns=generation.course.deadline_ns,
        resumed=resumed,
        fork=(generation.choice, generation.head.uid),
    )


def untold_ending(generation: Generation) -> EndingReason | None:
    """How it ended, where its worker died between telling the last token and telling that; None if it goes on."""
    if generation.output.stop is not None:
        return EndingReason.STOP
    if generation.output.last_token_id in generation.request.stop_ids:
        return EndingReason.STOP
    judged = generation.prompt_log is None or len(generation.prompt_log) == generation.request.num_prompt_tokens
    if judged and len(generation.output) >= generation.request.max_new_tokens:
        return EndingReason.LENGTH
    return None


def ending_here(generation: Generation, reason: EndingReason) -> EndingMsg:
    """An ending that the service knows of and no worker tells."""
    now_ns, course = time.monotonic_ns(), generation.course
    started_ns = course.started_ns or now_ns
    first_ns = course.first_token_ns or now_ns
    return EndingMsg(
        uid=generation.uid,
        reason=reason,
        error="",
        queued_ns=max(0, started_ns - generation.sent_ns),
        prefill_ns=max(0, first_ns - started_ns),
        decode_ns=max(0, now_ns - first_ns),
        swapped_ns=0,
        preemptions=course.losses,
        cached_tokens=generation.cached_tokens or 0,
    )

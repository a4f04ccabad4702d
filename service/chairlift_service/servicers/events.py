"""A generation's events as the API's messages."""

from __future__ import annotations

from chairlift.v1 import event_pb2
from chairlift_worker.ipc.messages import EndingMsg

from chairlift_service import convert
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice


def accepted(generation: Generation) -> event_pb2.Accepted:
    """What holds for it."""
    return convert.accepted(generation.request, state=generation.shown_state, cached_tokens=generation.cached_tokens)


def delta(generation: Generation, piece: LogSlice) -> event_pb2.Delta:
    """A part of its output."""
    return convert.delta(
        generation.request,
        index=piece.index,
        token_ids=piece.token_ids,
        text=piece.text,
        logprobs=piece.logprobs,
        tops=piece.tops,
        state=generation.shown_state,
    )


def finished(generation: Generation, ending: EndingMsg) -> event_pb2.Finished:
    """Its good ending."""
    return convert.finished(
        generation.request,
        ending,
        generated_tokens=len(generation.output),
        last_token_id=generation.output.last_token_id,
        stop_text=generation.output.stop,
    )

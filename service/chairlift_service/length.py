"""How long an output gets: at most, at least, and what it is that ends it."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.v1 import event_pb2, request_pb2
from chairlift_worker.ipc.messages import ModelCardMsg

from chairlift_service.defaults import RequestDefaults
from chairlift_service.faults import Faults


@dataclass(frozen=True, slots=True)
class OutputLength:
    """What holds for one request."""

    max_new_tokens: int
    limit: event_pb2.LengthLimit  # what it is that ends the output at max_new_tokens
    lowered_by: event_pb2.LengthLimit  # why max_new_tokens is lower than asked; unspecified if it is not
    min_new_tokens: int  # at most max_new_tokens


def check_length(
    request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults, faults: Faults
) -> None:
    """Refuses what no prompt could make right."""
    most = _asked(request, defaults)
    if request.HasField("max_new_tokens") and most == 0 and not request.logprobs.prompt_top_n:
        faults.add(f"{path}.max_new_tokens", "must be at least 1, is 0; with logprobs.prompt_top_n 0 scores the prompt")
    if most is not None and request.stop.min_new_tokens > most:
        why = f"must be at most max_new_tokens, {most}, is {request.stop.min_new_tokens}"
        faults.add(f"{path}.stop.min_new_tokens", why)


def output_length(
    request: request_pb2.GenerationRequest, *, defaults: RequestDefaults, num_prompt_tokens: int, model: ModelCardMsg
) -> OutputLength:
    """What holds behind a prompt of this length.

    The last token of an output is never computed, so prompt + output - 1 slots of the cache are enough. Where
    nothing was asked, the rest of the context counts as asked.
    """
    asked, unspecified = _asked(request, defaults), event_pb2.LENGTH_LIMIT_UNSPECIFIED
    by_context = model.context_len - num_prompt_tokens
    by_cache = model.cache_len - num_prompt_tokens + 1
    room, limit = min((by_context, event_pb2.LENGTH_LIMIT_CONTEXT), (by_cache, event_pb2.LENGTH_LIMIT_CACHE))
    stop = request.stop
    least = stop.min_new_tokens if stop.HasField("min_new_tokens") else defaults.least_new_tokens(num_prompt_tokens)
    if asked is not None and asked <= room:
        return OutputLength(asked, event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS, unspecified, min(asked, least))
    if asked is None and limit == event_pb2.LENGTH_LIMIT_CONTEXT:
        return OutputLength(room, limit, unspecified, min(room, least))
    return OutputLength(room, limit, limit, min(room, least))


def _asked(request: request_pb2.GenerationRequest, defaults: RequestDefaults) -> int | None:
    return request.max_new_tokens if request.HasField("max_new_tokens") else defaults.max_new_tokens

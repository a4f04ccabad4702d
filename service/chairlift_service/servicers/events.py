"""A generation's events as the API's messages."""

from __future__ import annotations

from chairlift.v1 import event_pb2, generation_service_pb2
from chairlift_worker.ipc.messages import EndingMsg

from chairlift_service import convert
from chairlift_service.requests.cursor import PromptSlice
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.output_log import LogSlice


def accepted(generation: Generation) -> event_pb2.Accepted:
    """What holds for its request."""
    head = generation.head
    return convert.accepted(head.request, state=generation.shown_state, cached_tokens=head.cached_tokens)


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
        choice=generation.choice,
    )


def prompt_delta(generation: Generation, piece: PromptSlice) -> event_pb2.Delta:
    """A part of what is told of its prompt."""
    message = event_pb2.Delta(choice=generation.choice, state=generation.shown_state)
    convert.add_prompt_logprobs(message, generation.request, index=piece.index, entries=piece.entries)
    return message


def whole_choice(generation: Generation, ending: EndingMsg) -> generation_service_pb2.Choice:
    """All of it, once it has ended well."""
    output = delta(generation, generation.output.slice(0, len(generation.output)))
    log = generation.prompt_log
    if log is not None:
        convert.add_prompt_logprobs(output, generation.request, index=0, entries=log.slice(0, len(log)))
    return generation_service_pb2.Choice(output=output, finished=finished(generation, ending))


def finished(generation: Generation, ending: EndingMsg) -> event_pb2.Finished:
    """Its good ending."""
    return convert.finished(
        generation.request,
        ending,
        generated_tokens=len(generation.output),
        last_token_id=generation.output.last_token_id,
        stop_text=generation.output.stop,
        choice=generation.choice,
    )

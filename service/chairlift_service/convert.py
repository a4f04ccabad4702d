"""From the API's messages to those of the worker and back; pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from chairlift.v1 import event_pb2, info_service_pb2, request_pb2
from chairlift_worker.ipc.messages import (
    NO_DEADLINE,
    AddRequestMsg,
    EndingMsg,
    EndingReason,
    ForkMsg,
    ModelCardMsg,
    ResumedMsg,
    SettingMsg,
)

from chairlift_service import errors
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.requests.prompt_log import PromptEntry
from chairlift_service.requests.top_logprobs import Top
from chairlift_service.sampling import choice_seed
from chairlift_service.validate import ValidRequest


def add_request_msg(
    request: ValidRequest,
    *,
    uid: int,
    arrival_ns: int,
    deadline_ns: int = NO_DEADLINE,
    resumed: ResumedMsg | None = None,
    fork_uids: Sequence[int] = (),
    fork: tuple[int, int] = (0, 0),
) -> AddRequestMsg:
    """The worker's form of a request; `resumed` is what came of it so far, where another worker had it before.

    With `fork_uids` it asks for all choices at once, those from 1 on by these uids; with `fork` for one of them: its
    number, and the uid of choice 0.
    """
    choice, head_uid = fork
    seed = request.sampling.seed
    return AddRequestMsg(
        uid=uid,
        prompt=request.prompt_ids.tobytes(),
        max_new_tokens=request.max_new_tokens,
        sampling=msgspec.structs.replace(request.sampling, seed=choice_seed(seed, choice))
        if choice
        else request.sampling,
        stop_ids=request.stop_ids,
        logprobs=request.want_logprobs,
        arrival_ns=arrival_ns,
        deadline_ns=deadline_ns,
        priority=request.priority,
        resumed=resumed,
        top_logprobs=request.top_logprobs,
        raw_logprobs=request.raw_logprobs,
        grammar=request.grammar,
        prompt_logprobs=0 if choice else request.prompt_top_n,
        forks=tuple(ForkMsg(uid=each, seed=choice_seed(seed, i)) for i, each in enumerate(fork_uids, start=1)),
        fork_of=head_uid if choice else 0,
    )


def accepted(
    request: ValidRequest, *, state: event_pb2.RequestState, cached_tokens: int | None = None
) -> event_pb2.Accepted:
    """What holds for a request. `cached_tokens` is None where it has not started."""
    sampling = request.sampling
    told = request_pb2.SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    told.MergeFrom(request.processors)
    return event_pb2.Accepted(
        request_id=request.request_id,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=cached_tokens,
        max_new_tokens=request.max_new_tokens,
        lowered_by=request.lowered_by,
        seed=sampling.seed,
        sampling=told,
        state=state,
        min_new_tokens=request.min_new_tokens,
        num_choices=request.num_choices,
    )


def delta(
    request: ValidRequest,
    *,
    index: int,
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[float],
    state: event_pb2.RequestState,
    tops: Sequence[Top] = (),
    choice: int = 0,
) -> event_pb2.Delta:
    """Newly generated tokens, in the forms that the request wants.

    `index` is that of the first token; `text` is what these tokens completed. `logprobs` has one entry for each
    token if the request wants them, and is not looked at otherwise; so has `tops` if it wants more than those.
    """
    message = event_pb2.Delta(choice=choice, index=index, num_tokens=len(token_ids), state=state)
    if request.want_text:
        message.text = text
    if request.want_ids:
        message.token_ids.extend(token_ids)
    if request.want_logprobs:
        for token_id, logprob, top in zip(token_ids, logprobs, tops or ((),) * len(token_ids), strict=True):
            entry = message.logprobs.add(chosen=logprob)
            for likely_id, likely_logprob in top or ((token_id, logprob),):
                entry.top.add(token_id=likely_id, logprob=likely_logprob)
    return message


def add_prompt_logprobs(
    message: event_pb2.Delta, request: ValidRequest, *, index: int, entries: Sequence[PromptEntry]
) -> None:
    """Adds what is known of the prompt's tokens from `index` on."""
    message.prompt_index = index
    for token_id, entry in zip(request.prompt_ids[index : index + len(entries)], entries, strict=True):
        told = message.prompt_logprobs.add()
        if entry.logprob is not None:
            told.chosen = entry.logprob
            for likely_id, likely_logprob in entry.top or ((token_id, entry.logprob),):
                told.top.add(token_id=likely_id, logprob=likely_logprob)


def finished(
    request: ValidRequest,
    ending: EndingMsg,
    *,
    generated_tokens: int,
    last_token_id: int | None,
    stop_text: str | None = None,
    choice: int = 0,
) -> event_pb2.Finished:
    """A good ending (STOP, LENGTH, CANCELLED); `stop_text` is the stop string that it had.

    Raises ValueError for the others: those are a gRPC status.
    """
    message = event_pb2.Finished(
        choice=choice,
        usage=event_pb2.Usage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=ending.cached_tokens,
            generated_tokens=generated_tokens,
        ),
    )
    if ending.reason is EndingReason.STOP:
        message.reason = event_pb2.FINISH_REASON_STOP
        if stop_text is not None:
            message.stop.text = stop_text
        elif request.grammar and last_token_id not in request.stop_ids:
            message.stop.constraint = True
        elif last_token_id is not None:
            message.stop.token_id = last_token_id
        else:
            raise ValueError("an ending with STOP needs the token or the text that stopped it")
    elif ending.reason is EndingReason.LENGTH:
        message.reason = event_pb2.FINISH_REASON_LENGTH
        message.limit = request.limit
    elif ending.reason is EndingReason.CANCELLED:
        message.reason = event_pb2.FINISH_REASON_CANCELLED
    else:
        raise ValueError(f"{ending.reason.name} is no good ending")
    timings = message.timings
    timings.preemptions = ending.preemptions
    timings.queued.FromNanoseconds(ending.queued_ns)
    timings.prefill.FromNanoseconds(ending.prefill_ns)
    timings.decode.FromNanoseconds(ending.decode_ns)
    timings.swapped.FromNanoseconds(ending.swapped_ns)
    return message


def ending_error(ending: EndingMsg) -> ServiceError | None:
    """The error that a bad ending (DEADLINE, ERROR) is; None for a good one."""
    if ending.reason is EndingReason.DEADLINE:
        return ServiceError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the generation ended")
    if ending.reason is EndingReason.ERROR:
        return errors.from_worker(ending.error)
    return None


def deadline_ns(*, now_ns: int, time_remaining: float | None) -> int:
    """CLOCK_MONOTONIC time of a call's deadline, from `time_remaining` in seconds (None: it has none).

    At least 1: a deadline that has passed already must not read as none.
    """
    if time_remaining is None or not math.isfinite(time_remaining):
        return NO_DEADLINE
    return min(max(1, now_ns + int(time_remaining * 1e9)), 2**63 - 1)


def statistics(counters: Mapping[str, int], *, worker_restarts: int, requests_held: int) -> info_service_pb2.Statistics:
    """The statistics message from the worker's counters by field name; a name that it lacks raises ValueError."""
    return info_service_pb2.Statistics(**counters, worker_restarts=worker_restarts, requests_held=requests_held)


def settings(resolved: Iterable[SettingMsg]) -> list[info_service_pb2.Setting]:
    """Resolved settings, as GetServer tells them."""
    return [info_service_pb2.Setting(name=s.name, value=s.value, reason=s.reason) for s in resolved]


def model_response(model: ModelCardMsg, *, has_chat_template: bool) -> info_service_pb2.GetModelResponse:
    """The model, as GetModel tells it."""
    return info_service_pb2.GetModelResponse(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context_len=model.context_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        num_parameters=model.num_parameters,
        has_chat_template=has_chat_template,
    )

"""From the API's messages to the client's values. Pure; shared by every client."""

from __future__ import annotations

from typing import Final

from chairlift.v1 import (
    admin_service_pb2,
    event_pb2,
    generation_service_pb2,
    info_service_pb2,
    request_pb2,
    text_service_pb2,
)

from chairlift_client import _errors
from chairlift_client._types import (
    Accepted,
    CancelStatus,
    Choice,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    LengthLimit,
    ModelInfo,
    RenderedChat,
    RequestState,
    Result,
    ResultEvent,
    Sampling,
    ServerInfo,
    ServerState,
    ServerStats,
    Setting,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
    WeightsUpdate,
)

_SCALARS: Final = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
)


def accepted(message: event_pb2.Accepted) -> Accepted:
    """`Accepted` of its message."""
    return Accepted(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        max_new_tokens=message.max_new_tokens,
        lowered_by=LengthLimit(message.lowered_by),
        seed=message.seed,
        sampling=_sampling(message.sampling),
        state=RequestState(message.state),
        min_new_tokens=message.min_new_tokens,
        num_choices=message.num_choices or 1,  # a service that does not know of choices gives one
    )


def _sampling(message: request_pb2.SamplingParams) -> Sampling:
    return Sampling(
        **{name: getattr(message, name) for name in _SCALARS if message.HasField(name)},
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        banned_words=tuple(message.banned_words),
        banned_sequences=tuple(tuple(banned.ids) for banned in message.banned_sequences),
    )


def logprobs(message: event_pb2.Delta) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a delta, one entry a token."""
    return tuple(_token_logprobs(entry) for entry in message.logprobs)


def prompt_logprobs(message: event_pb2.Delta) -> tuple[TokenLogprobs | None, ...]:
    """Those of the prompt that a delta brings; None for the prompt's first token."""
    first = message.prompt_index
    return tuple(_token_logprobs(entry) if first + i else None for i, entry in enumerate(message.prompt_logprobs))


def _token_logprobs(entry: event_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(chosen=entry.chosen, top=tuple((top.token_id, top.logprob) for top in entry.top))


def delta(message: event_pb2.Delta) -> Delta:
    """`Delta` of its message."""
    return Delta(
        choice=message.choice,
        index=message.index,
        num_tokens=message.num_tokens,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs(message),
        state=RequestState(message.state),
        prompt_logprobs=prompt_logprobs(message),
        prompt_index=message.prompt_index,
    )


def finished(message: event_pb2.Finished) -> Finished:
    """`Finished` of its message."""
    usage, timings = message.usage, message.timings
    return Finished(
        choice=message.choice,
        reason=FinishReason(message.reason),
        stop_token_id=message.stop.token_id if message.stop.WhichOneof("kind") == "token_id" else None,
        stop_text=message.stop.text if message.stop.WhichOneof("kind") == "text" else None,
        stop_constraint=message.stop.constraint,
        limit=LengthLimit(message.limit),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.generated_tokens,
        ),
        timings=Timings(
            queued=timings.queued.ToTimedelta().total_seconds(),
            prefill=timings.prefill.ToTimedelta().total_seconds(),
            decode=timings.decode.ToTimedelta().total_seconds(),
            swapped=timings.swapped.ToTimedelta().total_seconds(),
            preemptions=timings.preemptions,
        ),
    )


def generate_event(message: generation_service_pb2.GenerateResponse) -> Event | None:
    """The event of a Generate stream; None for a kind that this client does not know yet."""
    match message.WhichOneof("event"):
        case "delta":
            return delta(message.delta)
        case "accepted":
            return accepted(message.accepted)
        case "finished":
            return finished(message.finished)
        case _:
            return None


def result_event(message: generation_service_pb2.ResultResponse) -> ResultEvent | None:
    """The event of a Result stream; None for a kind that this client does not know yet."""
    event: Event | Failed
    match message.WhichOneof("event"):
        case "delta":
            event = delta(message.delta)
        case "accepted":
            event = accepted(message.accepted)
        case "finished":
            event = finished(message.finished)
        case "failed":
            event = Failed(error=_errors.from_status(message.failed.status))
        case _:
            return None
    return ResultEvent(request_id=message.request_id, event=event)


def result(message: generation_service_pb2.CompleteResponse) -> Result:
    """`Result` of its message."""
    return Result(
        accepted=accepted(message.accepted),
        choices=tuple(
            Choice(
                text=choice.output.text,
                token_ids=tuple(choice.output.token_ids),
                logprobs=logprobs(choice.output),
                finished=finished(choice.finished),
                prompt_logprobs=prompt_logprobs(choice.output),
            )
            for choice in message.choices
        ),
    )


def outcomes(message: generation_service_pb2.CancelResponse) -> dict[str, CancelStatus]:
    """What became of each request, by its id."""
    return {outcome.request_id: CancelStatus(outcome.status) for outcome in message.outcomes}


def tokens(message: text_service_pb2.TokenizeResponse) -> Tokens:
    """`Tokens` of its message."""
    return Tokens(
        token_ids=tuple(message.token_ids),
        tokens=tuple(message.tokens),
        offsets=tuple(zip(message.starts, message.ends, strict=True)),
        truncated=message.truncated,
    )


def rendered_chat(message: text_service_pb2.RenderChatResponse) -> RenderedChat:
    """`RenderedChat` of its message."""
    return RenderedChat(text=message.text, token_ids=tuple(message.token_ids))


def model_info(message: info_service_pb2.GetModelResponse) -> ModelInfo:
    """`ModelInfo` of its message."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        context_len=message.context_len,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        num_parameters=message.num_parameters,
        has_chat_template=message.has_chat_template,
    )


def server_info(message: info_service_pb2.GetServerResponse) -> ServerInfo:
    """`ServerInfo` of its message."""
    return ServerInfo(
        version=message.version,
        state=ServerState(message.state),
        worker_pids=tuple(message.worker_pids),
        config=tuple(Setting(name=s.name, value=s.value, reason=s.reason) for s in message.config),
        statistics=_statistics(message.statistics),
    )


def server_stats(message: info_service_pb2.WatchStatsResponse) -> ServerStats:
    """`ServerStats` of its message."""
    return ServerStats(
        state=ServerState(message.state),
        uptime=message.uptime.ToNanoseconds() / 1e9,
        statistics=_statistics(message.statistics),
    )


def _statistics(message: info_service_pb2.Statistics) -> dict[str, int]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def weights_update(message: admin_service_pb2.UpdateWeightsResponse) -> WeightsUpdate:
    """What an update did."""
    return WeightsUpdate(
        num_tensors=message.num_tensors, num_requests=message.num_requests, num_blocks=message.num_blocks
    )

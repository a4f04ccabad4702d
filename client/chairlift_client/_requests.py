"""From keyword arguments to the API's messages. Pure; shared by every client."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

from chairlift.v1 import generation_service_pb2, info_service_pb2, request_pb2, text_service_pb2

from chairlift_client._chat import Chat
from chairlift_client._constraint import Constraint

Prompt = str | Sequence[int] | Chat
"""Text, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every call that adds a request. Each is a field of the API's GenerationRequest.

    What is left out, or None, takes the model's generation_config.json, then transformers' defaults.
    """

    max_new_tokens: int | None
    """At least 1; lowered to what fits. 0 with `prompt_logprobs`: score the prompt, and generate nothing."""
    num_choices: int | None
    """Independent answers to give, 1 to 128; the prompt is computed once."""
    temperature: float | None
    """At least 0; 0 is greedy."""
    top_k: int | None
    """0 and -1 turn it off."""
    top_p: float | None
    """In (0, 1]."""
    min_p: float | None
    """In [0, 1)."""
    repetition_penalty: float | None
    """Above 0; over 1 tokens of prompt and output so far get less likely, under 1 likelier."""
    presence_penalty: float | None
    """-2 to 2, subtracted from the logits of tokens of the output so far."""
    frequency_penalty: float | None
    """-2 to 2, subtracted once for each time that a token is there."""
    no_repeat_ngram_size: int | None
    """No run of so many tokens comes twice."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these ids, -100 to 100 each."""
    allowed_token_ids: Iterable[int] | None
    """Nothing else is chosen."""
    banned_token_ids: Iterable[int] | None
    """Never chosen."""
    banned_words: str | Iterable[str] | None
    """Texts that do not come, with or without a space before them."""
    banned_sequences: Iterable[Iterable[int]] | None
    """Runs of ids that do not come."""
    seed: int | None
    """Seed of the sampling noise, 0 to 2**64 - 1."""
    stop_token_ids: Iterable[int] | None
    """Further ids that end the generation."""
    stop: str | Iterable[str] | None
    """Texts that end the generation; the answer's text ends before the first of them."""
    include_stop: bool | None
    """Let the text end behind the stop instead."""
    ignore_eos: bool | None
    """Do not stop at the model's and the tokenizer's EOS ids."""
    min_new_tokens: int | None
    """Nothing stops the generation before it has so many tokens."""
    logprobs: int | None
    """1: return the log-probability of each token; more, up to 128: of so many of the likeliest at its place."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens, by the model's own distribution. 0: none."""
    logprob_source: Literal["processed", "raw"] | None
    """Of the distribution that was sampled from, or of the model's own."""
    constraint: Constraint | None
    """A form that the answer must have."""
    request_id: str | None
    """Your own id, 1 to 128 printable characters."""
    session: str | None
    """A name that groups requests."""
    priority: int | None
    """-10 to 10: each level counts as if the request had come 10 seconds earlier."""
    return_text: bool | None
    """Return text; unset: yes."""
    return_token_ids: bool | None
    """Return token ids; unset: yes."""
    skip_special_tokens: bool | None
    """Leave special tokens out of the text; unset: yes."""
    stream_interval: int | None
    """Tokens that come together in a delta, at least; unset: 1."""
    echo: bool | None
    """Begin the text with the prompt's."""


# Where each scalar option goes: the submessage ("" is the request itself) and the field in it.
_FIELDS = {
    "max_new_tokens": ("", "max_new_tokens"),
    "num_choices": ("", "num_choices"),
    "seed": ("", "seed"),
    "request_id": ("", "request_id"),
    "session": ("", "session"),
    "priority": ("", "priority"),
    "temperature": ("sampling", "temperature"),
    "top_k": ("sampling", "top_k"),
    "top_p": ("sampling", "top_p"),
    "min_p": ("sampling", "min_p"),
    "repetition_penalty": ("sampling", "repetition_penalty"),
    "presence_penalty": ("sampling", "presence_penalty"),
    "frequency_penalty": ("sampling", "frequency_penalty"),
    "no_repeat_ngram_size": ("sampling", "no_repeat_ngram_size"),
    "ignore_eos": ("stop", "ignore_eos"),
    "min_new_tokens": ("stop", "min_new_tokens"),
    "include_stop": ("stop", "include_stop"),
    "logprobs": ("logprobs", "top_n"),
    "prompt_logprobs": ("logprobs", "prompt_top_n"),
    "return_text": ("output", "text"),
    "return_token_ids": ("output", "token_ids"),
    "skip_special_tokens": ("output", "skip_special_tokens"),
    "stream_interval": ("output", "stream_interval"),
    "echo": ("output", "echo"),
}
# The same of lists of token ids and of texts.
_ID_LISTS = {
    "stop_token_ids": ("stop", "token_ids"),
    "allowed_token_ids": ("sampling", "allowed_token_ids"),
    "banned_token_ids": ("sampling", "banned_token_ids"),
}
_TEXT_LISTS = {"stop": ("stop", "strings"), "banned_words": ("sampling", "banned_words")}
_SOURCES = {"processed": request_pb2.LOGPROB_SOURCE_PROCESSED, "raw": request_pb2.LOGPROB_SOURCE_RAW}


def generation_request(prompt: Prompt, options: GenerateOptions) -> request_pb2.GenerationRequest:
    """The message that asks for one generation.

    Raises TypeError for an option that does not exist or has the wrong type, ValueError for a number that its field
    cannot carry at all. Every other judgement is the service's.
    """
    given = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        there_are = ", ".join(sorted(GenerateOptions.__annotations__))
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}; there are {there_are}")
    request = request_pb2.GenerationRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(prompt.message())
    else:
        request.token_ids.SetInParent()  # an empty prompt is still ids, for the service to refuse by name
        _extend(request.token_ids.ids, prompt, name="prompt")
    for name, (part, field) in _FIELDS.items():
        if name in given:
            _assign(getattr(request, part) if part else request, field, given[name], name=name)
    for name, (part, field) in _ID_LISTS.items():
        if name in given:
            _extend(getattr(getattr(request, part), field), given[name], name=name)
    for name, (part, field) in _TEXT_LISTS.items():
        if name in given:
            _extend_texts(getattr(getattr(request, part), field), given[name], name=name)
    _set_others(request, options)
    return request


def _set_others(request: request_pb2.GenerationRequest, options: GenerateOptions) -> None:
    """What is neither a scalar nor a plain list."""
    sequences, biases = options.get("banned_sequences"), options.get("logit_bias")
    if sequences is not None and not isinstance(sequences, Iterable):
        raise TypeError(f"banned_sequences: expected lists of token ids, got {type(sequences).__name__}")
    if biases is not None and not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias: expected numbers by token id, got {type(biases).__name__}")
    for ids in sequences or ():
        _extend(request.sampling.banned_sequences.add().ids, ids, name="banned_sequences")
    for token_id, bias in (biases or {}).items():
        try:
            request.sampling.logit_bias[operator.index(token_id)] = bias
        except (TypeError, ValueError) as error:
            raise type(error)(f"logit_bias: {error}") from None
    constraint = options.get("constraint")
    if constraint is not None:
        if not isinstance(constraint, Constraint):
            raise TypeError(f"constraint: expected a Constraint, got {type(constraint).__name__}")
        request.constraint.CopyFrom(constraint.message())
    source = options.get("logprob_source")
    if source is not None:
        if source not in _SOURCES:
            raise ValueError(f"logprob_source: expected one of {', '.join(_SOURCES)}, got {source!r}")
        request.logprobs.source = _SOURCES[source]


def result_request(
    *, request_id: str | None, session: str | None, from_index: int
) -> generation_service_pb2.ResultRequest:
    """The message that asks for the events of one request or one session. Raises ValueError unless one is named."""
    if (request_id is None) == (session is None):
        raise ValueError("name either a request_id or a session")
    if session is not None and from_index:
        raise ValueError("from_index goes with a request_id")
    if session is not None:
        return generation_service_pb2.ResultRequest(session=session)
    request = generation_service_pb2.ResultRequest(request_id=request_id)
    _assign(request, "from_index", from_index, name="from_index")
    return request


def tokenize_request(
    text: str, *, add_special_tokens: bool | None, max_tokens: int | None = None, offsets: bool = False
) -> text_service_pb2.TokenizeRequest:
    """Request of `tokenize`. Raises ValueError for a number of tokens that its field cannot carry."""
    request = text_service_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens, offsets=offsets)
    if max_tokens is not None:
        _assign(request, "max_tokens", max_tokens, name="max_tokens")
    return request


def batch_detokenize_request(
    token_ids: Iterable[Sequence[int]], *, skip_special_tokens: bool | None
) -> text_service_pb2.BatchDetokenizeRequest:
    """Request of `detokenize_all`."""
    return text_service_pb2.BatchDetokenizeRequest(
        requests=[
            text_service_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
            for ids in token_ids
        ]
    )


def watch_stats_request(*, interval: float) -> info_service_pb2.WatchStatsRequest:
    """Request of `watch_stats`; `interval` in seconds."""
    request = info_service_pb2.WatchStatsRequest()
    request.interval.FromMilliseconds(round(interval * 1000))
    return request


def cancel_request(*, request_ids: tuple[str, ...], session: str | None) -> generation_service_pb2.CancelRequest:
    """The message that cancels. Raises ValueError if nothing is named."""
    if not request_ids and session is None:
        raise ValueError("name request ids or a session")
    return generation_service_pb2.CancelRequest(request_ids=request_ids, session=session or "")


def _assign(message: object, field: str, value: object, *, name: str) -> None:
    """Set a field; protobuf's own complaint lacks the field's name."""
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _extend_texts(field: object, texts: object, *, name: str) -> None:
    """Append texts, or one, to a repeated field."""
    try:
        field.extend([texts] if isinstance(texts, str) else texts)  # type: ignore[attr-defined] # protobuf has no types
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _extend(field: object, ids: object, *, name: str) -> None:
    """Append token ids of any integer type (numpy's, torch's) to a repeated field."""
    ids = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str | bytes) else ids
    if isinstance(ids, list) and any(isinstance(item, Mapping) for item in ids):
        raise TypeError(f"{name}: expected token ids; messages of a conversation go into Chat(...)")
    if not isinstance(ids, list):
        raise TypeError(f"{name}: expected a sequence of integers, got {type(ids).__name__}")
    try:
        field.extend([operator.index(token_id) for token_id in ids])  # type: ignore[attr-defined] # protobuf has no types
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None

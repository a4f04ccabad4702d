"""From a gateway's request to the service's own: what can be honoured, and a refusal of all the rest."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from chairlift.v1 import request_pb2
from chairlift_worker.ipc.messages import ModelCardMsg
from google.protobuf.message import Message

from chairlift_service import errors
from chairlift_service.errors import Reason, ServiceError, Violation
from chairlift_service.faults import Faults
from chairlift_service.servicers.vllm_engine.constraint import add_constraint

PATH: Final = "request"
"""Where the service's own message stands in its own calls."""

_HONOURED: Final = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
_HONOURED_SAMPLING: Final = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"),
        *("stop", "stop_token_ids", "skip_special_tokens", "logprobs", "prompt_logprobs", "n"),
        # About the text, which the gateway makes of the ids.
        *("spaces_between_special_tokens", "include_stop_str_in_output"),
        *("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"),
        "grammar_from_first_token",  # as all of ours begin
    }
)
# Values of other fields that ask for nothing.
_NEUTRAL: Final = {"data_parallel_rank": 0}

# The service's own field paths by the gateway's; the first that fits counts.
_FIELDS: Final = (
    (f"{PATH}.sampling.", "sampling_params."),
    (f"{PATH}.max_new_tokens", "sampling_params.max_tokens"),
    (f"{PATH}.stop.token_ids", "sampling_params.stop_token_ids"),
    (f"{PATH}.stop.min_new_tokens", "sampling_params.min_tokens"),
    (f"{PATH}.stop.strings", "sampling_params.stop"),
    (f"{PATH}.logprobs.top_n", "sampling_params.logprobs"),
    (f"{PATH}.logprobs.prompt_top_n", "sampling_params.prompt_logprobs"),
    (f"{PATH}.constraint.choices.texts", "sampling_params.choice.choices"),
    (f"{PATH}.constraint.tagged_text", "sampling_params.structural_tag"),
    (f"{PATH}.constraint.", "sampling_params."),
    (f"{PATH}.num_choices", "sampling_params.n"),
    (f"{PATH}.token_ids.ids", "tokenized.input_ids"),
    (f"{PATH}.token_ids", "tokenized.input_ids"),
    (f"{PATH}.", ""),
    (PATH, "input"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a gateway asks for."""

    message: request_pb2.GenerationRequest  # what the service itself does of it
    stream: bool
    logprobs: bool  # of the chosen tokens
    top_logprobs: bool  # and the likeliest ones, the chosen one always among them, as in chairlift.v1
    top_prompt_logprobs: bool  # the likeliest ones at each token of the prompt, too


def asked_of(request: Any, model: ModelCardMsg) -> Asked:
    """What a GenerateRequest asks for. Raises ServiceError, naming every field that cannot be honoured.

    Zeros of fields without presence mean unset, as the protocol has it: top_p 0 is 1, n 0 is 1.
    """
    params, faults = request.sampling_params, Faults()
    _refuse_others(request, path="", honoured=_HONOURED, faults=faults)
    _refuse_others(params, path="sampling_params.", honoured=_HONOURED_SAMPLING, faults=faults)
    _refuse_unknown(request, faults=faults)
    _check_lengths(request, model=model, faults=faults)
    if params.seed < 0:
        faults.add("sampling_params.seed", f"must be at least 0, is {params.seed}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) < 0:
            text = f"this version does not return those of all tokens: {getattr(params, name)}"
            faults.add(f"sampling_params.{name}", text, Reason.UNSUPPORTED_OPTION)
    faults.raise_any()
    message = _message(request)
    add_constraint(message, params, faults=faults)
    faults.raise_any()
    return Asked(
        message=message,
        stream=request.stream,
        logprobs=params.HasField("logprobs"),
        top_logprobs=params.logprobs > 0,
        top_prompt_logprobs=params.prompt_logprobs > 0,
    )


def told(error: ServiceError) -> ServiceError:
    """A refusal of the service's own message as the gateway is told it: by the fields of its own.

    A service that is about to end is UNAVAILABLE here: at FAILED_PRECONDITION a gateway would not try another one.
    """
    if error.reason is Reason.DRAINING:
        return ServiceError(Reason.SHUTTING_DOWN, error.message)
    if not error.violations:
        return error
    renamed = [Violation(_renamed(each.field), each.description, each.reason) for each in error.violations]
    return errors.from_violations(renamed, metadata=error.metadata)


def _message(request: Any) -> request_pb2.GenerationRequest:
    params = request.sampling_params
    message = request_pb2.GenerationRequest(
        request_id=request.request_id,
        stop=request_pb2.StopParams(token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos, strings=params.stop),
        output=request_pb2.OutputParams(text=False, token_ids=True, skip_special_tokens=params.skip_special_tokens),
    )
    match request.WhichOneof("input"):
        case "tokenized":
            message.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            message.text = request.text
    if params.HasField("max_tokens"):
        message.max_new_tokens = params.max_tokens
    if params.HasField("seed"):
        message.seed = params.seed
    if params.HasField("logprobs"):
        message.logprobs.top_n = max(1, params.logprobs)
    if params.HasField("prompt_logprobs"):
        message.logprobs.prompt_top_n = max(1, params.prompt_logprobs)
    if params.n:
        message.num_choices = params.n
    if params.min_tokens:
        message.stop.min_new_tokens = params.min_tokens
    _set_sampling(message.sampling, params)
    return message


def _set_sampling(sampling: request_pb2.SamplingParams, params: Any) -> None:
    """A temperature says all of it, with filters that are off where they are zero; without one the model's own hold."""
    whole = params.HasField("temperature")
    if whole:
        sampling.temperature = params.temperature
    if whole or params.top_p:
        sampling.top_p = params.top_p or 1.0
    if whole or params.top_k:
        sampling.top_k = params.top_k
    if whole or params.min_p:
        sampling.min_p = params.min_p
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(params, name):
            setattr(sampling, name, getattr(params, name))
    for token_id, bias in params.logit_bias.items():
        sampling.logit_bias[token_id] = bias


def _refuse_others(message: Message, *, path: str, honoured: frozenset[str], faults: Faults) -> None:
    for field, value in message.ListFields():
        if field.name not in honoured and _NEUTRAL.get(field.name) != value:
            faults.add(f"{path}{field.name}", "is not supported by this version", Reason.UNSUPPORTED_OPTION)


def _refuse_unknown(request: Message, *, faults: Faults) -> None:
    """Fields of a newer protocol, wherever they are. There may be millions: they are not looked at one by one."""
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if known.ByteSize() != request.ByteSize():
        text = "has fields that this version does not know"
        faults.add(request.DESCRIPTOR.name, text, Reason.UNSUPPORTED_OPTION)


def _check_lengths(request: Any, *, model: ModelCardMsg, faults: Faults) -> None:
    """Refuses lists that can be of no use before they are copied: all else about them is looked at later."""
    num_ids, num_stops = len(request.tokenized.input_ids), len(request.sampling_params.stop_token_ids)
    if num_ids > model.context_len:
        text = f"{num_ids} prompt tokens exceed the context of {model.context_len}"
        faults.add("tokenized.input_ids", text, Reason.PROMPT_TOO_LONG)
    if num_stops > model.vocab_size:
        text = f"has {num_stops} ids, more than the {model.vocab_size} tokens that there are"
        faults.add("sampling_params.stop_token_ids", text)


def _renamed(field: str) -> str:
    for own, theirs in _FIELDS:
        if field.startswith(own):
            return theirs + field.removeprefix(own)
    return field

"""From what a caller asks to what will be done: every value checked and final, or one refusal naming all faults."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from chairlift.v1 import event_pb2, request_pb2
from chairlift_worker.ipc.messages import ModelCardMsg, SamplingMsg

from chairlift_service.constraints import Constraints, Grammar
from chairlift_service.defaults import RequestDefaults
from chairlift_service.faults import Faults
from chairlift_service.length import check_length, output_length
from chairlift_service.processors import check_listed, read_processors
from chairlift_service.prompt import prompt_ids
from chairlift_service.sampling import asked_logprobs, sampling_msg
from chairlift_service.text.chat import ChatPrompts
from chairlift_service.text.tokenizer import Tokenizer

MAX_NAME_LEN: Final = 128  # characters of a request id or a session's name
MAX_PRIORITY: Final = 10  # and as much below 0: what one caller can gain over another stays within minutes
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STREAM_INTERVAL: Final = 512  # tokens; no delta has more of them
MAX_CHOICES: Final = 128
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request whose values are all checked and final. The prompt must not be mutated."""

    request_id: str  # the caller's, or made here
    session: str | None
    prompt_ids: array[int]  # typecode "i"; at least one, all inside the vocabulary
    max_new_tokens: int
    limit: event_pb2.LengthLimit  # what it is that ends the output at max_new_tokens
    lowered_by: event_pb2.LengthLimit  # why max_new_tokens is lower than asked; unspecified if it is not
    sampling: SamplingMsg
    stop_ids: tuple[int, ...]  # EOS ids included, unless ignored
    want_text: bool
    want_ids: bool
    want_logprobs: bool
    skip_special_tokens: bool
    priority: int = 0
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_new_tokens: int = 0  # at most max_new_tokens
    stream_interval: int = 1
    echo: bool = False
    top_logprobs: int = 0  # with want_logprobs: how many of the likeliest tokens besides
    raw_logprobs: bool = False  # of the model's own distribution
    prompt_top_n: int = 0  # of the prompt's tokens, and of so many likely ones at each; 1: their own; 0: none
    num_choices: int = 1
    grammar: Grammar = ""  # that the output has to follow; empty: there is none
    # What is changed or excluded before a token is chosen, as it is told; the worker's form of it is in `sampling`.
    processors: request_pb2.SamplingParams = field(default_factory=request_pb2.SamplingParams)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)


async def validate(
    request: request_pb2.GenerationRequest,
    *,
    path: str,
    model: ModelCardMsg,
    tokenizer: Tokenizer,
    chat: ChatPrompts | None,
    defaults: RequestDefaults,
    constraints: Constraints,
) -> ValidRequest:
    """Checks and resolves one request.

    `path` is where it stands in the call's message: `request`, or `requests[i]`. `chat` is None for a model without a
    chat template. A long text is tokenised off the event loop. Raises ServiceError: INVALID_ARGUMENT with one violation
    per fault, NO_CHAT_TEMPLATE for a conversation without one, or QUEUE_FULL where too many texts or constraints wait.
    """
    faults = _plain_faults(request, path=path, defaults=defaults)
    sampling = sampling_msg(request, path=path, defaults=defaults, vocab_size=model.vocab_size, faults=faults)
    processors = await read_processors(
        request.sampling, path=f"{path}.sampling", model=model, tokenizer=tokenizer, defaults=defaults, faults=faults
    )
    stop_ids = _stop_ids(request.stop, path=f"{path}.stop", model=model, faults=faults)
    logprobs = asked_logprobs(request.logprobs, path=f"{path}.logprobs", defaults=defaults, faults=faults)
    grammar = await constraints.read(request, path=path, tokenizer=tokenizer, faults=faults)
    ids = await prompt_ids(request, path=path, model=model, tokenizer=tokenizer, chat=chat, faults=faults)
    faults.raise_any()
    length = output_length(request, defaults=defaults, num_prompt_tokens=len(ids), model=model)
    early = stop_ids if length.min_new_tokens else ()
    processors.check_choice(path=f"{path}.sampling", vocab_size=model.vocab_size, stop_ids=early)
    made = processors.message(stop_ids=stop_ids, min_new_tokens=length.min_new_tokens)
    return ValidRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        session=request.session or None,
        prompt_ids=ids,
        max_new_tokens=length.max_new_tokens,
        limit=length.limit,
        lowered_by=length.lowered_by,
        sampling=msgspec.structs.replace(sampling, processors=made),
        processors=processors.params,
        stop_ids=stop_ids,
        want_text=_is_on(request.output, "text"),
        want_ids=_is_on(request.output, "token_ids"),
        want_logprobs=logprobs.chosen,
        skip_special_tokens=_is_on(request.output, "skip_special_tokens"),
        priority=request.priority,
        stop_strings=tuple(request.stop.strings),
        include_stop=request.stop.include_stop,
        min_new_tokens=length.min_new_tokens,
        stream_interval=request.output.stream_interval or 1,
        echo=request.output.echo,
        top_logprobs=logprobs.num_top,
        raw_logprobs=logprobs.raw,
        prompt_top_n=logprobs.prompt,
        num_choices=asked_choices(request),
        grammar=grammar,
    )


def _is_on(output: request_pb2.OutputParams, name: str) -> bool:
    return getattr(output, name) if output.HasField(name) else True


def asked_choices(request: request_pb2.GenerationRequest) -> int:
    """How many choices it has; where it asks for none, or for too many, and will be refused, a number in range."""
    return min(max(1, request.num_choices), MAX_CHOICES) if request.HasField("num_choices") else 1


def is_name(text: str) -> bool:
    """Whether `text` can name a request or a session: 1 to 128 printable characters."""
    return 0 < len(text) <= MAX_NAME_LEN and text.isprintable()


def _plain_faults(request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults) -> Faults:
    """What is wrong that needs no look at the model or the prompt."""
    faults = Faults()
    _check_names(request, path=path, faults=faults)
    check_length(request, path=path, defaults=defaults, faults=faults)
    _check_choices(request, path=path, faults=faults)
    if abs(request.priority) > MAX_PRIORITY:
        faults.add(f"{path}.priority", f"must be {-MAX_PRIORITY} to {MAX_PRIORITY}, is {request.priority}")
    _check_output(request.output, path=f"{path}.output", faults=faults)
    check_stop_strings(request.stop.strings, path=f"{path}.stop.strings", faults=faults)
    return faults


def _check_names(request: request_pb2.GenerationRequest, *, path: str, faults: Faults) -> None:
    for name in ("request_id", "session"):
        value = getattr(request, name)
        if value and not is_name(value):
            faults.add(f"{path}.{name}", f"must be 1 to {MAX_NAME_LEN} printable characters, has {len(value)}")


def _check_choices(request: request_pb2.GenerationRequest, *, path: str, faults: Faults) -> None:
    if not request.HasField("num_choices"):
        return
    if not 1 <= request.num_choices <= MAX_CHOICES:
        faults.add(f"{path}.num_choices", f"must be 1 to {MAX_CHOICES}, is {request.num_choices}")
    elif request.num_choices > 1 and request.HasField("max_new_tokens") and request.max_new_tokens == 0:
        faults.add(f"{path}.num_choices", f"must be 1 where nothing is generated, is {request.num_choices}")


def _stop_ids(stop: request_pb2.StopParams, *, path: str, model: ModelCardMsg, faults: Faults) -> tuple[int, ...]:
    if not check_listed(stop.token_ids, path=f"{path}.token_ids", vocab_size=model.vocab_size, faults=faults):
        return ()
    eos = () if stop.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*eos, *stop.token_ids)))


def check_stop_strings(strings: Sequence[str], *, path: str, faults: Faults) -> None:
    """Adds a fault for each that is empty or too long, or for too many of them."""
    if len(strings) > MAX_STOP_STRINGS:
        faults.add(path, f"has {len(strings)} strings, at most {MAX_STOP_STRINGS}")
        return
    for i, text in enumerate(strings):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            faults.add(f"{path}[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters, has {len(text)}")


def _check_output(output: request_pb2.OutputParams, *, path: str, faults: Faults) -> None:
    if output.HasField("stream_interval") and not 1 <= output.stream_interval <= MAX_STREAM_INTERVAL:
        text = f"must be 1 to {MAX_STREAM_INTERVAL}, is {output.stream_interval}"
        faults.add(f"{path}.stream_interval", text)
    if output.echo and output.HasField("text") and not output.text:
        faults.add(f"{path}.echo", "is text, which output.text turns off")

"""From what a caller asks to what will be done: every value checked and final, or one refusal naming all faults."""

from __future__ import annotations

import math
import secrets
import struct
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.v1 import event_pb2, request_pb2
from chairlift_worker.ipc.messages import ModelCardMsg, SamplingMsg

from chairlift_service import not_yet
from chairlift_service.defaults import RequestDefaults
from chairlift_service.errors import Reason
from chairlift_service.faults import Faults
from chairlift_service.prompt import check_ids, prompt_ids
from chairlift_service.text.chat import ChatPrompts
from chairlift_service.text.tokenizer import Tokenizer

MAX_NAME_LEN: Final = 128  # characters of a request id or a session's name
MAX_PRIORITY: Final = 10  # and as much below 0: what one caller can gain over another stays within minutes
# Temperatures under 1e-5 count as 0. This is 1e-5 as a float of 32 bits: what a caller sends is one, and 1e-5 itself
# is not under it.
GREEDY_BELOW: Final = struct.unpack("f", struct.pack("f", 1e-5))[0]
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
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
    min_new_tokens: int = 0
    stream_interval: int = 1
    echo: bool = False

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
) -> ValidRequest:
    """Checks and resolves one request.

    `path` is where it stands in the call's message: `request`, or `requests[i]`. `chat` is None for a model without a
    chat template. A long text is tokenised off the event loop. Raises ServiceError: INVALID_ARGUMENT with one violation
    per fault, NO_CHAT_TEMPLATE for a conversation without one, or QUEUE_FULL where too many texts wait.
    """
    faults = Faults()
    not_yet.refuse(request, path=path, faults=faults)
    _check_names(request, path=path, faults=faults)
    sampling = _sampling(request, path=path, defaults=defaults, vocab_size=model.vocab_size, faults=faults)
    stop_ids = _stop_ids(request.stop, path=f"{path}.stop", model=model, faults=faults)
    want_logprobs = _logprobs(request, path=path, defaults=defaults, faults=faults)
    if abs(request.priority) > MAX_PRIORITY:
        faults.add(f"{path}.priority", f"must be {-MAX_PRIORITY} to {MAX_PRIORITY}, is {request.priority}")
    asked = request.max_new_tokens if request.HasField("max_new_tokens") else None
    if asked == 0:
        faults.add(f"{path}.max_new_tokens", "must be at least 1, is 0")
    _check_output(request.output, path=f"{path}.output", faults=faults)
    check_stop_strings(request.stop.strings, path=f"{path}.stop.strings", faults=faults)
    ids = await prompt_ids(request, path=path, model=model, tokenizer=tokenizer, chat=chat, faults=faults)
    faults.raise_any()
    max_new_tokens, limit, lowered_by = _length(
        asked if asked is not None else defaults.max_new_tokens, num_prompt_tokens=len(ids), model=model
    )
    output = request.output
    return ValidRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        session=request.session or None,
        prompt_ids=ids,
        max_new_tokens=max_new_tokens,
        limit=limit,
        lowered_by=lowered_by,
        sampling=sampling,
        stop_ids=stop_ids,
        want_text=output.text if output.HasField("text") else True,
        want_ids=output.token_ids if output.HasField("token_ids") else True,
        want_logprobs=want_logprobs,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        priority=request.priority,
        stop_strings=tuple(request.stop.strings),
        include_stop=request.stop.include_stop,
        stream_interval=output.stream_interval if output.HasField("stream_interval") else 1,
        echo=output.echo,
    )


def is_name(text: str) -> bool:
    """Whether `text` can name a request or a session: 1 to 128 printable characters."""
    return 0 < len(text) <= MAX_NAME_LEN and text.isprintable()


def _check_names(request: request_pb2.GenerationRequest, *, path: str, faults: Faults) -> None:
    for name in ("request_id", "session"):
        value = getattr(request, name)
        if value and not is_name(value):
            faults.add(f"{path}.{name}", f"must be 1 to {MAX_NAME_LEN} printable characters, has {len(value)}")


def _stop_ids(stop: request_pb2.StopParams, *, path: str, model: ModelCardMsg, faults: Faults) -> tuple[int, ...]:
    if len(stop.token_ids) > model.vocab_size:
        text = f"has {len(stop.token_ids)} ids, more than the {model.vocab_size} tokens that there are"
        faults.add(f"{path}.token_ids", text)
        return ()
    check_ids(stop.token_ids, path=f"{path}.token_ids", size=model.vocab_size, faults=faults)
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
    if output.HasField("stream_interval") and output.stream_interval < 1:
        faults.add(f"{path}.stream_interval", "must be at least 1, is 0")
    if output.echo and output.HasField("text") and not output.text:
        faults.add(f"{path}.echo", "is text, which output.text turns off")


def _logprobs(request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults, faults: Faults) -> bool:
    if not request.logprobs.HasField("top_n"):
        return defaults.logprobs
    top_n = request.logprobs.top_n
    if top_n > 1:
        text = f"this version returns the chosen token's log-probability only: 0 or 1, not {top_n}"
        faults.add(f"{path}.logprobs.top_n", text, Reason.UNSUPPORTED_OPTION)
    return top_n > 0


def _length(
    asked: int | None, *, num_prompt_tokens: int, model: ModelCardMsg
) -> tuple[int, event_pb2.LengthLimit, event_pb2.LengthLimit]:
    """(max_new_tokens, what ends the output there, why it is lower than asked).

    The last token of an output is never computed, so prompt + output - 1 slots of the cache are enough. Where
    nothing was asked, the rest of the context counts as asked.
    """
    by_context = model.context_len - num_prompt_tokens
    by_cache = model.cache_len - num_prompt_tokens + 1
    room, limit = min((by_context, event_pb2.LENGTH_LIMIT_CONTEXT), (by_cache, event_pb2.LENGTH_LIMIT_CACHE))
    if asked is not None and asked <= room:
        return asked, event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS, event_pb2.LENGTH_LIMIT_UNSPECIFIED
    if asked is None and limit == event_pb2.LENGTH_LIMIT_CONTEXT:
        return room, limit, event_pb2.LENGTH_LIMIT_UNSPECIFIED
    return room, limit, limit


def _sampling(
    request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults, vocab_size: int, faults: Faults
) -> SamplingMsg:
    """Resolves the distribution's shape, as the contract in request.proto says; see RequestDefaults for the rest."""
    params, where = request.sampling, f"{path}.sampling"
    _check_sampling(params, path=where, faults=faults)
    seed = request.seed if request.HasField("seed") else secrets.randbits(63)
    named = any(params.HasField(name) for name in ("top_k", "top_p", "min_p"))
    if params.HasField("temperature"):
        temperature = params.temperature
    elif defaults.do_sample:
        temperature = defaults.temperature
    else:
        temperature = 1.0 if named else 0.0
    if temperature < GREEDY_BELOW:
        # The most likely token survives every filter, so they are off: `accepted` then tells it as it is.
        return SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    top_k = params.top_k if params.HasField("top_k") else defaults.top_k
    return SamplingMsg(
        temperature=temperature,
        top_k=top_k if 0 < top_k < vocab_size else 0,
        top_p=params.top_p if params.HasField("top_p") else defaults.top_p,
        min_p=params.min_p if params.HasField("min_p") else defaults.min_p,
        seed=seed,
    )


def _check_sampling(params: request_pb2.SamplingParams, *, path: str, faults: Faults) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        faults.add(f"{path}.temperature", f"must be a finite number of at least 0, is {params.temperature:g}")
    if params.top_k < -1:
        faults.add(f"{path}.top_k", f"must be at least 1, or 0 or -1 for off, is {params.top_k}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        faults.add(f"{path}.top_p", f"must be above 0 and at most 1, is {params.top_p:g}")
    if not 0 <= params.min_p < 1:
        faults.add(f"{path}.min_p", f"must be at least 0 and below 1, is {params.min_p:g}")

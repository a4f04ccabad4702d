"""From what a caller asks to what will be done: every value checked and final, or one refusal naming all faults."""

from __future__ import annotations

import math
import secrets
import struct
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from chairlift.v1 import event_pb2, request_pb2
from chairlift_worker.ipc.messages import ModelCardMsg, SamplingMsg

from chairlift_service.defaults import RequestDefaults
from chairlift_service.errors import Reason, Violation, from_violations
from chairlift_service.text.tokenizer import Tokenizer

MAX_NAME_LEN: Final = 128  # characters of a request id or a session's name
# Temperatures under 1e-5 count as 0. This is 1e-5 as a float of 32 bits: what a caller sends is one, and 1e-5 itself
# is not under it.
GREEDY_BELOW: Final = struct.unpack("f", struct.pack("f", 1e-5))[0]
MAX_BAD_IDS: Final = 16  # offending ids named in one refusal
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

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)


@dataclass(slots=True)
class _Faults:
    """Collects what is wrong with one request, in the order of discovery."""

    violations: list[Violation] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, description: str, reason: Reason = Reason.INVALID_VALUE) -> None:
        self.violations.append(Violation(path, description, reason))

    def raise_any(self) -> None:
        if self.violations:
            raise from_violations(self.violations, metadata=self.metadata)


async def validate(
    request: request_pb2.GenerationRequest,
    *,
    path: str,
    model: ModelCardMsg,
    tokenizer: Tokenizer,
    defaults: RequestDefaults,
) -> ValidRequest:
    """Checks and resolves one request.

    `path` is where it stands in the call's message: `request`, or `requests[i]`. A long text is tokenised off the
    event loop. Raises ServiceError: INVALID_ARGUMENT with one violation per fault, or QUEUE_FULL where too many long
    texts wait for the tokenizer.
    """
    faults = _Faults()
    _check_names(request, path=path, faults=faults)
    sampling = _sampling(request, path=path, defaults=defaults, vocab_size=model.vocab_size, faults=faults)
    stop_ids = _stop_ids(request.stop, path=f"{path}.stop", model=model, faults=faults)
    want_logprobs = _logprobs(request, path=path, defaults=defaults, faults=faults)
    asked = request.max_new_tokens if request.HasField("max_new_tokens") else None
    if asked == 0:
        faults.add(f"{path}.max_new_tokens", "must be at least 1, is 0")
    prompt_ids = await _prompt(request, path=path, model=model, tokenizer=tokenizer, faults=faults)
    faults.raise_any()
    max_new_tokens, limit, lowered_by = _length(
        asked if asked is not None else defaults.max_new_tokens, num_prompt_tokens=len(prompt_ids), model=model
    )
    output = request.output
    return ValidRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        session=request.session or None,
        prompt_ids=prompt_ids,
        max_new_tokens=max_new_tokens,
        limit=limit,
        lowered_by=lowered_by,
        sampling=sampling,
        stop_ids=stop_ids,
        want_text=output.text if output.HasField("text") else True,
        want_ids=output.token_ids if output.HasField("token_ids") else True,
        want_logprobs=want_logprobs,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
    )


def check_token_ids(ids: Sequence[int], *, path: str, size: int) -> None:
    """Refuses ids outside [0, size): ServiceError UNKNOWN_TOKEN_ID with a violation `path[i]` for each."""
    faults = _Faults()
    _check_ids(ids, path=path, size=size, faults=faults)
    faults.raise_any()


def is_name(text: str) -> bool:
    """Whether `text` can name a request or a session: 1 to 128 printable characters."""
    return 0 < len(text) <= MAX_NAME_LEN and text.isprintable()


def _check_names(request: request_pb2.GenerationRequest, *, path: str, faults: _Faults) -> None:
    for name in ("request_id", "session"):
        value = getattr(request, name)
        if value and not is_name(value):
            faults.add(f"{path}.{name}", f"must be 1 to {MAX_NAME_LEN} printable characters, has {len(value)}")


async def _prompt(
    request: request_pb2.GenerationRequest, *, path: str, model: ModelCardMsg, tokenizer: Tokenizer, faults: _Faults
) -> array[int]:
    """The prompt's ids; empty where a fault was found."""
    which = request.WhichOneof("input")
    if which is None:
        faults.add(path, "one of text and token_ids must be set", Reason.MISSING_INPUT)
        return array("i")
    if which == "text":
        where = f"{path}.text"
        num_bytes, most = len(request.text.encode()), tokenizer.max_text_bytes(model.context_len)
        if num_bytes > most:
            # Before it is tokenised: a text that cannot fit must cost nothing.
            faults.metadata |= {"context_len": str(model.context_len), "max_text_bytes": str(most)}
            text = f"has {num_bytes} bytes; at most {most} can fit the context of {model.context_len} tokens"
            faults.add(where, text, Reason.PROMPT_TOO_LONG)
            return array("i")
        ids: Sequence[int] = await tokenizer.encode_async(request.text, add_special_tokens=True)
    else:
        where, ids = f"{path}.token_ids.ids", request.token_ids.ids
    if not _fits(ids, path=where.removesuffix(".ids"), model=model, faults=faults):
        return array("i")
    if which == "text" and max(ids) >= model.vocab_size:
        text = f"has token {max(ids)}, which the model lacks: it has {model.vocab_size}"
        faults.add(where, text, Reason.UNKNOWN_TOKEN_ID)
        return array("i")
    return array("i", ids) if _check_ids(ids, path=where, size=model.vocab_size, faults=faults) else array("i")


def _fits(ids: Sequence[int], *, path: str, model: ModelCardMsg, faults: _Faults) -> bool:
    num = len(ids)
    if num == 0:
        faults.add(path, "has no tokens; a prompt needs at least one", Reason.EMPTY_PROMPT)
        return False
    if num + 1 <= model.context_len and num <= model.cache_len:
        return True
    faults.metadata |= {
        "prompt_tokens": str(num),
        "context_len": str(model.context_len),
        "cache_len": str(model.cache_len),
    }
    if num + 1 > model.context_len:
        why = f"and one generated token exceed the context of {model.context_len}"
    else:
        why = f"exceed the key-value cache of {model.cache_len}"
    faults.add(path, f"{num} prompt tokens {why}", Reason.PROMPT_TOO_LONG)
    return False


def _check_ids(ids: Sequence[int], *, path: str, size: int, faults: _Faults) -> bool:
    """Whether all of `ids` are in [0, size); names the first offenders with their index."""
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return True
    bad = 0
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < size:
            bad += 1
            if bad <= MAX_BAD_IDS:
                text = f"token id {token_id} is outside the vocabulary, [0, {size})"
                faults.add(f"{path}[{index}]", text, Reason.UNKNOWN_TOKEN_ID)
    faults.metadata["vocab_size"] = str(size)
    return False


def _stop_ids(stop: request_pb2.StopParams, *, path: str, model: ModelCardMsg, faults: _Faults) -> tuple[int, ...]:
    _check_ids(stop.token_ids, path=f"{path}.token_ids", size=model.vocab_size, faults=faults)
    eos = () if stop.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*eos, *stop.token_ids)))


def _logprobs(request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults, faults: _Faults) -> bool:
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
    request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults, vocab_size: int, faults: _Faults
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


def _check_sampling(params: request_pb2.SamplingParams, *, path: str, faults: _Faults) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        faults.add(f"{path}.temperature", f"must be a finite number of at least 0, is {params.temperature:g}")
    if params.top_k < -1:
        faults.add(f"{path}.top_k", f"must be at least 1, or 0 or -1 for off, is {params.top_k}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        faults.add(f"{path}.top_p", f"must be above 0 and at most 1, is {params.top_p:g}")
    if not 0 <= params.min_p < 1:
        faults.add(f"{path}.min_p", f"must be at least 0 and below 1, is {params.min_p:g}")

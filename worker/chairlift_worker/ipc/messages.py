"""What crosses between the service and the worker, as msgspec structs in MessagePack.

Requests ring (service -> worker): one `RequestMsg` a record.
Results ring (worker -> service): one `WorkerMsg` a record; a step's results are one `StepMsg`, columns not rows
(split into several only where a record would be larger than the ring takes).

Times are CLOCK_MONOTONIC nanoseconds, which both processes share. A request is named by its `uid`, a number that the
service never uses twice; the callers' ids do not cross.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

NO_DEADLINE: Final = 0


class ProcessorsMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changes or excludes tokens before one is chosen, in the order in which it is done; unset is neutral.

    Ids are int32 in native order, inside the output layer's rows.
    """

    bias_ids: bytes = b""
    biases: bytes = b""  # float32, added to the logits of these ids
    repetition_penalty: float = 1.0  # of tokens of prompt and output
    presence_penalty: float = 0.0  # of tokens of the output
    frequency_penalty: float = 0.0  # of tokens of the output, for each time that they are there
    no_repeat_ngram_size: int = 0  # no run of so many tokens comes twice
    banned_sequences: bytes = b""  # one after the other: its length, then its ids
    min_new_tokens: int = 0
    early_stop_ids: bytes = b""  # not chosen as one of the first min_new_tokens
    allowed_ids: bytes = b""  # nothing else is chosen; empty: all may be
    banned_ids: bytes = b""


NO_PROCESSORS: Final = ProcessorsMsg()


class SamplingMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How to choose one request's tokens; every value is valid and final."""

    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    min_p: float  # 0 is off
    seed: int  # unsigned, 64 bits
    processors: ProcessorsMsg | None = None  # None: nothing is changed or excluded


class ResumedMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What came of a request in workers that are gone."""

    generated: bytes  # int32, native order: its output so far, fewer than max_new_tokens
    cached_tokens: int  # prompt tokens that came from the prefix cache at its first start
    started_ns: int  # its first start; 0: it had none
    first_token_ns: int  # 0: there is none
    preemptions: int
    prompt_logprobs: int = 0  # entries of the prompt's log-probabilities that were told, the first, empty one included


class ForkMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Another output for the same request, by another seed."""

    uid: int
    seed: int  # unsigned, 64 bits


class AddRequestMsg(msgspec.Struct, frozen=True, array_like=True, tag="add", gc=False):
    """Start a request. The service has validated it: it fits the context and the cache."""

    uid: int
    prompt: bytes  # int32, native order; not empty
    max_new_tokens: int  # prompt + max_new_tokens - 1 slots fit the cache; 0 only where the prompt's logprobs are asked
    sampling: SamplingMsg
    stop_ids: tuple[int, ...]  # EOS ids included, unless ignored
    logprobs: bool  # return each chosen token's log-probability
    arrival_ns: int
    deadline_ns: int  # NO_DEADLINE where there is none
    priority: int = 0  # higher ones start earlier
    resumed: ResumedMsg | None = None  # None: it is new
    top_logprobs: int = 0  # with `logprobs`: return so many of the likeliest tokens at each place besides
    raw_logprobs: bool = False  # of the model's own logits, not of what is chosen from
    prompt_logprobs: int = (
        0  # of each token of the prompt, and of so many likeliest ones at its place; 1: its own; 0: none
    )
    forks: tuple[
        ForkMsg, ...
    ] = ()  # requests that are this one but for their seed; of the prompt's logprobs they tell none
    fork_of: int = 0  # the uid of a request with this prompt, which need not be here; 0: there is none
    grammar: str = ""  # llguidance's, that the output has to follow; empty: there is none


class CancelMsg(msgspec.Struct, frozen=True, array_like=True, tag="cancel", gc=False):
    """End a request with CANCELLED. Of a uid that is unknown, or over, nothing is said."""

    uid: int


class HoldMsg(msgspec.Struct, frozen=True, array_like=True, tag="hold", gc=False):
    """Give a request no more tokens, or, where not `held`, go on with it. A uid that is unknown, or over, is let be."""

    uid: int
    held: bool


class FlushPrefixCacheMsg(msgspec.Struct, frozen=True, array_like=True, tag="flush", gc=False):
    """Forget the cached pages that no request uses; answered by `FlushedMsg`."""

    op: int


class PauseMsg(msgspec.Struct, frozen=True, array_like=True, tag="pause", gc=False):
    """Begin no step until a `ResumeMsg`; answered by `DoneMsg`, after all that earlier steps brought."""

    op: int


class ResumeMsg(msgspec.Struct, frozen=True, array_like=True, tag="resume", gc=False):
    """Step again, after an update of the weights that may be under way; answered by `DoneMsg` at once."""

    op: int


class UpdateWeightsMsg(msgspec.Struct, frozen=True, array_like=True, tag="weights", gc=False):
    """While paused: replace the weights by those of a folder; answered by `WeightsMsg`."""

    op: int
    folder: str


class ShutdownMsg(msgspec.Struct, frozen=True, array_like=True, tag="shutdown", gc=False):
    """Exit with code 0 after this step. Requests still there are dropped without a word."""


ControlMsg = FlushPrefixCacheMsg | PauseMsg | ResumeMsg | UpdateWeightsMsg
RequestMsg = AddRequestMsg | CancelMsg | HoldMsg | ControlMsg | ShutdownMsg


class SettingMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One resolved setting and where its value comes from."""

    name: str
    value: str
    reason: str


class ModelCardMsg(msgspec.Struct, frozen=True, array_like=True):
    """What the service must know of the loaded model."""

    name: str
    architecture: str
    tokenizer_dir: str  # holds tokenizer.json, tokenizer_config.json and the chat template
    vocab_size: int  # rows of the output layer
    context_len: int
    cache_len: int  # slots of key-value cache that one request alone can use
    eos_token_ids: tuple[int, ...]  # of the config, the generation config and the tokenizer
    dtype: str
    num_parameters: int
    generation_config: dict[str, object]  # generation_config.json as it is; empty if there is none


class ReadyMsg(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker can serve. First message of a worker that starts well."""

    model: ModelCardMsg
    settings: tuple[SettingMsg, ...]


class StartFailedMsg(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start; it exits after this. First message of a worker that does not start."""

    message: str  # one line, naming setting and value where one is at fault


class EndingReason(enum.IntEnum):
    """Why a request left the worker."""

    STOP = 1  # the last token is in stop_ids, or completes what the grammar allows
    LENGTH = 2  # max_new_tokens are generated
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5  # this request's own processing failed


class StartedMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's first tokens were computed in this step."""

    uid: int
    cached_tokens: int  # prompt tokens that came from the prefix cache


class Turn(enum.IntEnum):
    """What befell a request on its way."""

    PREEMPTED = 1  # gave its pages up, to be computed again
    SWAPPED = 2  # its pages went to the swap pool
    RESUMED = 3  # is in the batch again


class EndingMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request left the worker: nothing of this uid follows. Its last tokens may stand in the same `StepMsg`."""

    uid: int
    reason: EndingReason
    error: str  # with ERROR: one of errors.py's reasons, a colon, a sentence; else empty
    queued_ns: int
    prefill_ns: int
    decode_ns: int
    swapped_ns: int
    preemptions: int
    cached_tokens: int  # at its first start
    turns: tuple[tuple[Turn, int], ...] = ()  # and when, CLOCK_MONOTONIC ns; the first `MAX_TURNS` of them


class PromptLogprobsMsg(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of a prompt's tokens from position `index` on; the columns are as `StepMsg` has them."""

    uid: int
    index: int
    logprobs: bytes  # float32
    num_tops: bytes = b""  # uint8; empty where only the tokens' own were asked
    top_ids: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32


class StepMsg(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """All that one step brought: the columns `uids`, `token_ids` and `logprobs` have one entry for each token.

    So has `num_tops`, if not empty: how many entries of `top_ids` and `top_logprobs` are a token's, one token's after
    the other's.
    """

    step: int
    uids: bytes  # uint64
    token_ids: bytes  # int32
    logprobs: bytes  # float32, NaN where not asked; empty if nobody asked
    started: tuple[StartedMsg, ...]
    endings: tuple[EndingMsg, ...]
    num_tops: bytes = b""  # uint8; empty if nobody asked
    top_ids: bytes = b""  # int32; the likeliest tokens at a token's place, likeliest first
    top_logprobs: bytes = b""  # float32
    prompts: tuple[PromptLogprobsMsg, ...] = ()  # before the first token of the same request


class FlushedMsg(msgspec.Struct, frozen=True, array_like=True, tag="flushed", gc=False):
    """Answer to `FlushPrefixCacheMsg`."""

    op: int
    num_pages: int


class DoneMsg(msgspec.Struct, frozen=True, array_like=True, tag="done", gc=False):
    """Answer to `PauseMsg` and `ResumeMsg`."""

    op: int


class WeightsMsg(msgspec.Struct, frozen=True, array_like=True, tag="updated", gc=False):
    """Answer to `UpdateWeightsMsg`: the new weights are in place, or, with `error`, the old ones are."""

    op: int
    error: str  # one of errors.py's reasons, a colon, a sentence; empty if it went well
    num_tensors: int
    num_requests: int  # that are computed again
    num_pages: int  # of the prefix cache, forgotten


AnswerMsg = FlushedMsg | DoneMsg | WeightsMsg
WorkerMsg = ReadyMsg | StartFailedMsg | StepMsg | AnswerMsg

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[RequestMsg] = msgspec.msgpack.Decoder(RequestMsg)
_worker_decoder: msgspec.msgpack.Decoder[WorkerMsg] = msgspec.msgpack.Decoder(WorkerMsg)


def encode(message: RequestMsg | WorkerMsg) -> bytes:
    """One record's bytes."""
    return _encoder.encode(message)


def decode_request(record: bytes) -> RequestMsg:
    """The inverse of `encode`, in the worker. Raises msgspec.DecodeError on bytes that are no request."""
    return _request_decoder.decode(record)


def decode_worker(record: bytes) -> WorkerMsg:
    """The inverse of `encode`, in the service. Raises msgspec.DecodeError on bytes that are no worker message."""
    try:
        return _worker_decoder.decode(record)
    except RecursionError as error:  # generation_config may hold anything, to any depth
        raise msgspec.DecodeError("nested too deeply") from error

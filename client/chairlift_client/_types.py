"""What the client's calls return: frozen values, free of protobuf."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RequestState(enum.IntEnum):
    """Where a request stands, as the service sees it. The numbers are the API's."""

    UNSPECIFIED = 0
    WAITING = 1
    PREFILLING = 2
    DECODING = 3
    SWAPPED = 4
    PAUSED = 5
    FINISHED = 6


class LengthLimit(enum.IntEnum):
    """Which limit cut a generation's length, or lowered what was asked."""

    UNSPECIFIED = 0
    MAX_NEW_TOKENS = 1
    CONTEXT = 2
    CACHE = 3


class FinishReason(enum.IntEnum):
    """Why a generation ended well."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


class CancelStatus(enum.IntEnum):
    """What a cancellation did."""

    UNSPECIFIED = 0
    CANCELLED = 1
    ALREADY_FINISHED = 2
    NOT_FOUND = 3


class ServerState(enum.IntEnum):
    """What the server does."""

    UNSPECIFIED = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3
    FAILED = 4
    PAUSED = 5
    STOPPED = 6
    RECOVERING = 7


class HealthStatus(enum.IntEnum):
    """Answer of the standard health service."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that hold for a request, the model's own filled in. None: not told."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits, by id."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all may be chosen."""
    banned_token_ids: tuple[int, ...] = ()
    banned_words: tuple[str, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request was taken. `max_new_tokens` is what holds; `lowered_by` says why it is less than was asked."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int | None
    max_new_tokens: int
    lowered_by: LengthLimit
    seed: int
    sampling: Sampling
    state: RequestState
    min_new_tokens: int = 0
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one position: the chosen token's, and `top` as (token id, logprob) pairs."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice: `num_tokens` of them, from output index `index` on.

    Or, before them and in choice 0 alone, `prompt_logprobs` of the prompt's tokens from `prompt_index` on; None for the
    first token of the prompt, which nothing stands before.
    """

    choice: int
    index: int
    num_tokens: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    state: RequestState
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice; a stop token counts as generated."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one choice's time went, in seconds; `swapped` is part of the others."""

    queued: float
    prefill: float
    decode: float
    swapped: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The good ending of one choice. What stopped it is set with STOP, `limit` with LENGTH."""

    choice: int
    reason: FinishReason
    stop_token_id: int | None
    limit: LengthLimit
    usage: Usage
    timings: Timings
    stop_text: str | None = None
    stop_constraint: bool = False  # it has the form that was asked for, and nothing can follow


@dataclass(frozen=True, slots=True)
class Failed:
    """The ending by error of one request in a stream of a session, which itself goes on."""

    error: Exception


Event = Accepted | Delta | Finished
"""One event of `generate`: `Accepted` first, then `Delta`s, then one `Finished` for each choice."""


@dataclass(frozen=True, slots=True)
class ResultEvent:
    """One event of `result`, and the request that it belongs to."""

    request_id: str
    event: Accepted | Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of the prompt's tokens, if asked; in the first choice alone. None for the first token."""


@dataclass(frozen=True, slots=True)
class Result:
    """The answer of `complete`. The properties but `choices` speak of the first choice."""

    accepted: Accepted
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's token ids."""
        return self.choices[0].token_ids

    @property
    def reason(self) -> FinishReason:
        """Why it ended."""
        return self.choices[0].finished.reason

    @property
    def usage(self) -> Usage:
        """What was counted."""
        return self.choices[0].finished.usage


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenised text: ids, and their spellings in the vocabulary.

    `offsets`, if asked, are where each token begins and ends in the text, in characters. `truncated`: there were more
    than `max_tokens`.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a conversation, as the model's chat template writes it: text and ids."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served. `vocab_size` counts the rows of the output layer; token ids are below it."""

    name: str
    architecture: str
    vocab_size: int
    context_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """What taking other weights did."""

    num_tensors: int
    num_requests: int
    """Requests in flight that will be computed again."""
    num_blocks: int
    """Pages of the prefix cache that were forgotten."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the service's settings as it was resolved."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server. `statistics` has the counters and gauges of the API by name."""

    version: str
    state: ServerState
    worker_pids: tuple[int, ...]
    config: tuple[Setting, ...]
    statistics: dict[str, int]


@dataclass(frozen=True, slots=True)
class ServerStats:
    """One look at the server. `statistics` has the counters and gauges of the API by name."""

    state: ServerState
    uptime: float  # seconds since the service was started, by a clock that never jumps
    statistics: dict[str, int]

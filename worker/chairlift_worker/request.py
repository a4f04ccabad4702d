"""One request in the worker: its tokens, how far they are computed, and its state."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from typing import Final

import msgspec

from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, ResumedMsg, Turn
from chairlift_worker.plan import PromptSpan, SampleSpec
from chairlift_worker.speculation.drafter import Drafter

HEAD_START_NS: Final = 10_000_000_000
"""What a level of priority is worth: a request is treated as if it had come so much earlier.

So the urgent overtake, and nobody waits for ever: whoever has waited long enough comes before all who come later.
"""


# Of each request, told with its ending: a record must stay small however often a request is preempted.
MAX_TURNS: Final = 32


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()  # holds no pages
    SWAPPED = enum.auto()  # holds no pages; the swap pool keeps what it had computed
    PREFILLING = enum.auto()  # active; more than its newest token is still to be computed
    DECODING = enum.auto()  # active; only its newest token is still to be computed
    FINISHED = enum.auto()


_NEXT: Final = {
    RequestState.WAITING: {RequestState.PREFILLING, RequestState.FINISHED},
    RequestState.SWAPPED: {RequestState.PREFILLING, RequestState.WAITING, RequestState.FINISHED},
    RequestState.PREFILLING: {
        RequestState.DECODING,
        RequestState.WAITING,
        RequestState.SWAPPED,
        RequestState.FINISHED,
    },
    RequestState.DECODING: {RequestState.WAITING, RequestState.SWAPPED, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


class PageTable:
    """Where a request's keys and values lie. Written by the memory that gave the sectors, and by nobody else.

    One table for each group of layers. A table only ever grows at its end; entries below `first` are -1, given back.
    """

    __slots__ = ("due", "first", "names", "num_published", "room", "sectors")

    def __init__(self, num_groups: int) -> None:
        """Empty tables; none at all for a request that waits."""
        self.sectors = tuple(array("i") for _ in range(num_groups))
        self.first = [0] * num_groups  # for each group, the first entry that is still held
        self.room = 0  # tokens that are known to have their entries in all tables
        self.due = 0  # computed tokens below which there is nothing to publish or give back
        self.names = array("Q")  # of the pages' contents, as far as they are published or promised
        self.num_published = 0  # pages, from the first on, that other requests can find

    @property
    def is_settled(self) -> bool:
        """Whether a step is done that computed something behind it: all that was to be copied into it is there."""
        return self.due > 0

    @property
    def num_held(self) -> int:
        """Sectors of all groups."""
        return sum(len(sectors) - first for sectors, first in zip(self.sectors, self.first, strict=True))


class SavedPages:
    """What the swap pool keeps of a request that gave up its pages."""

    __slots__ = ("computed", "first", "slots")

    def __init__(self, *, computed: int, first: list[int], slots: list[list[int]]) -> None:
        self.computed = computed  # tokens
        self.first = first  # for each group, the first entry of its table that is kept
        self.slots = slots  # for each group, where the entries from `first` on lie


class Progress:
    """What was told of a request, when things happened, and how often; for its ending, and for steps to come."""

    __slots__ = (
        "announced",
        "cached_tokens",
        "first_token_ns",
        "judged",
        "preemptions",
        "started_ns",
        "swapped_at_ns",
        "swapped_ns",
        "turns",
    )

    def __init__(self) -> None:
        self.started_ns = 0  # 0: not started
        self.first_token_ns = 0  # 0: none yet
        self.cached_tokens = 0  # prompt tokens that the cache had at the first start
        self.preemptions = 0
        self.swapped_ns = 0  # time in the swap pool so far
        self.swapped_at_ns = 0  # since when it is there
        self.announced = False  # the service knows that it has started
        # Tokens of the prompt whose logprobs are told, or will be by steps in flight; the first has none to tell.
        self.judged = 1
        self.turns: list[tuple[Turn, int]] = []

    def resume(self, before: ResumedMsg) -> None:
        """Goes on where a worker that is gone left it; what that one has told is not told again."""
        self.started_ns, self.first_token_ns = before.started_ns, before.first_token_ns
        self.cached_tokens, self.preemptions = before.cached_tokens, before.preemptions
        self.announced = before.started_ns > 0
        self.judged = max(1, before.prompt_logprobs)

    def note(self, turn: Turn, now_ns: int) -> None:
        """Keeps what befell the request, for its trace; of a very eventful one, the beginning."""
        if len(self.turns) < MAX_TURNS:
            self.turns.append((turn, now_ns))


class Request:
    """What the worker knows of one request.

    There are no phases: `computed` tokens have their keys and values in the cache and catch up with `total`, by some
    number each step. When they meet, the next token is sampled and `total` grows by one.

    | range               | what                                       | whose to change              |
    |---------------------|--------------------------------------------|------------------------------|
    | [0, prompt_len)     | the prompt                                 | nobody                       |
    | [prompt_len, total) | generated so far                           | Scheduler.apply              |
    | [0, computed)       | keys and values are in the table's sectors | Scheduler.apply, PagedMemory |
    | [computed, planned) | steps in flight compute them               | Scheduler.plan, PagedMemory  |

    While a step is in flight that samples the request's next token, `pending` is 1: the token has a place already,
    [total], and a later plan may name it. A step with drafts may bring several tokens; its drafts count as planned, and
    those that did not hold are taken back before the next plan.
    """

    __slots__ = (
        "_state",
        "computed",
        "drafter",
        "max_total",
        "params",
        "pending",
        "planned",
        "progress",
        "prompt_len",
        "rank",
        "saved",
        "stop_ids",
        "table",
        "tokens",
        "uid",
    )

    def __init__(self, params: AddRequestMsg) -> None:
        self.uid = params.uid
        self.params = params
        # Its place among all requests, lowest first, waiting or active. Never changes, so neither does their order.
        self.rank = (params.arrival_ns - params.priority * HEAD_START_NS, params.uid)
        self.tokens = array("i")
        self.tokens.frombytes(params.prompt)
        self.prompt_len = len(self.tokens)
        # Tokens whose keys and values may have to be kept: the last generated one's never are.
        self.max_total = self.prompt_len + max(1, params.max_new_tokens) - 1
        self.stop_ids = frozenset(params.stop_ids)
        self.computed = 0
        self.planned = 0
        self.pending = 0
        self.table = PageTable(0)
        self.saved: SavedPages | None = None
        self.drafter: Drafter | None = None  # the Speculator's
        self.progress = Progress()
        if params.resumed is not None:
            self.tokens.frombytes(params.resumed.generated)
            self.progress.resume(params.resumed)
        self._state = RequestState.WAITING

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        return self._state

    def become(self, state: RequestState) -> None:
        """Changes the state; raises ValueError where that cannot happen."""
        if state not in _NEXT[self._state]:
            raise ValueError(f"request {self.uid} cannot go from {self._state.name} to {state.name}")
        self._state = state

    @property
    def total(self) -> int:
        """Tokens of prompt and output."""
        return len(self.tokens)

    @property
    def expected(self) -> int:
        """Tokens of prompt and output, and the one that a step in flight samples."""
        return len(self.tokens) + self.pending

    @property
    def num_generated(self) -> int:
        """Tokens of output."""
        return len(self.tokens) - self.prompt_len

    @property
    def first_wanted(self) -> int:
        """The first place whose logits are still wanted: up to there its keys and values may come from elsewhere."""
        judged = self.progress.judged
        return judged - 1 if self.params.prompt_logprobs and judged < self.prompt_len else self.total - 1

    @property
    def generates(self) -> bool:
        """Whether it is to have any output; else its prompt is judged, and that is all."""
        return self.params.max_new_tokens > 0

    @property
    def has_deadline(self) -> bool:
        """Whether it ends by itself at some time."""
        return self.params.deadline_ns != NO_DEADLINE

    def judge(self, start: int, end: int) -> PromptSpan | None:
        """The tokens of the prompt that logits at places [start, end) judge, of those that are wanted and not yet told.

        From now on they count as told.
        """
        index, stop = max(start + 1, self.progress.judged), min(end + 1, self.prompt_len)
        num_top = self.params.prompt_logprobs
        if not num_top or index >= stop:
            return None
        self.progress.judged = stop
        return PromptSpan(index=index, num_tokens=stop - index, num_top=num_top if num_top > 1 else 0)

    def sample_spec(self, index: int) -> SampleSpec:
        """How to choose token number `index` of its output."""
        params, sampling = self.params, self.params.sampling
        return SampleSpec(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            index=index,
            logprob=params.logprobs,
            num_top=params.top_logprobs,
            raw=params.raw_logprobs,
            processors=sampling.processors,
            constrained=bool(params.grammar),
        )


def requests_of(message: AddRequestMsg) -> Iterator[Request]:
    """The request that a message asks for, and its forks."""
    yield Request(message)
    for fork in message.forks:
        sampling = msgspec.structs.replace(message.sampling, seed=fork.seed)
        yield Request(
            msgspec.structs.replace(
                message, uid=fork.uid, sampling=sampling, prompt_logprobs=0, forks=(), fork_of=message.uid
            )
        )

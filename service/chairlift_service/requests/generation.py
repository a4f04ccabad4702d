"""One request from its admission until the service forgets it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from chairlift.v1 import event_pb2
from chairlift_worker.ipc.messages import NO_DEADLINE, EndingMsg

from chairlift_service.errors import ServiceError
from chairlift_service.requests.output_log import OutputLog
from chairlift_service.requests.prompt_log import PromptLog

if TYPE_CHECKING:
    from chairlift_service.validate import ValidRequest

_NUM_OBJECT_BYTES = 4096  # what an empty generation and its entries in the maps take, generously


@dataclasses.dataclass(slots=True, kw_only=True)
class Course:
    """What a worker that takes the request over must know, or has to be told of. Times are CLOCK_MONOTONIC ns."""

    deadline_ns: int = NO_DEADLINE
    started_ns: int = 0  # when the service heard of its start; 0: it has not started
    first_token_ns: int = 0  # the same of its first token
    losses: int = 0  # workers that were lost while they computed it


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """A request, its output so far and its ending; of a request with several choices, one of them.

    Each choice is computed by itself, under a uid of its own. The first one, the head, is what the request's id names.
    They fail together: where one ends with an error, so do the others.

    It ends twice: once for its readers (`ending`), once for the service's books, when the worker has confirmed that
    nothing of it follows (the registry forgets it then). The registry and the dispatcher alone mutate it, and the
    brake and the lease where that says so.
    """

    uid: int
    request: ValidRequest
    detached: bool  # lives on without a reader, and its result is kept
    output: OutputLog
    choice: int = 0
    family: Sequence[Generation] = ()  # all choices of its request, where there are several
    prompt_log: PromptLog | None = None  # the head's, where that is asked
    cached_tokens: int | None = None  # None: it has not started
    state: event_pb2.RequestState = event_pb2.REQUEST_STATE_WAITING
    ending: EndingMsg | ServiceError | None = None
    cancelled: bool = False  # a caller was told that it ends with CANCELLED
    left: bool = False  # the call that owned it is over; the lease's
    unwanted: bool = False  # a detached one's result is not kept
    paused: bool = False  # the service is, and this with it
    num_full: int = 0  # readers whose buffer is full of it; the brake's
    waiting: bool = False  # counts in the admission's bound
    trace_headers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the caller's trace
    received_ns: int = 0  # CLOCK_MONOTONIC; when its call was read
    sent_ns: int = 0  # the same; when the worker was sent it
    last_token_ns: int = 0  # the same of its newest token, where that is recorded; 0: there is none
    course: Course = dataclasses.field(default_factory=Course)
    size: int = 0  # bytes accounted for its kept result

    @property
    def request_id(self) -> str:
        """The caller's name for it, or the one that the service made."""
        return self.request.request_id

    @property
    def head(self) -> Generation:
        """The first choice of its request."""
        return self.family[0] if self.family else self

    @property
    def choices(self) -> Sequence[Generation]:
        """All choices of its request, by number."""
        return self.family or (self,)

    @property
    def started(self) -> bool:
        """Whether the worker has begun to compute it."""
        return self.cached_tokens is not None

    @property
    def shown_state(self) -> event_pb2.RequestState:
        """Where it stands, for its readers."""
        held = self.paused or self.num_full > 0
        return event_pb2.REQUEST_STATE_PAUSED if held and self.ending is None else self.state

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that it takes."""
        prompt = 0 if self.choice else 4 * self.request.num_prompt_tokens
        if self.prompt_log is not None:
            prompt += self.prompt_log.num_bytes
        return _NUM_OBJECT_BYTES + prompt + self.output.num_bytes

    def start(self, cached_tokens: int) -> None:
        """Its first tokens were computed. A repetition changes nothing."""
        if not self.started and self.ending is None:
            self.cached_tokens = cached_tokens
            self.course.started_ns = time.monotonic_ns()
            self.state = event_pb2.REQUEST_STATE_PREFILLING

    def lose_worker(self) -> None:
        """The worker that had it is gone: it waits for the next one."""
        if self.ending is None:
            self.state = event_pb2.REQUEST_STATE_WAITING

    def append(
        self, token_id: int, logprob: float, top_ids: Sequence[int] = (), top_logprobs: Sequence[float] = ()
    ) -> None:
        """Adds a generated token, and the likeliest ones at its place."""
        self.state = event_pb2.REQUEST_STATE_DECODING
        if not self.course.first_token_ns:
            self.course.first_token_ns = time.monotonic_ns()
        self.output.append(token_id, logprob, top_ids, top_logprobs)

    def end(self, ending: EndingMsg | ServiceError) -> bool:
        """Sets the ending that its readers see. False if it has one already: the first counts."""
        if self.ending is not None:
            return False
        if isinstance(ending, EndingMsg):
            self.output.close()
        self.ending = ending
        self.state = event_pb2.REQUEST_STATE_FINISHED
        return True


def family_of(
    request: ValidRequest, *, uids: Sequence[int], outputs: Sequence[OutputLog], detached: bool
) -> list[Generation]:
    """A request's choices, the head first; one uid and one empty log for each."""
    made = [
        Generation(uid=uid, request=request, detached=detached, output=output, choice=choice)
        for choice, (uid, output) in enumerate(zip(uids, outputs, strict=True))
    ]
    if request.prompt_top_n:
        made[0].prompt_log = PromptLog()
    if len(made) > 1:
        for generation in made:
            generation.family = made
    return made

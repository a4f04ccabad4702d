"""The books of the service without gRPC and without a worker: generations, and a port that notes what is sent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chairlift.v1 import event_pb2
from chairlift_service.requests.admission import Admission
from chairlift_service.requests.brake import Brake
from chairlift_service.requests.dispatch import Dispatcher
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.kept import KeptResults
from chairlift_service.requests.output_log import OutputLog
from chairlift_service.requests.readers import Readers
from chairlift_service.requests.registry import Registry
from chairlift_service.validate import ValidRequest
from chairlift_worker.ipc.messages import AddRequestMsg, EndingMsg, EndingReason, SamplingMsg, StartedMsg, StepMsg

GIB = 2**30


class Letters:
    """A decoder whose text is late: token t is the letter t, and is certain only when the next token comes."""

    found: str | None = None

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        if token_id == 666:
            raise ValueError("no such letter")
        told, self.held = self.held, chr(token_id)
        return told

    def finish(self) -> str:
        told, self.held = self.held, ""
        return told


class Port:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.holds: list[tuple[int, bool]] = []

    def add(self, messages: Sequence[AddRequestMsg]) -> None:
        raise NotImplementedError

    def cancel(self, uid: int) -> None:
        self.cancelled.append(uid)

    def hold(self, uid: int, *, held: bool) -> None:
        self.holds.append((uid, held))


class Books:
    """A registry with all that belongs to it."""

    def __init__(
        self,
        *,
        ttl_s: float = 300,
        max_bytes: int = GIB,
        buffer_tokens: int = GIB,
        patience_s: float = 60.0,
    ) -> None:
        self.port = Port()
        self.readers = Readers(brake=Brake(port=self.port, buffer_tokens=buffer_tokens, patience_s=patience_s))
        self.admission = Admission(max_requests=1000, max_tokens=10**6)
        self.kept = KeptResults(ttl_s=ttl_s, max_bytes=max_bytes)
        self.registry = Registry(admission=self.admission, kept=self.kept, readers=self.readers)
        self.dispatcher = Dispatcher(registry=self.registry, readers=self.readers, port=self.port)

    def add(self, uid: int, **fields: object) -> Generation:
        generation = a_generation(uid, **fields)  # type: ignore[arg-type] # of its keywords
        self.registry.add(generation)
        return generation


def a_generation(
    uid: int,
    *,
    detached: bool = False,
    session: str | None = None,
    want_text: bool = True,
    want_ids: bool = True,
    want_logprobs: bool = False,
    name: str = "",
) -> Generation:
    request = ValidRequest(
        request_id=name or f"r{uid}",
        session=session,
        prompt_ids=array("i", [1, 2, 3]),
        max_new_tokens=10,
        limit=event_pb2.LENGTH_LIMIT_MAX_NEW_TOKENS,
        lowered_by=event_pb2.LENGTH_LIMIT_UNSPECIFIED,
        sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
        stop_ids=(),
        want_text=want_text,
        want_ids=want_ids,
        want_logprobs=want_logprobs,
        skip_special_tokens=True,
    )
    output = OutputLog(decoder=Letters() if want_text else None)
    return Generation(uid=uid, request=request, detached=detached, output=output)


def ending(uid: int, reason: EndingReason = EndingReason.LENGTH, error: str = "") -> EndingMsg:
    return EndingMsg(
        uid=uid,
        reason=reason,
        error=error,
        queued_ns=0,
        prefill_ns=0,
        decode_ns=0,
        swapped_ns=0,
        preemptions=0,
        cached_tokens=0,
    )


def step(
    tokens: Sequence[tuple[int, int]] = (),
    *,
    started: Sequence[int] = (),
    endings: Sequence[EndingMsg] = (),
    logprobs: Sequence[float] = (),
) -> StepMsg:
    return StepMsg(
        step=1,
        uids=array("Q", [uid for uid, _ in tokens]).tobytes(),
        token_ids=array("i", [token for _, token in tokens]).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        started=tuple(StartedMsg(uid=uid, cached_tokens=0) for uid in started),
        endings=tuple(endings),
    )

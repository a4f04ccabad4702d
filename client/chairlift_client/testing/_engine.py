"""What the fake server holds: its requests, and how far each has come."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator

import grpc
from chairlift.v1 import event_pb2, generation_service_pb2, info_service_pb2, request_pb2

from chairlift_client.testing import _model
from chairlift_client.testing._model import FakeRequest
from chairlift_client.testing._place import Place, event_field
from chairlift_client.testing._refusals import Refusal

_TICK = 0.02  # seconds between looks at the clock while a stream waits


class FakeEngine:
    """Requests by id. A token of each request comes out every `token_delay` seconds, `tokens_allowed` at most."""

    def __init__(self, *, token_delay: float) -> None:
        self.token_delay = token_delay
        self.tokens_allowed: int | None = None
        self.requests: dict[str, FakeRequest] = {}
        self.changed = threading.Condition()
        self.break_count = 0
        self.state: info_service_pb2.ServerState = info_service_pb2.SERVER_STATE_SERVING
        self._held_at: dict[tuple[int, int], int] = {}  # while paused: tokens that were out, by number and choice
        self._session_readers: Counter[str] = Counter()
        self._numbers = itertools.count()

    def add(self, messages: list[request_pb2.GenerationRequest], *, prefix: str = "request") -> list[FakeRequest]:
        """Add all of them or, raising Refusal, none."""
        with self.changed:
            if self.state == info_service_pb2.SERVER_STATE_DRAINING:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "draining", reason="DRAINING")
            if self.state == info_service_pb2.SERVER_STATE_STOPPED:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "stopped", reason="STOPPED")
            made: dict[str, FakeRequest] = {}
            for i, message in enumerate(messages):
                path = prefix if len(messages) == 1 and prefix == "request" else f"{prefix}[{i}]"
                request = self._make(message, path)
                known = made.get(request.request_id) or self.requests.get(request.request_id)
                if known and not (self.ended(known)):
                    raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "the id is taken", reason="DUPLICATE_REQUEST_ID")
                made[request.request_id] = request
            self.requests.update(made)
            self.changed.notify_all()
            return list(made.values())

    def num_out(self, request: FakeRequest) -> int:
        """How many tokens of the request, or of one of its choices, are out by now. Call it with `changed` held."""
        out = len(request.output)
        if self.tokens_allowed is not None and not request.cancelled:
            out = min(out, self.tokens_allowed)
        if self.token_delay and not request.cancelled:
            out = min(out, int((time.monotonic() - request.started) / self.token_delay))
        if self.state == info_service_pb2.SERVER_STATE_PAUSED and not request.cancelled:
            out = min(out, self._held_at.get((request.number, request.choice), 0))
        return out

    def ended(self, request: FakeRequest) -> bool:
        """Whether the request is over. Call it with `changed` held."""
        return request.failure is not None or all(self.num_out(c) == len(c.output) for c in request.choices)

    def live(self) -> list[FakeRequest]:
        """The requests that are not over. Call it with `changed` held."""
        return [request for request in self.requests.values() if not self.ended(request)]

    def enter(self, state: info_service_pb2.ServerState) -> None:
        """Change the state. Call it with `changed` held."""
        choices = [choice for request in self.requests.values() for choice in request.choices]
        self._held_at = {(choice.number, choice.choice): self.num_out(choice) for choice in choices}
        self.state = state
        self.changed.notify_all()

    def cancel(self, request_id: str, *, unwanted: bool = False) -> generation_service_pb2.CancelOutcome:
        """End a live request where it is; forget one that is over, and an unwanted one as soon as that is told."""
        with self.changed:
            request = self.requests.get(request_id)
            if request is None:
                status = generation_service_pb2.CANCEL_STATUS_NOT_FOUND
            elif self.ended(request):
                status = generation_service_pb2.CANCEL_STATUS_ALREADY_FINISHED
                del self.requests[request_id]
            else:
                status = generation_service_pb2.CANCEL_STATUS_CANCELLED
                for choice in [c for c in request.choices if self.num_out(c) < len(c.output)]:
                    del choice.output[self.num_out(choice) :]
                    choice.cancelled = True
                request.unwanted = unwanted
                if unwanted and not self._session_readers[request.message.session]:
                    del self.requests[request_id]
            self.changed.notify_all()
            return generation_service_pb2.CancelOutcome(request_id=request_id, status=status)

    def follow(self, request: FakeRequest, from_index: int, context: grpc.ServicerContext) -> Iterator[object]:
        """Events of one request. Raises Refusal where the connection is made to break."""
        breaks = self.break_count
        place = Place(request, num_out=self.num_out, from_index=from_index)
        while context.is_active() and not place.is_done:
            with self.changed:
                news = place.news()
                if not news:
                    self.changed.wait(_TICK)
            if breaks != self.break_count:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            yield from news

    def follow_session(
        self, session: str, context: grpc.ServicerContext
    ) -> Iterator[generation_service_pb2.ResultResponse]:
        """Events of all requests of a session, from the first of each, until the caller leaves."""
        self._session_readers[session] += 1
        try:
            yield from self._session_events(session, context)
        finally:
            with self.changed:
                self._session_readers[session] -= 1
                for request in [r for r in self.requests.values() if r.unwanted and r.message.session == session]:
                    del self.requests[request.request_id]

    def _session_events(
        self, session: str, context: grpc.ServicerContext
    ) -> Iterator[generation_service_pb2.ResultResponse]:
        breaks = self.break_count
        places: dict[int, Place] = {}  # by number: an id may come back as another request
        while context.is_active():
            with self.changed:
                for request in [r for r in self.requests.values() if r.message.session == session]:
                    if request.number not in places:
                        places[request.number] = Place(request, num_out=self.num_out)
                news = [(place.request, event) for place in places.values() for event in place.news()]
                if not news:
                    self.changed.wait(_TICK)
                for place in places.values():
                    told = place.request
                    if place.is_done and told.unwanted and self.requests.get(told.request_id) is told:
                        del self.requests[told.request_id]
            if breaks != self.break_count:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            for request, event in news:
                yield generation_service_pb2.ResultResponse(request_id=request.request_id, **event_field(event))

    def _make(self, message: request_pb2.GenerationRequest, path: str) -> FakeRequest:
        prompt = _prompt(message, path)
        if not prompt:
            raise Refusal.field(f"{path}.token_ids", "the prompt is empty", reason="EMPTY_PROMPT")
        for i, token_id in enumerate(prompt):
            if not 0 <= token_id < _model.VOCAB_SIZE:
                raise Refusal.field(f"{path}.token_ids.ids[{i}]", f"no token {token_id}", reason="UNKNOWN_TOKEN_ID")
        asked = message.max_new_tokens if message.HasField("max_new_tokens") else _model.DEFAULT_MAX_NEW_TOKENS
        if asked < 1 and not message.logprobs.prompt_top_n:
            raise Refusal.field(f"{path}.max_new_tokens", "must be at least 1", reason="INVALID_VALUE")
        if message.HasField("num_choices") and not 1 <= message.num_choices <= _model.MAX_CHOICES:
            raise Refusal.field(f"{path}.num_choices", f"must be 1 to {_model.MAX_CHOICES}", reason="INVALID_VALUE")
        if message.sampling.HasField("top_p") and not 0 < message.sampling.top_p <= 1:
            raise Refusal.field(f"{path}.sampling.top_p", "must be in (0, 1]", reason="INVALID_VALUE")
        if message.HasField("constraint") and _model.constrained(message.constraint) is None:
            form = message.constraint.WhichOneof("form")
            text = "the fake server knows the forms json_object and choices only"
            raise Refusal.field(f"{path}.constraint.{form}", text, reason="UNSUPPORTED_OPTION")
        fits = _model.CONTEXT_LEN - len(prompt)
        number = next(self._numbers)
        return FakeRequest(
            number=number,
            request_id=message.request_id or f"fake-{number}",
            message=message,
            prompt=prompt,
            max_new_tokens=min(asked, fits),
            lowered_by=event_pb2.LENGTH_LIMIT_CONTEXT if asked > fits else event_pb2.LENGTH_LIMIT_UNSPECIFIED,
            started=time.monotonic(),
        )


def _prompt(message: request_pb2.GenerationRequest, path: str) -> list[int]:
    match message.WhichOneof("input"):
        case "text":
            return _model.encode(message.text)
        case "chat":
            if not message.chat.messages:
                raise Refusal.field(f"{path}.chat.messages", "there are none", reason="MISSING_INPUT")
            return _model.encode(_model.render(message.chat))
        case _:
            return list(message.token_ids.ids)

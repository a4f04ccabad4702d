"""The API's services over a FakeEngine."""

# ruff: noqa: ARG001, ARG002, N802 # gRPC gives the names and the arguments of these methods

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from chairlift.v1 import (
    event_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    info_service_pb2,
    info_service_pb2_grpc,
    text_service_pb2,
    text_service_pb2_grpc,
)
from google.protobuf import wrappers_pb2

from chairlift_client.testing import _model
from chairlift_client.testing._engine import FakeEngine
from chairlift_client.testing._model import FakeRequest
from chairlift_client.testing._place import event_field
from chairlift_client.testing._refusals import Refusal

_pb = generation_service_pb2


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Generation; every Refusal becomes the call's status."""

    def __init__(self, *, engine: FakeEngine) -> None:
        self._engine = engine

    def Generate(self, message: _pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[_pb.GenerateResponse]:
        (request,) = _answer(context, lambda: self._engine.add([message.request]))
        context.add_callback(lambda: self._drop(request))
        for event in _refusing(context, self._engine.follow(request, 0, context)):
            yield _pb.GenerateResponse(**_event(event, context))

    def Complete(self, message: _pb.CompleteRequest, context: grpc.ServicerContext) -> _pb.CompleteResponse:
        (request,) = _answer(context, lambda: self._engine.add([message.request]))
        context.add_callback(lambda: self._drop(request))
        for event in _refusing(context, self._engine.follow(request, 0, context)):
            _event(event, context)
        return _pb.CompleteResponse(accepted=request.accepted(), choices=[_whole(choice) for choice in request.choices])

    def AddRequest(self, message: _pb.AddRequestRequest, context: grpc.ServicerContext) -> _pb.AddRequestResponse:
        (request,) = _answer(context, lambda: self._engine.add([message.request]))
        return _pb.AddRequestResponse(accepted=request.accepted())

    def AddRequests(self, message: _pb.AddRequestsRequest, context: grpc.ServicerContext) -> _pb.AddRequestsResponse:
        added = _answer(context, lambda: self._engine.add(list(message.requests), prefix="requests"))
        return _pb.AddRequestsResponse(accepted=[request.accepted() for request in added])

    def Result(self, message: _pb.ResultRequest, context: grpc.ServicerContext) -> Iterator[_pb.ResultResponse]:
        if message.WhichOneof("target") == "session":
            yield from _refusing(context, self._engine.follow_session(message.session, context))
            return
        request = self._engine.requests.get(message.request_id)
        if request is None:
            Refusal(grpc.StatusCode.NOT_FOUND, "no such request", reason="REQUEST_NOT_FOUND").abort(context)
        for event in _refusing(context, self._engine.follow(request, message.from_index, context)):
            yield _pb.ResultResponse(request_id=request.request_id, **_event(event, context))

    def Cancel(self, message: _pb.CancelRequest, context: grpc.ServicerContext) -> _pb.CancelResponse:
        held = list(self._engine.requests.values()) if message.session else []
        unwanted = dict.fromkeys(r.request_id for r in held if r.message.session == message.session)
        ids = dict.fromkeys((*message.request_ids, *unwanted))
        return _pb.CancelResponse(outcomes=[self._engine.cancel(i, unwanted=i in unwanted) for i in ids])

    def _drop(self, request: FakeRequest) -> None:
        """What the end of its call does to a request: cancel it if need be, and forget it."""
        for _ in range(2):
            if self._engine.requests.get(request.request_id) is request:
                self._engine.cancel(request.request_id)


class TextServicer(text_service_pb2_grpc.TextServiceServicer):
    """Text as bytes."""

    def Tokenize(
        self, message: text_service_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> text_service_pb2.TokenizeResponse:
        return self._tokens(message)

    def BatchTokenize(
        self, message: text_service_pb2.BatchTokenizeRequest, context: grpc.ServicerContext
    ) -> text_service_pb2.BatchTokenizeResponse:
        return text_service_pb2.BatchTokenizeResponse(responses=map(self._tokens, message.requests))

    @staticmethod
    def _tokens(message: text_service_pb2.TokenizeRequest) -> text_service_pb2.TokenizeResponse:
        ids = _model.encode(message.text)
        end = message.max_tokens if message.HasField("max_tokens") else len(ids)
        answer = text_service_pb2.TokenizeResponse(
            token_ids=ids[:end], tokens=[f"<0x{i:02X}>" for i in ids[:end]], truncated=end < len(ids)
        )
        if message.offsets:
            places = [place for place, char in enumerate(message.text) for _ in char.encode()][:end]
            answer.starts.extend(places)
            answer.ends.extend(place + 1 for place in places)
        return answer

    def Detokenize(
        self, message: text_service_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> text_service_pb2.DetokenizeResponse:
        return self._text(message, "token_ids", context)

    def BatchDetokenize(
        self, message: text_service_pb2.BatchDetokenizeRequest, context: grpc.ServicerContext
    ) -> text_service_pb2.BatchDetokenizeResponse:
        texts = [self._text(each, f"requests[{i}].token_ids", context) for i, each in enumerate(message.requests)]
        return text_service_pb2.BatchDetokenizeResponse(responses=texts)

    @staticmethod
    def _text(
        message: text_service_pb2.DetokenizeRequest, path: str, context: grpc.ServicerContext
    ) -> text_service_pb2.DetokenizeResponse:
        for i, token_id in enumerate(message.token_ids):
            if not 0 <= token_id < _model.VOCAB_SIZE:
                Refusal.field(f"{path}[{i}]", f"no token {token_id}", reason="UNKNOWN_TOKEN_ID").abort(context)
        return text_service_pb2.DetokenizeResponse(text=_model.decode(list(message.token_ids)))

    def RenderChat(
        self, message: text_service_pb2.RenderChatRequest, context: grpc.ServicerContext
    ) -> text_service_pb2.RenderChatResponse:
        if not message.chat.messages:
            Refusal.field("chat.messages", "there are none", reason="MISSING_INPUT").abort(context)
        text = _model.render(message.chat)
        return text_service_pb2.RenderChatResponse(text=text, token_ids=_model.encode(text))


class InfoServicer(info_service_pb2_grpc.InfoServiceServicer):
    """What the fake serves, and the settings that it pretends to have."""

    def __init__(self, *, engine: FakeEngine, config: dict[str, str]) -> None:
        self._engine = engine
        self._config = config
        self._began = time.monotonic()

    def GetModel(
        self, message: info_service_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> info_service_pb2.GetModelResponse:
        return info_service_pb2.GetModelResponse(
            name="fake",
            architecture="FakeForCausalLM",
            vocab_size=_model.VOCAB_SIZE,
            context_len=_model.CONTEXT_LEN,
            eos_token_ids=[_model.EOS_TOKEN_ID],
            dtype="float32",
            has_chat_template=True,
        )

    def GetServer(
        self, message: info_service_pb2.GetServerRequest, context: grpc.ServicerContext
    ) -> info_service_pb2.GetServerResponse:
        return info_service_pb2.GetServerResponse(
            version="fake",
            state=self._engine.state,
            config=[info_service_pb2.Setting(name=n, value=v, reason="set") for n, v in self._config.items()],
            statistics=self._statistics(),
        )

    def WatchStats(
        self, message: info_service_pb2.WatchStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[info_service_pb2.WatchStatsResponse]:
        left = threading.Event()
        context.add_callback(left.set)
        while not left.is_set():
            look = info_service_pb2.WatchStatsResponse(state=self._engine.state, statistics=self._statistics())
            look.uptime.FromMilliseconds(round((time.monotonic() - self._began) * 1000))
            yield look
            left.wait(message.interval.ToMilliseconds() / 1000 if message.HasField("interval") else 1.0)

    def _statistics(self) -> info_service_pb2.Statistics:
        with self._engine.changed:
            held = list(self._engine.requests.values())
            running = sum(not self._engine.ended(request) for request in held)
        return info_service_pb2.Statistics(requests_running=running, requests_held=len(held))


def health_handler(serving: Callable[[], bool]) -> Any:
    """The standard health service's Check (wire-equal wrapper types, as in the client)."""

    def check(message: wrappers_pb2.StringValue, context: grpc.ServicerContext) -> wrappers_pb2.Int32Value:
        return wrappers_pb2.Int32Value(value=1 if serving() else 2)

    method = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=wrappers_pb2.StringValue.FromString,
        response_serializer=wrappers_pb2.Int32Value.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})


def _answer(context: grpc.ServicerContext, act: Callable[[], list[FakeRequest]]) -> list[FakeRequest]:
    try:
        return act()
    except Refusal as refusal:
        refusal.abort(context)


def _refusing(context: grpc.ServicerContext, events: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from events
    except Refusal as refusal:
        refusal.abort(context)


def _event(event: object, context: grpc.ServicerContext) -> dict[str, Any]:
    """The event as a field of a response; a failure ends the stream with its status."""
    if isinstance(event, event_pb2.Failed):
        status = event.status
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        codes = {code.value[0]: code for code in grpc.StatusCode}
        context.abort(codes[status.code], status.message)
    return event_field(event)


def _whole(choice: FakeRequest) -> _pb.Choice:
    """All of one choice."""
    output = choice.delta(0, len(choice.output))
    if choice.message.logprobs.prompt_top_n and not choice.choice:
        output.MergeFrom(event_pb2.Delta(prompt_logprobs=choice.prompt_delta().prompt_logprobs))
    return _pb.Choice(output=output, finished=choice.finished())

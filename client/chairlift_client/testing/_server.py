"""The fake server itself."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from typing import Any, Self

import grpc
from chairlift.v1 import (
    admin_service_pb2_grpc,
    event_pb2,
    generation_service_pb2_grpc,
    info_service_pb2_grpc,
    text_service_pb2_grpc,
)

from chairlift_client._channel import MAX_MESSAGE_BYTES
from chairlift_client.testing import _admin, _servicers
from chairlift_client.testing._engine import FakeEngine
from chairlift_client.testing._refusals import Refusal

_MAX_CALLS = 64  # open at once; each takes a thread


class FakeServer:
    """A Chairlift service without a model, for tests: real gRPC on a real socket, the same answer every time.

    Tokens are bytes (EOS is 256, the vocabulary has 257 rows), and the answer to a prompt is the prompt over and
    over, until `max_new_tokens` (default 16), an EOS in the prompt or a stop id. Log-probabilities are
    0, -1/8, ... -7/8 and again. One token a delta. A conversation's prompt has a line `role: content` for each message,
    and ends with `assistant: `.

    `address` is `HOST:PORT` (port 0 picks one) or `unix:PATH`; `token_delay` are the seconds that each token takes;
    `config` are the settings that GetServer tells. All services, admin included, answer on the one address.

    >>> with FakeServer() as server, Client(server.target) as client:
    ...     client.complete("abc", max_new_tokens=5).text
    'abcab'
    """

    def __init__(
        self, address: str = "127.0.0.1:0", *, token_delay: float = 0.0, config: dict[str, str] | None = None
    ) -> None:
        self._address = address
        self._engine = FakeEngine(token_delay=token_delay)
        self._config = dict(config or {})
        self._failures = _Failures()
        self._server: grpc.Server | None = None
        self._serving = True
        self.target = address
        """The address to give to clients, once it is started."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to answer. After `stop`, the same address answers again, and remembers its requests."""
        server = grpc.server(
            futures.ThreadPoolExecutor(_MAX_CALLS),
            interceptors=[self._failures],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        engine = self._engine
        for add, servicer in (
            (
                generation_service_pb2_grpc.add_GenerationServiceServicer_to_server,
                _servicers.GenerationServicer(engine=engine),
            ),
            (text_service_pb2_grpc.add_TextServiceServicer_to_server, _servicers.TextServicer()),
            (
                info_service_pb2_grpc.add_InfoServiceServicer_to_server,
                _servicers.InfoServicer(engine=engine, config=self._config),
            ),
            (admin_service_pb2_grpc.add_AdminServiceServicer_to_server, _admin.AdminServicer(engine=engine)),
        ):
            add(servicer, server)  # type: ignore[no-untyped-call] # generated
        server.add_generic_rpc_handlers([_servicers.health_handler(lambda: self._serving)])
        port = server.add_insecure_port(self.target)
        if not self.target.startswith("unix:"):
            self.target = f"{self._address.rpartition(':')[0]}:{port}"
        server.start()
        self._server = server

    def stop(self) -> None:
        """Stop answering; open calls end with UNAVAILABLE or CANCELLED."""
        if self._server is not None:
            self._server.stop(grace=None).wait(10)
            self._server = None

    def allow_tokens(self, count: int | None) -> None:
        """Let every request have `count` tokens and no more, until this is called again; None: all of them."""
        with self._engine.changed:
            self._engine.tokens_allowed = count
            self._engine.changed.notify_all()

    def fail_next(self, method: str, code: grpc.StatusCode, message: str, **details: Any) -> None:
        """End the next call of `method` ("Generate", "AddRequest", ...) with a status.

        `details`: `reason`, `field` (a proto field path), `retry_after` (seconds).
        """
        self._failures.add(method, Refusal(code, message, **details))

    def fail_request(self, request_id: str, code: grpc.StatusCode, message: str, **details: Any) -> None:
        """End a live request with a status. `details` as for `fail_next`."""
        with self._engine.changed:
            status = Refusal(code, message, **details).status
            self._engine.requests[request_id].failure = event_pb2.Failed(status=status)
            self._engine.changed.notify_all()

    def break_streams(self) -> None:
        """End every open stream with UNAVAILABLE, as a broken connection does; added requests live on."""
        with self._engine.changed:
            self._engine.break_count += 1
            self._engine.changed.notify_all()

    def forget_requests(self) -> None:
        """Forget every request, as a service that was replaced has."""
        with self._engine.changed:
            self._engine.requests.clear()

    def set_serving(self, *, serving: bool) -> None:
        """What the health service says from now on."""
        self._serving = serving

    @property
    def request_ids(self) -> list[str]:
        """The requests that the server holds, kept results included."""
        with self._engine.changed:
            return list(self._engine.requests)


class _Failures(grpc.ServerInterceptor):  # type: ignore[misc] # grpc has no types
    """Ends calls with the statuses that a test asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, list[Refusal]] = defaultdict(list)

    def add(self, method: str, refusal: Refusal) -> None:
        """Refuse the next call of this method that is not spoken for yet."""
        with self._lock:
            self._waiting[method].append(refusal)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Put a handler that refuses in the place of the method's own."""
        handler = continuation(details)
        with self._lock:
            waiting = self._waiting[details.method.rpartition("/")[2]]
            if handler is None or not waiting:
                return handler
            refusal = waiting.pop(0)

        def refuse(_request: object, context: grpc.ServicerContext) -> None:
            refusal.abort(context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(refuse, handler.request_deserializer, handler.response_serializer)

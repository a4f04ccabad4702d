"""The blocking client: gRPC's own blocking stubs, no event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from chairlift.v1 import generation_service_pb2, info_service_pb2, text_service_pb2
from google.protobuf import wrappers_pb2

from chairlift_client import _convert, _requests
from chairlift_client._chat import Chat
from chairlift_client._requests import GenerateOptions, Prompt
from chairlift_client._streams import EventStream
from chairlift_client._sync_connection import Connected, call
from chairlift_client._types import (
    Accepted,
    CancelStatus,
    Event,
    HealthStatus,
    ModelInfo,
    RenderedChat,
    Result,
    ResultEvent,
    ServerInfo,
    ServerStats,
    Tokens,
)


class Client(Connected):
    """A blocking connection to a Chairlift service. Safe to share between threads.

    `target` is `HOST:PORT` or `unix:PATH`; without it, the environment's CHAIRLIFT_TARGET, else 127.0.0.1:50051.
    `tls`, `token` and `token_in_clear`: see `Access`.
    Connecting happens with the first call. Each call takes a `timeout` in seconds, which reaches the scheduler as the
    request's deadline, and raises a `ChairliftError`.

    >>> with Client(target) as client:
    ...     print(client.complete("echo ", max_new_tokens=9).text)
    echo echo
    """

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> EventStream[Event]:
        """Add a request and stream its events: `Accepted`, `Delta`s, one `Finished` for each choice.

        Errors are raised by the iteration. Close or leave the stream to cancel the request.

        >>> with Client(target) as client, client.generate("abc", max_new_tokens=4) as events:
        ...     for event in events:
        ...         if isinstance(event, Delta):
        ...             print(event.index, event.text)
        0 a
        1 b
        2 c
        3 a
        """
        request = generation_service_pb2.GenerateRequest(request=_requests.generation_request(prompt, options))
        return EventStream(self._stubs.generation.Generate(request, timeout=timeout), _convert.generate_event)

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """Add a request and wait for its whole answer.

        >>> with Client(target) as client:
        ...     answer = client.complete([10, 11, 12], max_new_tokens=5)
        >>> answer.token_ids
        (10, 11, 12, 10, 11)
        >>> answer.reason.name, answer.usage.generated_tokens
        ('LENGTH', 5)
        """
        request = generation_service_pb2.CompleteRequest(request=_requests.generation_request(prompt, options))
        return _convert.result(call(self._stubs.generation.Complete, request, timeout=timeout))

    def add_request(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Accepted:
        """Add a request that lives on by itself; `result` reads it, now or later, and `cancel` lets it go.

        >>> with Client(target) as client:
        ...     added = client.add_request("abc", max_new_tokens=3, request_id="mine")
        ...     events = list(client.result(added.request_id))
        >>> [type(e.event).__name__ for e in events]
        ['Accepted', 'Delta', 'Delta', 'Delta', 'Finished']
        """
        request = generation_service_pb2.AddRequestRequest(request=_requests.generation_request(prompt, options))
        return _convert.accepted(call(self._stubs.generation.AddRequest, request, timeout=timeout).accepted)

    def add_requests(
        self, requests: Sequence[tuple[Prompt, GenerateOptions]], *, timeout: float | None = None
    ) -> list[Accepted]:
        """Add a batch of requests, all or none. Field paths in errors start with `requests[i]`.

        >>> with Client(target) as client:
        ...     batch = client.add_requests([("a", {"max_new_tokens": 1}), ([7], {"request_id": "second"})])
        >>> batch[1].request_id
        'second'
        """
        message = generation_service_pb2.AddRequestsRequest(
            requests=[_requests.generation_request(prompt, options) for prompt, options in requests]
        )
        reply = call(self._stubs.generation.AddRequests, message, timeout=timeout)
        return [_convert.accepted(accepted) for accepted in reply.accepted]

    def result(
        self,
        request_id: str | None = None,
        *,
        session: str | None = None,
        from_index: int = 0,
        timeout: float | None = None,
    ) -> EventStream[ResultEvent]:
        """Stream the events of one added request, or of all requests of a session.

        The stream of one request ends with it. That of a session stays open until you close it, and tells a request's
        error as `Failed`. `from_index` is the first output token to send, to go on after a broken connection.

        >>> with Client(target) as client:
        ...     added = client.add_request("abc", max_new_tokens=3)
        ...     events = list(client.result(added.request_id, from_index=2))
        >>> [e.event.index for e in events if isinstance(e.event, Delta)]
        [2]
        """
        request = _requests.result_request(request_id=request_id, session=session, from_index=from_index)
        return EventStream(self._stubs.generation.Result(request, timeout=timeout), _convert.result_event)

    def cancel(
        self, *request_ids: str, session: str | None = None, timeout: float | None = None
    ) -> dict[str, CancelStatus]:
        """Cancel requests by id, or all of a session; let finished ones go. Returns what became of each.

        >>> with Client(target) as client:
        ...     client.cancel("nobody")
        {'nobody': <CancelStatus.NOT_FOUND: 3>}
        """
        request = _requests.cancel_request(request_ids=request_ids, session=session)
        return _convert.outcomes(call(self._stubs.generation.Cancel, request, timeout=timeout))

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
        offsets: bool = False,
        timeout: float | None = None,
    ) -> Tokens:
        """Turn text into token ids, as a plain prompt is tokenised; the first `max_tokens` of them.

        >>> with Client(target) as client:
        ...     client.tokenize("Hi").token_ids
        (72, 105)
        """
        request = _requests.tokenize_request(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, offsets=offsets
        )
        return _convert.tokens(call(self._stubs.text.Tokenize, request, timeout=timeout))

    def tokenize_all(
        self, texts: Iterable[str], *, add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> list[Tokens]:
        """Turn several texts into token ids, in one call.

        >>> with Client(target) as client:
        ...     [tokens.token_ids for tokens in client.tokenize_all(["H", "Hi"])]
        [(72,), (72, 105)]
        """
        requests = [_requests.tokenize_request(text, add_special_tokens=add_special_tokens) for text in texts]
        request = text_service_pb2.BatchTokenizeRequest(requests=requests)
        answer = call(self._stubs.text.BatchTokenize, request, timeout=timeout)
        return [_convert.tokens(each) for each in answer.responses]

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """Turn token ids into text.

        >>> with Client(target) as client:
        ...     client.detokenize([72, 105])
        'Hi'
        """
        request = text_service_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = call(self._stubs.text.Detokenize, request, timeout=timeout).text
        return text

    def detokenize_all(
        self,
        token_ids: Iterable[Sequence[int]],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """Turn several lists of token ids into texts, in one call.

        >>> with Client(target) as client:
        ...     client.detokenize_all([[72], [72, 105]])
        ['H', 'Hi']
        """
        request = _requests.batch_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        answer = call(self._stubs.text.BatchDetokenize, request, timeout=timeout)
        return [each.text for each in answer.responses]

    def render_chat(self, chat: Chat, *, timeout: float | None = None) -> RenderedChat:
        """Turn a conversation into the prompt that a generation would have.

        >>> with Client(target) as client:
        ...     print(client.render_chat(Chat([{"role": "user", "content": "Hi"}])).text + "...")
        user: Hi
        assistant: ...
        """
        request = text_service_pb2.RenderChatRequest(chat=chat.message())
        return _convert.rendered_chat(call(self._stubs.text.RenderChat, request, timeout=timeout))

    def get_model(self, *, timeout: float | None = None) -> ModelInfo:
        """The model that is served.

        >>> with Client(target) as client:
        ...     client.get_model().eos_token_ids
        (256,)
        """
        return _convert.model_info(call(self._stubs.info.GetModel, info_service_pb2.GetModelRequest(), timeout=timeout))

    def get_server(self, *, timeout: float | None = None) -> ServerInfo:
        """The server: version, state, worker, settings, statistics.

        >>> with Client(target) as client:
        ...     client.get_server().state.name
        'SERVING'
        """
        request = info_service_pb2.GetServerRequest()
        return _convert.server_info(call(self._stubs.info.GetServer, request, timeout=timeout))

    def watch_stats(self, *, interval: float = 1.0, timeout: float | None = None) -> EventStream[ServerStats]:
        """Stream what the server does and counts: now, and every `interval` seconds, 0.05 to 3600.

        >>> with Client(target) as client, client.watch_stats(interval=0.05) as looks:
        ...     next(looks).statistics["requests_running"]
        0
        """
        request = _requests.watch_stats_request(interval=interval)
        return EventStream(self._stubs.info.WatchStats(request, timeout=timeout), _convert.server_stats)

    def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """What the standard health service says of `service`, or of the server as a whole.

        >>> with Client(target) as client:
        ...     client.health().name
        'SERVING'
        """
        reply = call(self._stubs.health_check, wrappers_pb2.StringValue(value=service), timeout=timeout)
        return HealthStatus(reply.value)

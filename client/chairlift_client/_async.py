"""The asyncio client."""

# ruff: noqa: ASYNC109 # a call's `timeout` is its gRPC deadline, which the service is told; asyncio.timeout is not

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from chairlift.v1 import generation_service_pb2, info_service_pb2, text_service_pb2
from google.protobuf import wrappers_pb2

from chairlift_client import _convert, _requests
from chairlift_client._async_connection import AsyncConnected, call
from chairlift_client._chat import Chat
from chairlift_client._requests import GenerateOptions, Prompt
from chairlift_client._streams import AsyncEventStream
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


class AsyncClient(AsyncConnected):
    """An asyncio connection to a Chairlift service; make it inside a running event loop. The twin of `Client`.

    `target` is `HOST:PORT` or `unix:PATH`; without it, the environment's CHAIRLIFT_TARGET, else 127.0.0.1:50051.
    `tls`, `token` and `token_in_clear`: see `Access`.
    Connecting happens with the first call. Each call takes a `timeout` in seconds, which reaches the scheduler as the
    request's deadline, and raises a `ChairliftError`. Cancelling the task that waits for a call cancels the request.

    >>> async def main():
    ...     async with AsyncClient(target) as client, client.generate("abc", max_new_tokens=4) as events:
    ...         return "".join([event.text async for event in events if isinstance(event, Delta)])
    >>> asyncio.run(main())
    'abca'
    """

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncEventStream[Event]:
        """Add a request and stream its events: `Accepted`, `Delta`s, one `Finished` for each choice.

        Errors are raised by the iteration. Close or leave the stream to cancel the request.
        """
        request = generation_service_pb2.GenerateRequest(request=_requests.generation_request(prompt, options))
        return AsyncEventStream(self._stubs.generation.Generate(request, timeout=timeout), _convert.generate_event)

    async def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Result:
        """Add a request and wait for its whole answer.

        >>> async def main():
        ...     async with AsyncClient(target) as client:
        ...         return await client.complete("echo ", max_new_tokens=7)
        >>> asyncio.run(main()).text
        'echo ec'
        """
        request = generation_service_pb2.CompleteRequest(request=_requests.generation_request(prompt, options))
        return _convert.result(await call(self._stubs.generation.Complete, request, timeout=timeout))

    async def add_request(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Accepted:
        """Add a request that lives on by itself; `result` reads it, now or later, and `cancel` lets it go."""
        request = generation_service_pb2.AddRequestRequest(request=_requests.generation_request(prompt, options))
        return _convert.accepted((await call(self._stubs.generation.AddRequest, request, timeout=timeout)).accepted)

    async def add_requests(
        self, requests: Sequence[tuple[Prompt, GenerateOptions]], *, timeout: float | None = None
    ) -> list[Accepted]:
        """Add a batch of requests, all or none. Field paths in errors start with `requests[i]`."""
        message = generation_service_pb2.AddRequestsRequest(
            requests=[_requests.generation_request(prompt, options) for prompt, options in requests]
        )
        reply = await call(self._stubs.generation.AddRequests, message, timeout=timeout)
        return [_convert.accepted(accepted) for accepted in reply.accepted]

    def result(
        self,
        request_id: str | None = None,
        *,
        session: str | None = None,
        from_index: int = 0,
        timeout: float | None = None,
    ) -> AsyncEventStream[ResultEvent]:
        """Stream the events of one added request, or of all requests of a session.

        The stream of one request ends with it. That of a session stays open until you close it, and tells a request's
        error as `Failed`. `from_index` is the first output token to send, to go on after a broken connection.
        """
        request = _requests.result_request(request_id=request_id, session=session, from_index=from_index)
        return AsyncEventStream(self._stubs.generation.Result(request, timeout=timeout), _convert.result_event)

    async def cancel(
        self, *request_ids: str, session: str | None = None, timeout: float | None = None
    ) -> dict[str, CancelStatus]:
        """Cancel requests by id, or all of a session; let finished ones go. Returns what became of each."""
        request = _requests.cancel_request(request_ids=request_ids, session=session)
        return _convert.outcomes(await call(self._stubs.generation.Cancel, request, timeout=timeout))

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
        offsets: bool = False,
        timeout: float | None = None,
    ) -> Tokens:
        """Turn text into token ids, as a plain prompt is tokenised; the first `max_tokens` of them."""
        request = _requests.tokenize_request(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, offsets=offsets
        )
        return _convert.tokens(await call(self._stubs.text.Tokenize, request, timeout=timeout))

    async def tokenize_all(
        self, texts: Iterable[str], *, add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> list[Tokens]:
        """Turn several texts into token ids, in one call."""
        requests = [_requests.tokenize_request(text, add_special_tokens=add_special_tokens) for text in texts]
        request = text_service_pb2.BatchTokenizeRequest(requests=requests)
        answer = await call(self._stubs.text.BatchTokenize, request, timeout=timeout)
        return [_convert.tokens(each) for each in answer.responses]

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """Turn token ids into text."""
        request = text_service_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = (await call(self._stubs.text.Detokenize, request, timeout=timeout)).text
        return text

    async def detokenize_all(
        self,
        token_ids: Iterable[Sequence[int]],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """Turn several lists of token ids into texts, in one call."""
        request = _requests.batch_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        answer = await call(self._stubs.text.BatchDetokenize, request, timeout=timeout)
        return [each.text for each in answer.responses]

    async def render_chat(self, chat: Chat, *, timeout: float | None = None) -> RenderedChat:
        """Turn a conversation into the prompt that a generation would have."""
        request = text_service_pb2.RenderChatRequest(chat=chat.message())
        return _convert.rendered_chat(await call(self._stubs.text.RenderChat, request, timeout=timeout))

    async def get_model(self, *, timeout: float | None = None) -> ModelInfo:
        """The model that is served."""
        request = info_service_pb2.GetModelRequest()
        return _convert.model_info(await call(self._stubs.info.GetModel, request, timeout=timeout))

    async def get_server(self, *, timeout: float | None = None) -> ServerInfo:
        """The server: version, state, worker, settings, statistics."""
        request = info_service_pb2.GetServerRequest()
        return _convert.server_info(await call(self._stubs.info.GetServer, request, timeout=timeout))

    def watch_stats(self, *, interval: float = 1.0, timeout: float | None = None) -> AsyncEventStream[ServerStats]:
        """Stream what the server does and counts: now, and every `interval` seconds, 0.05 to 3600."""
        request = _requests.watch_stats_request(interval=interval)
        return AsyncEventStream(self._stubs.info.WatchStats(request, timeout=timeout), _convert.server_stats)

    async def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """What the standard health service says of `service`, or of the server as a whole."""
        reply = await call(self._stubs.health_check, wrappers_pb2.StringValue(value=service), timeout=timeout)
        return HealthStatus(reply.value)

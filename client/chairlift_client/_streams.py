"""Streams of events: iterators that cancel their call when they are closed or dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from chairlift_client import _errors

T = TypeVar("T")


class EventStream(Iterator[T], Generic[T]):
    """Events of one call, as they come. Leaving `with`, `close()`, or dropping the last reference ends the call.

    Iteration raises a `ChairliftError` where the call fails.
    """

    def __init__(self, call: Any, convert: Callable[[Any], T | None]) -> None:
        self._call = call
        self._convert = convert
        self._closed = False

    def __next__(self) -> T:
        while not self._closed:
            try:
                event = self._convert(next(self._call))
            except StopIteration:
                self._closed = True
            except grpc.RpcError as error:
                closed, self._closed = self._closed, True
                if closed:  # from another thread, while this one waited
                    break
                raise _errors.from_rpc_error(error) from None
            else:
                if event is not None:
                    return event
        raise StopIteration

    def close(self) -> None:
        """End the call; the service cancels a `generate` request."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self.close()


class AsyncEventStream(AsyncIterator[T], Generic[T]):
    """Events of one call, as they come. Leaving `async with`, `aclose()`, or dropping the stream ends the call.

    Iteration raises a `ChairliftError` where the call fails.
    """

    def __init__(self, call: Any, convert: Callable[[Any], T | None]) -> None:
        self._call = call
        self._convert = convert
        self._closed = False

    async def __anext__(self) -> T:
        while not self._closed:
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                closed, self._closed = self._closed, True
                if closed:
                    break
                raise _errors.from_rpc_error(error) from None
            if message is grpc.aio.EOF:
                self._closed = True
            elif (event := self._convert(message)) is not None:
                return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the call; the service cancels a `generate` request."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

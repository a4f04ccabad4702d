"""The unary calls of a manager: what it adds and cancels, in the name of its session."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Sequence
from typing import Any, Final

import grpc
from chairlift.v1 import generation_service_pb2, info_service_pb2, request_pb2

from chairlift_client import _convert, _errors, _requests
from chairlift_client._requests import GenerateOptions
from chairlift_client._stubs import Stubs
from chairlift_client.manager import _batching_config, _generation_config
from chairlift_client.manager._inbox import Inbox
from chairlift_client.manager._releaser import Releaser
from chairlift_client.manager._request import TrackedRequest
from chairlift_client.manager._session import Session

logger = logging.getLogger("chairlift_client.manager")

_TIMEOUT: Final = 30.0  # seconds of a call
_LAST_TIMEOUT: Final = 5.0  # of the call that ends a session, which may not hold anybody up

# After these nobody knows whether the service took the requests.
_IN_DOUBT: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


class Submitter:
    """Makes requests of prompts and configuration, expects their events in the session, and sends them.

    Raises ValueError if the service does not run with the given ContinuousBatchingConfig or cannot honour the
    GenerationConfig, ChairliftError if it does not answer.
    """

    def __init__(
        self,
        *,
        stubs: Stubs,
        session: Session,
        inbox: Inbox,
        releaser: Releaser,
        generation_config: object,
        continuous_batching_config: object | None,
    ) -> None:
        _generation_config.check_generation_config(generation_config)
        self._generation = stubs.generation
        self._session = session
        self._inbox = inbox
        self._releaser = releaser
        self._generation_config = generation_config
        self._own = _batching_config.SessionConfig()
        if continuous_batching_config is not None:
            server = _convert.server_info(_call(stubs.info.GetServer, info_service_pb2.GetServerRequest()))
            self._own = _batching_config.compare(continuous_batching_config, server.config)
        model = _call(stubs.info.GetModel, info_service_pb2.GetModelRequest())
        self._eos_token_ids: tuple[int, ...] = tuple(model.eos_token_ids)
        self._counter = itertools.count()
        self.refusal: str | None = None
        """Why nothing is added now, if so."""

    def add(
        self,
        named_inputs: Sequence[tuple[str | None, Sequence[int]]],
        *,
        streaming: bool,
        record_timestamps: bool,
        max_new_tokens: int | None,
        eos_token_id: int | list[int] | None,
        sampling: dict[str, Any],
    ) -> list[str]:
        """Add (id, prompt) pairs, all or none; an id of None is made up. Returns the ids, none of them if refusing."""
        refusal = self.refusal or self._session.failure
        if refusal:
            logger.warning("%s: %d request(s) dropped.", refusal, len(named_inputs))
        if refusal or not named_inputs:
            return []
        options = _generation_config.request_options(
            self._generation_config,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            overrides=sampling,
            model_eos_token_ids=self._eos_token_ids,
        )
        stops = {*(options.get("stop_token_ids") or ()), *self._eos_token_ids}
        tracked, messages = [], []
        for request_id, input_ids in named_inputs:
            message = self._message(request_id, input_ids, options)
            messages.append(message)
            tracked.append(
                TrackedRequest(
                    request_id=message.request_id,
                    prompt_ids=list(message.token_ids.ids),
                    streaming=streaming,
                    record_timestamps=record_timestamps,
                    stop_token_ids=stops,
                    stops_anywhere=bool(options.get("stop")),
                )
            )
        # Events may come before the call returns, so they are expected from before it.
        self._releaser.wait_until_free([request.request_id for request in tracked])
        self._inbox.register(tracked)
        try:
            self._send(messages)
        except BaseException:
            self._inbox.unregister(tracked)
            raise
        return [request.request_id for request in tracked]

    def cancel(self, request_id: str) -> None:
        """Cancel one request."""
        _call(self._generation.Cancel, generation_service_pb2.CancelRequest(request_ids=[request_id]))

    def cancel_session(self) -> None:
        """Cancel every request of the session, and let its results go. Never raises: the service may be gone."""
        try:
            message = generation_service_pb2.CancelRequest(session=self._session.name)
            _call(self._generation.Cancel, message, timeout=_LAST_TIMEOUT)
        except _errors.ChairliftError as error:
            logger.warning("could not cancel the session: %s", error)

    def _message(
        self, request_id: str | None, input_ids: Sequence[int], options: GenerateOptions
    ) -> request_pb2.GenerationRequest:
        number = next(self._counter)
        # The session's name makes an id of our own different from those of other managers of the same service.
        own = GenerateOptions(
            request_id=request_id or f"req_{number}_{self._session.name}",
            session=self._session.name,
            return_text=False,
            logprobs=1 if self._own.return_logprobs else None,
            seed=options.get("seed"),
            min_new_tokens=_generation_config.min_new_tokens(self._generation_config, num_prompt_tokens=len(input_ids)),
        )
        base = getattr(self._generation_config, "seed", None)
        base = self._own.seed if base is None else base
        if own["seed"] is None and base is not None:
            own["seed"] = (base + number) % 2**64
        return _requests.generation_request([operator.index(token_id) for token_id in input_ids], {**options, **own})

    def _send(self, messages: list[request_pb2.GenerationRequest]) -> None:
        try:
            if len(messages) == 1:
                _call(self._generation.AddRequest, generation_service_pb2.AddRequestRequest(request=messages[0]))
            else:
                _call(self._generation.AddRequests, generation_service_pb2.AddRequestsRequest(requests=messages))
        except _errors.ChairliftError as error:
            if error.code in _IN_DOUBT:
                for message in messages:
                    self._releaser.release(message.request_id)
            raise


def _call(method: Any, message: object, *, timeout: float = _TIMEOUT) -> Any:
    """Make a unary call. Raises ChairliftError."""
    try:
        return method(message, timeout=timeout)
    except grpc.RpcError as error:
        raise _errors.from_rpc_error(error) from None

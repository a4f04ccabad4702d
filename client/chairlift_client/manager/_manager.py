"""The manager: transformers' ContinuousBatchingManager, whose batch runs in the service."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from chairlift_client._access import Connection
from chairlift_client._stubs import Stubs
from chairlift_client.manager._inbox import Inbox
from chairlift_client.manager._output import GenerationOutput
from chairlift_client.manager._releaser import Releaser
from chairlift_client.manager._session import Session
from chairlift_client.manager._submitter import Submitter

logger = logging.getLogger("chairlift_client.manager")


class ContinuousBatchingManager:
    """Adds requests and hands out their results, independently; one session of the service.

    Made by `RemoteModel.init_continuous_batching` and `continuous_batching_context_manager`. Methods and their
    meaning are those of transformers' manager, with these differences, each on purpose: an invalid request raises
    where it is added; `get_result(request_id=...)` waits for that request and leaves the others where they are;
    iteration ends when every request has been handed out; a cancelled request is handed out, too (FINISHED, with
    `finish_reason` CANCELLED).
    """

    def __init__(
        self,
        *,
        connection: Connection,
        generation_config: object,
        continuous_batching_config: object | None,
        reconnect_timeout: float,
    ) -> None:
        self._channel = connection.open()
        stubs = Stubs(self._channel, metadata=connection.metadata)
        releaser = Releaser(cancel=stubs.generation.Cancel)
        self._inbox = Inbox(releaser=releaser)
        self._session = Session(
            name=f"manager-{uuid.uuid4().hex[:12]}",
            result=stubs.generation.Result,
            inbox=self._inbox,
            reconnect_timeout=reconnect_timeout,
        )
        try:
            self._submitter = Submitter(
                stubs=stubs,
                session=self._session,
                inbox=self._inbox,
                releaser=releaser,
                generation_config=generation_config,
                continuous_batching_config=continuous_batching_config,
            )
        except BaseException:
            self._channel.close()
            raise
        self._destroyed = False

    def is_running(self) -> bool:
        """Whether results are being received."""
        return self._session.is_attached

    def start(self) -> None:
        """Begin to receive results; again after `stop`, never after `destroy` (RuntimeError)."""
        if self._destroyed:
            raise RuntimeError("the manager was destroyed")
        if self.is_running():
            logger.warning("Manager thread is already running.")
            return
        self._submitter.refusal = None
        self._session.attach()

    def stop(self, *, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Take no more requests, and end receiving when those added are over; `hard_stop` ends them now, as FAILED.

        With `block`, wait for that, `timeout` seconds at most. Results that were not taken stay to be taken.
        """
        if not self.is_running():
            logger.warning("Manager not started.")
            return
        self._submitter.refusal = "The manager is stopped"
        if hard_stop:
            error = "RuntimeError: generation was stopped before this request completed"
            self._inbox.fail(self._inbox.live_ids(), error)
            self._submitter.cancel_session()
        if not self._session.detach(timeout=timeout if block else 0.0) and block:
            logger.warning("Requests were still running after the time-out of stop (%s s).", timeout)

    def destroy(self) -> None:
        """End the session, stopping first if need be, and close the connection. The service goes on. Final."""
        if self._destroyed:
            return
        if self.is_running():
            self.stop()
        self._submitter.refusal = "The manager was destroyed"
        self._destroyed = True
        self._submitter.cancel_session()
        self._channel.close()

    def add_request(  # the document's parameters
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,  # noqa: FBT001, FBT002 # the document's signature
        record_timestamps: bool = False,  # noqa: FBT001, FBT002 # the document's signature
        eos_token_id: int | list[int] | None = None,
        **sampling: Any,
    ) -> str | None:
        """Add one request; returns its id, or None, with a warning, once the manager is stopped.

        `sampling`: temperature, top_k, top_p, min_p, seed of this request alone. Raises ChairliftError if the service
        refuses it, ValueError for an id that is in use, TypeError for another keyword.
        """
        ids = self._submitter.add(
            [(request_id, input_ids)],
            streaming=streaming,
            record_timestamps=record_timestamps,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            sampling=sampling,
        )
        return ids[0] if ids else None

    def add_requests(
        self,
        inputs: Iterable[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,  # noqa: FBT001, FBT002 # the document's signature
        record_timestamps: bool = False,  # noqa: FBT001, FBT002 # the document's signature
        **sampling: Any,
    ) -> list[str]:
        """Add a batch at once, all of it or, raising, none. Returns the ids, in the order of `inputs`.

        The service starts them in an order in which common prefixes meet in its cache. No ids come back once the
        manager is stopped. Keywords and errors as in `add_request`.
        """
        return self._submitter.add(
            [(None, input_ids) for input_ids in inputs],
            streaming=streaming,
            record_timestamps=record_timestamps,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            sampling=sampling,
        )

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request; its result, with the tokens so far, comes with `finish_reason` CANCELLED."""
        self._submitter.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Take the next result, or, with `request_id`, wait for that request's and leave the others.

        A streaming request's next result is one token more. None after `timeout` seconds, when the manager has
        stopped and nothing is left, or when the id is not one of a request to come.
        """
        return self._inbox.take(request_id, timeout=timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until every request that was added has been handed out, or the manager has stopped."""
        while (output := self._inbox.take(None, timeout=None, until_idle=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request: for a streaming one, one for each token, each with all tokens so far."""
        while (output := self._inbox.take(request_id, timeout=None)) is not None:
            yield output
            if output.is_finished():
                return

"""The way in: from a caller's message to generations that the worker has been sent."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence

from chairlift.v1 import request_pb2
from chairlift_worker.ipc.messages import NO_DEADLINE

from chairlift_service import convert
from chairlift_service.constraints import Constraints
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.lifecycle import Lifecycle, ServedModel
from chairlift_service.requests.admission import Admission
from chairlift_service.requests.generation import Generation, family_of
from chairlift_service.requests.lease import Lease
from chairlift_service.requests.outputs import output_log
from chairlift_service.requests.registry import Registry, check_free
from chairlift_service.requests.worker_port import WorkerPort
from chairlift_service.validate import ValidRequest, asked_choices, validate


class Intake:
    """Admits requests, all of a call or none of them. A refusal leaves nothing behind, here or in the worker."""

    def __init__(self, *, lifecycle: Lifecycle, admission: Admission, registry: Registry, port: WorkerPort) -> None:
        self._lifecycle = lifecycle
        self._admission = admission
        self._registry = registry
        self._port = port
        self._uids = itertools.count(1)
        self._constraints = Constraints()

    async def own(
        self,
        message: request_pb2.GenerationRequest,
        *,
        path: str,
        time_remaining: float | None,
        trace_headers: Mapping[str, str],
    ) -> Lease:
        """A request that its call owns, and the lease of it: of all its choices, the head first.

        `time_remaining` is that until the call's deadline, in seconds; None if it has none. Raises ServiceError.
        """
        if time_remaining is not None and time_remaining <= 0:
            raise ServiceError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the request was read")
        deadline_ns = convert.deadline_ns(now_ns=time.monotonic_ns(), time_remaining=time_remaining)
        generations = await self._admit(
            [message], paths=[path], detached=False, deadline_ns=deadline_ns, trace_headers=trace_headers
        )
        return Lease(generations=generations, registry=self._registry, port=self._port)

    async def detach(
        self,
        messages: Sequence[request_pb2.GenerationRequest],
        *,
        paths: Iterable[str],
        trace_headers: Mapping[str, str],
    ) -> list[Generation]:
        """Heads of requests that live on without a reader. `paths` tells where each stands in the call.

        Raises ServiceError.
        """
        generations = await self._admit(
            messages, paths=paths, detached=True, deadline_ns=NO_DEADLINE, trace_headers=trace_headers
        )
        return [generation for generation in generations if generation is generation.head]

    async def _admit(
        self,
        messages: Sequence[request_pb2.GenerationRequest],
        *,
        paths: Iterable[str],
        detached: bool,
        deadline_ns: int,
        trace_headers: Mapping[str, str],
    ) -> list[Generation]:
        received_ns = time.monotonic_ns()
        self._lifecycle.accepting()
        with self._admission.places(sum(asked_choices(message) for message in messages)):
            model = self._lifecycle.accepting()
            requests, outputs = [], []
            for message, path in zip(messages, paths, strict=True):
                request = await self._validate(message, path=path, model=model)
                requests.append(request)
                logs = [await output_log(request, tokenizer=model.tokenizer) for _ in range(request.num_choices)]
                outputs.append(logs)
                await asyncio.sleep(0)  # a large batch of short texts must not hold everybody else up
        # From here on nothing waits, so that what is checked stays true until it is used.
        model = self._lifecycle.accepting()
        self._admission.check_tokens(sum(request.num_prompt_tokens for request in requests))
        check_free(self._registry, (request.request_id for request in requests))
        families = [
            family_of(request, uids=[next(self._uids) for _ in logs], outputs=logs, detached=detached)
            for request, logs in zip(requests, outputs, strict=True)
        ]
        arrival_ns = time.monotonic_ns()
        # In an order in which common prefixes meet in the cache, where there is something to meet.
        order = sorted(families, key=_prompt) if model.prefix_sharing else families
        self._port.add(
            [
                convert.add_request_msg(
                    head.request,
                    uid=head.uid,
                    arrival_ns=arrival_ns,
                    deadline_ns=deadline_ns,
                    fork_uids=[choice.uid for choice in others],
                )
                for head, *others in order
            ]
        )
        generations = [choice for family in families for choice in family]
        for generation in generations:
            generation.trace_headers = trace_headers
            generation.received_ns, generation.sent_ns = received_ns, arrival_ns
            generation.course.deadline_ns = deadline_ns
            self._registry.add(generation)
        return generations

    async def _validate(self, message: request_pb2.GenerationRequest, *, path: str, model: ServedModel) -> ValidRequest:
        return await validate(
            message,
            path=path,
            model=model.card,
            tokenizer=model.tokenizer,
            chat=model.chat,
            defaults=model.defaults,
            constraints=self._constraints,
        )


def _prompt(family: Sequence[Generation]) -> array[int]:
    return family[0].request.prompt_ids

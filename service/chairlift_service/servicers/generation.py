"""GenerationService."""

from __future__ import annotations

from typing import Any, Final

from chairlift.v1 import event_pb2, generation_service_pb2, generation_service_pb2_grpc, request_pb2
from chairlift_worker.ipc.messages import EndingMsg

from chairlift_service import errors
from chairlift_service.errors import Reason, ServiceError, Violation
from chairlift_service.requests.canceller import Canceller
from chairlift_service.requests.cursor import Ended, Event, PromptSlice, Started
from chairlift_service.requests.generation import Generation
from chairlift_service.requests.intake import Intake
from chairlift_service.requests.lease import Lease
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.requests.readers import Reader, Readers
from chairlift_service.requests.registry import Registry, readable
from chairlift_service.servicers import events
from chairlift_service.servicers.edge import CallContext, guarded, log_under, request_id_metadata, trace_headers
from chairlift_service.validate import is_name

_pb = generation_service_pb2

MAX_CANCELLED_IDS: Final = 4096
"""Ids of one Cancel: all are cancelled in one turn of the loop, some 20 us each."""


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Adds, reads and cancels generations. Method names and meaning: generation_service.proto."""

    def __init__(self, *, intake: Intake, registry: Registry, readers: Readers, canceller: Canceller) -> None:
        self._intake = intake
        self._registry = registry
        self._readers = readers
        self._canceller = canceller

    @guarded
    async def Generate(self, request: _pb.GenerateRequest, context: CallContext) -> None:  # noqa: N802 - gRPC's name
        """Adds a request that this call owns, and streams it."""
        with await self._own(request.request, context) as lease:
            head = lease.generations[0]
            with self._readers.open(("request", head.uid)) as reader:
                reader.follow(head)
                await context.send_initial_metadata(request_id_metadata(head.request_id))
                async for generation, event in reader.events():
                    if isinstance(event, Ended) and isinstance(event.ending, ServiceError):
                        raise event.ending
                    await reader.deliver(context.write(_event(generation, event)))
                    if reader.is_done:
                        return

    @guarded
    async def Complete(self, request: _pb.CompleteRequest, context: CallContext) -> _pb.CompleteResponse:  # noqa: N802 - gRPC's name
        """Adds a request that this call owns, and returns its whole output."""
        with await self._own(request.request, context) as lease:
            head = lease.generations[0]
            with self._readers.open(("request", head.uid), endings_only=True) as reader:
                reader.follow(head)
                async for _ in reader.events():
                    if all(choice.ending is not None for choice in head.choices):
                        break
            choices = []
            for choice in head.choices:
                if isinstance(choice.ending, ServiceError):
                    raise choice.ending
                assert choice.ending is not None  # the only way out of the loop
                choices.append(events.whole_choice(choice, choice.ending))
            # Not before: a failure without initial metadata is one that a client's retry policy may try again.
            await context.send_initial_metadata(request_id_metadata(head.request_id))
            return _pb.CompleteResponse(accepted=events.accepted(head), choices=choices)

    @guarded
    async def AddRequest(self, request: _pb.AddRequestRequest, context: CallContext) -> _pb.AddRequestResponse:  # noqa: N802 - gRPC's name
        """Adds a request that lives on without a reader. This call's deadline is not the request's."""
        log_under(request.request.request_id)
        (generation,) = await self._intake.detach(
            [request.request], paths=["request"], trace_headers=trace_headers(context)
        )
        return _pb.AddRequestResponse(accepted=events.accepted(generation))

    @guarded
    async def AddRequests(self, request: _pb.AddRequestsRequest, context: CallContext) -> _pb.AddRequestsResponse:  # noqa: N802 - gRPC's name
        """Adds all of a batch, or none."""
        paths = (f"requests[{i}]" for i in range(len(request.requests)))  # none is made of a batch that is too large
        generations = await self._intake.detach(request.requests, paths=paths, trace_headers=trace_headers(context))
        return _pb.AddRequestsResponse(accepted=[events.accepted(generation) for generation in generations])

    @guarded
    async def Result(self, request: _pb.ResultRequest, context: CallContext) -> None:  # noqa: N802 - gRPC's name
        """Streams a detached request, or all of a session's."""
        match request.WhichOneof("target"):
            case "request_id":
                await self._stream_request(request.request_id, request.from_index, context)
            case "session":
                await self._stream_session(request.session, request.from_index, context)
            case _:
                raise _violation("target", "one of request_id and session must be set", Reason.MISSING_INPUT)

    @guarded
    async def Cancel(self, request: _pb.CancelRequest, context: CallContext) -> _pb.CancelResponse:  # noqa: N802, ARG002 - gRPC's signature
        """Cancels requests by id and by session."""
        if len(request.request_ids) > MAX_CANCELLED_IDS:
            text = f"has {len(request.request_ids)} ids; at most {MAX_CANCELLED_IDS} are cancelled in one call"
            raise _violation("request_ids", text)
        of_session = self._registry.of_session(request.session) if request.session else []
        unwanted = dict.fromkeys(generation.request_id for generation in of_session)
        response = _pb.CancelResponse()
        for request_id in dict.fromkeys((*request.request_ids, *unwanted)):
            status = self._canceller.cancel(request_id, unwanted=request_id in unwanted)
            response.outcomes.add(request_id=request_id, status=status)
        return response

    async def _own(self, message: request_pb2.GenerationRequest, context: CallContext) -> Lease:
        log_under(message.request_id)
        lease = await self._intake.own(
            message,
            path="request",
            time_remaining=context.time_remaining(),
            trace_headers=trace_headers(context),
        )
        log_under(lease.generations[0].request_id)
        return lease

    async def _stream_request(self, request_id: str, from_index: int, context: CallContext) -> None:
        log_under(request_id)
        head = readable(self._registry, request_id)
        num_tokens = max(len(choice.output) for choice in head.choices)
        if from_index > num_tokens:
            raise _violation("from_index", f"is {from_index}; {num_tokens} tokens are generated so far")
        with self._readers.open(("request", head.uid)) as reader:
            reader.follow(head, index=from_index)
            await context.send_initial_metadata(request_id_metadata(request_id))
            async for generation, event in reader.events():
                if isinstance(event, Ended) and isinstance(event.ending, ServiceError):
                    raise event.ending
                await reader.deliver(context.write(_result(generation, event)))
                if reader.is_done:
                    return

    async def _stream_session(self, session: str, from_index: int, context: CallContext) -> None:
        if not is_name(session):
            raise _violation("session", "must be 1 to 128 printable characters")
        if from_index:
            raise _violation("from_index", "belongs to request_id, not to session")
        with self._readers.open(("session", session)) as reader:
            self._follow_session(session, reader)
            await context.send_initial_metadata(())
            async for generation, event in reader.events():
                await reader.deliver(context.write(_result(generation, event)))

    def _follow_session(self, session: str, reader: Reader) -> None:
        for generation in self._registry.of_session(session):
            if generation.detached:
                reader.follow(generation)


def _event(generation: Generation, event: Event) -> _pb.GenerateResponse:
    """One event of a Generate stream. Must not be an error."""
    return _pb.GenerateResponse(**_parts(generation, event))


def _result(generation: Generation, event: Event) -> _pb.ResultResponse:
    """One event of a Result stream."""
    return _pb.ResultResponse(request_id=generation.request_id, **_parts(generation, event))


def _parts(generation: Generation, event: Event) -> dict[str, Any]:
    """The event as the field of its message."""
    match event:
        case Started():
            return {"accepted": events.accepted(generation)}
        case PromptSlice():
            return {"delta": events.prompt_delta(generation, event)}
        case LogSlice():
            return {"delta": events.delta(generation, event)}
        case Ended(EndingMsg() as ending):
            return {"finished": events.finished(generation, ending)}
        case Ended(error):
            assert isinstance(error, ServiceError)
            return {"failed": event_pb2.Failed(status=errors.status(error))}


def _violation(field: str, description: str, reason: Reason = Reason.INVALID_VALUE) -> ServiceError:
    return errors.from_violations([Violation(field, description, reason)])

"""VllmEngine."""

# ruff: noqa: ARG001, ARG002, N802 # gRPC gives the names and the arguments of these methods

from __future__ import annotations

import time
from typing import Any, NoReturn

import grpc
from chairlift_worker.ipc.messages import EndingMsg
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from chairlift_service.errors import ServiceError, Violation, from_violations
from chairlift_service.health import Health
from chairlift_service.lifecycle import Lifecycle, State
from chairlift_service.requests.canceller import Canceller
from chairlift_service.requests.cursor import Ended
from chairlift_service.requests.intake import Intake
from chairlift_service.requests.lease import Lease
from chairlift_service.requests.output_log import LogSlice
from chairlift_service.requests.readers import Readers
from chairlift_service.requests.registry import Registry
from chairlift_service.servicers.edge import CallContext, guarded, log_under, trace_headers
from chairlift_service.servicers.generation import MAX_CANCELLED_IDS
from chairlift_service.servicers.vllm_engine import facts
from chairlift_service.servicers.vllm_engine.asked import PATH, Asked, asked_of, told
from chairlift_service.servicers.vllm_engine.bundle import CHUNK_BYTES, TokenizerBundle, fingerprint
from chairlift_service.servicers.vllm_engine.output import Output
from chairlift_service.statistics import ServerStatistics

_pb = vllm_engine_pb2


async def _not_offered(servicer: Any, request: Any, context: CallContext) -> NoReturn:
    """As if the server had no such method, from which a gateway draws its conclusions."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not offered by this service")
    raise AssertionError("abort returned")


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc] # the package has no types
    """Answers gateways, by the objects that GenerationService and InfoService use. Meaning: vllm_engine.proto.

    What an operator may do alone (to flush the cache, to profile) is not offered on callers' addresses.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        health: Health,
        intake: Intake,
        registry: Registry,
        readers: Readers,
        canceller: Canceller,
        statistics: ServerStatistics,
    ) -> None:
        self._lifecycle = lifecycle
        self._health = health
        self._intake = intake
        self._registry = registry
        self._readers = readers
        self._canceller = canceller
        self._statistics = statistics
        self._bundle = TokenizerBundle()
        self._received_s = 0.0  # when the last request came, in seconds since 1970

    Embed = FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _not_offered

    def add_to(self, server: grpc.aio.Server) -> None:
        """Puts it on a server."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    @guarded
    async def Generate(self, request: Any, context: CallContext) -> None:
        """Adds a request that this call owns: chunks as they come, if asked, and an ending with all of each choice.

        Nothing is sent before there is output: until then a gateway may try another service.
        """
        self._received_s = time.time()
        log_under(request.request_id)
        asked, lease = await self._own(request, context)
        with lease:
            head = lease.generations[0]
            outputs = {choice.uid: Output(generation=choice, asked=asked) for choice in head.choices}
            with self._readers.open(("request", head.uid), endings_only=not asked.stream) as reader:
                reader.follow(head)
                async for generation, event in reader.events():
                    match event:
                        case LogSlice() if asked.stream and event.token_ids:
                            await reader.deliver(context.write(outputs[generation.uid].chunk(event)))
                        case Ended(EndingMsg() as ending):
                            await reader.deliver(context.write(outputs[generation.uid].complete(ending)))
                            if reader.is_done:
                                return
                        case Ended(ServiceError() as error):
                            raise error

    @guarded
    async def Abort(self, request: Any, context: CallContext) -> Any:
        """Cancels requests by id; of those that are over or unknown nothing is said."""
        if len(request.request_ids) > MAX_CANCELLED_IDS:
            text = f"has {len(request.request_ids)} ids; at most {MAX_CANCELLED_IDS} are cancelled in one call"
            raise from_violations([Violation("request_ids", text)])
        for request_id in dict.fromkeys(request.request_ids):
            self._canceller.cancel(request_id, unwanted=True)
        return _pb.AbortResponse()

    @guarded
    async def HealthCheck(self, request: Any, context: CallContext) -> Any:
        """What grpc.health.v1 says of the service."""
        serving = self._health.serving
        return _pb.HealthCheckResponse(healthy=serving, message="serving" if serving else "not serving")

    @guarded
    async def GetModelInfo(self, request: Any, context: CallContext) -> Any:
        """The model."""
        return facts.model_info(self._lifecycle.model())

    @guarded
    async def GetServerInfo(self, request: Any, context: CallContext) -> Any:
        """The server."""
        return facts.server_info(
            self._lifecycle.model(),
            num_live=self._registry.num_live,
            is_paused=self._lifecycle.state in (State.PAUSED, State.UPDATING),
            uptime_ns=self._statistics.uptime_ns,
            received_s=self._received_s,
        )

    @guarded
    async def GetLoads(self, request: Any, context: CallContext) -> Any:
        """The load."""
        waiting = (each.request.num_prompt_tokens for each in self._registry.all_live() if each.waiting)
        return facts.loads(self._lifecycle.model(), self._statistics.read(), num_waiting_tokens=sum(waiting))

    @guarded
    async def GetTokenizer(self, request: Any, context: CallContext) -> None:
        """The tokenizer's files, in pieces."""
        data = await self._bundle.data(self._lifecycle.model().card.tokenizer_dir)
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES])
            if start + CHUNK_BYTES >= len(data):
                chunk.sha256 = fingerprint(data)
            await context.write(chunk)

    async def _own(self, request: Any, context: CallContext) -> tuple[Asked, Lease]:
        try:
            asked = asked_of(request, self._lifecycle.accepting().card)
            lease = await self._intake.own(
                asked.message,
                path=PATH,
                time_remaining=context.time_remaining(),
                trace_headers=trace_headers(context),
            )
        except ServiceError as error:
            raise told(error) from error
        log_under(lease.generations[0].request_id)
        return asked, lease

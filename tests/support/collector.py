"""A collector of traces, by OTLP over gRPC."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        for resource in request.resource_spans:
            self.resource = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def since_queued(span: Any) -> dict[str, int]:
    """The span's events, in order, in nanoseconds from the first of them."""
    times = [event.time_unix_nano for event in span.events]
    assert times == sorted(times)
    return {event.name: event.time_unix_nano - times[0] for event in span.events}

"""Traces by OpenTelemetry: a span for each request, with what befell it in the worker as events.

Needs the extra `otel`; imported only where traces are asked for.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections.abc import Mapping
from typing import Final

from chairlift_worker.ipc.messages import EndingMsg
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from chairlift_service import convert
from chairlift_service.errors import ServiceError
from chairlift_service.requests.generation import Generation

CLOSE_S: Final = 2.0
"""For the last spans to be taken, when the service ends."""

SPAN_NAME: Final = "generate"


class OtelTracer:
    """Makes a request's span when it is over: until then a trace costs nothing.

    Its parent is the span that the caller's `traceparent` names, and whether it is sampled follows that, too, unless
    OTEL_TRACES_SAMPLER says otherwise. The exporter's variables (OTEL_EXPORTER_OTLP_HEADERS and so on) hold.
    No prompt and no output goes along.
    """

    def __init__(self, *, endpoint: str | None, environ: Mapping[str, str]) -> None:
        """`endpoint` None: as the exporter's variables say."""
        named = {} if environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "chairlift"}
        version = importlib.metadata.version("chairlift")
        resource = Resource.create({**named, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("chairlift", version)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, generation: Generation, ending: EndingMsg) -> None:
        """A span with the worker's events, by the worker's clock."""
        shift_ns = _shift_ns()
        span = self._begin(generation, shift_ns=shift_ns)
        moments = _moments(generation, ending)
        for name, at_ns in moments:
            span.add_event(name, timestamp=at_ns + shift_ns)
        span.set_attributes(
            {
                "gen_ai.usage.cache_read.input_tokens": ending.cached_tokens,
                "gen_ai.response.finish_reasons": [ending.reason.name.lower()],
                "chairlift.preemptions": ending.preemptions,
            }
        )
        # What the service itself ended (an operator's Stop, for one) is CANCELLED to the worker.
        told = generation.ending if isinstance(generation.ending, ServiceError) else convert.ending_error(ending)
        _end(span, generation, told, end_time=moments[-1][1] + shift_ns)

    def lost(self, generation: Generation, error: ServiceError) -> None:
        """A span of which only the service's part is known."""
        _end(self._begin(generation, shift_ns=_shift_ns()), generation, error, end_time=time.time_ns())

    def close(self) -> None:
        """Sends what is there. A collector that does not answer is not waited for."""
        closing = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _begin(self, generation: Generation, *, shift_ns: int) -> Span:
        return self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(generation.trace_headers),
            kind=SpanKind.SERVER,
            start_time=generation.received_ns + shift_ns,
            attributes={
                "chairlift.request_id": generation.request_id,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.max_tokens": generation.request.max_new_tokens,
                "gen_ai.usage.input_tokens": generation.request.num_prompt_tokens,
            },
        )


def _moments(generation: Generation, ending: EndingMsg) -> list[tuple[str, int]]:
    """What befell a request, and when, by CLOCK_MONOTONIC, in order."""
    started_ns = generation.sent_ns + ending.queued_ns
    first_token_ns = started_ns + ending.prefill_ns
    moments = [("queued", generation.sent_ns), *((turn.name.lower(), at_ns) for turn, at_ns in ending.turns)]
    if generation.started:
        moments.append(("started", started_ns))
    if len(generation.output):
        moments.append(("first token", first_token_ns))
    moments.sort(key=lambda moment: moment[1])
    return [*moments, ("finished", first_token_ns + ending.decode_ns)]


def _end(span: Span, generation: Generation, error: ServiceError | None, *, end_time: int) -> None:
    span.set_attribute("gen_ai.usage.output_tokens", len(generation.output))
    if error is not None:
        span.set_attribute("error.type", error.reason.value)
        span.set_status(StatusCode.ERROR)
    span.end(end_time=end_time)


def _shift_ns() -> int:
    """From CLOCK_MONOTONIC to nanoseconds since 1970."""
    return time.time_ns() - time.monotonic_ns()

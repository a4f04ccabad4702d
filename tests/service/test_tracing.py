"""Traces, as a collector gets them by OTLP."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from chairlift.v1 import admin_service_pb2, generation_service_pb2
from chairlift_service.tracing import TracingError, make_tracer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from structlog.testing import capture_logs
from support.collector import Collector, attributes, since_queued
from support.fake_worker import CRASH_TOKEN, ERROR_TOKEN, SWAPPED_TOKEN
from support.served import eventually, generate, ids_request, refusal, rest, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
MS = 1_000_000


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its address."""
    made, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"http://127.0.0.1:{port}"
    await server.stop(0)


async def test_a_request_is_a_span_of_the_callers_trace_with_the_workers_events(collector: Any) -> None:
    collected, endpoint = collector
    before = time.time_ns()
    async with serving(otlp_endpoint=endpoint) as served:
        call = served.generation.Generate(
            generate(5, 6, 7, max_new_tokens=9, request_id="mine"), metadata=(*SAMPLED, ("tracestate", "vendor=1"))
        )
        await rest(call)
        await served.idle()
        assert collected.spans == []  # they go in batches
    (span,) = collected.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert (span.name, span.kind) == ("generate", trace_pb2.Span.SPAN_KIND_SERVER)
    # The fake worker says 1 ms in the queue, 2 ms until the first token, 3 ms from there.
    assert since_queued(span) == {"queued": 0, "started": MS, "first token": 3 * MS, "finished": 6 * MS}
    assert before < span.start_time_unix_nano < span.events[0].time_unix_nano < time.time_ns()
    assert span.end_time_unix_nano == span.events[-1].time_unix_nano
    told = attributes(span)
    assert told.pop("gen_ai.response.finish_reasons").values[0].string_value == "length"
    assert told == {
        "chairlift.request_id": "mine",
        "chairlift.preemptions": 0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 9,
    }
    assert collected.resource["service.name"] == "chairlift"
    assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET


async def test_preemptions_are_events_with_the_workers_times(collector: Any) -> None:
    collected, endpoint = collector
    async with serving(otlp_endpoint=endpoint) as served:
        await rest(served.generation.Generate(generate(SWAPPED_TOKEN, max_new_tokens=2)))
    (span,) = collected.spans
    assert since_queued(span) == {
        "queued": 0,
        "started": MS,
        "first token": 3 * MS,
        "swapped": 4 * MS,
        "resumed": 5 * MS,
        "finished": 6 * MS,
    }


async def test_every_request_of_a_batch_has_a_span_and_without_a_callers_trace_one_of_its_own(collector: Any) -> None:
    collected, endpoint = collector
    async with serving(otlp_endpoint=endpoint) as served:
        batch = generation_service_pb2.AddRequestsRequest(requests=[ids_request(1), ids_request(2)])
        await served.generation.AddRequests(batch, metadata=SAMPLED)
        await served.generation.Complete(generation_service_pb2.CompleteRequest(request=ids_request(3)))
        await eventually(lambda: served.core.registry.num_live == 0)
    traces = [span.trace_id.hex() for span in collected.spans]
    assert sorted(trace == TRACE for trace in traces) == [False, True, True]
    assert len({span.span_id for span in collected.spans}) == 3
    (own,) = (span for span in collected.spans if span.trace_id.hex() != TRACE)
    assert own.parent_span_id == b""


async def test_what_the_caller_does_not_sample_is_not_sent(collector: Any) -> None:
    collected, endpoint = collector
    async with serving(otlp_endpoint=endpoint) as served:
        unsampled = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
        await rest(served.generation.Generate(generate(5), metadata=unsampled))
        await rest(served.generation.Generate(generate(5), metadata=(("traceparent", "nonsense"),)))
    (span,) = collected.spans
    assert span.trace_id.hex() != TRACE


async def test_a_failure_is_a_span_with_its_reason(collector: Any) -> None:
    collected, endpoint = collector
    async with serving(otlp_endpoint=endpoint) as served:
        await refusal(served.generation.Generate(generate(ERROR_TOKEN, max_new_tokens=9)))
        await refusal(served.generation.Generate(generate(CRASH_TOKEN, max_new_tokens=9)))
    failed, lost = collected.spans
    assert attributes(failed)["error.type"] == "NUMERICAL_ERROR"
    assert attributes(lost)["error.type"] == "POISONED_REQUEST"
    assert failed.status.code == lost.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert attributes(failed)["gen_ai.usage.output_tokens"] == 2
    assert list(lost.events) == []


async def test_what_an_operator_stops_says_so(collector: Any) -> None:
    collected, endpoint = collector
    async with serving(script={"step_s": 0.01}, admin=True, otlp_endpoint=endpoint) as served:
        call = served.generation.Generate(generate(5, max_new_tokens=1000))
        await call.read()
        await served.admin.Stop(admin_service_pb2.StopRequest())
        assert (await refusal(call)).reason == "STOPPED"
        await served.idle()
    (span,) = collected.spans
    assert attributes(span)["error.type"] == "STOPPED"


async def test_opentelemetrys_own_variable_turns_traces_on(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collected, endpoint = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    async with serving() as served:
        await rest(served.generation.Generate(generate(5)))
    assert len(collected.spans) == 1
    assert collected.resource["service.name"] == "ours"


async def test_a_collector_that_is_not_there_disturbs_nobody_and_is_not_waited_for() -> None:
    async with serving(otlp_endpoint="http://127.0.0.1:1") as served:
        await rest(served.generation.Generate(generate(5)))
        served.signals.first.set()
        await served.run
        began = time.monotonic()
        await served.app.close()
        assert time.monotonic() - began < 4
    await asyncio.sleep(0)


async def test_traces_are_off_unless_asked_for() -> None:
    async with serving() as served:
        assert served.core.tracer is None


def test_without_the_packages_a_flag_is_an_error_and_a_variable_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chairlift_service.otel", None)  # Python's way to say that it cannot be imported
    with pytest.raises(TracingError, match=r"^otlp_endpoint = http://c: .*chairlift\[otel\]$"):
        make_tracer("http://c", {})
    with capture_logs() as logs:
        assert make_tracer(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}) is None
    assert [(each["log_level"], each["variable"]) for each in logs] == [("warning", "OTEL_EXPORTER_OTLP_ENDPOINT")]

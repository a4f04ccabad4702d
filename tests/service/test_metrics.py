"""What a scrape tells of requests that the test itself made, read by prometheus_client's own parsers."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from chairlift.v1 import generation_service_pb2, info_service_pb2
from chairlift_service.requests.histogram import Histogram
from grpc_health.v1 import health_pb2
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from support.certificates import Certificates
from support.fake_worker import ERROR_TOKEN
from support.scraping import ANYWHERE, http, scrape, value, where
from support.served import Served, eventually, generate, ids_request, refusal, rest, serving

_pb = generation_service_pb2
GENERATE = "/chairlift.v1.GenerationService/Generate"


async def test_a_scrape_counts_exactly_the_requests_and_tokens_that_there_were() -> None:
    async with serving(**ANYWHERE) as served:
        before = await scrape(served)
        for length, count in ((3, 8), (5, 1), (7, 20)):
            await rest(served.generation.Generate(generate(*range(10, 10 + length), max_new_tokens=count)))
        await refusal(served.generation.Generate(generate()))  # empty
        await refusal(served.generation.Generate(generate(ERROR_TOKEN, max_new_tokens=5)))  # ends after two tokens
        await served.idle()
        after = await scrape(served)
        assert value(before, "generated_tokens_total") == 0
        assert value(after, "generated_tokens_total") == 8 + 1 + 20 + 2
        assert value(after, "prompt_tokens_total") == 3 + 5 + 7 + 1
        assert value(after, "requests_running") == value(after, "requests_waiting") == 0
        assert value(after, "requests_ended_total", reason="LENGTH") == 3
        assert value(after, "requests_ended_total", reason="ERROR") == 1
        assert value(after, "requests_ended_total", reason="STOP") == 0
        assert value(after, "time_to_first_token_seconds_count") == 4
        assert value(after, "inter_token_seconds_count") == 7 + 0 + 19 + 1
        for name in ("request", "request_queue", "request_prefill", "request_decode", "request_swap"):
            assert value(after, f"{name}_seconds_count") == 3, name
        # The fake worker says 1 ms, 2 ms, 3 ms and 0 of every request.
        assert value(after, "request_queue_seconds_sum") == pytest.approx(3 * 0.001)
        assert value(after, "request_prefill_seconds_sum") == pytest.approx(3 * 0.002)
        assert value(after, "request_decode_seconds_sum") == pytest.approx(3 * 0.003)
        assert value(after, "request_swap_seconds_sum") == 0
        assert value(after, "grpc_calls_total", method=GENERATE, code="OK") == 3
        assert value(after, "grpc_calls_total", method=GENERATE, code="INVALID_ARGUMENT") == 1
        assert value(after, "grpc_calls_total", method=GENERATE, code="INTERNAL") == 1
        assert value(after, "grpc_call_seconds_count", method=GENERATE) == 5
        assert value(after, "grpc_calls_in_flight", method=GENERATE) == 0


async def test_times_are_as_long_as_the_caller_waited() -> None:
    async with serving(script={"step_s": 0.02}, **ANYWHERE) as served:
        began = time.monotonic()
        await rest(served.generation.Generate(generate(5, 6, max_new_tokens=11)))
        waited = time.monotonic() - began
        await served.idle()
        samples = await scrape(served)
        gaps = value(samples, "inter_token_seconds_sum")
        assert 10 * 0.02 <= gaps < waited
        assert 0.02 <= value(samples, "time_to_first_token_seconds_sum") < waited - gaps
        whole = value(samples, "request_seconds_sum")
        assert gaps < whole < waited
        assert whole < value(samples, "grpc_call_seconds_sum", method=GENERATE)
        # A token that was noticed late makes the gap behind it seem shorter.
        assert value(samples, "inter_token_seconds_bucket", le="0.015") < 5
        assert value(samples, "inter_token_seconds_bucket", le="+Inf") == 10


async def test_the_names_are_those_of_the_statistics_and_every_metric_is_the_products() -> None:
    async with serving(**ANYWHERE) as served:
        _, _, body = await http(served)
        families = {family.name: family for family in parse(body)}
        assert all(name.startswith("chairlift_") for name in families)
        names = (
            "requests_waiting requests_running requests_swapped blocks_total blocks_free blocks_cached "
            "swap_blocks_used steps generated_tokens prompt_tokens cached_prompt_tokens preemptions_swap "
            "preemptions_recompute worker_restarts"
        )
        counters = set(names.split()[7:])
        for name in names.split():
            assert families[f"chairlift_{name}"].type == ("counter" if name in counters else "gauge"), name
        assert all(family.documentation for family in families.values())
        server = await served.info.GetServer(info_service_pb2.GetServerRequest())
        told = {field.name for field in server.statistics.DESCRIPTOR.fields} - {"busy_ns"}
        assert {f"chairlift_{name}" for name in told} <= set(families)


async def test_an_openmetrics_scraper_gets_openmetrics() -> None:
    async with serving(**ANYWHERE) as served:
        code, headers, body = await http(
            served, "GET /metrics HTTP/1.1", "Accept: application/openmetrics-text;version=1.0.0"
        )
        assert code == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert "chairlift_requests_ended" in {family.name for family in parse_openmetrics(body)}


@pytest.mark.parametrize("version", ["x", "1.x.0", "1..0", "a.b", "", "\xff"])
async def test_a_version_that_is_no_number_gets_the_usual_form(endpoint: Served, version: str) -> None:
    code, headers, body = await http(
        endpoint, "GET /metrics HTTP/1.1", f"Accept: application/openmetrics-text; version={version}"
    )
    assert code == 200
    assert "chairlift_requests_waiting" in body
    assert headers["Content-Type"].startswith(("text/plain", "application/openmetrics-text"))


async def test_open_calls_are_in_flight_and_show_how_they_were_left() -> None:
    async with serving(script={"step_s": 0.01}, **ANYWHERE) as served:
        left = served.generation.Generate(generate(5, max_new_tokens=1000))
        late = served.generation.Generate(generate(5, max_new_tokens=1000), timeout=0.3)
        await left.read()
        await late.read()
        assert value(await scrape(served), "grpc_calls_in_flight", method=GENERATE) == 2
        assert value(await scrape(served), "requests_running") == 2
        left.cancel()
        assert (await refusal(late)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.idle()
        samples = await scrape(served)
        assert value(samples, "grpc_calls_in_flight", method=GENERATE) == 0
        assert value(samples, "grpc_calls_total", method=GENERATE, code="CANCELLED") == 1
        assert value(samples, "grpc_calls_total", method=GENERATE, code="DEADLINE_EXCEEDED") == 1
        # The worker's own clock may be the one that notices: the call is over in either case.
        assert value(samples, "requests_ended_total", reason="CANCELLED") >= 1
        assert value(samples, "request_seconds_count") == 0


async def test_names_that_callers_make_up_are_one_label() -> None:
    async with serving(**ANYWHERE) as served:
        for number in range(5):
            unknown = served.channel.unary_unary(f"/nonsense.Service{number}/Method")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        samples = await scrape(served)
        assert value(samples, "grpc_calls_total", method="other", code="UNIMPLEMENTED") == 5
        assert not any("nonsense" in str(labels) for _, labels in samples)


async def test_unary_calls_health_and_reflection_are_counted_too() -> None:
    async with serving(**ANYWHERE) as served:
        await served.health.Check(health_pb2.HealthCheckRequest())
        await served.generation.Complete(_pb.CompleteRequest(request=ids_request(1, 2)))
        reflect = served.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        assert [message async for message in reflect(iter([]))] == []
        samples = await scrape(served)
        for method in (
            "/grpc.health.v1.Health/Check",
            "/chairlift.v1.GenerationService/Complete",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ):
            assert value(samples, "grpc_calls_total", method=method, code="OK") == 1, method


@pytest.mark.parametrize(
    ("request_line", "code"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/x HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("GET /metrics?name[]=x HTTP/1.0", 200),
        ("GET /metrics HTTP/2", 400),
        ("GARBAGE", 400),
        ("GET /" + "x" * 20_000 + " HTTP/1.1", 400),
    ],
)
async def test_anything_but_the_one_page_is_refused(endpoint: Served, request_line: str, code: int) -> None:
    assert (await http(endpoint, request_line))[0] == code


@pytest.fixture
async def endpoint() -> Any:
    async with serving(**ANYWHERE) as served:
        yield served


async def test_a_head_has_the_length_of_the_page_and_no_page(endpoint: Served) -> None:
    code, headers, body = await http(endpoint, "HEAD /metrics HTTP/1.1")
    assert (code, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


async def test_a_caller_who_says_nothing_holds_nothing_up(endpoint: Served) -> None:
    address = where(endpoint)
    with socket.create_connection((address.host, address.port)):
        await scrape(endpoint)
        began = time.monotonic()
        endpoint.signals.first.set()
        await eventually(endpoint.run.done)
        await endpoint.app.close()
        assert time.monotonic() - began < 2


async def test_a_unix_socket_serves_too_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    async with serving(metrics_listen=f"unix:{path}"):
        assert path.stat().st_mode & 0o777 == 0o600
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"chairlift_steps_total 0.0" in await reader.read()
        writer.close()
    assert not path.exists()


async def test_metrics_are_off_unless_asked_for() -> None:
    async with serving() as served:
        await rest(served.generation.Generate(generate(5)))
        assert served.app._entrance._endpoint is None
        assert served.core.metered is None


async def test_where_tokens_are_asked_for_a_scraper_needs_one_that_may_look(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("looker prom observer\nteller who caller\noperator op admin\n")
    async with serving(auth_token_file=tmp_path / "tokens", **ANYWHERE) as served:
        assert (await http(served))[0] == 401
        assert (await http(served, "GET /metrics HTTP/1.1", "Authorization: Bearer wrong"))[0] == 401
        for token in ("looker", "teller", "operator"):
            assert (await http(served, "GET /metrics HTTP/1.1", f"Authorization: Bearer {token}"))[0] == 200


async def test_with_certificates_the_page_is_encrypted_and_renewed_ones_count_at_once(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)

    def trusting(authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return context

    async with serving(**ANYWHERE, **certificates.settings) as served:
        before = certificates.authority
        assert (await http(served, tls=trusting(before)))[0] == 200
        certificates.write(trustme.CA())
        assert (await http(served, tls=trusting(certificates.authority)))[0] == 200
        with pytest.raises(ssl.SSLError):
            await http(served, tls=trusting(before))


async def test_with_mutual_tls_a_scraper_without_certificate_gets_nothing(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with serving(**ANYWHERE, **certificates.settings, tls_client_ca=certificates.ca) as served:
        context = ssl.create_default_context()
        certificates.authority.configure_trust(context)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await http(served, tls=context)
        certificates.authority.issue_cert("prom.example").configure_cert(context)
        assert (await http(served, tls=context))[0] == 200


def test_a_duration_counts_in_every_bucket_that_is_not_below_it() -> None:
    histogram = Histogram(bounds_s=(0.1, 1, 10))
    for duration_ns in (0, 100_000_000, 100_000_001, 2_000_000_000, 20_000_000_000):
        histogram.observe(duration_ns)
    assert histogram.buckets == [("0.1", 2), ("1", 3), ("10", 4), ("+Inf", 5)]
    assert histogram.sum_s == pytest.approx(22.200000001)

"""Metrics, traces and the log of a real service whose requests are preempted."""

from __future__ import annotations

import asyncio
import http.client
import socket
import tempfile
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from chairlift_client import Client, Finished
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from support.collector import Collector, attributes, since_queued
from support.idle import assert_idle
from support.live_server import LiveServer, live_server
from support.tiny_models import tiny_model

NUM_REQUESTS, NUM_TOKENS = 10, 40
SWAPPING = ("--dtype", "float32", "--page-size", "4", "--num-blocks", "80", "--max-prefill-chunk", "16")
SWAPPING += ("--cpu-offload-space", "0.05", "--safety-margin", "0")


def prompt(number: int) -> list[int]:
    return [4 + (number * 41 + i * i * 7) % 370 for i in range(5 + 6 * number)]


def stream_all(server: LiveServer) -> dict[str, Finished]:
    """All at once, each by a thread of its own; the ending of each."""
    endings: dict[str, Finished] = {}

    def one(number: int) -> None:
        options: Any = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "request_id": f"r{number}"}
        with Client(server.target) as client, client.generate(prompt(number), **options) as events:
            endings.update((f"r{number}", event) for event in events if isinstance(event, Finished))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(NUM_REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return endings


def scrape(path: str) -> dict[str, float]:
    """The samples without labels, and those of LENGTH endings."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    return {
        sample.name.removeprefix("chairlift_"): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels in ({}, {"reason": "LENGTH"})
    }


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    made, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"http://127.0.0.1:{port}"
    await server.stop(0)


async def test_figures_events_and_log_of_preempted_requests_agree_with_what_callers_were_told(collector: Any) -> None:
    collected, endpoint = collector
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:
        flags = ("--metrics-listen", f"unix:{folder}/m", "--otlp-endpoint", endpoint, "--log-level", "debug")
        endings, samples, log = await asyncio.to_thread(run, f"{folder}/m", flags)
    num_preempted = sum(ending.timings.preemptions for ending in endings.values())
    assert num_preempted > 0, "nothing was preempted: the test means nothing"
    assert samples["generated_tokens_total"] == NUM_REQUESTS * NUM_TOKENS
    assert samples["prompt_tokens_total"] == sum(len(prompt(number)) for number in range(NUM_REQUESTS))
    assert samples["requests_ended_total"] == samples["request_seconds_count"] == NUM_REQUESTS
    assert samples["time_to_first_token_seconds_count"] == NUM_REQUESTS
    assert samples["inter_token_seconds_count"] == NUM_REQUESTS * (NUM_TOKENS - 1)
    assert samples["preemptions_swap_total"] + samples["preemptions_recompute_total"] == num_preempted
    swapped = sum(ending.timings.swapped for ending in endings.values())
    assert samples["request_swap_seconds_sum"] == pytest.approx(
        swapped, abs=NUM_REQUESTS * 1e-6
    )  # clients see microseconds
    assert samples["cache_use_ratio"] == 0
    spans = {attributes(span)["chairlift.request_id"]: span for span in collected.spans}
    assert spans.keys() == endings.keys()
    for name, ending in endings.items():
        turns = [event.name for event in spans[name].events if event.name in {"swapped", "preempted"}]
        assert len(turns) == ending.timings.preemptions
        times = since_queued(spans[name])
        assert times["started"] / 1e9 == pytest.approx(ending.timings.queued, abs=1e-6)
        assert (times["finished"] - times["first token"]) / 1e9 == pytest.approx(ending.timings.decode, abs=1e-6)
        assert name in log
    for number in range(NUM_REQUESTS):
        assert ", ".join(map(str, prompt(number)[:5])) not in log


def run(path: str, flags: tuple[str, ...]) -> tuple[dict[str, Finished], dict[str, float], str]:
    """What callers were told, what a scrape told afterwards, and the whole log."""
    with live_server(tiny_model("llama"), *SWAPPING, *flags) as server:
        endings = stream_all(server)
        assert_idle(server)
        samples = scrape(path)
        server.process.terminate()
        server.process.wait(60)
        return endings, samples, server.log()

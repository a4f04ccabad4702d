"""Figures of the service in the data model of Prometheus."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from chairlift.v1 import info_service_pb2
from chairlift_worker.ipc.messages import EndingReason
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from chairlift_service.lifecycle import ALL_SHOWN, Lifecycle
from chairlift_service.requests.histogram import NS_PER_S, Histogram
from chairlift_service.requests.recorder import RequestRecorder
from chairlift_service.servicers.call_counts import CallCounts
from chairlift_service.statistics import ServerStatistics

PREFIX: Final = "chairlift_"

_HELP: Final = {
    "requests_waiting": "Requests that wait for their first step, or for their next after giving up their pages.",
    "requests_running": "Requests in the batch.",
    "requests_swapped": "Requests whose pages lie in the swap pool.",
    "requests_held": "Requests that the service holds, kept results included.",
    "blocks_total": "Pages of the key-value cache.",
    "blocks_free": "Pages that hold nothing.",
    "blocks_cached": "Pages that no request uses but that hold a prefix worth keeping.",
    "swap_blocks_used": "Pages used of the swap pool.",
    "swap_blocks_total": "Pages that the swap pool has room for.",
    "steps": "Steps run.",
    "generated_tokens": "Tokens generated.",
    "prompt_tokens": "Prompt tokens of started requests.",
    "cached_prompt_tokens": "Prompt tokens that came from the prefix cache.",
    "computed_tokens": "Tokens computed, prompt and output, those computed again included.",
    "draft_tokens": "Tokens that speculation proposed and that were computed.",
    "accepted_draft_tokens": "Tokens that speculation proposed and that became output.",
    "preemptions_swap": "Preemptions by swapping.",
    "preemptions_recompute": "Preemptions by giving pages up.",
    "worker_restarts": "Workers that were replaced.",
}
_GAUGES: Final = frozenset(name for name in _HELP if name.startswith(("requests_", "blocks_", "swap_blocks_")))
_TO_SECONDS: Final = {"busy_ns": ("step_seconds", "Time that the worker spent on steps.")}


@dataclass(frozen=True, kw_only=True)
class Metered:
    """What `metrics_listen` turns on."""

    requests: RequestRecorder
    calls: CallCounts


class ServiceCollector(Collector):
    """Reads everything when it is asked; between two scrapes it costs nothing."""

    def __init__(self, *, statistics: ServerStatistics, lifecycle: Lifecycle, metered: Metered) -> None:
        self._statistics = statistics
        self._lifecycle = lifecycle
        self._metered = metered

    def collect(self) -> Iterator[Metric]:
        """Every metric, one moment's values."""
        statistics = self._statistics.read()
        yield from self._server()
        for field in statistics.DESCRIPTOR.fields:
            yield _statistic(field.name, getattr(statistics, field.name))
        yield from _ratios(statistics)
        yield from _requests(self._metered.requests)
        yield from _calls(self._metered.calls)

    def _server(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            PREFIX + "build", "The program.", value={"version": importlib.metadata.version("chairlift")}
        )
        state = GaugeMetricFamily(PREFIX + "state", "1 for what the server does now, else 0.", labels=["state"])
        shown = self._lifecycle.shown
        for number in ALL_SHOWN:
            name = info_service_pb2.ServerState.Name(number).removeprefix("SERVER_STATE_")
            state.add_metric([name], float(number == shown))
        yield state
        yield GaugeMetricFamily(
            PREFIX + "uptime_seconds", "Time since the start.", value=self._statistics.uptime_ns / NS_PER_S
        )


def _statistic(name: str, value: int) -> Metric:
    """A field of Statistics under its own name; a KeyError where it has no help yet."""
    if name in _TO_SECONDS:
        name, text = _TO_SECONDS[name]
        return CounterMetricFamily(PREFIX + name, text, value=value / NS_PER_S)
    make: Callable[..., Metric] = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
    return make(PREFIX + name, _HELP[name], value=value)


def _ratios(statistics: info_service_pb2.Statistics) -> Iterator[Metric]:
    used = statistics.blocks_total - statistics.blocks_free - statistics.blocks_cached
    for name, text, part, whole in (
        ("cache_use_ratio", "Pages of the key-value cache that requests use.", used, statistics.blocks_total),
        (
            "prefix_cache_hit_ratio",
            "Prompt tokens since the start that came from the prefix cache.",
            statistics.cached_prompt_tokens,
            statistics.prompt_tokens,
        ),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=part / whole if whole else 0.0)


def _requests(recorder: RequestRecorder) -> Iterator[Metric]:
    ended = CounterMetricFamily(PREFIX + "requests_ended", "Requests that the worker is done with.", labels=["reason"])
    for reason in EndingReason:
        ended.add_metric([reason.name], recorder.endings[reason])
    yield ended
    for name, text, histogram in (
        ("time_to_first_token", "From a request's arrival to its first token.", recorder.first_token),
        ("inter_token", "From a request's token to its next.", recorder.inter_token),
        ("request", "From a request's arrival to its end.", recorder.whole),
        ("request_queue", "A request's wait for its first step.", recorder.queued),
        ("request_prefill", "From a request's first step to its first token.", recorder.prefill),
        ("request_decode", "From a request's first token to its end.", recorder.decode),
        ("request_swap", "A request's time in the swap pool.", recorder.swapped),
    ):
        family = HistogramMetricFamily(f"{PREFIX}{name}_seconds", text)
        _add(family, [], histogram)
        yield family


def _calls(counts: CallCounts) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily(PREFIX + "grpc_calls_in_flight", "Calls that are open.", labels=["method"])
    for method, number in counts.in_flight.items():
        in_flight.add_metric([method], number)
    ended = CounterMetricFamily(PREFIX + "grpc_calls", "Calls that have ended.", labels=["method", "code"])
    for (method, code), number in counts.ended.items():
        ended.add_metric([method, code], number)
    seconds = HistogramMetricFamily(
        PREFIX + "grpc_call_seconds", "From a call's beginning to its status.", labels=["method"]
    )
    for method, histogram in counts.seconds.items():
        _add(seconds, [method], histogram)
    yield from (in_flight, ended, seconds)


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, buckets=histogram.buckets, sum_value=histogram.sum_s)

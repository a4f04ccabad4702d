"""From a Cancel to the moment when nothing of the request is left in the worker, by the state it was in.

usage: PYTHONPATH=tests cancel_latency.py [--times 100] [--step-ms 25] [--json FILE]

A tiny model whose steps are made to take `--step-ms` at least. What is measured ends when the service's statistics show
every page free again, so that it includes the poll's own round trip. Allowed: two steps and 20 ms at the 99th
percentile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chairlift_client import AdminClient, Client
from support.live_server import LiveServer, live_server
from support.tiny_models import tiny_model

ALLOWED_MS = 20.0
LONG = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 400}
CACHE = ("--page-size", "4", "--num-blocks", "160", "--max-prefill-chunk", "8", "--max-requests-per-batch", "2")
SWAP = ("--cpu-offload-space", "0.01")

Statistics = dict[str, int]


def until(client: Client, holds: Callable[[Statistics], bool]) -> float:
    """Seconds until the statistics are so; at most 20."""
    began = time.monotonic()
    while not holds(client.get_server().statistics):
        if time.monotonic() - began > 20:
            raise RuntimeError(f"never came: {client.get_server().statistics}")
    return time.monotonic() - began


def is_empty(seen: Statistics) -> bool:
    """Whether nothing is left of any request."""
    gone = seen["requests_waiting"] + seen["requests_running"] + seen["requests_swapped"] + seen["swap_blocks_used"]
    return gone == 0 and seen["blocks_free"] + seen["blocks_cached"] == seen["blocks_total"]


@contextlib.contextmanager
def waiting(client: Client, _: AdminClient) -> Iterator[tuple[str, Callable[[Statistics], bool]]]:
    """Behind two that fill the batch."""
    others = [client.add_request([9 + i], **LONG).request_id for i in range(2)]
    until(client, lambda seen: seen["requests_running"] == 2)
    target = client.add_request([5, 6, 7], **LONG).request_id
    until(client, lambda seen: seen["requests_waiting"] == 1)
    yield target, lambda seen: seen["requests_waiting"] == 0
    client.cancel(*others)


@contextlib.contextmanager
def prefilling(client: Client, _: AdminClient) -> Iterator[tuple[str, Callable[[Statistics], bool]]]:
    """Part-way through a prompt of fifty steps."""
    before = client.get_server().statistics["computed_tokens"]
    target = client.add_request([5 + i % 300 for i in range(400)], **{**LONG, "max_new_tokens": 100}).request_id
    until(client, lambda seen: seen["computed_tokens"] >= before + 16)
    yield target, is_empty


@contextlib.contextmanager
def decoding(client: Client, _: AdminClient) -> Iterator[tuple[str, Callable[[Statistics], bool]]]:
    """After its first tokens."""
    before = client.get_server().statistics["generated_tokens"]
    target = client.add_request([5, 6, 7], **LONG).request_id
    until(client, lambda seen: seen["generated_tokens"] >= before + 3)
    yield target, is_empty


@contextlib.contextmanager
def swapped(client: Client, _: AdminClient) -> Iterator[tuple[str, Callable[[Statistics], bool]]]:
    """Evicted by an older one, both of which have prompts of half the cache."""
    older = client.add_request([5 + i % 300 for i in range(312)], **{**LONG, "max_new_tokens": 100}).request_id
    target = client.add_request([7 + i % 290 for i in range(312)], **{**LONG, "max_new_tokens": 100}).request_id
    until(client, lambda seen: seen["requests_swapped"] == 1)
    yield target, lambda seen: seen["requests_swapped"] == 0 and seen["swap_blocks_used"] == 0
    client.cancel(older)


@contextlib.contextmanager
def paused(client: Client, admin: AdminClient) -> Iterator[tuple[str, Callable[[Statistics], bool]]]:
    """In a service that stands still."""
    with decoding(client, admin) as (target, holds):
        admin.pause()
        yield target, holds
    admin.resume()


STATES = (waiting, prefilling, decoding, swapped, paused)


def measure(server: LiveServer, *, times: int) -> dict[str, list[float]]:
    """Milliseconds of each, by state."""
    found: dict[str, list[float]] = {state.__name__: [] for state in STATES}
    with Client(server.target) as client, AdminClient(server.admin_target) as admin:
        for state in STATES:
            for _ in range(times):
                with state(client, admin) as (target, holds):
                    began = time.monotonic()
                    client.cancel(target)
                    until(client, holds)
                    found[state.__name__].append((time.monotonic() - began) * 1e3)
                until(client, is_empty)
    return found


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--step-ms", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = ("--dtype", "float32", *CACHE, *SWAP, "--fault-injection", f"slow:{args.step_ms}")
    with live_server(tiny_model("llama"), *options) as server:
        found = measure(server, times=args.times)
        with Client(server.target) as client:
            seen = client.get_server().statistics
    step_ms = seen["busy_ns"] / seen["steps"] / 1e6
    allowed = 2 * step_ms + ALLOWED_MS
    print(f"a step takes {step_ms:.1f} ms; allowed: {allowed:.1f} ms")
    print("state        p50 ms   p99 ms   max ms")
    for name, values in found.items():
        p99 = statistics.quantiles(values, n=100)[98]
        print(f"{name:<10} {statistics.median(values):8.1f} {p99:8.1f} {max(values):8.1f}")
    if args.json:
        args.json.write_text(json.dumps({"step_ms": step_ms, "allowed_ms": allowed, "milliseconds": found}))


if __name__ == "__main__":
    main()

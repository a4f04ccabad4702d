"""How long health takes to answer while the service has the most to do that a caller can give it.

usage: PYTHONPATH=tests health_latency.py [--streams 500] [--seconds 20] [--model MODEL] [--json FILE]

Meanwhile: `--streams` open streams, a prompt of 3 MB of text that is refused, again and again, and a prompt as long as
the context that is computed. Health is asked every 50 ms over a connection of its own, by a process of its own. Asked
for: every answer within 200 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc
from chairlift_client import AsyncClient, ChairliftError, Client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.live_server import live_server
from support.tiny_models import tiny_model

ALLOWED_MS = 200.0
EVERY_S = 0.05
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def probe(target: str, seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    found = []
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            found.append((time.monotonic() - began) * 1e3)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise RuntimeError("not serving")
            time.sleep(EVERY_S)
    return found


async def burden(target: str, *, streams: int, seconds: float, context_len: int) -> int:
    """Does all that for so long; returns how many large prompts were refused."""
    text = "It was a dark and stormy night; the rain fell in torrents. " * (3 * 2**20 // 59)
    refused = 0

    async def open_stream(client: AsyncClient, number: int) -> None:
        async with client.generate(
            [5 + number % 300, 6], max_new_tokens=min(1000, context_len - 2), **GREEDY
        ) as events:
            async for _ in events:
                pass

    async def refuse(client: AsyncClient) -> None:
        nonlocal refused
        while True:
            with contextlib.suppress(ChairliftError):
                await client.complete(text, max_new_tokens=1)
                raise RuntimeError("3 MB were not refused")
            refused += 1

    async def whole_context(client: AsyncClient) -> None:
        while True:
            await client.complete([5 + i % 300 for i in range(context_len - 2)], max_new_tokens=1, **GREEDY)

    async with AsyncClient(target) as client:
        tasks = [asyncio.create_task(open_stream(client, number)) for number in range(streams)]
        tasks += [asyncio.create_task(refuse(client)), asyncio.create_task(whole_context(client))]
        await asyncio.sleep(seconds)
        for task in tasks:
            if task.done() and task.exception() is not None:
                raise RuntimeError("a call failed") from task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return refused


def main() -> None:
    """Prints the figures; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", help="instead of a tiny one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        print(json.dumps(probe(args.probe, args.seconds)))
        return
    with live_server(args.model or tiny_model("llama"), "--max-requests-per-batch", "64") as server:
        with Client(server.target) as client:
            context_len = client.get_model().context_len
        command = [sys.executable, __file__, "--probe", server.target, "--seconds", str(args.seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as prober:
            work = burden(server.target, streams=args.streams, seconds=args.seconds, context_len=context_len)
            refused = asyncio.run(work)
            found = json.loads(prober.communicate()[0])
    p99 = statistics.quantiles(found, n=100)[98]
    print(
        f"{len(found)} answers beside {args.streams} streams, {refused} prompts of 3 MB refused, context {context_len}"
    )
    print(f"ms: p50 {statistics.median(found):.1f}, p99 {p99:.1f}, max {max(found):.1f}; allowed {ALLOWED_MS:.0f}")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Two hundred streams, one in ten of which is never read, beside as many that all are.

usage: PYTHONPATH=tests unread_streams.py [--streams 200] [--tokens 400] [--runs 3] [--json FILE]

Tokens a second of the streams that are read, and how much memory the service takes for one that is not. A tiny model;
the callers that do not read have HTTP/2 windows as small as gRPC allows. The two kinds of run take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
from chairlift.v1 import generation_service_pb2, generation_service_pb2_grpc
from chairlift_client import AsyncClient, Delta
from support.live_server import LiveServer, live_server
from support.tiny_models import tiny_model

GREEDY = {"temperature": 0.0, "ignore_eos": True}
UNREAD_TOKENS = 4000
BUFFER = 256
WINDOWS = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


async def read(client: AsyncClient, number: int, tokens: int) -> float:
    """Tokens a second of one stream, from its first to its last."""
    first, count = 0.0, 0
    async with client.generate([5 + number, 6], max_new_tokens=tokens, **GREEDY) as events:
        async for event in events:
            if isinstance(event, Delta):
                first = first or time.monotonic()
                count += len(event.token_ids)
    return count / (time.monotonic() - first)


async def leave_unread(channel: grpc.aio.Channel, number: int) -> Any:
    """A stream of which only the first message is read."""
    request = generation_service_pb2.GenerateRequest()
    request.request.token_ids.ids.extend([5 + number, 7])
    request.request.max_new_tokens = UNREAD_TOKENS
    request.request.stop.ignore_eos = True
    call = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)
    await call.read()
    return call


async def one_run(server: LiveServer, *, streams: int, unread: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of a read stream, the median, and by how many bytes the service has grown."""
    service = psutil.Process(server.process.pid)
    before = service.memory_info().rss
    async with (
        AsyncClient(server.target) as client,
        grpc.aio.insecure_channel(server.target, options=WINDOWS) as channel,
    ):
        calls = [await leave_unread(channel, number) for number in range(unread)]
        rates = await asyncio.gather(*(read(client, number, tokens) for number in range(streams - unread)))
        grown = service.memory_info().rss - before
        for call in calls:
            call.cancel()
    return statistics.median(rates), grown


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = ("--dtype", "float32", "--model-config", "max_position_embeddings=8192", "--num-blocks", "8192")
    limits = ("--max-requests-per-batch", "256", "--reader-buffer-tokens", str(BUFFER), "--page-size", "16")
    found: dict[str, list[tuple[float, float]]] = {"all read": [], "one in ten unread": []}
    with live_server(tiny_model("llama"), *model, *limits) as server:
        asyncio.run(one_run(server, streams=args.streams, unread=args.streams // 10, tokens=50))  # first-time work
        for _ in range(args.runs):
            for name, unread in (("all read", 0), ("one in ten unread", args.streams // 10)):
                run = one_run(server, streams=args.streams, unread=unread, tokens=args.tokens)
                found[name].append(asyncio.run(run))
    print("streams             tokens/s of a read one (slowest to fastest run)   service grew, MB")
    for name, runs in found.items():
        rates, grown = [rate for rate, _ in runs], max(bytes_ for _, bytes_ in runs) / 1e6
        print(f"{name:<18} {statistics.median(rates):8.1f} ({min(rates):.1f} to {max(rates):.1f}) {grown:24.1f}")
    ratio = statistics.median(r for r, _ in found["one in ten unread"]) / statistics.median(
        r for r, _ in found["all read"]
    )
    print(f"ratio {ratio:.3f}; asked for: 0.95")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

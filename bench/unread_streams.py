"""A hundred and eighty streams that are read, with and without twenty others that nobody reads.

usage: PYTHONPATH=tests unread_streams.py [--model demo|tiny] [--read 180] [--unread 20] [--tokens 96] [--runs 3]
                                          [--json FILE]

Tokens a second of the streams that are read, all of them together, and how much memory the service takes for those that
are not. The callers that do not read have HTTP/2 windows as small as gRPC allows, and so many tokens to come that their
buffers are full when the others begin. The two kinds of run take turns; which one is first changes.
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
UNREAD_TOKENS = 1000
BUFFER = 32
WINDOWS = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


async def read(client: AsyncClient, number: int, tokens: int) -> int:
    """How many tokens a stream brought."""
    count = 0
    async with client.generate([5 + number, 6], max_new_tokens=tokens, **GREEDY) as events:
        async for event in events:
            if isinstance(event, Delta):
                count += len(event.token_ids)
    return count


async def leave_unread(channel: grpc.aio.Channel, number: int) -> Any:
    """A stream of which only the first message is read."""
    request = generation_service_pb2.GenerateRequest()
    request.request.token_ids.ids.extend([5 + number, 7])
    request.request.max_new_tokens = UNREAD_TOKENS
    request.request.stop.ignore_eos = True
    call = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)
    await call.read()
    return call


async def all_held(client: AsyncClient) -> None:
    """Waits until no request gets a token any more."""
    steps = -1
    while steps != (now := (await client.get_server()).statistics["steps"]):
        steps = now
        await asyncio.sleep(0.5)


async def one_run(server: LiveServer, *, streams: int, unread: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of a stream that is read, and by how many bytes the service has grown."""
    service = psutil.Process(server.process.pid)
    before = service.memory_info().rss
    async with (
        AsyncClient(server.target) as client,
        grpc.aio.insecure_channel(server.target, options=WINDOWS) as channel,
    ):
        calls = [await leave_unread(channel, number) for number in range(unread)]
        await all_held(client)
        began = time.monotonic()
        counts = await asyncio.gather(*(read(client, number, tokens) for number in range(streams)))
        seconds = time.monotonic() - began
        grown = service.memory_info().rss - before
        for call in calls:
            call.cancel()
    return statistics.mean(counts) / seconds, grown


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=int, default=180)
    parser.add_argument("--unread", type=int, default=20)
    parser.add_argument("--model", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tiny = ("--dtype", "float32", "--model-config", "max_position_embeddings=8192", "--page-size", "16")
    model, options = ("demo", ()) if args.model == "demo" else (tiny_model("llama"), tiny)
    limits = ("--num-blocks", "8192", "--max-requests-per-batch", "256", "--reader-buffer-tokens", str(BUFFER))
    kinds = [("alone", 0), ("beside unread ones", args.unread)]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in kinds}
    with live_server(model, *options, *limits) as server:
        for _, unread in kinds:  # first-time work
            asyncio.run(one_run(server, streams=args.read, unread=unread, tokens=args.tokens // 4))
        for _ in range(args.runs):
            for name, unread in kinds:
                run = one_run(server, streams=args.read, unread=unread, tokens=args.tokens)
                found[name].append(asyncio.run(run))
            kinds.reverse()
    print("streams             tokens/s of a read one (slowest to fastest run)   service grew, MB")
    for name, runs in found.items():
        rates, grown = [rate for rate, _ in runs], max(bytes_ for _, bytes_ in runs) / 1e6
        print(f"{name:<18} {statistics.median(rates):8.1f} ({min(rates):.1f} to {max(rates):.1f}) {grown:24.1f}")
    ratio = statistics.median(r for r, _ in found["beside unread ones"]) / statistics.median(
        r for r, _ in found["alone"]
    )
    print(f"ratio {ratio:.3f}; asked for: 0.95")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

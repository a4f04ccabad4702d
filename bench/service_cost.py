"""The service's CPU time a token, beside a bare grpc.aio stream of the same messages at the same pace.

usage: PYTHONPATH=tests service_cost.py [--streams 1 16 64] [--tokens 300] [--step-ms 30] [--metrics] [--json FILE]

Both servers run in a process of their own, behind a Unix socket, and are read by the same client. The worker is the
tests' fake one, which sends a token for each stream every step: what is measured is the service alone. CPU time is
user + system of the server's process, over the tokens sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import psutil
from chairlift.v1 import event_pb2, generation_service_pb2, generation_service_pb2_grpc
from support.serve_fake import COMMAND_LINE
from support.tiny_models import write_tokenizer

PROMPT = list(range(40, 72))


class Bare(generation_service_pb2_grpc.GenerationServiceServicer):
    """Streams ready-made messages at the pace of steps: what gRPC alone costs."""

    def __init__(self, *, tokens: int, step_s: float) -> None:
        self._tokens = tokens
        self._step_s = step_s

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generation_service_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
        """The same number of messages, as large as the service's."""
        del request, context
        began = time.monotonic()
        for index in range(self._tokens):
            await asyncio.sleep(max(0.0, began + (index + 1) * self._step_s - time.monotonic()))
            delta = event_pb2.Delta(index=index, num_tokens=1, token_ids=[PROMPT[index % len(PROMPT)]])
            yield generation_service_pb2.GenerateResponse(delta=delta)


async def serve_bare(address: str, tokens: int, step_s: float) -> None:
    """The bare server, until it is ended."""
    server = grpc.aio.server()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(Bare(tokens=tokens, step_s=step_s), server)
    server.add_insecure_port(address)
    await server.start()
    print("chairlift: serving bare", flush=True)
    await server.wait_for_termination()


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[psutil.Process]:
    """A server in a process, once it says that it serves."""
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert b"serving" in process.stdout.readline(), "the server did not start"
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


async def read_all(address: str, *, streams: int, tokens: int) -> int:
    """Reads so many streams at once; the number of tokens received."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

        async def one() -> int:
            request = generation_service_pb2.GenerateRequest()
            request.request.token_ids.ids.extend(PROMPT)
            request.request.max_new_tokens = tokens
            request.request.output.text = False
            return sum([len(response.delta.token_ids) async for response in stub.Generate(request)])

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


def cost(process: psutil.Process, address: str, *, streams: int, tokens: int) -> float:
    """Microseconds of the process's CPU a token."""
    asyncio.run(read_all(address, streams=streams, tokens=10))  # first-time work
    before = process.cpu_times()
    received = asyncio.run(read_all(address, streams=streams, tokens=tokens))
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / received * 1e6


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--metrics", action="store_true", help="with the service's metrics on; nobody scrapes them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        asyncio.run(serve_bare(args.bare, args.tokens, args.step_ms / 1000))
        return
    lines = []
    print("streams  service us/token  bare us/token  ratio")
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:
        write_tokenizer(Path(folder))
        script = {"tokenizer_dir": folder, "step_s": args.step_ms / 1000}
        address, bare_address = f"unix:{folder}/s", f"unix:{folder}/b"
        service = [*COMMAND_LINE, "--model", "fake", "--listen", address]
        service += ["--metrics-listen", f"unix:{folder}/m"] if args.metrics else []
        bare = [sys.executable, __file__, "--bare", bare_address, *("--tokens", str(args.tokens))]
        bare += ["--step-ms", str(args.step_ms)]
        with running(service, {"FAKE_WORKER": json.dumps(script)}) as ours, running(bare, {}) as theirs:
            for streams in args.streams:
                mine = cost(ours, address, streams=streams, tokens=args.tokens)
                base = cost(theirs, bare_address, streams=streams, tokens=args.tokens)
                lines.append({"streams": streams, "service_us": mine, "bare_us": base, "ratio": mine / base})
                print(f"{streams:7}  {mine:16.0f}  {base:13.0f}  {mine / base:5.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()

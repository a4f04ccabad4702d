"""`chairlift bench`: run a workload and measure what a caller sees."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

import grpc
import grpc.aio
from chairlift.v1 import generation_service_pb2

from chairlift_client import _errors, _requests
from chairlift_client._access import Connection
from chairlift_client._progress import Progress
from chairlift_client._requests import GenerateOptions
from chairlift_client._stubs import Stubs
from chairlift_client.cli import _input, _report
from chairlift_client.cli._output import Commands, WrongUseError, add_command, print_json
from chairlift_client.cli._report import Measured
from chairlift_client.cli._workload import WorkItem, read_workload

_CONNECT_TIMEOUT: Final = 10.0  # seconds


def add_bench(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = add_command(commands, common, "bench", run, "Run a workload and report throughput and latencies.")
    parser.add_argument("--workload", required=True, metavar="FILE.json", help="[{id, prompt: [ids], max_new_tokens}]")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, default=0, metavar="N", help="requests at a time (default 0: all)")
    load.add_argument("--rate", type=_input.positive_float, metavar="R", help="Poisson arrivals, R a second")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrival times (default 0)")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the distributions (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Run the command. Exit code 1 if any request failed."""
    if options.concurrency < 0:
        raise WrongUseError("--concurrency must not be negative")
    items = read_workload(options.workload)
    if options.plot:
        _report.check_plotting()
    requests = [_request(item, options) for item in items]
    measured, seconds = asyncio.run(_run(requests, options))
    figures = _report.report(measured, seconds)
    if options.json:
        print_json(figures)
    else:
        print(_report.table(figures))
    if options.plot:
        _report.plot(measured, options.plot)
    errors = sorted({m.error for m in measured if m.error is not None})
    for error in errors:
        print(f"chairlift bench: {error}", file=sys.stderr)
    return 1 if errors else 0


def _request(item: WorkItem, options: argparse.Namespace) -> generation_service_pb2.GenerateRequest:
    """The workload's ids are names, not request ids: the same workload may run twice at once."""
    wanted = GenerateOptions(
        max_new_tokens=item.max_new_tokens,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        return_text=False,
    )
    return generation_service_pb2.GenerateRequest(request=_requests.generation_request(item.prompt, wanted))


async def _run(
    requests: list[generation_service_pb2.GenerateRequest], options: argparse.Namespace
) -> tuple[list[Measured], float]:
    """Send all requests as the options say. Returns what was measured, and the seconds from first to last."""
    connection = Connection.resolve(options.target, options.access)
    async with connection.open_async() as channel:
        generate = Stubs(channel, metadata=connection.metadata).generation.Generate
        await _connect(channel, connection.target)
        with Progress(total=len(requests), stream=sys.stderr) as progress:
            if options.rate:
                tasks = await _at_rate(generate, requests, progress, rate=options.rate, seed=options.seed)
                measured = list(await asyncio.gather(*tasks))
            else:
                waiting = iter(requests)
                workers = min(options.concurrency or len(requests), len(requests))
                done = await asyncio.gather(*(_one_by_one(generate, waiting, progress) for _ in range(workers)))
                measured = [m for part in done for m in part]
    return measured, max(m.ended for m in measured) - min(m.sent for m in measured)


async def _connect(channel: grpc.aio.Channel, target: str) -> None:
    """Connect beforehand: it is not what is measured."""
    try:
        await asyncio.wait_for(channel.channel_ready(), _CONNECT_TIMEOUT)
    except TimeoutError:
        raise _errors.UnavailableError(f"nobody answers at {target}", code=grpc.StatusCode.UNAVAILABLE) from None


async def _at_rate(
    generate: Any,
    requests: list[generation_service_pb2.GenerateRequest],
    progress: Progress,
    *,
    rate: float,
    seed: int,
) -> list[asyncio.Task[Measured]]:
    """Begin requests at the arrival times of a Poisson process, whether or not earlier ones have ended."""
    gaps = random.Random(seed)  # noqa: S311 # arrival times, not secrets
    loop = asyncio.get_running_loop()
    due = loop.time()
    tasks = []
    for request in requests:
        due += gaps.expovariate(rate)
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(asyncio.create_task(_measure(generate, request, progress)))
    return tasks


async def _one_by_one(
    generate: Any, waiting: Iterable[generation_service_pb2.GenerateRequest], progress: Progress
) -> list[Measured]:
    """Take requests from what is waiting until nothing is."""
    return [await _measure(generate, request, progress) for request in waiting]


async def _measure(generate: Any, request: generation_service_pb2.GenerateRequest, progress: Progress) -> Measured:
    """Run one request. As little work a token as can be, to keep out of the service's way."""
    clock = time.perf_counter
    measured = Measured(sent=clock())
    arrivals = measured.arrivals
    finished = False
    try:
        async for message in generate(request):
            if message.HasField("delta"):
                arrivals.append((clock(), message.delta.num_tokens))
            else:
                finished = message.HasField("finished")
    except grpc.RpcError as error:
        measured.error = str(_errors.from_rpc_error(error))
    else:
        measured.error = None if finished else "a stream ended without an ending"
    measured.ended = clock()
    progress.advance()
    return measured

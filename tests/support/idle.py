"""IDLE-CHECK: after any test the service and its worker are as they were before the first request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from chairlift_client import Client, ServerInfo

from support.live_server import LiveServer

PATIENCE_S = 5.0


@dataclass(frozen=True)
class Footprint:
    """What the two processes hold of the system."""

    fds: tuple[int, ...]
    threads: tuple[int, ...]
    processes: int
    shared_memory: frozenset[str]

    @classmethod
    def of(cls, server: LiveServer) -> Footprint:
        service = psutil.Process(server.process.pid)
        family = [service, *service.children(recursive=True)]
        return cls(
            fds=tuple(process.num_fds() for process in family),
            threads=tuple(process.num_threads() for process in family),
            processes=len(family),
            shared_memory=frozenset(path.name for path in Path("/dev/shm").iterdir()),
        )


def assert_idle(server: LiveServer, before: Footprint | None = None) -> ServerInfo:
    """Fails unless everything is given back within PATIENCE_S, and stays so.

    Pages: free + cached = all. Swap pool empty, nobody waiting, running, swapped or held. The step counter stands
    still. With `before`: no new descriptors, threads, processes, nothing new in /dev/shm.
    """
    deadline = time.monotonic() + PATIENCE_S
    with Client(server.target) as client:
        while True:
            problems, info = _problems(client)
            if not problems or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        assert not problems, f"not idle after {PATIENCE_S} s: {problems}"
        time.sleep(0.1)
        again = client.get_server()
        assert again.statistics["steps"] == info.statistics["steps"], "steps without requests"
    while before is not None and (problem := _grown(before, Footprint.of(server))):
        assert time.monotonic() < deadline + PATIENCE_S, problem
        time.sleep(0.05)
    return again


def _problems(client: Client) -> tuple[list[str], ServerInfo]:
    info = client.get_server()
    figures = info.statistics
    zero = ("requests_waiting", "requests_running", "requests_swapped", "swap_blocks_used", "requests_held")
    problems = [f"{name} = {figures[name]}" for name in zero if figures[name]]
    free, cached, total = (figures[f"blocks_{name}"] for name in ("free", "cached", "total"))
    if free + cached != total:
        problems.append(f"pages: {free} free, {cached} cached of {total}")
    return problems, info


def _grown(before: Footprint, now: Footprint) -> str | None:
    if now.processes != before.processes:
        return f"{now.processes} processes, not {before.processes}"
    for what, old, new in (("descriptors", before.fds, now.fds), ("threads", before.threads, now.threads)):
        if any(b > a for a, b in zip(old, new, strict=True)):
            return f"{what}: {old} before, {new} now"
    if new_names := now.shared_memory - before.shared_memory:
        return f"left in /dev/shm: {sorted(new_names)}"
    return None

"""Callers of every kind, and faults of every kind, on one live service, at random but for a seed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from chairlift_client import (
    AsyncClient,
    DeadlineExceededError,
    Delta,
    Finished,
    FinishReason,
    OverloadedError,
    PoisonedRequestError,
)

from support.live_server import LiveServer

NUM_JOBS = 24
NUM_CALLERS = 24
BURST = 150  # requests that come at once
STORM = 40  # requests that are cancelled, or whose time is over, at once
PATIENCE_S = 120.0  # within which any call must be over
FAULT_EVERY_S = (2.0, 6.0)


@dataclass(frozen=True)
class Job:
    """A request whose answer is known."""

    prompt: list[int]
    options: dict[str, object]
    ids: list[int]


@dataclass
class Findings:
    """What has happened."""

    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)  # from the loss of a worker to the next token of any caller
    last_token: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.endings.total()


class Chaos:
    """Runs callers and faults side by side for some time."""

    def __init__(self, *, server: LiveServer, jobs: list[Job], seed: int) -> None:
        self._server = server
        self._jobs = jobs
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._until = 0.0
        self.findings = Findings()

    async def run(self, seconds: float) -> Findings:
        """Ends when every call is over. Raises where an answer is not what it should be, or a call does not end."""
        self._until = time.monotonic() + seconds
        async with AsyncClient(self._server.target) as client, asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLERS):
                group.create_task(self._call_on(client))
            group.create_task(self._break_on(client))
        return self.findings

    async def do_everything_once(self) -> None:
        """Each kind of caller, and as many at once as there will be: what is made at the first use is there then."""
        async with AsyncClient(self._server.target) as client:
            for _ in range(2):
                await self._burst(client)
                await self._storm(client)
        await self.run(5)

    async def _call_on(self, client: AsyncClient) -> None:
        """One caller after the other."""
        kinds = (self._stream, self._complete, self._detach, self._leave, self._cancel, self._hurry, self._dawdle)
        while time.monotonic() < self._until:
            kind: Callable[[AsyncClient, Job], Awaitable[str]] = self._rng.choice(kinds)
            await self._account(kind(client, self._rng.choice(self._jobs)))

    async def _account(self, call: Awaitable[str]) -> None:
        """Counts how a call ended, which must be one of the ways that there are."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                ending = await call
        except (PoisonedRequestError, OverloadedError, DeadlineExceededError) as error:
            ending = error.reason or type(error).__name__
            if isinstance(error, OverloadedError):
                await asyncio.sleep(0.2)  # as RetryInfo asks for
        self.findings.endings[ending] += 1

    async def _read(self, events: object, job: Job, ids: list[int]) -> Finished:
        """The rest of a stream, whose tokens must follow those that are there without a gap."""
        finished: Finished | None = None
        async for item in events:  # type: ignore[attr-defined]
            event = getattr(item, "event", item)
            assert finished is None, "something came after the ending"
            if isinstance(event, Delta):
                assert event.index == len(ids), "tokens were lost or doubled"
                ids.extend(event.token_ids)
                assert ids == job.ids[: len(ids)], "the answer is another one"
                self.findings.last_token = time.monotonic()
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None, "the stream has no ending"
        assert finished.usage.generated_tokens == len(ids)
        if finished.reason is not FinishReason.CANCELLED:
            assert ids == job.ids
        return finished

    def _max_tokens(self, job: Job) -> dict[str, object]:
        return {**job.options, "max_new_tokens": len(job.ids)}

    async def _stream(self, client: AsyncClient, job: Job) -> str:
        async with client.generate(job.prompt, **self._max_tokens(job)) as events:
            return (await self._read(events, job, [])).reason.name

    async def _complete(self, client: AsyncClient, job: Job) -> str:
        result = await client.complete(job.prompt, **self._max_tokens(job))
        assert list(result.token_ids) == job.ids
        self.findings.last_token = time.monotonic()
        return result.reason.name

    async def _detach(self, client: AsyncClient, job: Job) -> str:
        """Read a while, break off, read on from there."""
        request_id = f"chaos-{next(self._numbers)}"
        await client.add_request(job.prompt, request_id=request_id, **self._max_tokens(job))
        ids: list[int] = []
        stop = self._rng.randrange(len(job.ids))
        async with client.result(request_id) as events:
            async for item in events:
                if isinstance(item.event, Delta):
                    ids.extend(item.event.token_ids)
                if len(ids) >= stop:
                    break
        async with client.result(request_id, from_index=len(ids)) as events:
            reason = (await self._read(events, job, ids)).reason.name
        await client.cancel(request_id)  # lets the result go
        return reason

    async def _leave(self, client: AsyncClient, job: Job) -> str:
        stop, count = self._rng.randrange(len(job.ids)), 0
        async with client.generate(job.prompt, **self._max_tokens(job)) as events:
            async for event in events:
                count += len(event.token_ids) if isinstance(event, Delta) else 0
                if count >= stop:
                    break
        return "LEFT"

    async def _cancel(self, client: AsyncClient, job: Job) -> str:
        request_id = f"chaos-{next(self._numbers)}"
        async with client.generate(job.prompt, request_id=request_id, **self._max_tokens(job)) as events:
            reading = asyncio.create_task(self._read(events, job, []))
            await asyncio.sleep(self._rng.random() * 0.3)
            await client.cancel(request_id)
            return (await reading).reason.name

    async def _hurry(self, client: AsyncClient, job: Job) -> str:
        async with client.generate(job.prompt, timeout=self._rng.random() * 0.5, **self._max_tokens(job)) as events:
            return (await self._read(events, job, [])).reason.name

    async def _dawdle(self, client: AsyncClient, job: Job) -> str:
        """A caller that takes its time with every message."""
        ids: list[int] = []
        async with client.generate(job.prompt, **self._max_tokens(job)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    ids.extend(event.token_ids)
                    await asyncio.sleep(0.1)
        assert ids == job.ids
        return "LENGTH"

    async def _break_on(self, client: AsyncClient) -> None:
        """One fault after the other: the worker killed, then stopped, then any."""
        faults = (self._kill_worker, self._kill_worker, self._stop_worker, self._kill_caller, self._burst, self._storm)
        first: list[Callable[[AsyncClient], Awaitable[None]]] = [self._stop_worker, self._kill_worker]
        while time.monotonic() < self._until:
            await asyncio.sleep(self._rng.uniform(*FAULT_EVERY_S))
            fault = first.pop() if first else self._rng.choice(faults)
            self.findings.faults[fault.__name__.strip("_").replace("_", " ")] += 1
            await fault(client)

    async def _signal_worker(self, client: AsyncClient, number: signal.Signals) -> None:
        """Waits until tokens come again, from another one."""
        pids = (await client.get_server()).worker_pids
        if not pids:  # the one before it is still being replaced
            return
        began = time.monotonic()
        os.kill(pids[0], number)
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get_server()).worker_pids in ((), pids):  # noqa: ASYNC110 - to be asked for
                await asyncio.sleep(0.02)
            replaced = time.monotonic()
            while self.findings.last_token < replaced < self._until:  # noqa: ASYNC110 - what comes has no event
                await asyncio.sleep(0.02)
        if self.findings.last_token >= replaced:
            self.findings.recoveries_s.append(self.findings.last_token - began)

    async def _kill_worker(self, client: AsyncClient) -> None:
        await self._signal_worker(client, signal.SIGKILL)

    async def _stop_worker(self, client: AsyncClient) -> None:
        await self._signal_worker(client, signal.SIGSTOP)

    async def _kill_caller(self, client: AsyncClient) -> None:
        """A program that dies in the middle of a stream."""
        program = Path(sys.executable).with_name("chairlift")
        arguments = ("generate", "--target", self._server.target, "--ids", "5,6,7", "--max-new-tokens", "300")
        process = await asyncio.create_subprocess_exec(
            *(program, *arguments, "--ignore-eos", "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            await process.stdout.readline()
        process.kill()
        await process.wait()

    async def _burst(self, client: AsyncClient) -> None:
        """More than the cache has room for, and than may wait."""
        jobs = self._rng.choices(self._jobs, k=BURST)
        await asyncio.gather(*(self._account(self._complete(client, job)) for job in jobs))

    async def _storm(self, client: AsyncClient) -> None:
        """Cancellations, and deadlines, all at once."""
        jobs = self._rng.choices(self._jobs, k=STORM)
        kinds = (self._cancel, self._hurry)
        await asyncio.gather(*(self._account(self._rng.choice(kinds)(client, job)) for job in jobs))

"""Rendering of chat templates, in helper processes that are ended when a template does not end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chairlift_service.child_process import ChildProcess, describe_exit
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.text.render_frames import HEADER, MAX_ANSWER_BYTES, AddedTokens, Answer, Question
from chairlift_service.text.rendering import TemplateError

NUM_PROCESSES: Final = 2
MAX_WAITING_RENDERS: Final = 256
_PROGRAM: Final = ("-m", "chairlift_service.text.render_program")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one render may use."""

    cpu_s: float = 2.0
    wall_s: float = 20.0  # where the machine is so busy that processor time does not pass
    memory_bytes: int = 512 * 2**20


class Renderer:
    """Up to NUM_PROCESSES processes, made when they are needed and kept; each renders one template at a time."""

    def __init__(self, *, tokens: AddedTokens, limits: RenderLimits = RenderLimits()) -> None:
        self._tokens = tokens
        self._limits = limits
        self._free = asyncio.Semaphore(NUM_PROCESSES)
        self._helpers: set[_Helper] = set()  # whose processes are not over
        self._idle: list[_Helper] = []
        self._num_waiting = 0

    async def render(self, question: Question) -> Answer:
        """The prompt. Raises TemplateError; ServiceError QUEUE_FULL where too many wait."""
        if self._num_waiting >= MAX_WAITING_RENDERS:
            raise ServiceError(Reason.QUEUE_FULL, "too many conversations wait for the chat template")
        self._num_waiting += 1
        try:
            async with self._free:
                helper = self._idle.pop() if self._idle else await self._start()
                try:
                    answer = await helper.ask(question)
                except BaseException:
                    # The caller left, or the process did: what it would still say belongs to nobody.
                    helper.kill()
                    raise
                self._idle.append(helper)
        finally:
            self._num_waiting -= 1
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer

    async def close(self) -> None:
        """Ends the processes, and whatever they are at."""
        for helper in list(self._helpers):
            helper.kill()
            await helper.ended()

    async def _start(self) -> _Helper:
        helper = await _Helper.start(self._tokens, self._limits)
        self._helpers.add(helper)
        helper.when_ended(lambda: self._helpers.discard(helper))
        return helper


class _Helper:
    """One process and this end of its socket."""

    def __init__(
        self,
        *,
        process: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: RenderLimits,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._limits = limits

    @classmethod
    async def start(cls, tokens: AddedTokens, limits: RenderLimits) -> _Helper:
        """A new one; it gets its questions as soon as it is up."""
        ours, theirs = socket.socketpair()
        with theirs:
            options = {"fd": theirs.fileno(), "cpu-seconds": limits.cpu_s, "memory-bytes": limits.memory_bytes}
            flags = [f"--{name}={value}" for name, value in options.items()]
            argv = [sys.executable, *_PROGRAM, *flags]
            process = ChildProcess(argv=argv, pass_fds=[theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(_frame(tokens))
        return cls(process=process, reader=reader, writer=writer, limits=limits)

    async def ask(self, question: Question) -> Answer:
        """Its answer. Raises TemplateError where the process ended instead, or takes too long."""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                self._writer.write(_frame(question))
                await self._writer.drain()
                (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if num_bytes > MAX_ANSWER_BYTES:
                    raise TemplateError("the template wrote too much")
                answer: Answer = json.loads(await self._reader.readexactly(num_bytes))
                return answer
        except TimeoutError:
            raise TemplateError(f"the template took more than {self._limits.wall_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.end(patience_s=1.0)
            if code == -signal.SIGPROF:
                raise TemplateError(f"the template took more than {self._limits.cpu_s:g} s of processor time") from None
            raise TemplateError(f"the template ended its process: {describe_exit(code)}") from None

    def kill(self) -> None:
        """Ends the process."""
        self._writer.close()
        self._process.kill()

    async def ended(self) -> None:
        """Waits for its end."""
        await asyncio.shield(self._process.exited)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Calls `then` after its end."""
        self._process.exited.add_done_callback(lambda _: then())


def _frame(content: AddedTokens | Question) -> bytes:
    encoded = json.dumps(content).encode()
    return HEADER.pack(len(encoded)) + encoded

"""A child process of the service: spawned, watched by a pidfd, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})


class ChildProcess:
    """A child process whose end is noticed at once.

    Make it in the main thread: the child asks the kernel for a signal when its parent *thread* ends. It gets a
    session of its own, so that Ctrl-C in a terminal does not reach it, and standard error as its standard output,
    since the service's own standard output is for one line. Of the service's descriptors it sees `pass_fds` alone.
    """

    def __init__(
        self, *, argv: Sequence[str], pass_fds: Sequence[int], variables: Mapping[str, str] = _NO_VARIABLES
    ) -> None:
        """`variables` come on top of this process's environment."""
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=2,
            close_fds=True,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            env={**os.environ, **variables},
        )
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def kill(self) -> None:
        """Ends it and whatever it started, at once. Does nothing if it is over."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    async def end(self, *, patience_s: float) -> int:
        """Waits so long for it to end by itself, then kills it. Returns its exit code, negative for a signal."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self.exited), patience_s)
        self.kill()
        return await self.exited

    def _reap(self) -> None:
        """The pidfd is readable: the process is over."""
        self._loop.remove_reader(self._pidfd)
        code = self._popen.wait()
        os.close(self._pidfd)
        if not self.exited.done():
            self.exited.set_result(code)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"

"""The processes of one worker, its ranks: one, or several that share each layer (tensor parallelism)."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from chairlift_worker.ipc.status import Status, StatusReader

from chairlift_service.child_process import ChildProcess, describe_exit

LOOPBACK: Final = "127.0.0.1"

REST_S: Final = 2.0
"""How long the others may take to end by themselves once rank 0 has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """How one rank is started, and where it shows what it does."""

    argv: Sequence[str]
    pass_fds: Sequence[int]
    status: StatusReader


class RankProcesses:
    """They begin together and end together: without one of them the others are of no use.

    Several get the variables that torchrun sets, and meet at a port of the loopback interface. Rank 0 inherits the
    socket that listens there, so that nobody else can take the port in between.
    """

    def __init__(self, launches: Sequence[RankLaunch]) -> None:
        """Starts them. Raises OSError, with none left, where one cannot be started."""
        self._launches = launches
        self._processes: list[ChildProcess] = []
        self.first_exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # in words
        try:
            if len(launches) == 1:
                self._start(launches[0], {}, ())
            else:
                self._start_several()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank, of those that are not over."""
        return tuple(process.pid for process in self._processes if not process.exited.done())

    @property
    def leader_exited(self) -> asyncio.Future[int]:
        """Rank 0's exit code."""
        return self._processes[0].exited

    def statuses(self) -> list[tuple[str, Status]]:
        """What each shows of itself now, and its name."""
        return [(self._name(number), launch.status.read()) for number, launch in enumerate(self._launches)]

    def kill(self) -> None:
        """Ends all of them, and whatever they started, at once."""
        for process in self._processes:
            process.kill()

    async def gone(self, *, timeout_s: float) -> None:
        """Waits until all are over."""
        await asyncio.wait([process.exited for process in self._processes], timeout=timeout_s)

    async def end(self, *, patience_s: float) -> str:
        """Waits so long for them to end by themselves, then kills them. How rank 0 ended, in words."""
        leader, *others = self._processes
        code = await leader.end(patience_s=patience_s)
        await asyncio.gather(*(process.end(patience_s=REST_S) for process in others))
        return describe_exit(code)

    def _start_several(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as meeting:
            port = meeting.getsockname()[1]
            for number, launch in enumerate(self._launches):
                variables = {
                    "RANK": str(number),
                    "LOCAL_RANK": str(number),
                    "WORLD_SIZE": str(len(self._launches)),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",  # what ranks say to each other does not leave the machine
                }
                self._start(launch, variables, (meeting.fileno(),) if number == 0 else ())

    def _start(self, launch: RankLaunch, variables: Mapping[str, str], listen_fds: tuple[int, ...]) -> None:
        argv = [*launch.argv, *(word for fd in listen_fds for word in ("--listen-fd", str(fd)))]
        process = ChildProcess(argv=argv, pass_fds=(*launch.pass_fds, *listen_fds), variables=variables)
        name = self._name(len(self._processes))
        self._processes.append(process)
        process.exited.add_done_callback(lambda exited: self._note(f"{name}{describe_exit(exited.result())}"))

    def _note(self, how: str) -> None:
        if not self.first_exit.done():
            self.first_exit.set_result(how)

    def _name(self, number: int) -> str:
        """What to put before what is said of a rank; nothing where there is but one."""
        return f"rank {number}: " if len(self._launches) > 1 else ""

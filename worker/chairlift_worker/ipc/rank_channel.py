"""What joins the service and a rank of a worker that only follows: a status page, and a life line.

Rank 0 has the rings (channel.py). Nothing here has a name, either, and each rank of each worker gets its own.
"""

from __future__ import annotations

import os
import select
from contextlib import ExitStack, closing
from typing import Final

from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.ipc.status import StatusReader, StatusWriter, create_page

_NUM_FDS: Final = 2


class ServiceRankChannel:
    """The service's ends. Owns every descriptor and all memory, through `resources`."""

    def __init__(self, *, status: StatusReader, worker_fds: tuple[int, ...], resources: ExitStack) -> None:
        self.status = status
        self.worker_fds = worker_fds
        self._resources = resources

    @classmethod
    def create(cls) -> ServiceRankChannel:
        """Raises OSError where memory or descriptors do not suffice."""
        resources = ExitStack()
        try:
            page = resources.enter_context(closing(create_page()))
            life_read, life_write = os.pipe2(os.O_CLOEXEC)
            resources.callback(os.close, life_read)
            resources.callback(os.close, life_write)
            return cls(status=StatusReader(memory=page), worker_fds=(page.fd, life_read), resources=resources)
        except BaseException:
            resources.close()
            raise

    @property
    def description(self) -> str:
        """What `RankChannel.attach` needs; digits and a colon."""
        return ":".join(map(str, self.worker_fds))

    def close(self) -> None:
        """Give everything back, life line included; a second call does nothing."""
        self._resources.close()


class RankChannel:
    """The rank's ends. Owns its descriptors and mapping, through `resources`."""

    def __init__(self, *, status: StatusWriter, life_fd: int, resources: ExitStack) -> None:
        self.status = status
        self._resources = resources
        self._life = select.poll()
        self._life.register(life_fd, 0)  # a hang-up is always reported

    @classmethod
    def attach(cls, description: str) -> RankChannel:
        """The channel of which `ServiceRankChannel.description` tells; its descriptors become this channel's own.

        Raises ValueError for a description of another kind, OSError for descriptors that are not open.
        """
        fds = [int(part) for part in description.split(":")]
        if len(fds) != _NUM_FDS:
            raise ValueError(f"{description!r} describes no channel of a rank")
        resources = ExitStack()
        try:
            for fd in fds:
                os.set_inheritable(fd, False)  # noqa: FBT003 - the parameter has no keyword
            page = resources.enter_context(closing(SharedMemory(fd=fds[0])))
            resources.callback(os.close, fds[1])
            return cls(status=StatusWriter(memory=page), life_fd=fds[1], resources=resources)
        except BaseException:
            resources.close()
            raise

    def service_gone(self) -> bool:
        """Whether the service closed the channel or died."""
        return bool(self._life.poll(0))

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        self._resources.close()

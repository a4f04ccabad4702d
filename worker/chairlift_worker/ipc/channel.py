"""All that joins the service and one worker process: two rings, their doorbells, status page, roll, life line.

    service                                   worker
    requests: Sender      ── requests ring ─▶ requests: Receiver
    results: Receiver     ◀── results ring ── results: Sender
    status: StatusReader  ◀── status page ─── status: StatusWriter
    roll: RollReader      ◀── roll ────────── roll: RollWriter
    (write end, held)     ──── life line ───▶ hangs up when the service is gone, whatever ended it

Nothing has a name. The service creates, starts the worker with `pass_fds=channel.worker_fds` and with the description
in its arguments, and makes a new channel for each worker: what a dead one left is never used again.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Final

from chairlift_worker.ipc.doorbell import Doorbell, milliseconds
from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.ipc.ring import Receiver, RingMemory, Sender
from chairlift_worker.ipc.roll import RollReader, RollWriter, create_roll
from chairlift_worker.ipc.status import StatusReader, StatusWriter, create_page

DEFAULT_RING_BYTES: Final = 4 << 20
SPIN_S: Final = 50e-6  # look this long before parking: about what a wake-up costs
SLICE_S: Final = 0.005  # how often a full results ring is tried again

_VERSION: Final = 2
_NUM_FDS: Final = 7


class ServiceGoneError(Exception):
    """The service closed the channel or died."""


class ServiceChannel:
    """The service's ends. Owns every descriptor and all memory, through `resources`."""

    def __init__(
        self,
        *,
        requests: Sender,
        results: Receiver,
        results_doorbell: Doorbell,
        status: StatusReader,
        roll: RollReader,
        worker_fds: tuple[int, ...],
        resources: ExitStack,
    ) -> None:
        self.requests = requests
        self.results = results
        self.results_doorbell = results_doorbell  # for the event loop; doorbell.py has the protocol
        self.status = status
        self.roll = roll
        self.worker_fds = worker_fds
        self._resources = resources

    @classmethod
    def create(
        cls, *, request_bytes: int = DEFAULT_RING_BYTES, result_bytes: int = DEFAULT_RING_BYTES
    ) -> ServiceChannel:
        """A channel with rings of these capacities: powers of two, else ValueError. OSError: no memory or fds."""
        resources = ExitStack()
        try:
            requests = resources.enter_context(closing(RingMemory.create(capacity=request_bytes)))
            results = resources.enter_context(closing(RingMemory.create(capacity=result_bytes)))
            page = resources.enter_context(closing(create_page()))
            roll = resources.enter_context(closing(create_roll()))
            requests_doorbell = resources.enter_context(closing(Doorbell.create()))
            results_doorbell = resources.enter_context(closing(Doorbell.create()))
            life_read, life_write = os.pipe2(os.O_CLOEXEC)
            resources.callback(os.close, life_read)
            resources.callback(os.close, life_write)
            fds = (requests.fd, results.fd, page.fd, requests_doorbell.fd, results_doorbell.fd, life_read, roll.fd)
            return cls(
                requests=resources.enter_context(closing(Sender(memory=requests, doorbell=requests_doorbell))),
                results=resources.enter_context(closing(Receiver(memory=results))),
                results_doorbell=results_doorbell,
                status=StatusReader(memory=page),
                roll=resources.enter_context(closing(RollReader(memory=roll))),
                worker_fds=fds,
                resources=resources,
            )
        except BaseException:
            resources.close()
            raise

    @property
    def description(self) -> str:
        """What `WorkerChannel.attach` needs; digits and colons."""
        return ":".join(map(str, (_VERSION, *self.worker_fds)))

    def close(self) -> None:
        """Give everything back, life line included; a second call does nothing.

        The event loop must have let go of the doorbell before.
        """
        self._resources.close()


class WorkerChannel:
    """The worker's ends. Owns its descriptors and mappings, through `resources`."""

    def __init__(
        self,
        *,
        requests: Receiver,
        results: Sender,
        requests_doorbell: Doorbell,
        status: StatusWriter,
        roll: RollWriter,
        life_fd: int,
        resources: ExitStack,
    ) -> None:
        self.requests = requests
        self.results = results
        self.status = status
        self.roll = roll
        self.life_fd = life_fd  # hangs up (POLLHUP) when the service is gone
        self._requests_doorbell = requests_doorbell
        self._resources = resources
        self._life = select.poll()
        self._life.register(life_fd, 0)  # a hang-up is always reported
        self._requests_or_life = select.poll()
        self._requests_or_life.register(requests_doorbell.fd, select.POLLIN)
        self._requests_or_life.register(life_fd, 0)

    @classmethod
    def attach(cls, description: str, *, duplicate: bool = False) -> WorkerChannel:
        """The channel of which `ServiceChannel.description` tells.

        The descriptors become this channel's own, and programs started later do not inherit them. With `duplicate` it
        takes copies instead: for both ends in one process. Raises ValueError for a description of another version or
        kind, OSError for descriptors that are not open.
        """
        fds = _parse(description)
        resources = ExitStack()
        try:
            if duplicate:
                fds = [os.dup(fd) for fd in fds]
            for fd in fds:
                os.set_inheritable(fd, False)  # noqa: FBT003 - the parameter has no keyword
            requests = resources.enter_context(closing(RingMemory.attach(fds[0])))
            results = resources.enter_context(closing(RingMemory.attach(fds[1])))
            page = resources.enter_context(closing(SharedMemory(fd=fds[2])))
            requests_doorbell = resources.enter_context(closing(Doorbell(fd=fds[3])))
            results_doorbell = resources.enter_context(closing(Doorbell(fd=fds[4])))
            resources.callback(os.close, fds[5])
            roll = resources.enter_context(closing(SharedMemory(fd=fds[6])))
            return cls(
                requests=resources.enter_context(closing(Receiver(memory=requests))),
                results=resources.enter_context(closing(Sender(memory=results, doorbell=results_doorbell))),
                requests_doorbell=requests_doorbell,
                status=StatusWriter(memory=page),
                roll=resources.enter_context(closing(RollWriter(memory=roll))),
                life_fd=fds[5],
                resources=resources,
            )
        except BaseException:
            resources.close()
            raise

    def wait_for_request(self, timeout_s: float) -> bool:
        """Look for a short while, then park. Whether there is something to receive; False may come early.

        Raises ServiceGoneError if the service is gone and nothing is left to read.
        """
        park_at = time.monotonic() + min(SPIN_S, timeout_s)
        while not self.requests.readable():
            if time.monotonic() >= park_at:
                return self._park(timeout_s)
        return True

    def send_result(self, record: bytes, *, heartbeat: Callable[[], None]) -> None:
        """Send a record that must not be lost: while the ring is full, call `heartbeat` and try again every 5 ms.

        Raises ServiceGoneError once nobody is left to read it; RecordTooLargeError and CorruptRecordError as the ring.
        """
        while not self.results.try_send(record):
            if self._life.poll(milliseconds(SLICE_S)):
                raise ServiceGoneError("the service is gone, and the results ring is full")
            heartbeat()

    def service_gone(self) -> bool:
        """Whether the service closed the channel or died."""
        return bool(self._life.poll(0))

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        self._resources.close()

    def _park(self, timeout_s: float) -> bool:
        if self.requests.arm():
            return True
        try:
            events = self._requests_or_life.poll(milliseconds(timeout_s))
        finally:
            self.requests.disarm()
        self._requests_doorbell.clear()
        if self.requests.readable():
            return True
        if any(fd == self.life_fd for fd, _ in events):
            raise ServiceGoneError("the service is gone")
        return False


def _parse(description: str) -> list[int]:
    version, *fds = map(int, description.split(":"))
    if version != _VERSION or len(fds) != _NUM_FDS:
        raise ValueError(f"channel description {description!r} is not of version {_VERSION}")
    return fds

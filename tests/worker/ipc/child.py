"""Processes that the tests start: python child.py ROLE ARGUMENT..."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from chairlift_worker.ipc import ring
from chairlift_worker.ipc.channel import ServiceChannel, ServiceGoneError, WorkerChannel
from chairlift_worker.ipc.ring import Receiver, RingMemory, Sender


def record(index: int, *, max_bytes: int) -> bytes:
    """The record of a number, of a random size."""
    noise = random.Random(index)
    return index.to_bytes(8, "little") + noise.randbytes(noise.randrange(max_bytes - 8))


def send(fd: str, count: str, max_bytes: str) -> None:
    """Send records 0 to count - 1 as fast as they go."""
    with_ring = Sender(memory=RingMemory.attach(int(fd)))
    for index in range(int(count)):
        while not with_ring.try_send(record(index, max_bytes=int(max_bytes))):
            time.sleep(0.0001)


def stage(fd: str) -> None:
    """Send one record, write two more without publishing them, and wait to be killed."""
    sender = Sender(memory=RingMemory.attach(int(fd)))
    assert sender.try_send(b"published")
    for _ in range(2):
        assert ring._sender_stage(sender._handle, b"half done" * 10, 90, 0) == 1
    print("staged", flush=True)
    time.sleep(60)


def kill_senders(rounds: str) -> None:
    """Fork a sender of large records, kill it at a random moment, look at what it left; again and again."""
    memory = RingMemory.create(capacity=1 << 20)
    receiver = Receiver(memory=memory)
    noise = random.Random(1)
    received = 0
    for _ in range(int(rounds)):
        pid = os.fork()
        if pid == 0:
            sender = Sender(memory=memory)
            index = received
            while True:
                if sender.try_send(record(index, max_bytes=300_000)):
                    index += 1
        kill_at = time.monotonic() + noise.uniform(0, 0.01)
        while time.monotonic() < kill_at:
            received += check_next(receiver, received)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while check_next(receiver, received):
            received += 1
    print(received, flush=True)


def check_next(receiver: Receiver, index: int) -> int:
    """1 if there was a record; it must be the one of this number."""
    found = receiver.receive()
    assert found is None or found == record(index, max_bytes=300_000)
    return int(found is not None)


def echo(description: str, count: str) -> None:
    """A worker: send every request back, parking in between. A time-out of 10 s means a lost wake-up."""
    channel = WorkerChannel.attach(description)
    assert not any(os.get_inheritable(int(fd)) for fd in description.split(":")[1:])
    for _ in range(int(count)):
        deadline = time.monotonic() + 10
        while not channel.wait_for_request(10):
            assert time.monotonic() < deadline, "a wake-up was lost"
        found = channel.requests.receive()
        assert found is not None
        channel.send_result(found, heartbeat=channel.status.beat)
    channel.close()


def wait_for_service(description: str) -> None:
    """A worker that has nothing to do but to see the service go."""
    channel = WorkerChannel.attach(description)
    print("waiting", flush=True)
    try:
        while True:
            channel.wait_for_request(60)
    except ServiceGoneError:
        print("gone", flush=True)


def serve() -> None:
    """A service that starts such a worker and waits to be killed."""
    channel = ServiceChannel.create()
    command = [sys.executable, __file__, "wait_for_service", channel.description]
    with subprocess.Popen(command, pass_fds=channel.worker_fds):
        time.sleep(60)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (send, stage, kill_senders, echo, wait_for_service, serve)
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])

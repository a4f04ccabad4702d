"""Two processes and what they do to each other, dying included."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from chairlift_worker.ipc.channel import ServiceChannel
from chairlift_worker.ipc.doorbell import Doorbell
from chairlift_worker.ipc.ring import Receiver, RingMemory, Sender

from . import child

CHILD = Path(__file__).with_name("child.py")


@contextmanager
def started(*arguments: object, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_records_of_random_sizes_arrive_intact_and_in_order() -> None:
    with closing(RingMemory.create(capacity=8192)) as memory, closing(Receiver(memory=memory)) as receiver:
        with started("send", memory.fd, 20_000, 4000, fds=(memory.fd,)) as process:
            for index in range(20_000):
                while (found := receiver.receive()) is None:
                    assert process.poll() in (None, 0)
                assert found == child.record(index, max_bytes=4000)
            assert process.wait(10) == 0
        assert receiver.receive() is None


def test_what_a_killed_sender_was_writing_is_never_seen() -> None:
    with closing(RingMemory.create(capacity=4096)) as memory, closing(Receiver(memory=memory)) as receiver:
        with started("stage", memory.fd, fds=(memory.fd,)) as process:
            assert line_of(process) == "staged"
            process.kill()
            assert process.wait(10) == -signal.SIGKILL
        assert receiver.receive() == b"published"
        assert receiver.receive() is None
        with closing(Sender(memory=memory)) as successor:
            assert successor.try_send(b"next")
        assert receiver.receive() == b"next"


@pytest.mark.timeout(120)
def test_two_hundred_senders_killed_at_random_moments_leave_no_torn_record() -> None:
    with started("kill_senders", 200) as process:
        received = int(line_of(process))
        assert process.wait(60) == 0
    assert received > 200  # so that they were killed while writing


@pytest.mark.timeout(120)
def test_no_wake_up_is_lost_when_both_sides_park_all_the_time() -> None:
    count = 20_000
    with (
        closing(ServiceChannel.create(request_bytes=4096, result_bytes=4096)) as channel,
        started("echo", channel.description, count, fds=channel.worker_fds) as process,
    ):
        for index in range(count):
            assert channel.requests.try_send(message := index.to_bytes(4, "little"))
            assert wait_for_record(channel.results, channel.results_doorbell) == message
        assert process.wait(10) == 0


def wait_for_record(receiver: Receiver, doorbell: Doorbell) -> bytes:
    """The blocking receiver of doorbell.py's description; a ring left over may wake it for nothing."""
    deadline = time.monotonic() + 10
    while (record := receiver.receive()) is None:
        if not receiver.arm():
            doorbell.wait(10)
            receiver.disarm()
        assert time.monotonic() < deadline, "a wake-up was lost"
    return record


def test_a_parked_receiver_uses_next_to_no_processor() -> None:
    with (
        closing(ServiceChannel.create()) as channel,
        started("wait_for_service", channel.description, fds=channel.worker_fds) as process,
    ):
        assert line_of(process) == "waiting"
        time.sleep(0.2)
        watched = psutil.Process(process.pid)
        before = sum(watched.cpu_times()[:2])
        time.sleep(2)
        assert sum(watched.cpu_times()[:2]) - before < 0.05 * 2


def test_a_worker_learns_at_once_that_its_service_was_killed() -> None:
    with started("serve") as service:
        assert line_of(service) == "waiting"  # said by the worker, on the output that it inherited
        service.kill()
        killed_at = time.monotonic()
        assert line_of(service) == "gone"
        assert time.monotonic() - killed_at < 2

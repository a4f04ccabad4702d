"""Both ends of a channel in one process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chairlift_worker.ipc.channel import ServiceChannel, ServiceGoneError, WorkerChannel

RING = 4096


def open_fds() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:chairlift" in line]


@pytest.fixture
def channels() -> Iterator[tuple[ServiceChannel, WorkerChannel]]:
    with (
        closing(ServiceChannel.create(request_bytes=RING, result_bytes=RING)) as service,
        closing(WorkerChannel.attach(service.description, duplicate=True)) as worker,
    ):
        yield service, worker


def nothing() -> None:
    pass


def test_requests_and_results_and_status_go_their_ways(channels: tuple[ServiceChannel, WorkerChannel]) -> None:
    service, worker = channels
    assert not worker.wait_for_request(0)
    assert service.requests.try_send(b"request")
    assert worker.wait_for_request(10)
    assert worker.requests.receive() == b"request"
    worker.send_result(b"result", heartbeat=nothing)
    assert service.results.receive() == b"result"
    worker.status.set(step=5)
    assert service.status.read().step == 5
    assert not worker.service_gone()


def test_a_request_wakes_a_parked_worker(channels: tuple[ServiceChannel, WorkerChannel]) -> None:
    service, worker = channels
    timer = threading.Timer(0.2, lambda: service.requests.try_send(b"request"))
    timer.start()
    start = time.monotonic()
    assert worker.wait_for_request(60)
    assert 0.1 < time.monotonic() - start < 10
    timer.join()


def test_closing_gives_back_every_descriptor_and_all_memory() -> None:
    fds, maps = open_fds(), mapped()
    service = ServiceChannel.create()
    worker = WorkerChannel.attach(service.description, duplicate=True)
    assert len(mapped()) == len(maps) + 8
    for end in (service, worker, service, worker):
        end.close()
    assert open_fds() == fds
    assert mapped() == maps


def test_a_channel_that_cannot_be_made_leaves_nothing_behind() -> None:
    fds = open_fds()
    with pytest.raises(ValueError, match="capacity 5000 is not a power of two"):
        ServiceChannel.create(request_bytes=RING, result_bytes=5000)
    assert open_fds() == fds


def test_the_default_rings_leave_most_of_a_small_container_free() -> None:
    with closing(ServiceChannel.create()) as service:
        assert sum(os.fstat(fd).st_size for fd in service.worker_fds[:3]) < 16 << 20
        assert service.requests.max_record_bytes == (2 << 20) - 16


@pytest.mark.parametrize("description", ["", "1", "2:3:4:5:6:7:8", "1:3:4:5:6:7", "1:a:b:c:d:e:f", "1:3:4:5:6:7:8:9"])
def test_a_description_of_another_kind_is_refused(description: str) -> None:
    with pytest.raises(ValueError, match=r"description|invalid literal"):
        WorkerChannel.attach(description)


def test_results_that_do_not_fit_wait_with_heartbeats_and_none_is_lost(
    channels: tuple[ServiceChannel, WorkerChannel],
) -> None:
    service, worker = channels
    count, beats = 100, []
    records = [bytes([index]) * 500 for index in range(count)]

    def send() -> None:
        for record in records:
            worker.send_result(record, heartbeat=lambda: beats.append(time.monotonic()))

    thread = threading.Thread(target=send)
    thread.start()
    while len(beats) < 5:
        time.sleep(0.001)
    assert thread.is_alive()
    received: list[bytes] = []
    deadline = time.monotonic() + 30
    while len(received) < count and time.monotonic() < deadline:
        if (record := service.results.receive()) is not None:
            received.append(record)
    thread.join(10)
    assert received == records


def test_both_rings_full_end_in_a_refusal_and_not_in_a_deadlock(channels: tuple[ServiceChannel, WorkerChannel]) -> None:
    service, worker = channels
    accepted = 0
    while service.requests.try_send(accepted.to_bytes(4, "little")):
        accepted += 1
    filled = RING // (16 + 112)  # whole records of 100 bytes

    def work() -> None:  # a worker: one result for each request, none may be lost
        while worker.results.try_send(b"f" * 100):
            pass
        for _ in range(accepted):
            assert worker.wait_for_request(10)
            request = worker.requests.receive()
            assert request is not None
            worker.send_result(request, heartbeat=nothing)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05)
    start = time.monotonic()
    for _ in range(10_000):
        assert not service.requests.try_send(b"more" * 20)  # refused at once, for the worker waits to send
    assert time.monotonic() - start < 5
    results: list[bytes] = []
    deadline = time.monotonic() + 30
    while len(results) < filled + accepted and time.monotonic() < deadline:
        if (record := service.results.receive()) is not None:
            results.append(record)
    thread.join(10)
    assert results == [b"f" * 100] * filled + [index.to_bytes(4, "little") for index in range(accepted)]


def test_a_worker_stops_waiting_when_its_service_closes(channels: tuple[ServiceChannel, WorkerChannel]) -> None:
    service, worker = channels
    threading.Timer(0.1, service.close).start()
    start = time.monotonic()
    with pytest.raises(ServiceGoneError):
        worker.wait_for_request(60)
    while worker.results.try_send(bytes(1000)):
        pass
    with pytest.raises(ServiceGoneError):
        worker.send_result(bytes(1000), heartbeat=nothing)
    assert time.monotonic() - start < 10
    assert worker.service_gone()


def test_the_package_loads_no_tensors_and_no_grpc() -> None:
    program = (
        "import sys, chairlift_worker.ipc.channel, chairlift_worker.ipc.messages;"
        "print({'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"

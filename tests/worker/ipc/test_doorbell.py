"""The doorbell alone, and in an event loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

import pytest
from chairlift_worker.ipc.channel import ServiceChannel, WorkerChannel
from chairlift_worker.ipc.doorbell import Doorbell, milliseconds


def test_a_ring_before_the_wait_is_not_lost_and_counts_once() -> None:
    with closing(Doorbell.create()) as doorbell:
        doorbell.ring()
        doorbell.ring()
        assert doorbell.wait(10)
        assert not doorbell.clear()


def test_waiting_ends_with_its_time_out() -> None:
    with closing(Doorbell.create()) as doorbell:
        start = time.monotonic()
        assert not doorbell.wait(0.05)
        assert 0.05 <= time.monotonic() - start < 5
        assert not doorbell.wait(0)


@pytest.mark.parametrize(("seconds", "expected"), [(-1, 0), (0, 0), (1e-9, 1), (0.001, 1), (0.0011, 2), (60, 60000)])
def test_a_time_out_is_rounded_up_and_never_endless(seconds: float, expected: int) -> None:
    assert milliseconds(seconds) == expected


async def test_an_event_loop_receives_all_by_the_described_protocol() -> None:
    count, received = 3000, []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    with closing(ServiceChannel.create(result_bytes=4096)) as service:
        worker = WorkerChannel.attach(service.description, duplicate=True)

        def on_bell() -> None:
            service.results_doorbell.clear()
            service.results.disarm()
            for _ in range(7):
                record = service.results.receive()
                if record is None:
                    if service.results.arm():
                        continue
                    return
                received.append(record)
                if len(received) == count:
                    done.set()
            loop.call_soon(on_bell)

        def send() -> None:
            for index in range(count):
                worker.send_result(str(index).encode(), heartbeat=lambda: None)
                if index % 100 == 0:
                    time.sleep(0.001)

        loop.add_reader(service.results_doorbell.fd, on_bell)
        on_bell()
        await asyncio.gather(asyncio.to_thread(send), asyncio.wait_for(done.wait(), 20))
        loop.remove_reader(service.results_doorbell.fd)
        worker.close()
    assert received == [str(index).encode() for index in range(count)]

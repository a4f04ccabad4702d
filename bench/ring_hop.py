"""How long a record takes from one process to the other, and how many go per second. Prints one line of JSON.

usage: python bench/ring_hop.py [--hops N] [--records N] [--record-bytes N]

A hop is half a round trip: the other process sends each record back. The receivers park between two records, as an idle
worker does, or look without pause (spinning), as a busy one does in effect.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from chairlift_worker.ipc.channel import ServiceChannel, WorkerChannel
from chairlift_worker.ipc.doorbell import Doorbell
from chairlift_worker.ipc.ring import Receiver

TIMEOUT_S = 10.0
GAP_S = 0.0005  # between two hops with parked receivers, so that both do park


def receive(receiver: Receiver, doorbell: Doorbell | None) -> bytes:
    """The next record; parks if there is a doorbell, else spins. TimeoutError after 10 s."""
    deadline = time.monotonic() + TIMEOUT_S
    while (record := receiver.receive()) is None:
        if doorbell is not None and not receiver.arm():
            doorbell.wait(TIMEOUT_S)
            receiver.disarm()
        if time.monotonic() > deadline:
            raise TimeoutError("no record came")
    return record


def measure_hops(*, parked: bool, count: int, record: bytes) -> dict[str, float]:
    """Microseconds of half a round trip."""
    channel = ServiceChannel.create()
    mode = "echo-parked" if parked else "echo-spinning"
    command = [sys.executable, __file__, "--child", mode, channel.description, str(count)]
    hops = []
    with subprocess.Popen(command, pass_fds=channel.worker_fds) as child:
        for _ in range(count):
            if parked:
                time.sleep(GAP_S)
            start = time.perf_counter_ns()
            if not channel.requests.try_send(record):
                raise RuntimeError("an empty ring is full")
            receive(channel.results, channel.results_doorbell if parked else None)
            hops.append((time.perf_counter_ns() - start) / 2000)
        child.wait(TIMEOUT_S)
    channel.close()
    percentiles = statistics.quantiles(hops[count // 10 :], n=100)  # the first ones wait for the child to start
    return {"p50_us": round(percentiles[49], 2), "p99_us": round(percentiles[98], 2)}


def measure_rate(*, count: int, record: bytes) -> float:
    """Records per second from a sender that never pauses."""
    channel = ServiceChannel.create()
    command = [sys.executable, __file__, "--child", "count", channel.description, str(count)]
    with subprocess.Popen(command, pass_fds=channel.worker_fds) as child:
        receive(channel.results, channel.results_doorbell)  # it is there
        start = time.perf_counter()
        for _ in range(count):
            while not channel.requests.try_send(record):
                pass
        receive(channel.results, channel.results_doorbell)
        seconds = time.perf_counter() - start
        child.wait(TIMEOUT_S)
    channel.close()
    return round(count / seconds)


def run_child(mode: str, description: str, count: int) -> None:
    """The other process."""
    channel = WorkerChannel.attach(description)
    if mode == "count":
        channel.send_result(b"ready", heartbeat=channel.status.beat)
    for _ in range(count):
        if mode == "echo-parked":
            deadline = time.monotonic() + TIMEOUT_S
            while not channel.wait_for_request(TIMEOUT_S):
                if time.monotonic() > deadline:
                    raise TimeoutError("no record came")
        record = receive(channel.requests, None)
        if mode != "count":
            channel.send_result(record, heartbeat=channel.status.beat)
    if mode == "count":
        channel.send_result(b"done", heartbeat=channel.status.beat)
    channel.close()


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", type=int, default=5000)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--record-bytes", type=int, default=200)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mode, description, count = options.child
        run_child(mode, description, int(count))
        return
    record = bytes(options.record_bytes)
    report = {
        "record_bytes": options.record_bytes,
        "parked": measure_hops(parked=True, count=options.hops, record=record),
        "spinning": measure_hops(parked=False, count=options.hops, record=record),
        "records_per_s": measure_rate(count=options.records, record=record),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

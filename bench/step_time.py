"""Where a step's time goes, in the worker, without service or gRPC.

usage: step_time.py [--model demo] [--rows 1 8 32] [--context 250] [--steps 30] [--dtype auto] [--json FILE]

For each number of rows: that many requests with `context` prompt tokens decode together; the prefill line is one
prompt of `context` tokens. Medians over steps, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from chairlift_worker.assemble import build
from chairlift_worker.ipc.channel import ServiceChannel, WorkerChannel
from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, SamplingMsg, encode
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.request import Request

PARTS = ("plan", "build", "forward", "sample", "apply", "emit")


def add(uid: int, prompt_len: int, max_new_tokens: int) -> AddRequestMsg:
    """A greedy request with a prompt of its own."""
    prompt = array("i", [(uid * 7919 + i * 104_729) % 40_000 for i in range(prompt_len)])
    return AddRequestMsg(
        uid=uid,
        prompt=prompt.tobytes(),
        max_new_tokens=max_new_tokens,
        sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        stop_ids=(),
        logprobs=False,
        arrival_ns=0,
        deadline_ns=NO_DEADLINE,
    )


class Driver:
    """Steps a worker's parts one by one, as the engine does, with a clock between them."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._service = ServiceChannel.create()
        self._channel = WorkerChannel.attach(self._service.description, duplicate=True)
        self._parts = build(settings, self._channel)
        self._uid = 0

    def fill(self, *, rows: int, context: int, steps: int) -> None:
        """Requests that decode for so many steps."""
        for _ in range(rows):
            self._uid += 1
            self._parts.roster.add(Request(add(self._uid, context, steps)))

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Runs until all requests are over; the query tokens of each step and its times in milliseconds."""
        parts = self._parts
        while True:
            marks = [time.monotonic_ns()]
            plan = parts.scheduler.plan(marks[0])
            if plan is None:
                return
            marks.append(time.monotonic_ns())
            result = parts.executor.execute(plan)
            marks.append(time.monotonic_ns())
            parts.scheduler.apply(plan, result, marks[-1])
            marks.append(time.monotonic_ns())
            for message in parts.roster.outbox.take(plan.step):
                self._channel.results.try_send(encode(message))
            marks.append(time.monotonic_ns())
            while self._service.results.receive() is not None:
                pass
            inside = parts.executor.last_times
            spans = (
                marks[1] - marks[0],
                inside.build_ns,
                inside.forward_ns,
                inside.sample_ns,
                marks[3] - marks[2],
                marks[4] - marks[3],
            )
            yield plan.num_tokens, {name: span / 1e6 for name, span in zip(PARTS, spans, strict=True)}


def measure(driver: Driver, *, rows: int, context: int, steps: int) -> list[dict[str, float | str]]:
    """A line for the prompts and a line for the decoding of so many rows."""
    driver.fill(rows=rows, context=context, steps=steps)
    lines: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}
    for num_tokens, times in driver.steps():
        lines["decode" if num_tokens == rows else "prefill"].append({**times, "tokens": float(num_tokens)})
    out: list[dict[str, float | str]] = []
    for kind, taken in lines.items():
        if taken:
            medians = {name: round(statistics.median(t[name] for t in taken), 3) for name in (*PARTS, "tokens")}
            out.append({"kind": kind, "rows": rows, "total": round(sum(medians[name] for name in PARTS), 3), **medians})
    return out


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=250)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    driver = Driver(WorkerSettings(model=args.model, dtype=args.dtype, num_blocks=1200, safety_margin=0.0))
    header = ("kind", "rows", "tokens", "total", *PARTS)
    print("  ".join(f"{name:>8}" for name in header))
    lines = []
    for rows in args.rows:
        for line in measure(driver, rows=rows, context=args.context, steps=args.steps):
            lines.append(line)
            print("  ".join(f"{line[name]:>8}" for name in header), flush=True)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()

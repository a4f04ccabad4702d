"""The scheduler's own time for a step, plan and apply, without a model.

usage: scheduler.py [--running 1 8 64 512] [--waiting 0 10 10000] [--steps 300] [--context 256] [--json FILE]

`running` requests decode, each with about `context` prompt tokens; `waiting` ones are queued behind one whose prompt
needs the whole cache. Each step's results are made up. Microseconds of processor time, so that other programs do not
count: medians and 99th percentiles over the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, SamplingMsg
from chairlift_worker.kv.layout import CacheLayout, make_layout
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.plan import RowResult, StepPlan, StepResult
from chairlift_worker.request import Request
from chairlift_worker.roster import Roster
from chairlift_worker.scheduler import Scheduler
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.policy import NEVER_SWAP
from chairlift_worker.swap.pool import SwapPool
from chairlift_worker.swap.space import SwapSpace

PAGE_SIZE = 16
LAYERS = {"full": (None,), "sliding": (None, 128)}  # windows of the kinds of layers
SKIPPED = 20  # steps before the measured ones
STEP_MS = 3.0  # what a step may take


def request(uid: int, prompt_len: int, max_new_tokens: int) -> Request:
    """One with a prompt of its own."""
    prompt = array("i", [uid, *range(1, prompt_len)])
    return Request(
        AddRequestMsg(
            uid=uid,
            prompt=prompt.tobytes(),
            max_new_tokens=max_new_tokens,
            sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
            stop_ids=(),
            logprobs=False,
            arrival_ns=0,
            deadline_ns=NO_DEADLINE,
        )
    )


def result_of(plan: StepPlan) -> StepResult:
    """A token for each row that samples."""
    rows = tuple(RowResult(uid=row.uid, token_id=7, logprob=None) for row in plan.rows if row.sample)
    return StepResult(step=plan.step, rows=rows)


class Driver:
    """A scheduler with requests that run and requests that wait for them."""

    def __init__(self, *, layout: CacheLayout, running: int, waiting: int, context: int, steps: int) -> None:
        total = context + steps + SKIPPED + 1
        memory = PagedMemory(
            num_pages=running * layout.peak(0, total, context),
            layout=layout,
            sharing=layout.is_uniform,
        )
        self.roster = Roster(memory=memory, swap=SwapSpace(pool=SwapPool(num_slots=0), costs=NEVER_SWAP))
        limits = StepLimits(
            max_batch_tokens=running * context + 1,
            max_prefill_chunk=context,
            max_requests_per_batch=running + 1,  # so that each step looks whether one more could start
            scheduler_type="fifo",
            safety_margin=0.0,
        )
        self.scheduler = Scheduler(limits=limits, roster=self.roster)
        for uid in range(1, running + 1):
            # Of different lengths, so that not all need their next page in the same step.
            self.roster.add(request(uid, context - uid % PAGE_SIZE, steps + SKIPPED + 2))
        for _ in self.steps(2):
            pass
        whole = layout.capacity(num_sectors=memory.pool.num_pages, step_len=context, limit=1 << 24)
        for uid in range(running + 1, running + waiting + 1):
            self.roster.add(request(uid, whole if uid == running + 1 else context, 1))

    def steps(self, number: int) -> Iterator[tuple[float, float]]:
        """Microseconds of plan and of apply."""
        for _ in range(number):
            began = time.thread_time_ns()
            plan = self.scheduler.plan(began)
            planned = time.thread_time_ns()
            assert plan is not None
            result = result_of(plan)
            made_up = time.thread_time_ns()
            self.scheduler.apply(plan, result, made_up)
            applied = time.thread_time_ns()
            self.roster.outbox.take(plan.step)
            yield (planned - began) / 1e3, (applied - made_up) / 1e3


def measure(*, kind: str, running: int, waiting: int, context: int, steps: int) -> dict[str, float | str]:
    """A line of the table."""
    layers = [LayerFacts(num_kv_heads=1, head_dim=2, sliding_window=window) for window in LAYERS[kind]]
    layout = make_layout(layers, page_size=PAGE_SIZE)
    driver = Driver(layout=layout, running=running, waiting=waiting, context=context, steps=steps)
    list(driver.steps(SKIPPED - 2))
    plans, applies = zip(*driver.steps(steps), strict=True)
    assert len(driver.roster.active) == running
    assert len(driver.roster.waiting) == waiting
    both = [plan + apply for plan, apply in zip(plans, applies, strict=True)]
    return {
        "layers": kind,
        "running": running,
        "waiting": waiting,
        "plan": round(statistics.median(plans), 1),
        "apply": round(statistics.median(applies), 1),
        "both": round(statistics.median(both), 1),
        "p99": round(statistics.quantiles(both, n=100)[98], 1),
    }


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=["full", "sliding"], choices=LAYERS)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10, 10_000])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = []
    for kind in args.layers:
        for running in args.running:
            for waiting in args.waiting:
                line = measure(kind=kind, running=running, waiting=waiting, context=args.context, steps=args.steps)
                if not lines:
                    print("  ".join(f"{name:>8}" for name in line))
                print("  ".join(f"{value:>8}" for value in line.values()), flush=True)
                lines.append(line)
    slowest = max(float(line["both"]) for line in lines) / 1e3
    print(f"slowest: {slowest:.2f} ms a step; at most {STEP_MS} ms are allowed")
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()

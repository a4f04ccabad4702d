"""What speculation by prompt lookup gains: the same requests with it and without, by turns.

usage: speculation.py [--model demo] [--dtype auto] [--runs 5] [--streams 1 8] [--new-tokens 120] [--tokens 7]
       speculation.py --lookup

No service and no gRPC. `quote` prompts ask to repeat a text, `plain` ones for something new; greedy. For each kind and
number of streams: output tokens a second without and with, the ratio of the medians, the same ratio by CPU time, which
other programs disturb less, and of the drafts the share that held. `--lookup` measures the time that the index takes
instead, without a model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Sequence

from chairlift_worker.assemble import Parts, build
from chairlift_worker.ipc.channel import ServiceChannel, WorkerChannel
from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, SamplingMsg
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.request import Request
from chairlift_worker.speculation.lookup import PromptLookup
from chairlift_worker.speculation.speculator import CATCH_UP
from tokenizers import Tokenizer

TOPICS = ("a lighthouse", "the harbour", "an old bridge", "a mill", "the market", "a school", "the station", "a garden")
QUOTE = """<|im_start|>user
Repeat the report word for word, then name its subject.

Report: In the spring of 1912 the town council decided to repair {0}. The work was given to a firm from the coast, which
sent eleven men and two carts. They found that the foundations of {0} had moved by four inches since the last survey, so
the council paid for new stones from the quarry at Hollow Hill. By the end of September the repair of {0} was complete,
and the firm was paid two hundred and ten pounds.<|im_end|>
<|im_start|>assistant
Report: In the spring of 1912 the town council"""
PLAIN = """<|im_start|>user
Write a short story about {0} and a stranger who comes to town in winter.<|im_end|>
<|im_start|>assistant
"""


class Driver:
    """A worker's parts, stepped one by one as the engine does."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._service = ServiceChannel.create()
        self.parts: Parts = build(settings, WorkerChannel.attach(self._service.description, duplicate=True))
        self._uid = 0

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, float]:
        """Seconds, and of CPU time, from the first step that only decodes to the end of all requests."""
        parts = self.parts
        for prompt in prompts:
            self._uid += 1
            parts.roster.add(Request(add(self._uid, prompt, new_tokens)))
        began = (0.0, 0.0)
        while (plan := parts.scheduler.plan(time.monotonic_ns())) is not None:
            if not any(began) and all(row.sample is not None and row.num_known == 1 for row in plan.rows):
                began = (time.monotonic(), time.process_time())
            parts.scheduler.apply(plan, parts.executor.execute(plan), time.monotonic_ns())
            parts.roster.outbox.take(plan.step)
        return time.monotonic() - began[0], time.process_time() - began[1]


def add(uid: int, prompt: Sequence[int], new_tokens: int) -> AddRequestMsg:
    """A greedy request that does not stop before its limit."""
    return AddRequestMsg(
        uid=uid,
        prompt=array("i", prompt).tobytes(),
        max_new_tokens=new_tokens,
        sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        stop_ids=(),
        logprobs=False,
        arrival_ns=0,
        deadline_ns=NO_DEADLINE,
    )


def compare(drivers: dict[str, Driver], prompts: Sequence[Sequence[int]], *, runs: int, new_tokens: int) -> str:
    """One line of the table: what these prompts take in each mode."""
    rates: dict[str, list[float]] = {mode: [] for mode in drivers}
    cpu_seconds: dict[str, list[float]] = {mode: [] for mode in drivers}
    counters = drivers["ngram"].parts.roster.counters
    drafted, held = counters.draft_tokens, counters.accepted_draft_tokens
    for _ in range(runs):
        for mode, driver in drivers.items():
            seconds, cpu = driver.run(prompts, new_tokens)
            rates[mode].append(len(prompts) * (new_tokens - 1) / seconds)
            cpu_seconds[mode].append(cpu)
    drafted, held = counters.draft_tokens - drafted, counters.accepted_draft_tokens - held
    median = statistics.median
    shown = [f"{median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in rates.values()]
    shown.append(f"{median(rates['ngram']) / median(rates['none']):.2f}")
    shown.append(f"{median(cpu_seconds['none']) / median(cpu_seconds['ngram']):.2f}")
    shown.append(f"{held / drafted:.2f} of {drafted // runs}" if drafted else "no drafts")
    return " | ".join(shown)


def measure_lookup() -> None:
    """Prints what the index takes for a row of a step, in microseconds, over texts of more and of less variety."""
    print("| different tokens | step p50 | step p99 | catching up with a prompt p50 |")
    for vocab_size in (3, 30, 3000):
        generator = random.Random(vocab_size)
        text = array("i", [generator.randrange(vocab_size) for _ in range(8192)])
        lookup = PromptLookup(min_len=2, max_len=4, num_tokens=2 * len(text))
        lagging = [timed(lookup, text) for _ in range(100)]
        lookup.catch_up(text, len(text))
        steps = []
        for _ in range(4000):
            text.append(generator.randrange(vocab_size))
            steps.append(timed(lookup, text))
        p50, p99 = (statistics.quantiles(steps, n=100)[place - 1] for place in (50, 99))
        print(f"| {vocab_size} | {p50:.1f} | {p99:.1f} | {statistics.median(lagging):.1f} |")


def timed(lookup: PromptLookup, text: array[int]) -> float:
    """Microseconds of what a row of one token takes."""
    began = time.monotonic_ns()
    lookup.catch_up(text, CATCH_UP + 1)
    lookup.propose(text, 7)
    return (time.monotonic_ns() - began) / 1e3


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=7)
    parser.add_argument("--lookup", action="store_true")
    args = parser.parse_args()
    if args.lookup:
        measure_lookup()
        return
    drivers = {
        mode: Driver(
            WorkerSettings(
                model=args.model, dtype=args.dtype, num_blocks=600, speculative=mode, speculative_tokens=args.tokens
            )
        )
        for mode in ("none", "ngram")
    }
    tokenizer = Tokenizer.from_file(f"{drivers['none'].parts.ready.model.tokenizer_dir}/tokenizer.json")
    print("| prompts | streams | none | ngram | ratio | by CPU time | drafts that held |")
    for name, template in (("quote", QUOTE), ("plain", PLAIN)):
        for streams in args.streams:
            prompts = [tokenizer.encode(template.format(topic)).ids for topic in TOPICS * streams][:streams]
            print(
                f"| {name} | {streams} | {compare(drivers, prompts, runs=args.runs, new_tokens=args.new_tokens)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

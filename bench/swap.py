"""Swapping evicted requests' pages against computing them again, in a cache that is too small.

usage: swap.py [--lengths 128 256 512 1024 2048] [--runs 5] [--requests 6] [--new-tokens 48] [--sharing] [--model demo]
               [--json FILE]

For each length: that many requests with prompts of so many tokens, in a cache that holds half of the prompts and a
little more, so that requests are evicted while they grow. `swap` and `recompute` always do the one; `by cost` decides
by what was measured when the worker warmed up, as it does by default. The runs of the three take turns. Tokens a second
are generated ones: the median over the runs, and the slowest and fastest. With --sharing evicted requests find again
those of their pages that nobody has taken yet, so that little is computed again. Without --model: a random Llama of 11
million parameters in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.executor import ModelExecutor
from chairlift_worker.faults import Faults
from chairlift_worker.ipc.messages import NO_DEADLINE, AddRequestMsg, SamplingMsg
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import CacheLayout, make_layout
from chairlift_worker.kv.memory import PagedMemory
from chairlift_worker.model import load_model
from chairlift_worker.pipeline import Pipeline
from chairlift_worker.request import Request
from chairlift_worker.roster import Counters, Roster
from chairlift_worker.runner import ModuleForward, Runner
from chairlift_worker.scheduler import Scheduler
from chairlift_worker.step_budget import StepLimits
from chairlift_worker.swap.mover import SwapMover
from chairlift_worker.swap.policy import ALWAYS_SWAP, NEVER_SWAP, SwapCosts
from chairlift_worker.swap.pool import SwapPool
from chairlift_worker.swap.space import SwapSpace
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

PAGE_SIZE = 16
CHUNK = 512
WARM_UP_LEN = 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one run is given."""

    prompt_len: int
    new_tokens: int
    requests: int

    @property
    def num_pages(self) -> int:
        """Room for half of the requests, and for a third of what they add."""
        tokens = self.prompt_len + self.new_tokens // 3
        return max(self.requests // 2 * -(-tokens // PAGE_SIZE), -(-(self.prompt_len + self.new_tokens) // PAGE_SIZE))

    def request(self, uid: int) -> Request:
        """A greedy request with a prompt of its own."""
        prompt = array("i", [(uid * 7919 + i * 104_729) % 2000 for i in range(self.prompt_len)])
        return Request(
            AddRequestMsg(
                uid=uid,
                prompt=prompt.tobytes(),
                max_new_tokens=self.new_tokens,
                sampling=SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
                stop_ids=(),
                logprobs=False,
                arrival_ns=0,
                deadline_ns=NO_DEADLINE,
            )
        )


class Bench:
    """A model with memory enough for the largest load, run with loads and policies."""

    def __init__(self, module: PreTrainedModel, layers: tuple[LayerFacts, ...], *, num_pages: int) -> None:
        self._layout: CacheLayout = make_layout(layers, page_size=PAGE_SIZE)
        self._num_slots = 4 * num_pages
        cache = PagedCache(layout=self._layout, num_sectors=num_pages, dtype=module.dtype)
        forward = ModuleForward(model=module, backend=make_backend("native"), cache=cache)
        runner = Runner(forward=forward, cache=cache)
        mover = SwapMover(sectors=cache.sectors, num_slots=self._num_slots)
        self._executor = ModelExecutor(runner=runner, mover=mover, faults=Faults(""))
        self._executor.warm_up()
        self.costs = self._executor.measure_swap_costs()

    def run(self, load: Load, costs: SwapCosts, *, sharing: bool) -> tuple[float, Counters]:
        """Seconds, and what was done."""
        memory = PagedMemory(num_pages=load.num_pages, layout=self._layout, sharing=sharing)
        swap = SwapSpace(pool=SwapPool(num_slots=self._num_slots), costs=costs)
        roster = Roster(memory=memory, swap=swap)
        limits = StepLimits(
            max_batch_tokens=CHUNK,
            max_prefill_chunk=CHUNK,
            max_requests_per_batch=load.requests,
            scheduler_type="fifo",
            safety_margin=0.0,
        )
        scheduler = Scheduler(limits=limits, roster=roster)
        pipeline = Pipeline(executor=self._executor, depth=1)
        for uid in range(1, load.requests + 1):
            roster.add(load.request(uid))
        began = time.monotonic_ns()
        while (plan := scheduler.plan(time.monotonic_ns())) is not None:
            pipeline.submit(plan)
            scheduler.apply(*pipeline.finish(), time.monotonic_ns())
            roster.outbox.take(plan.step)
        return (time.monotonic_ns() - began) / 1e9, roster.counters


def small_model() -> tuple[PreTrainedModel, tuple[LayerFacts, ...]]:
    """A random Llama whose prompt of 2,048 tokens takes about a second."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    return module, (LayerFacts(num_kv_heads=2, head_dim=64, sliding_window=None),) * 6


def measure(bench: Bench, load: Load, runs: int, *, sharing: bool) -> list[dict[str, object]]:
    """A line for each policy."""
    policies = {"swap": ALWAYS_SWAP, "recompute": NEVER_SWAP, "by cost": bench.costs}
    rates: dict[str, list[float]] = {name: [] for name in policies}
    done: dict[str, Counters] = {}
    for turn in range(runs):
        names = list(policies)
        for name in names[turn % 3 :] + names[: turn % 3]:
            seconds, done[name] = bench.run(load, policies[name], sharing=sharing)
            rates[name].append(load.requests * load.new_tokens / seconds)
    return [
        {
            "prompt": load.prompt_len,
            "policy": name,
            "tokens/s": round(statistics.median(rates[name]), 1),
            "slowest": round(min(rates[name]), 1),
            "fastest": round(max(rates[name]), 1),
            "swapped": done[name].preemptions_swap,
            "recomputed": done[name].preemptions_recompute,
            "computed": done[name].computed_tokens,
        }
        for name in policies
    ]


def main() -> None:
    """Prints a table; writes the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--sharing", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loads = [Load(prompt_len=n, new_tokens=args.new_tokens, requests=args.requests) for n in args.lengths]
    if args.model:
        model = load_model(WorkerSettings(model=args.model))
        module, layers = model.module, model.layers
    else:
        module, layers = small_model()
    bench = Bench(module, layers, num_pages=max(load.num_pages for load in loads))
    costs = bench.costs
    print(f"a prompt token: {costs.token_ns / 1e3:.0f} us; a page, one way: {costs.sector_ns / 1e3:.1f} us")
    bench.run(Load(prompt_len=WARM_UP_LEN, new_tokens=4, requests=args.requests), ALWAYS_SWAP, sharing=False)
    lines: list[dict[str, object]] = []
    for load in loads:
        for line in measure(bench, load, args.runs, sharing=args.sharing):
            if not lines:
                print("  ".join(f"{name:>10}" for name in line))
            print("  ".join(f"{value:>10}" for value in line.values()), flush=True)
            lines.append(line)
    if args.json:
        args.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()

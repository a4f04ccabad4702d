"""Tokens a second, beside transformers' own continuous batching on the same model and machine."""

from __future__ import annotations

import gc
import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from chairlift_worker.compile_choice import of_level
from chairlift_worker.graph_choice import KV_INTERVAL, Q_INTERVAL
from chairlift_worker.pass_config import PassConfig
from checks import in_place
from models import make_model, sized_config
from report import Part
from rig import Rig, Shape, captured, random_prompts
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel


@dataclass(frozen=True)
class Load:
    """The same for both sides."""

    num_prompts: int
    prompt_len: int
    new_tokens: int

    @property
    def max_len(self) -> int:
        """Of a request."""
        return self.prompt_len + self.new_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Different ones."""
        return random_prompts([self.prompt_len] * self.num_prompts, vocab_size=vocab_size, seed=1)


def load_of(*, dry: bool) -> Load:
    """What is asked of a model."""
    return Load(num_prompts=4, prompt_len=20, new_tokens=8) if dry else Load(64, 256, 128)


def check_speed(part: Part, device: torch.device, name: str, *, dry: bool) -> None:
    """One model: ours step by step, captured, two in flight, compiled; then transformers, captured and not."""
    dtype = torch.float32 if dry else torch.bfloat16
    load = load_of(dry=dry)
    module = make_model(sized_config(name, dry=dry), dtype=dtype, device=device)
    backend = in_place(device, dtype)
    graphs = captured(q_interval=Q_INTERVAL, kv_interval=KV_INTERVAL).graphs
    compiled = of_level(1)
    ours: dict[str, tuple[PassConfig, int]] = {
        "plain": (PassConfig(), 1),
        "graphs": (PassConfig(graphs=graphs), 1),
        "graphs, async": (PassConfig(graphs=graphs), 2),
    }
    for mode, (passes, depth) in ours.items():
        _ours(part, module, load, _shape(load, backend, passes, depth), f"{name}: chairlift, {mode}")
    for use_graphs in (False,) if dry else (False, True):
        _theirs(part, module, load, use_graphs=use_graphs, name=f"{name}: transformers", dry=dry)
    if not dry:  # last, since compiling may take the rest of the time
        passes = PassConfig(decode_compile=compiled, graphs=graphs)
        _ours(part, module, load, _shape(load, backend, passes, 2), f"{name}: chairlift, graphs, async, compiled")


def _shape(load: Load, backend: str, passes: PassConfig, depth: int) -> Shape:
    page_size = 16
    pages = -(-load.max_len // page_size) + 1
    return Shape(
        backend=backend,
        page_size=page_size,
        num_sectors=pages * load.num_prompts,
        depth=depth,
        max_batch_tokens=2048,
        max_prefill_chunk=2048,
        max_requests=load.num_prompts,
        max_len=load.max_len,
        passes=passes,
    )


def _ours(part: Part, module: PreTrainedModel, load: Load, shape: Shape, name: str) -> None:
    with part.item(name) as figures:
        prompts = load.prompts(module.config.vocab_size)
        rig = Rig(module, shape)
        began = time.monotonic()
        rig.run(prompts, max_new_tokens=load.new_tokens)  # compiles, captures
        figures["first run, s"] = round(time.monotonic() - began, 2)
        run = rig.run(prompts, max_new_tokens=load.new_tokens)
        figures["tokens/s"] = round(run.tokens_a_second, 1)
        figures["ms a step"] = round(1e3 * run.seconds / run.num_steps, 2)
    _let_go(module)


def _theirs(part: Part, module: PreTrainedModel, load: Load, *, use_graphs: bool, name: str, dry: bool) -> None:
    with part.item(f"{name}, {'graphs' if use_graphs else 'plain'}") as figures:
        prompts = load.prompts(module.config.vocab_size)
        # No id ends an output: all have the same length on both sides.
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=load.new_tokens, eos_token_id=-1, pad_token_id=0, use_cuda_graph=use_graphs
        )
        arguments: dict[str, Any] = {"generation_config": generation}
        if "continuous_batching_config" in inspect.signature(module.generate_batch).parameters:
            small = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64} if dry else {}
            arguments["continuous_batching_config"] = ContinuousBatchingConfig(use_cuda_graph=use_graphs, **small)
        for turn in ("first run, s", "second"):
            began = time.monotonic()
            outputs = module.generate_batch(inputs=prompts, progress_bar=False, **arguments)
            seconds = time.monotonic() - began
            if turn != "second":
                figures[turn] = round(seconds, 2)
        lengths = {len(output.generated_tokens) for output in outputs.values()}
        figures["tokens/s"] = round(sum(len(output.generated_tokens) for output in outputs.values()) / seconds, 1)
        if lengths != {load.new_tokens} or len(outputs) != load.num_prompts:
            raise ValueError(f"outputs have lengths {sorted(lengths)}, and are {len(outputs)}")
    _let_go(module)


def _let_go(module: PreTrainedModel) -> None:
    gc.collect()
    if module.device.type == "cuda":
        torch.cuda.empty_cache()

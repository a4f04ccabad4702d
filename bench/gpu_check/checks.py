"""What must hold: outputs, whatever computes them and in whatever order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from chairlift_worker.attention.backends import make_backend
from chairlift_worker.attention.choice import IN_PLACE, find_faults
from chairlift_worker.ipc.messages import SamplingMsg
from chairlift_worker.plan import RowPlan, SampleSpec
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling.device import DeviceSampler
from models import make_model, tiny_config
from report import Part
from rig import Rig, Run, Shape, captured, random_prompts
from transformers import PreTrainedModel

# The best first: what is there of the first that reads block tables is what graphs and async batching run on.
BACKENDS = ("flash_attention_3", "flash_attention_2", "triton", "native", "sdpa", "eager")
KINDS = ("llama", "qwen3", "mistral", "gemma2")
WINDOWS = ("llama", "mistral")  # none, and one
LENGTHS = (1, 3, 15, 16, 17, 60, 130)
NEW_TOKENS = 24
# How far a chosen token's logit may be below the best, in standard deviations of the logits.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.6, torch.float16: 0.1}
SEEDED = [
    SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
    SamplingMsg(temperature=0.8, top_k=40, top_p=0.95, min_p=0.0, seed=1),
    SamplingMsg(temperature=1.3, top_k=0, top_p=1.0, min_p=0.05, seed=2**64 - 1),
]


def runnable(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The backends that can run there."""
    faults, found = find_faults(device=device, dtype=dtype), []
    for name in BACKENDS:
        try:
            make_backend(name)
        except (ValueError, ImportError):
            continue
        if name not in faults:
            found.append(name)
    return found


def in_place(device: torch.device, dtype: torch.dtype) -> str:
    """The backend for graphs. Raises RuntimeError if there is none."""
    found = [name for name in runnable(device, dtype) if name in IN_PLACE]
    if not found:
        raise RuntimeError("no backend that runs here reads block tables")
    return found[0]


def check_backends(part: Part, device: torch.device, *, dry: bool) -> None:
    """Each backend's tokens against the logits of transformers' own eager attention, in float32."""
    types = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    for kind in KINDS[:1] if dry else KINDS:
        for dtype in types:
            module = make_model(tiny_config(kind), dtype=dtype, device=device)
            reference = make_model(tiny_config(kind), dtype=dtype, device=device).float()
            for backend in runnable(device, dtype)[: 2 if dry else None]:
                with part.item(f"{kind}, {str(dtype).removeprefix('torch.')}, {backend}") as figures:
                    shape = Shape(backend=backend, num_sectors=512, max_prefill_chunk=32)
                    run = _run(module, shape)
                    gap = worst_gap(reference, run)
                    figures["worst gap"] = round(gap, 5)
                    expect(gap <= TOLERANCE[dtype], f"a token's logit is {gap} deviations below the best")


def check_graphs(part: Part, device: torch.device, *, dry: bool) -> None:
    """Captured steps against steps that are not."""
    for kind in WINDOWS[:1] if dry else WINDOWS:
        with part.item(kind) as figures:
            module, shape = _tiny(kind, device)
            plain = _run(module, shape, sampled=True)
            rig = Rig(module, replace(shape, passes=captured(q_interval=16, kv_interval=64)))
            prompts = random_prompts(LENGTHS, vocab_size=384)
            for turn in ("captured", "replayed"):
                run = rig.run(prompts, max_new_tokens=NEW_TOKENS, sampling=SEEDED)
                figures[f"{turn}, s"] = round(run.seconds, 2)
                expect_equal(run, plain)


def check_async(part: Part, device: torch.device, *, dry: bool) -> None:
    """Two steps in flight against one, with graphs and without."""
    for kind in WINDOWS[1:] if dry else WINDOWS:
        module, shape = _tiny(kind, device)
        plain = _run(module, shape, sampled=True)
        for name, passes in (("plain", shape.passes), ("captured", captured(q_interval=16, kv_interval=64))):
            with part.item(f"{kind}, {name}") as figures:
                run = _run(module, replace(shape, depth=2, passes=passes), sampled=True)
                figures["steps"] = run.num_steps
                expect_equal(run, plain)


def check_swap(part: Part, device: torch.device) -> None:
    """A cache that is too small, and evicted requests whose pages go to host memory and back."""
    for depth in (1, 2):
        with part.item(f"{depth} in flight") as figures:
            module, shape = _tiny("llama", device)
            plain = _run(module, shape, sampled=True)
            small = replace(shape, num_sectors=12, swap_slots=200, depth=depth)
            run = _run(module, small, sampled=True)
            figures["swapped"] = run.num_swapped
            expect_equal(run, plain)
            expect(run.num_swapped > 0, "nothing was swapped")


def check_sampling(part: Part, device: torch.device, *, dry: bool) -> None:
    """The device's sampler against the native one on the same logits."""
    generator = random.Random(0)
    for vocab_size in (384, 4000 if dry else 151_936):
        with part.item(f"vocabulary of {vocab_size}") as figures:
            num_rows = 64
            rows = [_random_row(uid, generator, vocab_size) for uid in range(num_rows)]
            logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
            logits[3, 5], logits[4] = float("nan"), float("-inf")
            sampler = DeviceSampler()
            packed = sampler.sample(logits.to(device), rows).packed.cpu()
            got, wanted = sampler.results(packed, rows), Sampler().sample(logits, rows)
            figures["rows"] = num_rows
            different = [number for number, pair in enumerate(zip(got, wanted, strict=True)) if not _same(*pair)]
            expect(not different, f"rows {different} differ")


def _same(one: object, other: object) -> bool:
    facts = [(result.token_id, result.error) for result in (one, other)]  # type: ignore[attr-defined]
    return facts[0] == facts[1]


def worst_gap(reference: PreTrainedModel, run: Run) -> float:
    """How far a token of these greedy outputs is below the best at most, in deviations of its step's logits."""
    worst = 0.0
    for prompt, output in zip(random_prompts(LENGTHS, vocab_size=384), run.outputs, strict=True):
        ids = torch.tensor([[*prompt, *output[:-1]]], device=reference.device)
        with torch.inference_mode():
            logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
        chosen = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])[:, 0]
        worst = max(worst, float(((logits.amax(dim=-1) - chosen) / logits.std(dim=-1)).max()))
    return worst


def expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - what was found
    """Raises ValueError unless it holds."""
    if not holds:
        raise ValueError(otherwise)


def expect_equal(run: Run, plain: Run) -> None:
    """Raises ValueError, naming the first difference, unless all outputs are the same."""
    for number, (got, wanted) in enumerate(zip(run.outputs, plain.outputs, strict=True)):
        places = [place for place, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]]
        expect(not places, f"output {number} differs from token {places[:1]} on")


def _tiny(kind: str, device: torch.device) -> tuple[PreTrainedModel, Shape]:
    module = make_model(tiny_config(kind), dtype=torch.float32, device=device)
    return module, Shape(backend=in_place(device, torch.float32), num_sectors=512, max_prefill_chunk=32)


def _run(module: PreTrainedModel, shape: Shape, *, sampled: bool = False) -> Run:
    sampling: Sequence[SamplingMsg] = SEEDED if sampled else ()
    prompts = random_prompts(LENGTHS, vocab_size=384)
    return Rig(module, shape).run(prompts, max_new_tokens=NEW_TOKENS, sampling=sampling)


def _random_row(uid: int, generator: random.Random, vocab_size: int) -> RowPlan:
    spec = SampleSpec(
        temperature=generator.choice([0.0, 0.3, 1.0, 1.9]),
        top_k=generator.choice([0, 0, 1, 40, vocab_size - 1]),
        top_p=generator.choice([1.0, 1.0, 0.95, 0.5]),
        min_p=generator.choice([0.0, 0.0, 0.01, 0.3]),
        seed=generator.randrange(2**64),
        index=generator.choice([0, 1, 2**33]),
        logprob=True,
    )
    return RowPlan(uid=uid, tokens=array("i"), start=0, num_tokens=1, tables=(), sample=spec)

"""Keys and values in int8: logits beside those of transformers' model whose own keys and values are rounded alike."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from chairlift_worker.attention.native_kernel import Isa, isas
from support.paged import Desk, some_ids
from support.pages import restored, stored
from support.tiny_models import reference_logits, reference_model, tiny_model

IDS = some_ids(60, seed=1)
WINDOWED = ("mistral", "gemma3")
KINDS = ("llama", "qwen3", *WINDOWED)
# Keys that differ in their last bits may be rounded to different numbers now and then: a 127th of the largest.
FLIPS = 2e-3
# And where queries and weights are rounded to bfloat16: a third of what may make the decoder unfit (decoder/verify).
DOTS = 0.05


def rounded(heads: torch.Tensor) -> torch.Tensor:
    return restored(stored(heads, torch.int8)).float()


@functools.cache
@torch.inference_mode()
def expected(kind: str) -> torch.Tensor:
    """(tokens, vocabulary): transformers' eager attention over rounded keys and values."""
    model = reference_model(tiny_model(kind))
    code = sys.modules[type(model).__module__]
    plain = code.eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return plain(module, query, rounded(key), rounded(value), *rest, **options)

    code.eager_attention_forward = attend
    try:
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    finally:
        code.eager_attention_forward = plain


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("chunk", [1, 7, 60])
@pytest.mark.parametrize("backend", [*(f"decoder {isa.name}" for isa in isas()), "native", "native, in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_rounded_keys_and_values(kind: str, backend: str, chunk: int) -> None:
    desk = Desk(tiny_model(kind), backend=backend, kv_cache="int8")
    assert desk.runner.cache.sectors.dtype == torch.int8
    dots = chunk > 1 and (backend.startswith("native") or Isa[backend.removeprefix("decoder ")] >= Isa.AVX512_BF16)
    sequence, unrounded = desk.sequence(IDS), reference_logits(tiny_model(kind), IDS)
    seen = []
    while sequence.computed < len(IDS):
        (logits,) = desk.step(sequence.row(min(chunk, len(IDS) - sequence.computed)))
        seen.append((logits, sequence.computed - 1))
        if kind in WINDOWED:
            desk.forget(sequence)
    for logits, place in seen:
        assert distance(logits, expected(kind)[place]) < (DOTS if dots else FLIPS)
    # What the rounding does can be told from what the model has without it: else nothing was shown.
    assert max(distance(unrounded[place], expected(kind)[place]) for _, place in seen) > 2 * FLIPS

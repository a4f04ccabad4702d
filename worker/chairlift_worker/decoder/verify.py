"""A look before serving whether the native decoder computes what the model's own module does.

It would not, for instance, if a later version of transformers changed what a class of models computes.
"""

from __future__ import annotations

from array import array
from typing import Final

import torch

from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.decoder.choice import Quantization
from chairlift_worker.plan import RowPlan, SampleSpec, StepPlan
from chairlift_worker.runner import Forward, Runner

_GREEDY: Final = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=0, logprob=False)
_MOST_TOKENS: Final = 24
# Distance of logits, relative to their length: what rounding may do, far below what another computation would.
_BOUNDS: Final = {torch.float32: 1e-3, torch.bfloat16: 0.15}
_QUANTISED_BOUND: Final = 0.7


def difference(candidate: Forward, reference: Forward, *, cache: PagedCache, vocab_size: int) -> float:
    """How far the logits of a short prompt and of the token after it are apart, relative to their length.

    Whatever lies in the first pages is overwritten: to be called before the first request.
    """
    length = min(_MOST_TOKENS, *(group.sector_len for group in cache.layout.groups))
    generator = torch.Generator().manual_seed(0)
    tokens = array("i", torch.randint(vocab_size, (length,), generator=generator).tolist())
    tables = tuple(array("i", [number]) for number in range(len(cache.layout.groups)))
    logits = []
    for forward in (candidate, reference):
        runner = Runner(forward=forward, cache=cache)
        for start, end in ((0, length - 1), (length - 1, length)):
            row = RowPlan(uid=0, tokens=tokens, start=start, num_tokens=end - start, tables=tables, sample=_GREEDY)
            logits.append(runner.forward(StepPlan(step=0, rows=(row,)))[0])
    got, wanted = torch.cat(logits[:2]), torch.cat(logits[2:])
    return float((got - wanted).norm() / wanted.norm())


def bound(dtype: torch.dtype, quantization: Quantization, *, is_int8_cache: bool) -> float:
    """The difference that rounding may make; of keys and values to int8, which both have, as much as to bfloat16."""
    if quantization != "none":
        return _QUANTISED_BOUND
    return _BOUNDS[torch.bfloat16 if is_int8_cache else dtype]

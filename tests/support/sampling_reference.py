"""The sampler as its definition says, in numpy: every token, every logarithm, no short cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from chairlift_worker.plan import SampleSpec
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.processors import penalised

_MASK = np.uint64(0xFFFFFFFF)


def philox(counter: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 blocks of (n, 4) counters; written from the paper's round function."""
    c = counter.astype(np.uint64)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        c = np.stack(
            [
                (p1 >> np.uint64(32)) ^ c[:, 1] ^ np.uint64(k0),
                p1 & _MASK,
                (p0 >> np.uint64(32)) ^ c[:, 3] ^ np.uint64(k1),
                p0 & _MASK,
            ],
            axis=1,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c.astype(np.uint32)


def noise_bits(num_tokens: int, seed: int, index: int) -> npt.NDArray[np.uint64]:
    """The 52 bits of every token id's uniform."""
    ids = np.arange(num_tokens)
    counter = np.zeros((num_tokens, 4), np.uint32)
    counter[:, 0] = ids // 2
    counter[:, 2], counter[:, 3] = index & 0xFFFFFFFF, index >> 32
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).astype(np.uint64)
    odd = (ids % 2).astype(bool)
    high, low = np.where(odd, words[:, 2], words[:, 0]), np.where(odd, words[:, 3], words[:, 1])
    return ((high << np.uint64(32)) | low) >> np.uint64(12)


def gumbel_noise(num_tokens: int, seed: int, index: int) -> npt.NDArray[np.float64]:
    """The noise of every token id."""
    uniform = noise_bits(num_tokens, seed, index).astype(np.float64)
    return -np.log(-np.log1p(-(uniform + 0.5) / 2.0**52))


def processed(logits: torch.Tensor, spec: SampleSpec, tokens: Sequence[int] = ()) -> torch.Tensor:
    """(vocabulary,) scores after transformers' own processors, in its order; minus infinity where masked.

    `tokens` are prompt and output so far. Where the choice is greedy, the filters are left out.
    """
    scores = penalised(logits, spec.processors, tokens, spec.index)
    if spec.temperature < 1e-5:
        return scores
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(spec.temperature))])
    if spec.top_k > 0:
        processors.append(TopKLogitsWarper(spec.top_k))
    if spec.top_p < 1:
        processors.append(TopPLogitsWarper(spec.top_p))
    if spec.min_p > 0:
        processors.append(MinPLogitsWarper(spec.min_p))
    return processors(torch.zeros((1, 1), dtype=torch.int64), scores[None].clone())[0]


def reference_choice(logits: torch.Tensor, spec: SampleSpec, tokens: Sequence[int] = ()) -> tuple[int, float]:
    """The token and its log-probability; argmax takes the first of equals."""
    scores = processed(logits, spec, tokens)
    if spec.temperature < 1e-5:
        token = int(scores.argmax())
    else:
        token = int(np.argmax(scores.double().numpy() + gumbel_noise(len(logits), spec.seed, spec.index)))
    return token, float((logits if spec.raw else scores).double().log_softmax(-1)[token])


def reference_top(
    logits: torch.Tensor, spec: SampleSpec, tokens: Sequence[int] = (), *, chosen: int
) -> list[tuple[int, float]]:
    """The `num_top` likeliest tokens, likeliest first, with their log-probabilities; the chosen one among them."""
    scores = (logits if spec.raw else processed(logits, spec, tokens)).double().log_softmax(-1)
    order = torch.sort(scores, descending=True, stable=True)
    top = [(int(i), float(value)) for value, i in zip(*order, strict=True) if value > -math.inf][: spec.num_top]
    if chosen not in [token for token, _ in top]:
        top[-1] = (chosen, float(scores[chosen]))
    return top

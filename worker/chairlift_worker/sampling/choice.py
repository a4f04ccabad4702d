"""Rows of logits to tokens in tensors, without a look at any value: nothing waits for the device.

The arithmetic is that of the native sampler, worker/native/src/sampling.cpp: logits over temperature in float32,
everything after it in float64. Sums may be added up in another order, which a share or a score of 53 bits sees only
where it is equal to a limit, or to another score, to some thirteen digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from chairlift_worker.sampling.noise import gumbel, uniform_bits

NEVER: Final = -math.inf


@dataclass(frozen=True, slots=True)
class RowParams:
    """How rows are sampled: one number for each row, on the device of their logits."""

    temperature: torch.Tensor  # float64, not greedy
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int64; 0 is off
    seed: torch.Tensor  # int64, the bits of an unsigned one
    index: torch.Tensor  # int64


@dataclass(frozen=True, slots=True)
class Filters:
    """Which filters any of the rows has; known without asking the device."""

    max_top_k: int  # 0: none has one
    top_p: bool
    min_p: bool


def choose_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows,) int64 tokens, the lowest id of the highest logit, and their float32 log-probabilities."""
    tokens = logits.argmax(dim=-1)
    return tokens, log_share(logits, tokens)


def choose_seeded(logits: torch.Tensor, params: RowParams, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows,) int64 tokens and float32 log-probabilities among the tokens that the filters leave."""
    z = scaled(logits, params.temperature)
    if filters.max_top_k:
        z = keep_top_k(z, params.top_k, filters.max_top_k)
    highest = z.amax(dim=-1, keepdim=True).double()
    kept = z
    if filters.top_p:
        kept = keep_top_p(z, highest, params.top_p)
    if filters.min_p:
        share = torch.exp(kept.double() - highest).float()
        kept = kept.masked_fill((share < params.min_p.float()[:, None]) & (params.min_p > 0)[:, None], NEVER)
    bits = uniform_bits(vocab_size=logits.shape[1], seeds=params.seed, indices=params.index)
    tokens = (kept.double() + gumbel(bits)).argmax(dim=-1)
    return tokens, log_share(kept, tokens)


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits over temperature; their distances from the highest over it, where its quotient is out of range."""
    by = temperature.float()[:, None]
    highest = logits.amax(dim=-1, keepdim=True)
    shift = torch.where(torch.isfinite(highest / by), 0.0, highest)
    return (logits - shift) / by


def keep_top_k(z: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Minus infinity for what is below the k-th highest of its row; equals of it stay."""
    vocab_size = z.shape[1]
    highest = z.topk(min(max_top_k, vocab_size), dim=-1).values
    has_one = (top_k > 0) & (top_k < vocab_size)
    places = torch.where(has_one, top_k - 1, 0)
    lowest = torch.where(has_one, highest.gather(1, places[:, None])[:, 0], NEVER)
    return z.masked_fill(z < lowest[:, None], NEVER)


def keep_top_p(z: torch.Tensor, highest: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Minus infinity for the least probable tokens whose shares add up to no more than 1 - top_p.

    Of equal ones the highest ids go first. The most probable one stays.
    """
    ordered, ids = z.sort(dim=-1, descending=True, stable=True)
    weights = torch.exp(ordered.double() - highest)
    from_here_on = weights.flip(-1).cumsum(-1).flip(-1)
    shares = (from_here_on / weights.sum(dim=-1, keepdim=True)).float()
    dropped = (shares <= (1.0 - top_p).float()[:, None]) & (top_p < 1.0)[:, None]
    dropped[:, 0] = False
    return torch.empty_like(z).scatter_(1, ids, ordered.masked_fill(dropped, NEVER))


def log_share(z: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(rows,) float32 log-probabilities of these tokens, by exp(z)."""
    z = z.double()
    highest = z.amax(dim=-1, keepdim=True)
    chosen = z.gather(1, tokens[:, None])
    return (chosen - highest - torch.exp(z - highest).sum(dim=-1, keepdim=True).log())[:, 0].float()

"""The sampler's noise as tensors: the definition at the top of worker/native/src/sampling.cpp, on any device."""

from __future__ import annotations

from typing import Final

import torch

_LOW: Final = 0xFFFFFFFF
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 blocks. Every word is int64 with a value under 2^32; all shapes fit each other's."""
    a, b, c, d = counter
    low, high = key
    for number in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2^64: the bits are those of unsigned products
        a, b, c, d = (
            _high(second) ^ b ^ ((low + number * _WEYL[0]) & _LOW),
            second & _LOW,
            _high(first) ^ d ^ ((high + number * _WEYL[1]) & _LOW),
            first & _LOW,
        )
    return a, b, c, d


def uniform_bits(*, vocab_size: int, seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """(rows, vocabulary) int64: the 52 bits of each token's uniform. `seeds` and `indices` are uint64 as int64."""
    blocks = torch.arange(-(-vocab_size // 2), device=seeds.device)[None]
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    counter = (blocks, zero, indices[:, None] & _LOW, _high(indices[:, None]))
    words = philox(counter, (seeds[:, None] & _LOW, _high(seeds[:, None])))
    pairs = torch.stack([_top(words[0], words[1]), _top(words[2], words[3])], dim=-1)
    return pairs.flatten(1)[:, :vocab_size]


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """float64 noise of these uniforms."""
    return -torch.log(-torch.log1p((bits.double() + 0.5) * -(2.0**-52)))


def _high(words: torch.Tensor) -> torch.Tensor:
    return (words >> 32) & _LOW


def _top(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The upper 52 of 64 bits."""
    return (high << 20) | (low >> 12)

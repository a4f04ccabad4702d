"""Weights of linear layers as the native kernels read them; include/chairlift/matmul.hpp has the layouts.

A quantised weight is scale * q + offset, with a scale and an offset of bfloat16 for each output and group of 32 inputs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import torch

BLOCK: Final = 16  # outputs
GROUP: Final = 32  # inputs that share a scale


class Format(enum.IntEnum):
    """What packed weights are made of."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear layer's weights."""

    data: torch.Tensor  # (blocks, bytes of a block) uint8
    format: Format
    outputs: int
    inputs: int


@torch.no_grad()
def pack(weight: torch.Tensor, packed_format: Format) -> Packed:
    """Packs (outputs, inputs) weights on the CPU. Raises ValueError where the format cannot hold their values."""
    outputs, inputs = weight.shape
    rows, columns = _up(outputs, BLOCK), _up(inputs, GROUP)
    padded = torch.zeros((rows, columns), dtype=weight.dtype)
    padded[:outputs, :inputs] = weight
    blocks = padded.view(rows // BLOCK, BLOCK, columns)
    match packed_format:
        case Format.FLOAT32:
            data = blocks.float().transpose(1, 2)
        case Format.BFLOAT16:
            data = blocks.bfloat16().view(-1, BLOCK, columns // 2, 2).transpose(1, 2)
        case Format.INT8:
            data = _quantised(blocks.float(), 8)
        case Format.INT4:
            data = _quantised(blocks.float(), 4)
    data = data.contiguous()
    return Packed(data.view(rows // BLOCK, -1).view(torch.uint8), packed_format, outputs, inputs)


def check_values(weight: torch.Tensor, packed_format: Format) -> None:
    """Raises ValueError where the format cannot hold the weights."""
    if packed_format in {Format.INT8, Format.INT4} and not bool(weight.isfinite().all()):
        raise ValueError("weights that are not finite numbers cannot be quantised")


def paired(gate: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Gates and what they gate, (inner, hidden) each, in turn: 16 rows of the one, 16 of the other, zeros up to 64."""
    inner, hidden = gate.shape
    both = torch.zeros((_up(inner, GROUP) // BLOCK, 2, BLOCK, hidden), dtype=gate.dtype)
    for place, weight in enumerate((gate, other)):
        padded = torch.zeros((_up(inner, GROUP), hidden), dtype=gate.dtype)
        padded[:inner] = weight
        both[:, place] = padded.view(-1, BLOCK, hidden)
    return both.view(-1, hidden)


def _quantised(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """(blocks, groups, bytes) uint8 of (blocks, 16, inputs) float32."""
    check_values(blocks, Format.INT8 if bits == 8 else Format.INT4)
    groups = blocks.view(blocks.shape[0], BLOCK, -1, GROUP)
    scale, offset = _symmetric(groups) if bits == 8 else _between(groups)
    steps = scale.float()
    steps = torch.where(steps > 0, steps, torch.ones_like(steps))
    q = ((groups - offset.float()[..., None]) / steps[..., None]).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    quads = q.view(*groups.shape[:3], GROUP // 4, 4).permute(0, 2, 3, 1, 4)  # (blocks, groups, quads, outputs, 4)
    if bits == 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    numbers = [part.transpose(1, 2).contiguous().view(torch.uint8) for part in (scale, offset)]
    return torch.cat([*numbers, quads.reshape(*quads.shape[:2], -1)], dim=2)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets by which q - 128 is from -127 to 127."""
    scale = (groups.abs().amax(-1) / 127).bfloat16()
    return scale, -128 * scale


def _between(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets by which 0 is the least weight and 15 the greatest."""
    least = groups.amin(-1).bfloat16()
    return ((groups.amax(-1) - least.float()) / 15).bfloat16(), least


def _up(number: int, to: int) -> int:
    return -(-number // to) * to

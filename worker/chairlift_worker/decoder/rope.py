"""Angles of rotary positions, asked once from the model's own module."""

from __future__ import annotations

from typing import Any, Final

import torch

_LEAST_LEN: Final = 4096  # positions of the first table


class RopeTable:
    """Cosines and sines of the positions seen so far, (positions, head_dim / 2) float32 each; grows by doubling."""

    def __init__(self, *, rotary: torch.nn.Module, layer_type: str | None, context_len: int) -> None:
        self._rotary: Any = rotary
        self._more = () if layer_type is None else (layer_type,)
        self._context_len = context_len
        self.cosines, self.sines = self._angles(min(_LEAST_LEN, context_len))

    def reach(self, position: int) -> None:
        """Makes sure that the table has this position."""
        length = self.cosines.shape[0]
        if position >= length:
            self.cosines, self.sines = self._angles(max(position + 1, min(2 * length, self._context_len)))

    def _angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        # In float32 whatever the model's type: the module rounds its result to the type of what it is shown.
        cosines, sines = self._rotary(torch.zeros(1), torch.arange(length)[None], *self._more)
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

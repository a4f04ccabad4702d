"""A model that can be served, and what the rest of the worker must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionOptions
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.ipc.messages import ModelCardMsg


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The module in eval mode, without gradients, and its facts."""

    module: PreTrainedModel
    name: str
    architecture: str
    tokenizer_dir: Path
    vocab_size: int  # rows of the output layer
    context_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    dtype_reason: str
    num_parameters: int
    generation_config: dict[str, object]  # generation_config.json as it is; empty if there is none
    layers: tuple[LayerFacts, ...]
    attention_options: tuple[AttentionOptions, ...]  # one for each layer
    overridden: tuple[str, ...] = ()  # entries of its config that a setting changed

    @property
    def dtype_name(self) -> str:
        """The type as users write it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_sliding_layers(self) -> bool:
        """Whether some layer sees only a window."""
        return any(layer.sliding_window is not None for layer in self.layers)

    def card(self, *, cache_len: int) -> ModelCardMsg:
        """What the service is told."""
        return ModelCardMsg(
            name=self.name,
            architecture=self.architecture,
            tokenizer_dir=str(self.tokenizer_dir),
            vocab_size=self.vocab_size,
            context_len=self.context_len,
            cache_len=cache_len,
            eos_token_ids=self.eos_token_ids,
            dtype=self.dtype_name,
            num_parameters=self.num_parameters,
            generation_config=self.generation_config,
        )

"""Random models: tiny ones whose best tokens are never near each other by chance, and ones of the size of real ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

_IDS = {"vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
_TINY = {"num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": 0.35, **_IDS}


def tiny_config(kind: str) -> PreTrainedConfig:
    """Grouped heads in all; a window in two of them, a soft cap in one."""
    match kind:
        case "llama":
            heads = {"hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 9, "num_key_value_heads": 3}
            return LlamaConfig(**_TINY, **heads, head_dim=64)
        case "qwen3":
            heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
            return Qwen3Config(**_TINY, **heads, head_dim=128)
        case "mistral":
            heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
            return MistralConfig(**_TINY, **heads, head_dim=64, sliding_window=24)
        case "gemma2":
            heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
            return Gemma2Config(**_TINY, **heads, head_dim=64, sliding_window=24, attn_logit_softcapping=20.0)
    raise ValueError(f"no tiny model is called {kind}")


def sized_config(name: str, *, dry: bool) -> PreTrainedConfig:
    """Of the size of Qwen3's models of that name; in a dry run of two small layers."""
    sizes: dict[str, dict[str, Any]] = {
        "0.6B": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "4B": {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    }
    size = sizes[name]
    if dry:
        few = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        size = {**size, **few, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocab_size, head_dim = (384, 32) if dry else (151_936, 128)
    return Qwen3Config(**size, head_dim=head_dim, vocab_size=vocab_size, max_position_embeddings=4096)


def make_model(config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The same weights for the same config, made where they are to be; of tiny models rounded from float32 ones."""
    is_tiny = config.vocab_size == _IDS["vocab_size"]
    torch.manual_seed(0)
    with torch.device("cpu" if is_tiny else device):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if is_tiny else dtype)
    made: PreTrainedModel = module.to(device=device, dtype=dtype).eval().requires_grad_(requires_grad=False)
    return made

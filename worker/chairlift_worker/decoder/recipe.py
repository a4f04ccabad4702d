"""What a transformers model computes, as far as the native decoder knows how: weights by role, and the variations.

The classes below are built as Llama is: norm, attention, residual; norm, gated feed-forward part, residual. A model is
taken by its class, since only the class's code says what it computes; before it serves it is compared with the module
itself (verify.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionOptions
from chairlift_worker.decoder.packing import paired

_LLAMA: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"}
)
_GEMMA: Final = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
_ACTIVATIONS: Final = {"silu": 0, "gelu_pytorch_tanh": 1}
_STEADY_ROPES: Final = frozenset({"default", "linear", "llama3", "yarn"})  # angles depend on the position alone


@dataclass(frozen=True, slots=True)
class Linear:
    """A product and its bias."""

    weight: torch.Tensor  # (outputs, inputs)
    bias: torch.Tensor | None  # (outputs,) float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecipe:
    """One layer; norms are float32 and what the normalised values are multiplied with."""

    qkv: Linear
    out: Linear
    gate_up: Linear  # blocks in turn, see packing.paired
    down: Linear
    attention_norm: torch.Tensor
    after_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    after_mlp_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    num_heads: int
    rope: int | None  # number in `ropes`
    options: AttentionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole model."""

    layers: tuple[LayerRecipe, ...]
    embedding: torch.Tensor  # (vocabulary, hidden)
    head: Linear  # its weight is the embedding itself where the two are tied
    norm: torch.Tensor
    ropes: tuple[str | None, ...]  # the type of layer that each is for; None: there is one for all
    rotary: torch.nn.Module
    hidden: int
    inner: int
    activation: int
    eps: float
    embedding_scale: float
    softcap: float

    @property
    def is_tied(self) -> bool:
        """Whether embedding and output layer are the same weights."""
        return self.head.weight is self.embedding


def recipe_fault(module: PreTrainedModel, options: tuple[AttentionOptions, ...]) -> str | None:
    """Why the native decoder cannot compute this model; None if it can."""
    name = type(module).__name__
    if name not in _LLAMA | _GEMMA:
        return f"it does not know {name}"
    if module.dtype not in {torch.float32, torch.bfloat16} or module.device.type != "cpu":
        dtype = str(module.dtype).removeprefix("torch.")
        return f"it computes in float32 and bfloat16 on the CPU, not in {dtype} on {module.device.type}"
    config: Any = module.config.get_text_config()
    unknown = [f"the activation {name}" for name in [_activation_name(config)] if name not in _ACTIVATIONS]
    kinds = sorted({_rope_kind(rope) for rope in _rope_parameters(config)} - _STEADY_ROPES)
    unknown += [f"rotary positions of type {kind}" for kind in kinds]
    if any(option.sinks is not None for option in options):
        unknown.append("attention sinks")
    return f"it does not know {', '.join(unknown)}" if unknown else None


@torch.no_grad()
def make_recipe(module: PreTrainedModel, options: tuple[AttentionOptions, ...]) -> Recipe:
    """The recipe of a model that has no fault; weights are the module's own tensors where nothing is joined."""
    model: Any = module
    config: Any = module.config.get_text_config()
    inner_model: Any = model.model
    is_gemma = type(module).__name__ in _GEMMA
    kinds = tuple(config.layer_types) if _is_per_type(config) else (None,) * len(options)
    ropes = tuple(dict.fromkeys(kinds))
    embedding = inner_model.embed_tokens.weight
    return Recipe(
        layers=tuple(
            _layer(layer, option, rope=ropes.index(kind), is_gemma=is_gemma)
            for layer, option, kind in zip(inner_model.layers, options, kinds, strict=True)
        ),
        embedding=embedding,
        head=_linear(model.lm_head),
        norm=_norm(inner_model.norm, is_gemma=is_gemma),
        ropes=ropes,
        rotary=inner_model.rotary_emb,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        activation=_ACTIVATIONS[_activation_name(config)],
        eps=config.rms_norm_eps,
        embedding_scale=_embedding_scale(inner_model.embed_tokens, embedding.dtype),
        softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def _layer(layer: Any, options: AttentionOptions, *, rope: int, is_gemma: bool) -> LayerRecipe:
    attention, mlp = layer.self_attn, layer.mlp
    if is_gemma:
        norms = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
    else:
        norms = (layer.input_layernorm, None, layer.post_attention_layernorm, None)
    before_attention, after_attention, before_mlp, after_mlp = norms
    return LayerRecipe(
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        out=_linear(attention.o_proj),
        gate_up=Linear(paired(mlp.gate_proj.weight, mlp.up_proj.weight), None),
        down=_linear(mlp.down_proj),
        attention_norm=_norm(before_attention, is_gemma=is_gemma),
        after_attention_norm=_optional_norm(after_attention, is_gemma=is_gemma),
        mlp_norm=_norm(before_mlp, is_gemma=is_gemma),
        after_mlp_norm=_optional_norm(after_mlp, is_gemma=is_gemma),
        query_norm=_optional_norm(getattr(attention, "q_norm", None), is_gemma=is_gemma),
        key_norm=_optional_norm(getattr(attention, "k_norm", None), is_gemma=is_gemma),
        num_heads=attention.q_proj.weight.shape[0] // attention.head_dim,
        rope=rope if getattr(attention, "use_rope", True) else None,
        options=options,
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight, None if module.bias is None else module.bias.float())


def _joined(*modules: Any) -> Linear:
    biases = [module.bias for module in modules]
    return Linear(
        torch.cat([module.weight for module in modules]),
        None if biases[0] is None else torch.cat([bias.float() for bias in biases]),
    )


def _norm(module: Any, *, is_gemma: bool) -> torch.Tensor:
    weight: torch.Tensor = module.weight.float()
    return weight + 1.0 if is_gemma else weight.clone()


def _optional_norm(module: Any, *, is_gemma: bool) -> torch.Tensor | None:
    return None if module is None else _norm(module, is_gemma=is_gemma)


def _embedding_scale(embedding: Any, dtype: torch.dtype) -> float:
    """As transformers has it: rounded to the model's type."""
    scale = getattr(embedding, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(dtype))


def _activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _is_per_type(config: Any) -> bool:
    """Whether each type of layer has rotary positions of its own."""
    parameters = config.rope_parameters
    return isinstance(parameters, dict) and "rope_type" not in parameters


def _rope_parameters(config: Any) -> list[Any]:
    return list(config.rope_parameters.values()) if _is_per_type(config) else [config.rope_parameters]


def _rope_kind(parameters: Any) -> str:
    return str((parameters or {}).get("rope_type", "default"))

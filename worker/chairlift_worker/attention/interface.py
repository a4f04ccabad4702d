"""The way from a transformers model's attention layers to a backend.

transformers looks up `config._attn_implementation` in ALL_ATTENTION_FUNCTIONS at each layer of each forward pass. Here
one more name is registered there. A model's config holds that name only while `AttentionSwitch` is entered, so plain
calls of the model before, between and after steps are what they were.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from chairlift_worker.attention.base import AttentionCall, AttentionOptions, AttentionStep

PAGED_ATTENTION = "chairlift_paged"
STEP_KEYWORD = "chairlift_step"  # forward keyword that carries the AttentionStep

# Keywords that say nothing about how to attend: positions are in the queries and keys by now.
_IGNORED = frozenset({"position_ids", "cache_position", "use_cache", "position_embeddings"})


class AttentionRefused(Exception):  # noqa: N818 - it says what happened, as StopIteration does
    """A model asks its attention for something that the backends do not compute."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,  # whatever a model passes; each is consumed or refused by name
) -> tuple[torch.Tensor, None]:
    """The attention function: (1, heads, tokens, head dim) in, (1, tokens, heads, head dim) out.

    Raises AttentionRefused for a keyword that is not understood, or outside a step.
    """
    step: AttentionStep | None = keywords.pop(STEP_KEYWORD, None)
    if step is None:
        raise AttentionRefused(f"{PAGED_ATTENTION} was called without {STEP_KEYWORD}: not inside a step")
    if attention_mask is not None:
        raise AttentionRefused("the model brings an attention mask of its own")
    options = _options(module, query.shape[-1], keywords)
    call = AttentionCall(
        layer=_layer_index(module),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        options=options,
    )
    return step.attend(call)[None], None


def _layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise AttentionRefused(f"{type(module).__name__} does not say which layer it is")
    return layer


def _options(module: torch.nn.Module, head_dim: int, keywords: dict[str, Any]) -> AttentionOptions:
    scaling = keywords.pop("scaling", None)
    options = AttentionOptions(
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        softcap=keywords.pop("softcap", None),
        sliding_window=keywords.pop("sliding_window", None),
        sinks=keywords.pop("s_aux", None),
    )
    causal = keywords.pop("is_causal", None)
    if causal is False or getattr(module, "is_causal", True) is False:
        raise AttentionRefused(f"{type(module).__name__} is not causal")
    if options.sinks is None and getattr(module, "sinks", None) is not None:
        raise AttentionRefused(f"{type(module).__name__} has sinks and does not pass them")
    for name in ("dropout", "output_attentions"):
        if keywords.pop(name, None):
            raise AttentionRefused(f"attention keyword {name} is not supported")
    unknown = sorted(name for name, value in keywords.items() if value is not None and name not in _IGNORED)
    if unknown:
        raise AttentionRefused(f"attention keywords not understood: {', '.join(unknown)}")
    return options


def _no_mask(*_args: object, **_keywords: object) -> None:
    """The backends make their own masks from the rows' positions."""


ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, paged_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _no_mask)


class AttentionSwitch:
    """Context in which a model's layers use the paged attention; afterwards its config is as before."""

    def __init__(self, model: PreTrainedModel) -> None:
        configs: dict[int, PreTrainedConfig] = {id(model.config): model.config}
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                configs[id(config)] = config
        self._configs = list(configs.values())
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        # The private attribute on purpose: the public setter also walks into sub-configs and warns.
        self._before = [config._attn_implementation_internal for config in self._configs]  # noqa: SLF001
        for config in self._configs:
            config._attn_implementation_internal = PAGED_ATTENTION  # noqa: SLF001

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for config, before in zip(self._configs, self._before, strict=True):
            config._attn_implementation_internal = before  # noqa: SLF001

"""What is refused at start, by name, instead of answering nonsense later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.model.errors import ModelError

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_ROPE_BY_BATCH = frozenset({"dynamic", "longrope"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_MAX_NAMED = 8


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text decoder."""
    found: PreTrainedConfig = config.get_text_config(decoder=True)
    return found


def check_config(model: str, config: PreTrainedConfig) -> None:
    """Raises ModelError for what a config alone shows."""
    text = text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model = {model}: encoder-decoder models are not supported ({config.model_type})")
    for kind in sorted(set(_rope_types(text))):
        if kind in _ROPE_BY_BATCH:
            raise ModelError(
                f"model = {model}: rope type {kind!r} is not supported: it scales by the longest request of a batch, "
                "so that neighbours would change each other's answers"
            )
        if kind not in _ROPE_TYPES:
            raise ModelError(
                f"model = {model}: unknown rope type {kind!r}; supported: {', '.join(sorted(_ROPE_TYPES))}"
            )
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        raise ModelError(f"model = {model}: layers of type {', '.join(strange)} are not supported")


def check_split(model: str, config: PreTrainedConfig, tp_size: int) -> None:
    """Raises ModelError for a model whose layers cannot be shared by so many ranks."""
    if tp_size == 1:
        return
    text = text_config(config)
    if not text.base_model_tp_plan:
        raise ModelError(
            f"model = {model}: tp_size = {tp_size}: transformers has no tensor parallel plan for {text.model_type}"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if kv_heads % tp_size or heads % tp_size:
        raise ModelError(
            f"model = {model}: tp_size = {tp_size} does not divide its {kv_heads} key-value heads "
            f"(and {heads} query heads)"
        )


def check_loading(model: str, info: Mapping[str, Any]) -> None:
    """Raises ModelError if the files did not hold every tensor of the model, in its shape."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"model = {model}: tensors missing in its files: {_some(missing)}")
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if mismatched:
        raise ModelError(f"model = {model}: tensors of another shape than its config says: {_some(mismatched)}")
    if info.get("error_msgs"):
        raise ModelError(f"model = {model}: {str(info['error_msgs'][0]).splitlines()[0]}")


def check_windows(model: str, config: PreTrainedConfig, layers: Iterable[LayerFacts]) -> None:
    """Raises ModelError if the layers do not tell their attention the windows that the config speaks of."""
    text = text_config(config)
    told = [layer.sliding_window for layer in layers]
    types = getattr(text, "layer_types", None)
    if types:
        agree = all((kind == "sliding_attention") == (w is not None) for kind, w in zip(types, told, strict=False))
    else:
        agree = getattr(text, "sliding_window", None) is None or all(window is not None for window in told)
    if not agree:
        raise ModelError(f"model = {model}: its layers do not pass their sliding windows on to attention")


def _rope_types(config: PreTrainedConfig) -> Iterable[str]:
    """The rope types of a config, whichever layout it has: flat, or one table per layer type."""
    table = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [table, *(value for value in table.values() if isinstance(value, Mapping))]
    for entry in tables:
        kind = entry.get("rope_type", entry.get("type"))
        if kind is not None:
            yield str(kind)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more

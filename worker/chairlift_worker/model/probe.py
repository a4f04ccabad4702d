"""A first look at a loaded model: one pass of two tokens that records what each attention layer asks for.

What the layers do is surer than what a config says, and a model whose attention does not come through transformers'
attention interface shows itself here, at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionCall, AttentionOptions
from chairlift_worker.attention.interface import STEP_KEYWORD, AttentionRefused, AttentionSwitch
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.model.checks import text_config
from chairlift_worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the probe found."""

    layers: tuple[LayerFacts, ...]
    options: tuple[AttentionOptions, ...]  # one for each layer
    vocab_size: int  # rows of the output layer


class _Recorder:
    """An attention step that notes the calls and attends to nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerFacts] = {}
        self.options: dict[int, AttentionOptions] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        num_kv_heads, head_dim = call.key.shape[1:]
        if call.value.shape != call.key.shape or call.query.shape[2] != head_dim:
            raise AttentionRefused("keys and values have different shapes")
        if call.layer in self.layers:
            raise AttentionRefused(f"layer {call.layer} attends twice")
        window = call.options.sliding_window
        self.layers[call.layer] = LayerFacts(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=window)
        self.options[call.layer] = call.options
        return torch.zeros_like(call.query)


@torch.inference_mode()
def probe(asked: str, model: PreTrainedModel) -> ModelShape:
    """The shape of a model. Raises ModelError, naming model and architecture, if it cannot be run on pages."""
    architecture = type(model).__name__
    recorder = _Recorder()
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        with AttentionSwitch(model):
            output = model(
                input_ids=ids,
                position_ids=torch.arange(2, device=model.device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=model.device),
                **{STEP_KEYWORD: recorder},
            )
    except (AttentionRefused, TypeError) as error:
        raise ModelError(f"model = {asked}: {architecture} is not supported: {error}") from error
    num_layers = text_config(model.config).num_hidden_layers
    if sorted(recorder.layers) != list(range(num_layers)):
        raise ModelError(
            f"model = {asked}: {architecture} is not supported: {len(recorder.layers)} of its {num_layers} layers go "
            "through transformers' attention interface"
        )
    if output.logits.shape[1] != 1:
        raise ModelError(f"model = {asked}: {architecture} is not supported: it does not select rows (logits_to_keep)")
    layers = tuple(recorder.layers[i] for i in range(num_layers))
    options = tuple(recorder.options[i] for i in range(num_layers))
    return ModelShape(layers=layers, options=options, vocab_size=output.logits.shape[2])

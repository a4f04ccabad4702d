"""What a model's layers pass to attention is used or refused, never dropped."""

import pytest
import torch
from chairlift_worker.attention.base import AttentionCall, AttentionOptions
from chairlift_worker.attention.interface import (
    PAGED_ATTENTION,
    STEP_KEYWORD,
    AttentionRefused,
    AttentionSwitch,
    paged_attention,
)
from support.tiny_models import reference_model, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Layer(torch.nn.Module):
    def __init__(self, **facts: object) -> None:
        super().__init__()
        self.layer_idx = 3
        for name, value in facts.items():
            setattr(self, name, value)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.query + 1


def attend(recorder: Recorder | None, layer: torch.nn.Module | None = None, mask=None, **keywords: object):
    query, key, value = torch.arange(2 * 4 * 5.0).view(1, 4, 2, 5), torch.ones(1, 2, 2, 5), torch.zeros(1, 2, 2, 5)
    return paged_attention(layer or Layer(), query, key, value, mask, **{STEP_KEYWORD: recorder}, **keywords)


def test_the_options_of_a_layer_reach_the_backend() -> None:
    recorder, sinks = Recorder(), torch.zeros(4)
    out, weights = attend(
        recorder,
        scaling=0.5,
        softcap=2.0,
        sliding_window=7,
        s_aux=sinks,
        dropout=0.0,
        is_causal=True,
        use_cache=False,
        position_ids=torch.zeros(1, 2),
        cache_position=None,
        output_attentions=False,
        something_unset=None,
    )
    (call,) = recorder.calls
    assert call.options == AttentionOptions(scaling=0.5, softcap=2.0, sliding_window=7, sinks=sinks)
    assert (call.layer, call.query.shape, call.key.shape) == (3, (2, 4, 5), (2, 2, 5))
    assert out.shape == (1, 2, 4, 5)
    assert torch.equal(out[0, 1, 2], torch.arange(25.0, 30.0) + 1)  # head 2, token 1
    assert weights is None


def test_scaling_that_is_not_given_is_the_usual_one() -> None:
    recorder = Recorder()
    attend(recorder, scaling=None)
    assert recorder.calls[0].options.scaling == pytest.approx(5**-0.5)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"temperature_tuning": False}, "temperature_tuning"),
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "not causal"),
        ({"mask": torch.zeros(1)}, "mask of its own"),
        ({"layer": Layer(is_causal=False)}, "not causal"),
        ({"layer": Layer(sinks=torch.zeros(4))}, "sinks"),
        ({"layer": torch.nn.Module()}, "which layer it is"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(keywords: dict, message: str) -> None:
    with pytest.raises(AttentionRefused, match=message):
        attend(Recorder(), **keywords)


def test_outside_a_step_the_attention_refuses() -> None:
    with pytest.raises(AttentionRefused, match="not inside a step"):
        attend(None)


def test_the_switch_gives_the_config_back_also_after_an_exception() -> None:
    model = reference_model(tiny_model("gemma3"))

    def names() -> set[str]:
        return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}

    def fail_inside() -> None:
        with AttentionSwitch(model):
            assert names() == {PAGED_ATTENTION}
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert names() == {"eager"}


def test_a_forward_without_a_step_is_a_clear_refusal_not_a_wrong_answer() -> None:
    model = reference_model(tiny_model("llama"))
    assert ALL_ATTENTION_FUNCTIONS[PAGED_ATTENTION] is paged_attention
    with AttentionSwitch(model), pytest.raises(AttentionRefused):
        model(input_ids=torch.tensor([[4, 5]]), use_cache=False)

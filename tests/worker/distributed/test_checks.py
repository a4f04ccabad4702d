"""What several ranks cannot share is refused by name, before weights are read."""

from __future__ import annotations

from typing import Any

import pytest
from chairlift_worker.distributed.checks import check_settings
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model.checks import check_split
from chairlift_worker.model.errors import ModelError
from chairlift_worker.setting_log import SettingError
from support.tiny_models import CONFIGS, llama_config

REFUSED: dict[str, Any] = {
    "model_impl": "native",
    "quantization": "int8",
    "default_compile_level": 1,
    "varlen_compile_config": "mode=default",
    "decode_compile_config": "mode=default",
    "use_cuda_graph": True,
    "q_padding_interval_size": 16,
    "kv_padding_interval_size": 64,
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_with_several_ranks(name: str) -> None:
    value = REFUSED[name]
    check_settings(WorkerSettings(model="m", **{name: value}))
    with pytest.raises(SettingError, match=rf"^{name} = {value}: not with tp_size = 2: "):
        check_settings(WorkerSettings(model="m", tp_size=2, **{name: value}))


def test_what_goes_with_several_ranks() -> None:
    check_settings(
        WorkerSettings(model="m", tp_size=8, use_async_batching=True, speculative="ngram", use_cuda_graph=False)
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"), [(9, 3, {1, 3}), (8, 2, {1, 2}), (8, 8, {1, 2, 4, 8}), (6, 1, {1})]
)
def test_key_value_heads_must_divide_by_the_number_of_ranks(heads: int, kv_heads: int, fitting: set[int]) -> None:
    config = llama_config(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    for tp_size in range(1, 10):
        if tp_size in fitting:
            check_split("m", config, tp_size)
        else:
            said = f"^model = m: tp_size = {tp_size} does not divide its {kv_heads} key-value heads"
            with pytest.raises(ModelError, match=said + rf" \(and {heads} query heads\)$"):
                check_split("m", config, tp_size)


def test_a_model_without_a_plan() -> None:
    check_split("m", CONFIGS["gpt2"](), 1)
    with pytest.raises(
        ModelError, match=r"^model = m: tp_size = 2: transformers has no tensor parallel plan for gpt2$"
    ):
        check_split("m", CONFIGS["gpt2"](), 2)

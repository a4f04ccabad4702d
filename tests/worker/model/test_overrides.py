"""Entries of a model's config that settings change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model import ModelError, load_model
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.model.weights import LiveWeights
from support.paged import some_ids
from support.tiny_models import reference_logits, tiny_model

IDS = some_ids(40)


def load(folder: Path, *entries: str) -> LoadedModel:
    return load_model(WorkerSettings(model=str(folder), dtype="float32", model_config=entries))


def edited(kind: str, target: Path, **entries: object) -> Path:
    """A copy of a tiny model whose own config.json has these entries."""
    shutil.copytree(tiny_model(kind), target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return target


@pytest.mark.parametrize(
    ("kind", "entries", "same"),
    [
        ("mistral", ["sliding_window=4096"], {"sliding_window": 4096}),
        ("mistral", ["sliding_window=null"], {"sliding_window": None}),
        ("mistral", ["sliding_window = 3", "rms_norm_eps=0.5"], {"sliding_window": 3, "rms_norm_eps": 0.5}),
        (
            "gemma3",
            ['layer_types=["full_attention", "sliding_attention"]'],
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("llama", ["hidden_act=gelu"], {"hidden_act": "gelu"}),
        ("gpt2", ["activation_function=relu"], {"activation_function": "relu"}),
    ],
)
def test_a_model_runs_as_if_its_own_config_said_it(
    kind: str, entries: list[str], same: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny_model(kind)
    before = (folder / "config.json").read_bytes()
    model = load(folder, *entries)
    twin = edited(kind, tmp_path / "twin", **same)
    assert model.layers == load(twin).layers
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, reference_logits(twin, IDS), rtol=0, atol=1e-4)
    assert (logits - reference_logits(folder, IDS)).abs().max() > 1e-3
    assert (folder / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        ("llama", ["slidng_window=5"], "this model's config has no entry slidng_window$"),
        ("llama", ["sliding_window"], "model_config = sliding_window: not of the form KEY=VALUE$"),
        ("llama", ["=5"], "model_config = =5: not of the form KEY=VALUE$"),
        ("mistral", ["sliding_window=5", "sliding_window=6"], "sliding_window is given twice$"),
        ("llama", ["model_type=mistral"], "model_type cannot be changed$"),
        ("llama", ["dtype=float16"], "dtype cannot be changed$"),
        ("qwen3", ["sliding_window=5"], "sliding_window = 5 does not hold: this model's config makes it None$"),
        ("llama", ["vocab_size=many"], "model_config = vocab_size=many: "),
        ("llama", ["hidden_size=100"], "model_config = hidden_size=100: .*hidden size"),
        ("llama", ["intermediate_size=100"], "tensors of another shape than its config says"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind: str, entries: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(tiny_model(kind), *entries)
    assert "\n" not in str(caught.value)


def test_the_models_own_folder_may_still_give_other_weights() -> None:
    folder = tiny_model("mistral")
    model = load(folder, "sliding_window=3")
    assert model.overridden == ("sliding_window",)
    LiveWeights(module=model.module, overridden=model.overridden).update(str(folder))
    assert model.module.config.sliding_window == 3

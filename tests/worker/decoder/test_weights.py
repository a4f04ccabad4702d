"""Other weights for a native decoder that runs."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.native_kernel import Isa
from chairlift_worker.decoder.build import DecoderWeights, build_forward, release
from chairlift_worker.decoder.choice import Quantization
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.kv.layout import make_layout
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.model.loader import load_model
from chairlift_worker.model.weights import LiveWeights
from chairlift_worker.plan import RowPlan, StepPlan
from chairlift_worker.runner import Runner
from safetensors.torch import load_file, save_file
from support.paged import GREEDY
from support.tiny_models import CONFIGS, reference_logits, tiny_model, write_model

IDS = [5, 6, 7, 300, 12]


class Live:
    """A model whose weights are packed, and let go of by the module."""

    def __init__(self, kind: str, quantization: Quantization = "none") -> None:
        model = load_model(WorkerSettings(model=str(tiny_model(kind)), dtype="float32"))
        layout = make_layout(model.layers, page_size=16)
        cache = PagedCache(layout=layout, num_sectors=8, dtype=model.dtype)
        forward = build_forward(model, cache=cache, quantization=quantization, isa=Isa.BEST)
        release(model.module)
        take = DecoderWeights(forward=forward, options=model.attention_options).take
        self.weights = LiveWeights(module=model.module, take=take)
        self._runner = Runner(forward=forward, cache=cache)
        self._tables = tuple(array("i", [number]) for number in range(len(layout.groups)))

    def logits(self) -> torch.Tensor:
        """After IDS."""
        row = RowPlan(uid=1, tokens=array("i", IDS), start=0, num_tokens=5, tables=self._tables, sample=GREEDY)
        return self._runner.forward(StepPlan(step=1, rows=(row,)))[0]


@pytest.mark.parametrize("kind", ["llama", "untied", "qwen3", "gemma3"])
def test_afterwards_it_computes_what_the_new_weights_compute(kind: str, tmp_path: Path) -> None:
    live, new = Live(kind), write_model(tmp_path / "new", CONFIGS[kind](), seed=5)
    torch.testing.assert_close(live.logits(), reference_logits(tiny_model(kind), IDS)[-1], rtol=1e-4, atol=1e-4)
    live.weights.update(str(new))
    torch.testing.assert_close(live.logits(), reference_logits(new, IDS)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_cannot_be_quantised_are_refused_and_change_nothing(name: str, tmp_path: Path) -> None:
    live, new = Live("llama", "int8"), write_model(tmp_path / "new", CONFIGS["llama"](), seed=5)
    tensors = load_file(new / "model.safetensors")
    tensors[name][1, 1] = float("nan")
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    before = live.logits()
    with pytest.raises(WeightsError, match=r"INVALID_WEIGHTS: .*not finite numbers cannot be quantised"):
        live.weights.update(str(new))
    assert torch.equal(live.logits(), before)

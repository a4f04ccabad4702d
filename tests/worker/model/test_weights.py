"""Putting other weights into a module that runs, compared with transformers loading them afresh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from chairlift_worker.decoder.build import release
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.model.loader import load_model
from chairlift_worker.model.weights import LiveWeights
from safetensors.torch import load_file, save_file
from support.tiny_models import CONFIGS, reference_logits, tiny_model, write_model
from transformers import AutoModelForCausalLM, PreTrainedModel

IDS = [5, 6, 7, 300, 12]


def live(kind: str, dtype: str = "float32") -> PreTrainedModel:
    return load_model(WorkerSettings(model=str(tiny_model(kind)), dtype=dtype)).module


@torch.inference_mode()
def logits(module: PreTrainedModel) -> torch.Tensor:
    return module(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].float()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Other weights for the tied Llama."""
    return write_model(tmp_path / "new", CONFIGS["llama"](), seed=5)


def changed(folder: Path, *, drop: str = "", **replaced: torch.Tensor) -> None:
    """Rewrites the file without a tensor, or with others."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(drop, None)
    save_file({**tensors, **replaced}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_afterwards_the_module_computes_what_the_new_weights_compute_at_the_old_addresses(
    kind: str, tmp_path: Path
) -> None:
    module = live(kind)
    addresses = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    new = write_model(tmp_path / "new", CONFIGS[kind](), seed=5)
    assert LiveWeights(module=module).update(str(new)) == len(set(addresses.values()))
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == addresses
    torch.testing.assert_close(logits(module), reference_logits(new, IDS), rtol=1e-4, atol=1e-4)
    assert (reference_logits(tiny_model(kind), IDS) - reference_logits(new, IDS)).abs().max() > 0.1


def test_the_served_type_stays_and_the_files_type_is_converted(folder: Path) -> None:
    module = live("llama", "bfloat16")
    LiveWeights(module=module).update(str(folder))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.bfloat16}
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_sharded_files_are_taken(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    sharded = folder.parent / "sharded"
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    module = live("llama")
    LiveWeights(module=module).update(str(sharded))
    torch.testing.assert_close(logits(module), reference_logits(folder, IDS), rtol=1e-4, atol=1e-4)


def test_the_folder_may_go_away_afterwards(folder: Path) -> None:
    module = live("llama")
    LiveWeights(module=module).update(str(folder))
    wanted = reference_logits(folder, IDS)
    file = folder / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    shutil.rmtree(folder)
    torch.testing.assert_close(logits(module), wanted, rtol=1e-4, atol=1e-4)


def test_where_the_weights_are_kept_in_another_form_the_new_module_is_handed_on(folder: Path) -> None:
    module = live("llama")
    taken: list[torch.Tensor] = []
    release(module)
    tensors = LiveWeights(module=module, take=lambda new: taken.append(logits(new))).update(str(folder))
    assert tensors == 20  # embeddings, 9 in each of two layers, the last norm; the head is tied
    torch.testing.assert_close(taken[0], reference_logits(folder, IDS), rtol=1e-4, atol=1e-4)


def refused(module: PreTrainedModel, folder: Path | str, message: str) -> None:
    """The update is refused with a message like that, and the module still computes what it did."""
    before = logits(module)
    with pytest.raises(WeightsError, match=message) as error:
        LiveWeights(module=module).update(str(folder))
    assert str(error.value).startswith(f"INVALID_WEIGHTS: {folder}: ")
    assert "\n" not in str(error.value)
    assert torch.equal(logits(module), before)


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(folder: Path) -> None:
    module = live("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(folder / "model.safetensors")
    changed(folder, drop=name)
    refused(module, folder, f"tensors missing in its files: {name}$")
    changed(folder, **{name: whole[name], "model.layers.7.extra": torch.ones(3)})
    refused(module, folder, "tensors that the model does not have: model.layers.7.extra$")
    changed(folder, drop="model.layers.7.extra", **{name: whole[name][:-1].contiguous()})
    refused(module, folder, f"tensors of another shape than the running model's: {name}$")
    changed(folder, **{name: whole[name].to(torch.int8)})
    refused(module, folder, f"tensors that are not floating-point numbers: {name}$")
    changed(folder, **{name: whole[name]})
    LiveWeights(module=module).update(str(folder))


def test_a_tensor_that_the_model_ties_must_be_the_same_under_both_names(folder: Path) -> None:
    module = live("llama")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    changed(folder, **{"lm_head.weight": embedding + 1})
    refused(module, folder, "lm_head.weight")
    changed(folder, **{"lm_head.weight": embedding.clone()})
    LiveWeights(module=module).update(str(folder))
    torch.testing.assert_close(logits(module), reference_logits(folder, IDS), rtol=1e-4, atol=1e-4)


def test_another_architecture_is_refused_even_if_its_tensors_fit(folder: Path) -> None:
    module = live("llama")
    refused(module, tiny_model("qwen3"), "its config.json is of a qwen3 model, not llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5, "eos_token_id": 9}))
    refused(module, folder, "its config.json differs from that of the running model: rms_norm_eps$")
    LiveWeights(module=module, overridden=["rms_norm_eps"]).update(str(folder))
    (folder / "config.json").unlink()
    LiveWeights(module=live("llama")).update(str(folder))


def test_a_folder_that_is_none_or_holds_no_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    module = live("llama")
    refused(module, "somebody/model", "must be the absolute path of a folder$")
    refused(module, tmp_path / "nowhere", "must be the absolute path of a folder$")
    refused(module, tmp_path, "has neither model.safetensors nor model.safetensors.index.json$")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(module, folder, ".")
    file.write_bytes(b"nonsense")
    refused(module, folder, ".")

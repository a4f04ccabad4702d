"""What a model folder from a stranger can do: it is refused, by name, before any of its bytes are believed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model import ModelError, load_model
from chairlift_worker.model.errors import WeightsError
from chairlift_worker.model.weights import LiveWeights
from safetensors.torch import load_file
from support.tiny_models import tiny_model
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def load(folder: Path) -> PreTrainedModel:
    return load_model(WorkerSettings(model=str(folder), dtype="float32")).module


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder: Path, words: str) -> None:
    """Neither loaded nor taken in place of weights that run."""
    module = load(tiny_model("llama"))
    before = module.model.norm.weight.clone()
    with pytest.raises(ModelError) as loading:
        load(folder)
    with pytest.raises(WeightsError) as updating:
        LiveWeights(module=module).update(str(folder))
    for caught, start in ((loading, f"model = {folder}: "), (updating, f"INVALID_WEIGHTS: {folder}: ")):
        assert str(caught.value).startswith(start)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert torch.equal(module.model.norm.weight, before)


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self._mark),)


def with_index(folder: Path, name: str) -> None:
    """As if the weights were in the file of that name; the real ones lie beside the folder."""
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "adapter_model.bin"])
def test_pickles_are_refused_and_never_opened(folder: Path, tmp_path: Path, file: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    refused(folder, "has neither model.safetensors nor model.safetensors.index.json")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_an_index_cannot_name_a_pickle(folder: Path, tmp_path: Path, where: str) -> None:
    with_index(folder, "weights.bin" if where == "inside" else "../weights.bin")
    for place in (folder, tmp_path):
        torch.save(load_file(tmp_path / "outside.safetensors"), place / "weights.bin")
    refused(folder, "weights.bin' as weights, which is no .safetensors file of the folder")


def test_a_config_cannot_name_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "adapter_model.bin")
    (folder / "model.safetensors").unlink()
    edit(folder / "config.json", transformers_weights="adapter_model.bin")
    refused(folder, "")
    with pytest.raises(ModelError, match=r"config\.json names 'adapter_model\.bin' as weights"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".safetensors/../../x"]
)
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, name: str) -> None:
    with_index(folder, name)
    refused(folder, f"names {name!r} as weights")


def test_an_absolute_path_to_good_weights_is_refused_too(folder: Path, tmp_path: Path) -> None:
    with_index(folder, str(tmp_path / "outside.safetensors"))
    refused(folder, "which is no .safetensors file of the folder")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 7}}', "nonsense"])
def test_an_index_that_is_none_is_refused(folder: Path, content: str) -> None:
    with_index(folder, "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder, "")


def test_an_index_that_names_a_file_that_is_missing_is_refused(folder: Path) -> None:
    with_index(folder, "x.safetensors")
    refused(folder, "x.safetensors")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "chat_template.jinja", "generation_config.json", "additional_chat_templates/x.jinja"]
)
def test_a_link_cannot_lead_out_of_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    if name == "model.safetensors":
        (folder / name).rename(secret)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    refused(folder, f"{name} is a link that leads out of the folder")


def test_links_inside_and_those_of_a_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "abc", tmp_path / "models--x--y" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    expected = load(folder).model.norm.weight
    assert torch.equal(load(snapshot).model.norm.weight, expected)
    (folder / "model.safetensors").rename(folder / "real")
    (folder / "model.safetensors").symlink_to("real")
    assert torch.equal(load(folder).model.norm.weight, expected)


def test_an_adapter_that_names_another_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    refused(folder, "adapters are not supported")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_name_code_in_a_hub_as_its_attention(folder: Path, monkeypatch, key: str) -> None:
    """transformers fetches and runs such code where the package `kernels` is installed, trusted or not."""
    from transformers.integrations import hub_kernels

    asked: list[object] = []
    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", lambda name, *_, **__: asked.append(name))
    edit(folder / "config.json", **{key: "somebody/kernel"})
    assert "somebody" not in str(load(folder).config._attn_implementation)
    assert asked == []


@pytest.mark.parametrize("kind", ["config", "model", "tokenizer"])
def test_code_in_a_folder_is_not_run_unless_asked(folder: Path, tmp_path: Path, kind: str) -> None:
    """Also where transformers has a class of its own for the model."""
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    if kind == "tokenizer":
        edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Mine", None]}, tokenizer_class="Mine")
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelError):
            load(folder)
    else:
        name = {"config": "AutoConfig", "model": "AutoModelForCausalLM"}[kind]
        edit(folder / "config.json", auto_map={name: "code.Mine"})
        assert type(load(folder)).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_trust_has_to_be_asked_for() -> None:
    assert WorkerSettings(model="x").trust_remote_code is False

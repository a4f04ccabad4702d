"""Loading: what is known of a model afterwards, and what is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chairlift_worker.attention.layer import LayerFacts
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model import ModelError, load_model
from safetensors.torch import load_file, save_file
from support.paged import Desk, some_ids
from support.tiny_models import CONFIGS, EOS_ID, generate_ids, llama_config, reference_logits, tiny_model, write_model


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(folder: Path, **settings: object):
    return load_model(WorkerSettings(model=str(folder), **{"dtype": "float32", **settings}))


def copy_of(kind: str, target: Path) -> Path:
    return Path(shutil.copytree(tiny_model(kind), target))


def edit_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_card_tells_what_the_files_say(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", llama_config(), temperature=0.6, eos_token_id=[2, 17])
    card = load(folder, max_context=100).card(cache_len=64)
    tensors = load_file(folder / "model.safetensors")
    assert (card.name, card.architecture, card.dtype) == ("mine", "LlamaForCausalLM", "float32")
    assert card.tokenizer_dir == str(folder)
    assert (card.vocab_size, card.context_len, card.cache_len) == (384, 100, 64)
    assert card.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert card.generation_config == json.loads((folder / "generation_config.json").read_text())
    assert card.eos_token_ids == (EOS_ID, 17)


def test_eos_ids_come_from_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    edit_json(folder / "config.json", eos_token_id=[7, 8])
    edit_json(folder / "generation_config.json", eos_token_id=9)
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<pad>", "special": True})
    assert load(folder).eos_token_ids == (3, 7, 8, 9)


def test_without_a_generation_config_there_is_none(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert load(folder).generation_config == {}


def test_max_context_only_lowers_the_context() -> None:
    assert load(tiny_model("llama")).context_len == 512
    assert load(tiny_model("gpt2"), max_context=9999).context_len == 512


@pytest.mark.parametrize(
    ("kind", "windows"),
    [("llama", [None, None]), ("gpt2", [None, None]), ("mistral", [10, 10]), ("gemma3", [10, None])],
)
def test_layers_are_what_the_model_computes(kind: str, windows: list[int | None]) -> None:
    heads, dim = {"llama": (3, 8), "gpt2": (4, 16), "mistral": (2, 16), "gemma3": (2, 16)}[kind]
    expected = tuple(LayerFacts(num_kv_heads=heads, head_dim=dim, sliding_window=window) for window in windows)
    model = load(tiny_model(kind))
    assert model.layers == expected
    assert model.has_sliding_layers == (windows != [None, None])


def test_the_module_has_no_gradients_and_is_in_eval_mode() -> None:
    module = load(tiny_model("llama")).module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_tied_head_is_the_embedding_with_and_without_a_head_in_the_file(tmp_path: Path) -> None:
    without = tiny_model("llama")
    with_head = copy_of("llama", tmp_path / "with")
    edit_tensors(with_head, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    expected = generate_ids(without, some_ids(9), 20).ids
    for folder in (without, with_head):
        module = load(folder).module
        assert torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)
        desk, got = Desk(folder), some_ids(9)
        for _ in range(20):
            got.append(int(desk.step(desk.sequence(got).row(len(got)))[0].argmax()))
            desk = desk if len(got) % 4 else Desk(folder)  # fresh pages
        assert got[9:] == expected


def test_a_tied_head_is_still_the_embedding_in_another_type() -> None:
    model = load(tiny_model("llama"), dtype="bfloat16")
    module = model.module
    assert (model.dtype, module.lm_head.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)
    embedding = load_file(tiny_model("llama") / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(module.lm_head.weight, embedding.to(torch.bfloat16))


def test_an_untied_model_without_a_head_is_refused_and_the_tensor_named(tmp_path: Path) -> None:
    folder = copy_of("untied", tmp_path / "model")
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"tensors missing in its files: lm_head\.weight$"):
        load(folder)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "missing")
    edit_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing in its files: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)
    folder = copy_of("llama", tmp_path / "misshapen")
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(ModelError, match=r"of another shape than its config says: model\.norm\.weight"):
        load(folder)


ROPE = {
    "base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 5e5,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4},
}


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("kind", sorted(ROPE))
def test_rotary_bases_and_scalings_of_both_layouts_are_the_models_own(kind: str, layout: str, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    if layout == "new":
        edit_json(folder / "config.json", rope_parameters=ROPE[kind])
    else:
        scaling = {key: value for key, value in ROPE[kind].items() if key != "rope_theta"}
        theta = ROPE[kind]["rope_theta"]
        edit_json(folder / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=theta)
    ids = some_ids(300)
    desk = Desk(folder, page_size=16)
    sequence = desk.sequence(ids)
    desk.step(sequence.row(170, sample=False))
    got = desk.step(sequence.row(130))[0]
    torch.testing.assert_close(got, reference_logits(folder, ids)[-1], atol=1e-4, rtol=0)
    plain = reference_logits(tiny_model("llama"), ids)[-1]
    assert (got - plain).abs().max() > 1e-2  # the scaling was not lost on the way


def test_a_base_for_each_layer_type_is_the_models_own(tmp_path: Path) -> None:
    folder = copy_of("gemma3", tmp_path / "model")
    bases = {"sliding_attention": 1e3, "full_attention": 1e6}
    edit_json(
        folder / "config.json",
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    )
    ids = some_ids(300)
    desk = Desk(folder, page_size=16)
    got = desk.step(desk.sequence(ids).row(300))[0]
    torch.testing.assert_close(got, reference_logits(folder, ids)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "made_up"])
def test_rotary_scalings_that_neighbours_would_change_or_nobody_knows_are_refused(kind: str, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    table = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    edit_json(folder / "config.json", rope_parameters=table)
    with pytest.raises(ModelError, match=f"rope type '{kind}'") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 64}, "BloomForCausalLM is not supported"),
        ({"model_type": "made_up"}, "made_up"),
    ],
)
def test_architectures_that_cannot_run_on_pages_are_refused_by_name(config: dict, message: str, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    if config["model_type"] == "bloom":
        from transformers import BloomConfig

        shutil.rmtree(folder)
        write_model(folder, BloomConfig(vocab_size=384, **{k: v for k, v in config.items() if k != "model_type"}))
    else:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load(folder)


def test_code_in_a_model_folder_is_not_run_unless_asked(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "model")
    edit_json(
        folder / "config.json",
        model_type="mine",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", "nowhere"])
def test_a_model_that_is_nowhere_is_named_in_one_line(model: str) -> None:
    with pytest.raises(ModelError, match=f"^model = {model}: ") as caught:
        load_model(WorkerSettings(model=model))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"must be a \.gguf file"):
        load_model(WorkerSettings(model=str(tmp_path / "model.bin")))


def test_a_hub_id_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"^model = nobody/nothing: ") as caught:
        load_model(WorkerSettings(model="nobody/nothing"))
    assert "\n" not in str(caught.value)


def test_every_tiny_model_loads() -> None:
    assert {kind: load(tiny_model(kind)).vocab_size for kind in CONFIGS} == dict.fromkeys(CONFIGS, 384)

"""A .gguf file: unpacked once, then a folder like any other."""

import json
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.model import gguf as unpacking
from chairlift_worker.model import load_model
from safetensors.torch import load_file
from support.tiny_models import byte_level_tokenizer, llama_config, reference_logits, write_model

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in GGUF's order for rotary embeddings: the halves of each head alternate."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The same model as a folder and as a .gguf file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, file = write_model(tmp_path / "folder", llama_config()), tmp_path / "Tiny.gguf"
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(2)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(384)
    tokenizer = json.loads(byte_level_tokenizer().to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    tokens += [f"<extra{i}>" for i in range(384 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 384)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, 9 if "q_proj" in name else 3)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, file


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def test_the_unpacked_model_is_the_model_and_the_second_start_reads_the_copy(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, file = files
    settings = WorkerSettings(model=str(file), dtype="float32")
    model = load_model(settings)
    assert (model.name, model.context_len, model.eos_token_ids) == ("Tiny", 512, (2,))
    assert model.generation_config == {}
    assert (model.tokenizer_dir / "tokenizer.json").is_file()
    assert model.tokenizer_dir.is_relative_to(file.parent / "cache" / "chairlift")
    ids = [9, 8, 7, 6, 5]
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)
    assert "%|" not in capfd.readouterr().err  # no progress bar in a service's log

    def fail(*_args: object, **_keywords: object) -> None:
        raise AssertionError("unpacked again")

    monkeypatch.setattr(unpacking, "AutoTokenizer", fail)
    again = load_model(settings)
    assert again.tokenizer_dir == model.tokenizer_dir
    state = model.module.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.module.state_dict().items())


def test_a_changed_file_or_another_type_is_unpacked_anew(files: tuple[Path, Path]) -> None:
    _, file = files
    first = load_model(WorkerSettings(model=str(file), dtype="float32"))
    bfloat16 = load_model(WorkerSettings(model=str(file), dtype="bfloat16"))
    assert bfloat16.dtype is torch.bfloat16
    now = time.time()
    import os

    os.utime(file, (now + 5, now + 5))
    later = load_model(WorkerSettings(model=str(file), dtype="float32"))
    assert len({first.tokenizer_dir, bfloat16.tokenizer_dir, later.tokenizer_dir}) == 3


def test_nothing_beside_the_file_is_read_or_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The file alone was asked for; a downloads folder may hold anything."""
    _, file = files
    mine = tmp_path / "downloads"
    mine.mkdir()
    file = file.rename(mine / file.name)
    (mine / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    (mine / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "code.Mine"}}))
    auto_map = {"AutoTokenizer": ["code.Mine", "code.Mine"]}
    (mine / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "chat_template": "theirs"}))
    (mine / "chat_template.jinja").write_text("theirs")
    model = load_model(WorkerSettings(model=str(file), dtype="float32"))
    assert not (tmp_path / "ran").exists()
    assert model.context_len == 512
    assert not (model.tokenizer_dir / "chat_template.jinja").exists()
    assert "theirs" not in (model.tokenizer_dir / "tokenizer_config.json").read_text()
    assert not (model.tokenizer_dir / "source").exists()

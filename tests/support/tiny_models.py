"""Tiny random models of several families, written as folders, and what transformers says about them.

Their weights are large (INITIALIZER_RANGE), so that the two best tokens of a step never come near each other by chance:
where two runs differ there is a bug, not rounding.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

INITIALIZER_RANGE = 0.35
VOCAB_SIZE = 384
BOS_ID, EOS_ID, UNK_ID, PAD_ID = 1, 2, 0, 3
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "chairs hop on and off and the lift never stops",
    "one token, two tokens, three tokens; then the next line",
    "def add(a, b): return a + b",
)
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_SHAPE = {"num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": INITIALIZER_RANGE}


def _llama(**changes: object) -> PreTrainedConfig:
    heads = {"hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 9, "num_key_value_heads": 3}
    return LlamaConfig(**{**_IDS, **_SHAPE, **heads, "tie_word_embeddings": True, **changes})


def _qwen3() -> PreTrainedConfig:
    heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3Config(**_IDS, **_SHAPE, **heads, head_dim=24, tie_word_embeddings=True)


def _gpt2() -> PreTrainedConfig:
    return GPT2Config(**_IDS, n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=INITIALIZER_RANGE)


def _mistral() -> PreTrainedConfig:
    heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MistralConfig(**_IDS, **_SHAPE, **heads, sliding_window=10)


def _gemma2(**changes: object) -> PreTrainedConfig:
    heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 40}
    rest = {"head_dim": 16, "sliding_window": 10, "tie_word_embeddings": False}
    return Gemma2Config(**{**_IDS, **_SHAPE, **heads, **caps, **rest, **changes})


def _gemma3(**changes: object) -> PreTrainedConfig:
    heads = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 40, "tie_word_embeddings": False}
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3TextConfig(**{**_IDS, **_SHAPE, **heads, **rest, **types, **changes})


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,  # 9 query heads, 3 key-value heads, tied embeddings
    "untied": lambda: _llama(tie_word_embeddings=False),
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
FULL_ATTENTION = ("llama", "untied", "qwen3", "gpt2")


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2 style: any bytes, no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Llama 2 style: spaces as marks, bytes as a fallback, BOS put in front."""
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    vocab = {token: i for i, token in enumerate([*specials, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for piece in ["\u2581", *sorted(set("".join(_CORPUS)) - {" "})]:
        vocab[piece] = len(vocab)
    merges = []
    for left, right in [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("o", "n"), ("\u2581", "o"), ("e", "n")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def write_tokenizer(folder: Path, *, style: str = "byte_level", chat_template: str | None = None) -> None:
    """tokenizer.json and tokenizer_config.json; `style` is byte_level or metaspace."""
    tokenizer = byte_level_tokenizer() if style == "byte_level" else metaspace_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"unk_token": "<unk>", "pad_token": "<pad>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path, config: PreTrainedConfig, *, seed: int = 0, tokenizer: str = "byte_level", **generation: object
) -> Path:
    """A random model of that config as a folder; `generation` goes into generation_config.json."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.model_type.startswith("gemma"):
        _let_layers_matter(model)
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder, style=tokenizer)
    stated = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, **generation}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return folder


@functools.cache
def _root() -> Path:
    folder = tempfile.mkdtemp(prefix="chairlift-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@torch.no_grad()
def _let_layers_matter(model: PreTrainedModel) -> None:
    """Gemma multiplies embeddings by the root of the hidden size: so large, they would drown the layers' output."""
    model.get_input_embeddings().weight.mul_(model.config.hidden_size**-0.5)


@functools.cache
def tiny_model(kind: str, *, tokenizer: str = "byte_level") -> Path:
    """The folder of a kind named in CONFIGS; built once a session, read only."""
    return write_model(_root() / f"{kind}-{tokenizer}", CONFIGS[kind](), tokenizer=tokenizer)


def gemma2_config(**changes: object) -> PreTrainedConfig:
    """Gemma 2 with soft caps and a query scale of its own, changed as told."""
    return _gemma2(**changes)


def gemma3_config(**changes: object) -> PreTrainedConfig:
    """Gemma 3 with a sliding layer, a full one, and a rotary base for each, changed as told."""
    return _gemma3(**changes)


def llama_config(**changes: object) -> PreTrainedConfig:
    """The 9/3-head Llama, changed as told."""
    return _llama(**changes)


@functools.lru_cache(maxsize=16)
def reference_model(folder: Path) -> PreTrainedModel:
    """The untouched transformers model: float32, eager attention."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary) float32: the logits after each token of the sequence alone."""
    return reference_model(folder)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy answer and how sure it was."""

    ids: list[int]
    gaps: list[float]  # best minus second best logit at each step, after all processors


@torch.inference_mode()
def generate_ids(
    folder: Path, prompt: list[int], num_tokens: int, *, ignore_eos: bool = True, **processors: object
) -> Reference:
    """Greedy ids of transformers' generate for one prompt alone, with its own processors as told."""
    model = reference_model(folder)
    output = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None if ignore_eos else EOS_ID,
        pad_token_id=PAD_ID,
        output_scores=True,
        return_dict_in_generate=True,
        **processors,
    )
    best = [scores[0].topk(2).values for scores in output.scores]
    return Reference(ids=output.sequences[0, len(prompt) :].tolist(), gaps=[float(two[0] - two[1]) for two in best])

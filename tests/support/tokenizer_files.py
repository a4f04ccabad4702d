"""Tokenizers for tests: SmolLM2's own, and small ones of every decoder's style, built here."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from support.smollm2 import smollm2_folder

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "  indented code:\n\treturn x ** 2  # done",
    "東京は日本の首都です。 안녕하세요",
    "emoji 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🚀",
] * 3


def smollm2(folder: Path) -> Path:
    """Writes SmolLM2-135M-Instruct's tokenizer into `folder`."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder() / file, folder / file)
    return folder


def byte_level() -> Tokenizer:
    """GPT-2 style, with special tokens and added ones whose text is outside the byte alphabet, or inside of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("tool call"), AddedToken("Ġplain"), AddedToken("čau")])
    return tokenizer


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁a", "▁the", "▁fox", "a", "b", "ing", "!", "▁▁", "ř", "▁ž", "日本", "▁new", "\n", "x▁y"]


def byte_fallback(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Llama style: pieces with ▁ for the space, bytes for what has no piece, BOS put in front."""
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((byte, -20.0) for byte in BYTES)]
    vocabulary += [(piece, -float(10 - len(piece))) for piece in PIECES]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def mostly_text(size: int) -> Tokenizer:
    """Llama style with `size` tokens, nearly all of them pieces of text: what a random model says can be read."""
    few = ["<0x0A>", "<0x09>", "<0xC3>", "<0xA9>"]
    pairs = [left + right for left in "▁aeioust" for right in "abcdefghijklmnopqrstuvwxyzž東—!'-,.0123456789ABCDEFGHIJ"]
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz,.", *pairs]
    vocabulary = [(piece, 0.0) for piece in (*specials, *few)] + [(piece, -2.0 / len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary[:size], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = byte_fallback().decoder
    tokenizer.add_special_tokens(specials)
    return tokenizer


def metaspace() -> Tokenizer:
    """T5 style: no byte tokens; the decoder drops the first token's space."""
    return byte_fallback(decoders.Metaspace())


def gemma() -> Tokenizer:
    """Gemma style: byte tokens, and no space is stripped."""
    return byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def word_piece() -> Tokenizer:
    """BERT style: `##` glues, and spaces before punctuation go."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "fox", "##es", "##y", ".", "!", "'", "s", "n", "t", "do", "##ing", ","]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def suffix_bpe() -> Tokenizer:
    """GPT-1 style: `</w>` ends a word."""
    words = ["<unk>", "a", "b", "a</w>", "b</w>", "fox</w>", "!</w>", "z"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    words = ["<pad>", "up", "and", "down", "hop"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>"])
    return tokenizer

"""The model's tokenizer, from tokenizer.json and what tokenizer_config.json changes in it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read by the library: no thread pool of its own, please

import tokenizers
from tokenizers import AddedToken

from chairlift_service.errors import Reason, ServiceError
from chairlift_service.text.control_tokens import Span
from chairlift_service.text.decoder import byte_level_bytes, decoder_traits
from chairlift_service.text.plain_text import PlainTextEncoder

LONG_TEXT_BYTES: Final = 4096  # longer ones are tokenised off the event loop
LONG_LIST: Final = 4096  # ids
NUM_THREADS: Final = 2
MAX_WAITING_TEXTS: Final = 256
MAX_FILE_BYTES: Final = 128 * 2**20  # of tokenizer.json; the largest in use have a quarter of it
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")


_T = TypeVar("_T")


class Tokenizer:
    """Text to ids and back. Its methods may be called from several threads; nothing mutates it after loading."""

    def __init__(self, *, backend: tokenizers.Tokenizer) -> None:
        """`backend` becomes this object's own: truncation and padding are turned off.

        Raises ValueError for a decoder whose text cannot be streamed.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._plain_text = PlainTextEncoder(backend=backend)
        self._may_take_long = _has_expressions(backend)
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size: Final = max(vocabulary.values(), default=-1) + 1
        longest = max((len(token.encode()) for token in vocabulary), default=1)
        # A normalizer may shorten a text before it is cut into tokens (composition of accents, runs of spaces).
        self._most_bytes_per_token = longest * (1 if backend.normalizer is None else 4)
        self.traits: Final = decoder_traits(_decoder(backend))
        self._bytes: dict[int, bytes] = {}  # by id, of those asked for; at most as many as there are tokens
        self._pool = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="tokenizer")
        self._num_waiting = 0

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a model's folder. Raises ValueError, one line, if there is none or it cannot be read."""
        path = Path(folder) / "tokenizer.json"
        try:
            _check_size(path)
            backend = tokenizers.Tokenizer.from_file(str(path))
        except OSError as error:
            raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        except Exception as error:
            raise ValueError(f"cannot read the tokenizer {path}: {error}") from error
        config_path = Path(folder) / "tokenizer_config.json"
        if config_path.is_file():
            try:
                _apply(json.loads(config_path.read_text(encoding="utf-8")), backend)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"cannot read {config_path}: {error!r}") from error
        return cls(backend=backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Takes time in proportion to its length: see `encode_async`."""
        # The batch form is the one that frees the interpreter's lock while it works.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, off the event loop if that may take long.

        A text that begins with BOS gets no second one: it was made by a template, or by someone who knows. Raises
        ServiceError QUEUE_FULL if too many texts wait, ValueError where the tokenizer gives up on the text.
        """
        return await self._off_loop(text, lambda: _encode_prompt(self, text, add_special_tokens=add_special_tokens))

    async def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> tuple[list[int], list[Span]]:
        """The same, and where in the text each token stands, in characters; one that was added stands at (0, 0).

        Tokens that share a character have all of it. Raises as `encode_async`.
        """

        def encode() -> tuple[list[int], list[Span]]:
            ids = _encode_prompt(self, text, add_special_tokens=add_special_tokens)
            found = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return ids, found.offsets[len(found.ids) - len(ids) :]  # without the first of two BOS

        return await self._off_loop(text, encode)

    async def encode_rendered(self, text: str, *, plain: Sequence[Span]) -> list[int]:
        """Ids of what a template wrote, which brings the special tokens itself; off the event loop as `encode_async`.

        Control tokens at `plain` are ordinary text. Raises ValueError where one of them cannot be that, and both errors
        of `encode_async`.
        """
        if not plain:
            return await self._off_loop(text, lambda: self.encode(text, add_special_tokens=False))
        return await self._off_loop(text, lambda: self._plain_text.encode(text, plain=plain))

    async def _off_loop(self, text: str, encode: Callable[[], _T]) -> _T:
        if len(text) <= LONG_TEXT_BYTES and not self._may_take_long:
            return _without_panic(encode)
        if self._num_waiting >= MAX_WAITING_TEXTS:
            raise ServiceError(Reason.QUEUE_FULL, "too many long texts wait for the tokenizer")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, _without_panic, encode)
        finally:
            self._num_waiting -= 1

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, U+FFFD for bytes that are not UTF-8. Ids without a token give nothing."""
        if len(ids) > LONG_LIST:  # in a thread, then: here, too, it is the batch form that frees the lock
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Spelling of a token in the vocabulary; None where there is no such token."""
        return self._backend.id_to_token(token_id)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Spellings of tokens in the vocabulary; empty for an id without a token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, if the decoder is byte-level; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            found = self._bytes[token_id] = byte_level_bytes(token)
        return found

    def added_tokens(self) -> dict[str, bool]:
        """The texts that are cut out of a text before anything else, and whether each is a special token."""
        return {token.content: token.special for token in self._backend.get_added_tokens_decoder().values()}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which `skip_special_tokens` leaves out of the text."""
        return token_id in self._special_ids

    def max_text_bytes(self, num_tokens: int) -> int:
        """More bytes of UTF-8 than this cannot be a text of `num_tokens` tokens."""
        return num_tokens * self._most_bytes_per_token

    def close(self) -> None:
        """Ends the threads; texts that wait are given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if add_special_tokens and ids[:1] == ids[1:2]:
        own = tokenizer.encode(text, add_special_tokens=False)
        if own[:1] == ids[:1] and own == ids[1 : 1 + len(own)]:
            return ids[1:]
    return ids


def _check_size(path: Path) -> None:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_FILE_BYTES:
        raise ValueError(f"it has {num_bytes} bytes, at most {MAX_FILE_BYTES} are read")


def _has_expressions(backend: tokenizers.Tokenizer) -> bool:
    """Whether texts are cut by regular expressions from tokenizer.json: for some, a line of text takes a minute."""
    parts = (part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None)
    return any(b'"Regex"' in part.__getstate__() for part in parts)


def _without_panic(encode: Callable[[], _T]) -> _T:
    """What it makes. Where an expression takes too many steps the library panics, not by an Exception: a ValueError."""
    try:
        return encode()
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError("the model's tokenizer gives up on this text") from None


def _decoder(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    """The decoder as tokenizer.json describes it; None where tokens are joined by spaces."""
    if backend.decoder is None:
        return None
    described: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    return described


def _apply(config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """What transformers changes in a tokenizer for the sake of tokenizer_config.json (TokenizersBackend.__init__).

    That is tokens which tokenizer.json lacks, and which tokens are special. `add_bos_token` and `add_eos_token` have no
    say where there is a tokenizer.json: its post-processor holds (PreTrainedTokenizerBase._from_pretrained).
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = [_added(entry) for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=_by_id)]
    backend.add_tokens([token for token in listed if token.content not in known])
    special = [_content(config[name]) for name in _NAMED if config.get(name) is not None]
    for name in _LISTS:
        entries = config.get(name) or []
        special += [_content(entry) for entry in (entries.values() if isinstance(entries, dict) else entries)]
    flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [flags.get(text) or AddedToken(text, special=True, normalized=False) for text in special]
    )


def _content(entry: Any) -> str:
    return str(entry["content"] if isinstance(entry, dict) else entry)


def _added(entry: Mapping[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(str(entry["content"]), **{name: bool(entry[name]) for name in names if name in entry})


def _by_id(item: tuple[str, Any]) -> int:
    return int(item[0])

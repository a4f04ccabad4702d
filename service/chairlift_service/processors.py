"""What a request wants changed or excluded before a token is chosen: penalties, biases, bans."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.v1 import request_pb2
from chairlift_worker.ipc.messages import NO_PROCESSORS, ModelCardMsg, ProcessorsMsg

from chairlift_service.defaults import RequestDefaults
from chairlift_service.faults import Faults
from chairlift_service.prompt import MAX_BAD_IDS, check_ids
from chairlift_service.text.tokenizer import Tokenizer

MAX_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0
MAX_BANNED: Final = 1024  # words, and sequences
MAX_BANNED_LEN: Final = 1024  # characters of a word, ids of a sequence
WORDS_AT_ONCE: Final = 64  # that are tokenised before others get their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """All of it, checked; defaults filled in."""

    params: request_pb2.SamplingParams  # as it is told; nothing of the distribution's shape is set
    banned_words: tuple[tuple[int, ...], ...]  # the ids of its banned words

    def message(self, *, stop_ids: Sequence[int], min_new_tokens: int) -> ProcessorsMsg | None:
        """The worker's form; None where nothing is changed or excluded. `stop_ids` are no early tokens."""
        params = self.params
        sequences = (*(tuple(banned.ids) for banned in params.banned_sequences), *self.banned_words)
        biases = {token_id: bias for token_id, bias in sorted(params.logit_bias.items()) if bias}
        message = ProcessorsMsg(
            bias_ids=_ints(biases),
            biases=array("f", biases.values()).tobytes(),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            no_repeat_ngram_size=params.no_repeat_ngram_size,
            banned_sequences=_ints(part for ids in dict.fromkeys(sequences) for part in (len(ids), *ids)),
            min_new_tokens=min_new_tokens if stop_ids else 0,
            early_stop_ids=_ints(stop_ids if min_new_tokens else ()),
            allowed_ids=_ints(params.allowed_token_ids),
            banned_ids=_ints(params.banned_token_ids),
        )
        return None if message == NO_PROCESSORS else message

    def check_choice(self, *, path: str, vocab_size: int, stop_ids: Iterable[int]) -> None:
        """Raises ServiceError if no token could come first, whatever the prompt; `stop_ids` are those that may not."""
        single = {banned.ids[0] for banned in self.params.banned_sequences if len(banned.ids) == 1}
        single |= {ids[0] for ids in self.banned_words if len(ids) == 1}
        excluded = single.union(self.params.banned_token_ids, stop_ids)
        allowed = self.params.allowed_token_ids
        if not (set(allowed) - excluded if allowed else len(excluded) < vocab_size):
            faults = Faults()
            faults.add(f"{path}.allowed_token_ids", "excludes, with what is banned, every token that may come first")
            faults.raise_any()


async def read_processors(
    params: request_pb2.SamplingParams,
    *,
    path: str,
    model: ModelCardMsg,
    tokenizer: Tokenizer,
    defaults: RequestDefaults,
    faults: Faults,
) -> Processors:
    """Checks and resolves them. Raises ServiceError QUEUE_FULL where too many texts wait for the tokenizer."""
    _check_penalties(params, path=path, faults=faults)
    _check_biases(params, path=f"{path}.logit_bias", vocab_size=model.vocab_size, faults=faults)
    for name in ("allowed_token_ids", "banned_token_ids"):
        check_listed(getattr(params, name), path=f"{path}.{name}", vocab_size=model.vocab_size, faults=faults)
    _check_sequences(params, path=f"{path}.banned_sequences", vocab_size=model.vocab_size, faults=faults)
    words = await _word_ids(params.banned_words, path=f"{path}.banned_words", tokenizer=tokenizer, faults=faults)
    if any(max(ids) >= model.vocab_size for ids in words):
        faults.add(f"{path}.banned_words", f"has a token that the model lacks: it has {model.vocab_size}")
    return Processors(params=_resolved(params, defaults=defaults), banned_words=words)


def check_listed(ids: Sequence[int], *, path: str, vocab_size: int, faults: Faults) -> bool:
    """Whether they are ids of tokens, and no more than there are; names the first offenders."""
    if len(ids) > vocab_size:
        faults.add(path, f"has {len(ids)} ids, more than the {vocab_size} tokens that there are")
        return False
    return check_ids(ids, path=path, size=vocab_size, faults=faults)


def _resolved(params: request_pb2.SamplingParams, *, defaults: RequestDefaults) -> request_pb2.SamplingParams:
    told = request_pb2.SamplingParams(
        repetition_penalty=defaults.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        no_repeat_ngram_size=defaults.no_repeat_ngram_size,
        banned_token_ids=() if params.banned_token_ids else defaults.banned_token_ids,
    )
    if not params.banned_sequences:
        told.banned_sequences.extend(request_pb2.TokenIds(ids=ids) for ids in defaults.banned_sequences)
    told.MergeFrom(params)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        told.ClearField(name)
    return told


def _check_penalties(params: request_pb2.SamplingParams, *, path: str, faults: Faults) -> None:
    repetition = params.repetition_penalty
    if params.HasField("repetition_penalty") and not (math.isfinite(repetition) and repetition > 0):
        faults.add(f"{path}.repetition_penalty", f"must be a finite number above 0, is {repetition:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(params, name)
        if not abs(penalty) <= MAX_PENALTY:
            faults.add(f"{path}.{name}", f"must be {-MAX_PENALTY:g} to {MAX_PENALTY:g}, is {penalty:g}")


def _check_biases(params: request_pb2.SamplingParams, *, path: str, vocab_size: int, faults: Faults) -> None:
    num_bad = 0
    for token_id, bias in sorted(params.logit_bias.items()):
        good = check_ids((token_id,), path=path, size=vocab_size, faults=faults, start=token_id)
        if not abs(bias) <= MAX_BIAS:
            faults.add(f"{path}[{token_id}]", f"must be {-MAX_BIAS:g} to {MAX_BIAS:g}, is {bias:g}")
            good = False
        num_bad += not good
        if num_bad == MAX_BAD_IDS:
            return


def _check_sequences(params: request_pb2.SamplingParams, *, path: str, vocab_size: int, faults: Faults) -> None:
    if len(params.banned_sequences) > MAX_BANNED:
        faults.add(path, f"has {len(params.banned_sequences)} entries, at most {MAX_BANNED}")
        return
    for i, banned in enumerate(params.banned_sequences):
        if not 0 < len(banned.ids) <= MAX_BANNED_LEN:
            faults.add(f"{path}[{i}]", f"must have 1 to {MAX_BANNED_LEN} ids, has {len(banned.ids)}")
        elif not check_ids(banned.ids, path=f"{path}[{i}].ids", size=vocab_size, faults=faults):
            return


async def _word_ids(
    words: Sequence[str], *, path: str, tokenizer: Tokenizer, faults: Faults
) -> tuple[tuple[int, ...], ...]:
    """The ids of each with and without a space before it."""
    if len(words) > MAX_BANNED:
        faults.add(path, f"has {len(words)} entries, at most {MAX_BANNED}")
        return ()
    bad = [i for i, word in enumerate(words) if not 0 < len(word) <= MAX_BANNED_LEN]
    for i in bad:
        faults.add(f"{path}[{i}]", f"must have 1 to {MAX_BANNED_LEN} characters, has {len(words[i])}")
    if bad or not words:
        return ()
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        bare = word.lstrip(" ") or word
        try:
            forms = [await tokenizer.encode_async(form, add_special_tokens=False) for form in (bare, f" {bare}")]
        except ValueError as error:
            faults.add(f"{path}[{i}]", str(error))
            return ()
        if not any(forms):
            faults.add(f"{path}[{i}]", "has no tokens")
        found |= dict.fromkeys(tuple(ids) for ids in forms if ids)
        if i % WORDS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return tuple(found)


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()

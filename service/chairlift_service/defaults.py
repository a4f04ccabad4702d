"""What holds where a request leaves a value unset: the model's generation_config.json, then transformers' defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

# transformers' own (GenerationConfig._get_default_generation_params), for the entries that can change the output and
# that Chairlift does not honour. An entry at its default, or null, changes nothing.
_NEUTRAL: Final[Mapping[str, object]] = {
    "assistant_early_exit": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_length": 20,
    "max_time": None,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": None,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
_TRANSFORMERS_TOP_K: Final = 50
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Values for what a request leaves unset.

    temperature unset: `do_sample` decides between `temperature` and greedy. If the caller names top_k, top_p or
    min_p, a model that is greedy by default samples at temperature 1, one that samples keeps its temperature. Once a
    request samples, for whatever reason, each of top_k, top_p and min_p that it leaves unset has the value here.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = _TRANSFORMERS_TOP_K
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int | None = None  # None: the rest of the context
    logprobs: bool = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_new_tokens: int | None = None  # None: what min_total_tokens says
    min_total_tokens: int = 0  # prompt included

    def least_new_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens before which nothing stops an output."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_total_tokens - num_prompt_tokens)


def request_defaults(
    generation_config: Mapping[str, object],
    *,
    model_defaults: bool = True,
    logprobs: bool = False,
    vocab_size: int = _INT32_MAX,
    eos_token_ids: Sequence[int] = (),
) -> RequestDefaults:
    """Defaults of a model whose generation_config.json is `generation_config`, empty where there is none.

    `model_defaults=False` leaves the file out. `logprobs` is the service's own default. Raises ValueError, one line
    that names entry and value, where the file holds a value that no request could have.
    """
    if not model_defaults:
        return RequestDefaults(logprobs=logprobs)
    file = _File(generation_config)
    top_k = file.number("top_k", default=_TRANSFORMERS_TOP_K, low=-1)
    max_new_tokens = file.number("max_new_tokens", default=0, low=1)
    has_minimum = generation_config.get("min_new_tokens") is not None
    return RequestDefaults(
        do_sample=file.flag("do_sample"),
        temperature=file.number("temperature", default=1.0, low=0),
        top_k=max(0, int(top_k)),
        top_p=file.number("top_p", default=1.0, low=0, high=1, low_allowed=False),
        min_p=file.number("min_p", default=0.0, low=0, high=1, high_allowed=False),
        max_new_tokens=int(max_new_tokens) or None,
        logprobs=logprobs,
        repetition_penalty=file.number("repetition_penalty", default=1.0, low=0, low_allowed=False),
        no_repeat_ngram_size=int(file.number("no_repeat_ngram_size", default=0, low=0)),
        # As in transformers, EOS is no bad word, and ids that there are not are suppressed anyway.
        banned_sequences=tuple(
            ids
            for ids in file.sequences("bad_words_ids", vocab_size=vocab_size)
            if not (len(ids) == 1 and ids[0] in eos_token_ids)
        ),
        banned_token_ids=tuple(i for i in file.ids("suppress_tokens") if 0 <= i < vocab_size),
        min_new_tokens=int(file.number("min_new_tokens", default=0, low=0)) if has_minimum else None,
        min_total_tokens=int(file.number("min_length", default=0, low=0)),
    )


def ignored_entries(generation_config: Mapping[str, object]) -> tuple[str, ...]:
    """`name = value` of each entry that would change what transformers generates and that is not honoured here.

    To be said aloud once at the start. Empty where the file is fully honoured.
    """
    return tuple(
        f"{name} = {generation_config[name]!r}"
        for name, neutral in _NEUTRAL.items()
        if generation_config.get(name) is not None and generation_config[name] != neutral
    )


@dataclass(frozen=True, slots=True)
class _File:
    """Checked reading of generation_config.json."""

    entries: Mapping[str, object]

    def flag(self, name: str) -> bool:
        value = self.entries.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(self._bad(name, "true or false"))
        return bool(value)

    def number(
        self,
        name: str,
        *,
        default: float,
        low: float,
        high: float = math.inf,
        low_allowed: bool = True,
        high_allowed: bool = True,
    ) -> float:
        value = self.entries.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(self._bad(name, "a finite number"))
        above = value >= low if low_allowed else value > low
        below = value <= high if high_allowed else value < high
        if not (above and below):
            raise ValueError(self._bad(name, f"between {low:g} and {high:g}"))
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.entries.get(name)
        if value is None:
            return ()
        if not _are_ids(value):
            raise ValueError(self._bad(name, "a list of token ids"))
        return tuple(value)

    def sequences(self, name: str, *, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        value = self.entries.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(ids and _are_ids(ids) for ids in value):
            raise ValueError(self._bad(name, "a list of lists of token ids, none empty"))
        if any(not 0 <= token_id < vocab_size for ids in value for token_id in ids):
            raise ValueError(self._bad(name, f"made of token ids in [0, {vocab_size})"))
        return tuple(tuple(ids) for ids in value)

    def _bad(self, name: str, wanted: str) -> str:
        value = self.entries[name]
        return (
            f"generation_config.json: {name} must be {wanted}, is {value!r} (--no-model-defaults leaves the file out)"
        )


def _are_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)

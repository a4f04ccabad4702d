"""How to generate, in the manager's terms: our own small GenerationConfig, or transformers'."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from chairlift_client._requests import GenerateOptions

logger = logging.getLogger("chairlift_client.manager")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How to generate, for all requests of a manager. None leaves it to the service: the model's own defaults.

    With `eos_token_id` set, exactly these ids end a generation (-1: none does). `do_sample=False` is greedy whatever
    the other fields say. With `seed`, the manager's request number i samples with seed + i. Where you have
    transformers, its own GenerationConfig will do as well.
    """

    max_new_tokens: int | None = None
    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_strings: str | list[str] | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: dict[tuple[int, ...], float] | list[list[Any]] | None = None
    suppress_tokens: list[int] | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None


SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p")
_PROCESSORS: Final = {
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("min_new_tokens", "min_length"),
}
_HONOURED: Final = {"max_new_tokens", "eos_token_id", "do_sample", "seed", "stop_strings", *SAMPLING, *_PROCESSORS}

# Attributes of transformers' GenerationConfig that say nothing about what is generated.
_MUTE: Final = {
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "return_dict_in_generate",
    "compile_config",
    "disable_compile",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "prefill_chunk_size",
    "is_assistant",
}

# Values that ask for nothing, beside None and False.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "max_length": (20,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
}


def check_generation_config(config: object) -> None:
    """Raise ValueError for an entry that the service cannot honour; nothing is dropped in silence."""
    entries = vars(config)
    for name, value in entries.items():
        if name.startswith("_") or name in _HONOURED or name in _MUTE or value is None or value is False:
            continue
        if not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            if name == "continuous_batching_config":
                raise ValueError("pass continuous_batching_config apart, not inside the GenerationConfig")
            raise ValueError(f"GenerationConfig.{name}={value!r} is not supported")
    _logit_bias(config)
    if entries.get("do_sample") is False and entries.get("temperature") not in (None, 0, 1):
        logger.warning("do_sample=False: generating greedily, whatever temperature says")


def request_options(
    config: object,
    *,
    max_new_tokens: int | None,
    eos_token_id: int | Iterable[int] | None,
    overrides: dict[str, Any],
    model_eos_token_ids: Collection[int] = (),
) -> GenerateOptions:
    """The options of one request: what it asks for itself, over what the config says; see also `min_new_tokens`.

    Raises TypeError for an override that is no sampling parameter.
    """
    unknown = overrides.keys() - {*SAMPLING, "seed"}
    if unknown:
        raise TypeError(f"not a per-request parameter: {', '.join(sorted(unknown))}")
    own = {name: value for name, value in overrides.items() if value is not None}
    options: dict[str, Any] = {name: own.get(name, getattr(config, name, None)) for name in SAMPLING}
    do_sample = getattr(config, "do_sample", None)
    if do_sample is not None and not own.keys() & set(SAMPLING):
        if not do_sample:
            options["temperature"] = 0.0
        elif options["temperature"] is None:
            options["temperature"] = 1.0
    options["seed"] = own.get("seed")
    options["max_new_tokens"] = getattr(config, "max_new_tokens", None) if max_new_tokens is None else max_new_tokens
    options["stop"] = getattr(config, "stop_strings", None)
    options["include_stop"] = None if options["stop"] is None else True  # transformers keeps it
    eos = getattr(config, "eos_token_id", None) if eos_token_id is None else eos_token_id
    if eos is not None:
        stops = eos if isinstance(eos, Iterable) else [eos]
        options["stop_token_ids"] = [int(stop) for stop in stops if int(stop) >= 0]
        options["ignore_eos"] = True  # these, and no others
    options |= _processors(config, eos_token_ids=options.get("stop_token_ids") or model_eos_token_ids)
    return cast("GenerateOptions", options)


def min_new_tokens(config: object, *, num_prompt_tokens: int) -> int | None:
    """What the config says of it for a prompt of this length; `min_length` counts the prompt, too."""
    least: int | None = getattr(config, "min_new_tokens", None)
    min_length: int | None = getattr(config, "min_length", None)
    if least is None and min_length:
        return max(0, min_length - num_prompt_tokens)
    return least


def _processors(config: object, *, eos_token_ids: Collection[int]) -> dict[str, Any]:
    banned = getattr(config, "bad_words_ids", None)
    if banned is not None:  # to transformers, EOS is no bad word
        banned = [ids for ids in banned if not (len(ids) == 1 and ids[0] in eos_token_ids)]
    return {
        "repetition_penalty": getattr(config, "repetition_penalty", None),
        "no_repeat_ngram_size": getattr(config, "no_repeat_ngram_size", None),
        "banned_sequences": banned,
        "banned_token_ids": getattr(config, "suppress_tokens", None),
        "logit_bias": _logit_bias(config),
    }


def _logit_bias(config: object) -> dict[int, float] | None:
    """`sequence_bias`, in either of transformers' forms. Raises ValueError for a run of several tokens."""
    asked = getattr(config, "sequence_bias", None)
    if asked is None:
        return None
    pairs = [(tuple(ids), bias) for ids, bias in (asked.items() if isinstance(asked, dict) else asked)]
    for ids, _ in pairs:
        if len(ids) != 1:
            raise ValueError(f"GenerationConfig.sequence_bias is supported for single tokens, not for {ids!r}")
    return {ids[0]: bias for ids, bias in pairs}

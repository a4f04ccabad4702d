"""Processors as the worker is sent them, and what they say, as transformers' own."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

import torch
from chairlift_worker.ipc.messages import ProcessorsMsg
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def make_processors(
    *,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    no_repeat_ngram_size: int = 0,
    banned_sequences: Iterable[Sequence[int]] = (),
    min_new_tokens: int = 0,
    early_stop_ids: Sequence[int] = (),
    allowed_ids: Sequence[int] = (),
    banned_ids: Sequence[int] = (),
) -> ProcessorsMsg:
    bias = logit_bias or {}
    return ProcessorsMsg(
        bias_ids=_ints(bias),
        biases=array("f", bias.values()).tobytes(),
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        banned_sequences=_ints(part for ids in banned_sequences for part in (len(ids), *ids)),
        min_new_tokens=min_new_tokens,
        early_stop_ids=_ints(early_stop_ids),
        allowed_ids=_ints(allowed_ids),
        banned_ids=_ints(banned_ids),
    )


def penalised(
    logits: torch.Tensor, processors: ProcessorsMsg | None, tokens: Sequence[int], num_output: int
) -> torch.Tensor:
    """(vocabulary,) scores of transformers' processors, in its order; those that it lacks as plain torch.

    `tokens` are prompt and output so far, `num_output` the length of the latter.
    """
    if processors is None:
        return logits
    ids = torch.tensor([list(tokens)], dtype=torch.int64)
    scores = _biases(processors)(ids, logits[None].clone())
    output = ids[0, len(tokens) - num_output :]
    counts = torch.bincount(output, minlength=logits.shape[0]).float()
    scores = scores - processors.frequency_penalty * counts - processors.presence_penalty * (counts > 0)
    return _bans(processors, prompt_len=len(tokens) - num_output)(ids, scores)[0]


def _biases(processors: ProcessorsMsg) -> LogitsProcessorList:
    made = LogitsProcessorList()
    bias_ids = _of_ints(processors.bias_ids)
    if bias_ids:
        biases = array("f", processors.biases).tolist()
        made.append(SequenceBiasLogitsProcessor({(i,): bias for i, bias in zip(bias_ids, biases, strict=True)}))
    if processors.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(float(processors.repetition_penalty)))
    return made


def _bans(processors: ProcessorsMsg, *, prompt_len: int) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if processors.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(processors.no_repeat_ngram_size))
    sequences = _of_ints(processors.banned_sequences)
    words = []
    while sequences:
        words.append(sequences[1 : 1 + sequences[0]])
        sequences = sequences[1 + sequences[0] :]
    if words:
        made.append(NoBadWordsLogitsProcessor(words))
    if processors.min_new_tokens and processors.early_stop_ids:
        stops = _of_ints(processors.early_stop_ids)
        made.append(MinNewTokensLengthLogitsProcessor(prompt_len, processors.min_new_tokens, stops))
    if processors.allowed_ids:
        allowed = _of_ints(processors.allowed_ids)
        made.append(PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1))
    if processors.banned_ids:
        made.append(SuppressTokensLogitsProcessor(_of_ints(processors.banned_ids)))
    return made


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


def _of_ints(values: bytes) -> list[int]:
    return array("i", values).tolist()

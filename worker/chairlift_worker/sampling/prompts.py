"""Log-probabilities of a prompt's tokens, by the logits at the places before them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from typing import Final

from chairlift_worker.ipc.messages import PromptLogprobsMsg
from chairlift_worker.plan import NO_TOKEN, PromptSpan, RowPlan, RowResult, TopTokens, failed_row
from chairlift_worker.sampling.native import SampleStatus, row_logprobs

# Entries of one result: with the most likely tokens that may be asked for some 250 KB, half of what a message may take.
MAX_ENTRIES: Final = 256
_ROW: Final = ctypes.sizeof(ctypes.c_float)
_ID_BYTES: Final = ctypes.sizeof(ctypes.c_int32)


def judge_prompt(row: RowPlan, address: int, vocab_size: int) -> list[RowResult]:
    """The log-probabilities of the row's `scored` span, in pieces, by contiguous float32 logits from `address` on.

    They are of the model's own distribution. What raises, or gives no finite number, is an error of the row alone.
    """
    results: list[RowResult] = []
    try:
        for span in _pieces(row.scored):
            results.append(_judge(row, span, address, vocab_size))
            if results[-1].error is not None:
                break
            address += span.num_tokens * vocab_size * _ROW
    except Exception as error:  # noqa: BLE001 - as in sampling: it must end that request only
        message = f"POISONED_REQUEST: judging the prompt raised {type(error).__name__}: {error}"
        results.append(failed_row(row.uid, message))
    return results


def _judge(row: RowPlan, span: PromptSpan, address: int, vocab_size: int) -> RowResult:
    logprobs, tops = array("f"), []
    for index in range(span.index, span.index + span.num_tokens):
        judged = row_logprobs(address, vocab_size, row.tokens[index], num_top=span.num_top)
        if judged.status is not SampleStatus.OK or judged.logprob is None:
            return failed_row(row.uid, _error(judged.status, index))
        logprobs.append(judged.logprob)
        if judged.top is not None:
            tops.append(judged.top)
        address += vocab_size * _ROW
    return RowResult(uid=row.uid, token_id=NO_TOKEN, logprob=None, prompt=_columns(row.uid, span, logprobs, tops))


def _columns(uid: int, span: PromptSpan, logprobs: array[float], tops: list[TopTokens]) -> PromptLogprobsMsg:
    return PromptLogprobsMsg(
        uid=uid,
        index=span.index,
        logprobs=logprobs.tobytes(),
        num_tops=bytes([len(top.ids) // _ID_BYTES for top in tops]),
        top_ids=b"".join([top.ids for top in tops]),
        top_logprobs=b"".join([top.logprobs for top in tops]),
    )


def _pieces(span: PromptSpan | None) -> Iterator[PromptSpan]:
    if span is None:
        return
    for begin in range(0, span.num_tokens, MAX_ENTRIES):
        num_tokens = min(MAX_ENTRIES, span.num_tokens - begin)
        yield PromptSpan(index=span.index + begin, num_tokens=num_tokens, num_top=span.num_top)


def _error(status: SampleStatus, index: int) -> str:
    if status is SampleStatus.NOT_FINITE:
        return f"NUMERICAL_ERROR: the logits at token {index - 1} of the prompt are not finite numbers."
    return f"NUMERICAL_ERROR: token {index} of the prompt has no probability."

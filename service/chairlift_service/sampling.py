"""The shape of the distribution that tokens are drawn from, and which log-probabilities of it are told."""

from __future__ import annotations

import math
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from chairlift.v1 import request_pb2
from chairlift_worker.ipc.messages import SamplingMsg

from chairlift_service.defaults import RequestDefaults
from chairlift_service.faults import Faults

# Temperatures under 1e-5 count as 0. This is 1e-5 as a float of 32 bits: what a caller sends is one, and 1e-5 itself
# is not under it.
GREEDY_BELOW: Final = struct.unpack("f", struct.pack("f", 1e-5))[0]
MAX_TOP_LOGPROBS: Final = 128
_UINT64_MAX: Final = 2**64 - 1
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15


def sampling_msg(
    request: request_pb2.GenerationRequest, *, path: str, defaults: RequestDefaults, vocab_size: int, faults: Faults
) -> SamplingMsg:
    """Resolves the distribution's shape, as the contract in request.proto says; see RequestDefaults for the rest."""
    params, where = request.sampling, f"{path}.sampling"
    _check_sampling(params, path=where, faults=faults)
    seed = request.seed if request.HasField("seed") else secrets.randbits(63)
    named = any(params.HasField(name) for name in ("top_k", "top_p", "min_p"))
    if params.HasField("temperature"):
        temperature = params.temperature
    elif defaults.do_sample:
        temperature = defaults.temperature
    else:
        temperature = 1.0 if named else 0.0
    if temperature < GREEDY_BELOW:
        # The most likely token survives every filter, so they are off: `accepted` then tells it as it is.
        return SamplingMsg(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    top_k = params.top_k if params.HasField("top_k") else defaults.top_k
    return SamplingMsg(
        temperature=temperature,
        top_k=top_k if 0 < top_k < vocab_size else 0,
        top_p=params.top_p if params.HasField("top_p") else defaults.top_p,
        min_p=params.min_p if params.HasField("min_p") else defaults.min_p,
        seed=seed,
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices: the request's own for choice 0, else output `choice` of SplitMix64.

    That generator begins with the request's seed; its first output is for choice 1. Source: Steele, Lea, Flood, "Fast
    splittable pseudorandom number generators", 2014.
    """
    if not choice:
        return seed
    z = (seed + choice * _GOLDEN_GAMMA) & _UINT64_MAX
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MAX
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64_MAX
    return z ^ (z >> 31)


def _check_sampling(params: request_pb2.SamplingParams, *, path: str, faults: Faults) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        faults.add(f"{path}.temperature", f"must be a finite number of at least 0, is {params.temperature:g}")
    if params.top_k < -1:
        faults.add(f"{path}.top_k", f"must be at least 1, or 0 or -1 for off, is {params.top_k}")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        faults.add(f"{path}.top_p", f"must be above 0 and at most 1, is {params.top_p:g}")
    if not 0 <= params.min_p < 1:
        faults.add(f"{path}.min_p", f"must be at least 0 and below 1, is {params.min_p:g}")


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Which log-probabilities are told."""

    chosen: bool  # those of the tokens that were chosen
    num_top: int  # of so many likely ones besides; 0: of none
    raw: bool  # by the model's own distribution
    prompt: int  # of the prompt's tokens, and of so many likely ones at each; 1: their own; 0: none


def asked_logprobs(
    params: request_pb2.LogprobParams, *, path: str, defaults: RequestDefaults, faults: Faults
) -> AskedLogprobs:
    """Reads them; `defaults` decide where nothing is said."""
    if params.source not in request_pb2.LogprobSource.values():
        faults.add(f"{path}.source", f"there is no source {params.source}")
    top_n = params.top_n if params.HasField("top_n") else int(defaults.logprobs)
    if top_n > MAX_TOP_LOGPROBS:
        faults.add(f"{path}.top_n", f"must be at most {MAX_TOP_LOGPROBS}, is {top_n}")
    if params.prompt_top_n > MAX_TOP_LOGPROBS:
        faults.add(f"{path}.prompt_top_n", f"must be at most {MAX_TOP_LOGPROBS}, is {params.prompt_top_n}")
    return AskedLogprobs(
        chosen=top_n > 0,
        num_top=top_n if top_n > 1 else 0,
        raw=params.source == request_pb2.LOGPROB_SOURCE_RAW,
        prompt=params.prompt_top_n,
    )

"""What gateways are told of model, server and load."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
from typing import Any, Final

from chairlift.v1 import info_service_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as _pb

from chairlift_service.defaults import RequestDefaults
from chairlift_service.lifecycle import ServedModel

SERVER_TYPE: Final = "chairlift"
_NS_PER_S: Final = 1_000_000_000


def model_info(model: ServedModel) -> Any:
    """The model.

    `model_path` is neither a folder nor a hub id, on purpose: a gateway takes the tokenizer from there if it can, and
    only the service's own is sure to be the right one.
    """
    card = model.card
    return _pb.GetModelInfoResponse(
        model_path=f"chairlift:{card.name}",
        served_model_name=card.name,
        is_generation=True,
        architectures=[card.architecture],
        vocab_size=card.vocab_size,
        max_context_length=card.context_len,
        max_req_input_len=min(card.context_len - 1, card.cache_len),
        eos_token_ids=card.eos_token_ids,
        default_sampling_params_json=json.dumps(_sampling(model.defaults)),
    )


def server_info(model: ServedModel | None, *, num_live: int, is_paused: bool, uptime_ns: int, received_s: float) -> Any:
    """The server; `model` is None while it is being loaded, `received_s` the time of the last request."""
    info = _pb.GetServerInfoResponse(
        active_requests=num_live,
        is_paused=is_paused,
        last_receive_timestamp=received_s,
        uptime_seconds=uptime_ns / _NS_PER_S,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
    )
    if model is not None:
        info.model_dtype = model.card.dtype
        info.block_size = _setting(model, "page_size")
        info.max_num_seqs = _setting(model, "max_requests_per_batch")
    return info


def loads(model: ServedModel, statistics: info_service_pb2.Statistics, *, num_waiting_tokens: int) -> Any:
    """The load, of the one rank that there is. Tokens per second are those of the time that was spent on steps.

    Of the prompt tokens that wait nobody knows yet which the prefix cache has.
    """
    now = dt.datetime.now(dt.UTC).isoformat()
    total = statistics.blocks_total
    used = (total - statistics.blocks_free - statistics.blocks_cached) / total if total else 0.0
    waiting = statistics.requests_waiting + statistics.requests_swapped
    prompt_tokens, busy_s = statistics.prompt_tokens, statistics.busy_ns / _NS_PER_S
    load = _pb.SchedulerLoad(
        num_running_reqs=statistics.requests_running,
        num_waiting_reqs=waiting,
        num_total_reqs=statistics.requests_running + waiting,
        num_used_tokens=round(used * model.card.cache_len),
        max_total_num_tokens=model.card.cache_len,
        token_usage=used,
        gen_throughput=statistics.generated_tokens / busy_s if busy_s else 0.0,
        cache_hit_rate=statistics.cached_prompt_tokens / prompt_tokens if prompt_tokens else 0.0,
        num_waiting_uncached_tokens=num_waiting_tokens,
        max_running_requests=_setting(model, "max_requests_per_batch"),
    )
    version = importlib.metadata.version("chairlift")
    return _pb.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[load])


def _sampling(defaults: RequestDefaults) -> dict[str, float]:
    """What a gateway fills in where its caller says nothing: what the service itself would."""
    penalty = {} if defaults.repetition_penalty == 1 else {"repetition_penalty": defaults.repetition_penalty}
    if not defaults.do_sample:
        return {"temperature": 0.0} | penalty
    return penalty | {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
    }


def _setting(model: ServedModel, name: str) -> int:
    """A number among the worker's settings; 0, which means unknown, where it is none."""
    value = next((setting.value for setting in model.settings if setting.name == name), "")
    return int(value) if value.isdecimal() else 0

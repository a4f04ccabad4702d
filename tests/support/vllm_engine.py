"""Calls of VllmEngine, as a gateway makes them."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from support.served import Served, rest

PROMPT = [40, 41, 42, 43]
_pb = vllm_engine_pb2


def stub(served: Served) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def asked(*ids: int, stream: bool = False, request_id: str = "", **sampling: Any) -> Any:
    """As the gateway sends it where its caller says little."""
    sampling = {"max_tokens": 8, "ignore_eos": True, "n": 1, "repetition_penalty": 1.0, "top_p": 1.0} | sampling
    sampling = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "temperature": 0.0} | sampling
    return _pb.GenerateRequest(
        request_id=request_id,
        tokenized=_pb.TokenizedInput(original_text="not looked at", input_ids=ids),
        sampling_params=_pb.SamplingParams(**sampling),
        stream=stream,
    )


async def answers(call: Any) -> tuple[list[Any], Any]:
    """(chunks, the ending), which must be the last message."""
    messages = await rest(call)
    kinds = [message.WhichOneof("response") for message in messages]
    assert kinds == ["chunk"] * (len(kinds) - 1) + ["complete"]
    return [message.chunk for message in messages[:-1]], messages[-1].complete

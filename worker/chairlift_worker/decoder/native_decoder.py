"""The native decoder, by ctypes. See worker/native/include/chairlift/decoder.hpp.

Everything is addresses: whoever makes a struct keeps the memory behind it alive.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from chairlift_worker.attention.native_kernel import Isa, LayerStruct, StepStruct, check_status
from chairlift_worker.decoder.packing import Packed
from chairlift_worker.native.library import load


class MatrixStruct(ctypes.Structure):
    """A linear layer's packed weights; all zeros: there is no such layer."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class DecoderLayerStruct(ctypes.Structure):
    """One layer."""

    _fields_ = (
        ("qkv", MatrixStruct),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("attention_norm", ctypes.c_void_p),
        ("after_attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("after_mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("rope", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("attention", LayerStruct),
    )


class DecoderStruct(ctypes.Structure):
    """A whole model."""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayerStruct)),
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        ("norm", ctypes.c_void_p),
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class RopeStruct(ctypes.Structure):
    """Angles of each position."""

    _fields_ = (("cosines", ctypes.c_void_p), ("sines", ctypes.c_void_p))


class DecoderStepStruct(ctypes.Structure):
    """One forward pass."""

    _fields_ = (
        ("groups", ctypes.POINTER(StepStruct)),
        ("ropes", ctypes.POINTER(RopeStruct)),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sampled", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_sampled", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("num_ropes", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


def matrix_struct(packed: Packed, bias: torch.Tensor | None) -> MatrixStruct:
    """The struct of packed weights and a float32 bias."""
    return MatrixStruct(
        packed.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        packed.format,
        packed.outputs,
        packed.inputs,
    )


def decode(decoder: DecoderStruct, step: DecoderStepStruct) -> None:
    """One forward pass; the GIL is free meanwhile.

    Raises ValueError, having written nothing, for what cannot be; MemoryError.
    """
    _check(_library().chairlift_decode(ctypes.byref(decoder), ctypes.byref(step)))


def multiply(rows: torch.Tensor, packed: Packed, *, isa: Isa = Isa.BEST) -> torch.Tensor:
    """(rows, outputs) float32: the product of (rows, inputs) float32 and packed weights, by one thread. For tests.

    Raises ValueError where this machine lacks the instruction set.
    """
    rows = rows.contiguous()
    out = torch.empty((rows.shape[0], -(-packed.outputs // 16) * 16))
    matrix = matrix_struct(packed, None)
    _check(
        _library().chairlift_multiply(
            isa, ctypes.byref(matrix), rows.data_ptr(), rows.shape[0], out.data_ptr(), out.stride(0)
        )
    )
    return out[:, : packed.outputs]


def _check(status: int) -> None:
    bad_shape = "sizes that do not fit each other, or a token or layer that does not exist"
    check_status(status, what="forward pass", bad_shape=bad_shape)


@cache
def _library() -> ctypes.CDLL:
    library = load()
    library.chairlift_decode.restype = ctypes.c_int32
    library.chairlift_decode.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.chairlift_multiply.restype = ctypes.c_int32
    library.chairlift_multiply.argtypes = (
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
    )
    return library

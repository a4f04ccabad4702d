"""The native paged attention, by ctypes. See worker/native/include/chairlift/attention.hpp.

The structs of a step and of a layer are made once and used for many calls; one call a layer then costs a few
microseconds of Python. Everything is addresses: whoever makes a struct keeps the memory behind it alive.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from functools import cache

from chairlift_worker.native.library import load


class ElementType(enum.IntEnum):
    """What the cache, or the tensors of a call, are made of."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # of the cache alone


class Isa(enum.IntEnum):
    """Instruction sets, each better than those before it; BEST is the last one that this machine has."""

    BEST = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4
    AMX = 5


class _Status(enum.IntEnum):
    """What the kernels' functions return; the same numbers in all their headers."""

    OK = 0
    BAD_SHAPE = 1
    NO_ISA = 2
    BAD_TABLE = 3
    NO_MEMORY = 4


class StepStruct(ctypes.Structure):
    """The rows of a step."""

    _fields_ = (
        ("row_first", ctypes.c_void_p),
        ("row_start", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """One layer."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("num_units", ctypes.c_int64),
        ("cache_type", ctypes.c_int32),
        ("io_type", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("unit_offset", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (("query", _Tensor), ("key", _Tensor), ("value", _Tensor), ("out", _Tensor))


Strided = tuple[int, int, int]
"""Address, elements from token to token, elements from head to head; head_dim is contiguous."""

NOTHING: Strided = (0, 0, 0)
"""Keys and values that are in the cache already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArguments:
    """One layer: where its units are and how it attends."""

    cache: int  # address of unit 0
    num_units: int
    cache_type: ElementType
    io_type: ElementType  # of queries, new keys, new values and output
    page_size: int
    heads: int
    kv_heads: int
    head_dim: int
    unit_offset: int  # of the keys in a page; the values are one further
    scale: float
    window: int = 0  # positions that a query sees, its own included; 0: all before it
    softcap: float = 0.0  # 0: off
    sinks: int = 0  # address of (heads,) float32; 0: none
    isa: Isa = Isa.BEST


def layer_struct(a: LayerArguments) -> LayerStruct:
    """The struct of a layer."""
    return LayerStruct(
        cache=a.cache,
        sinks=a.sinks,
        num_units=a.num_units,
        cache_type=a.cache_type,
        io_type=a.io_type,
        isa=a.isa,
        page_size=a.page_size,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        unit_offset=a.unit_offset,
        window=a.window,
        scale=a.scale,
        softcap=a.softcap,
    )


class NativeStep:
    """The rows of a step, for all layers of one page table. The arrays behind the addresses must outlive it."""

    __slots__ = ("_struct", "address")

    def __init__(
        self, *, row_first: int, row_start: int, tables: int, table_stride: int, num_rows: int, num_threads: int
    ) -> None:
        """Addresses of int32 arrays: (rows + 1,), (rows,), (rows, table_stride). num_threads must be torch's number."""
        self._struct = StepStruct(row_first, row_start, tables, table_stride, num_rows, num_threads)
        self.address = ctypes.addressof(self._struct)


class NativeLayer:
    """A layer's way to attend."""

    __slots__ = ("_attend", "_call", "_struct", "address")

    def __init__(self, arguments: LayerArguments) -> None:
        """Raises ValueError where this machine lacks the instruction set."""
        if not has_isa(arguments.isa):
            raise ValueError(f"this machine lacks {arguments.isa.name}; it has {', '.join(i.name for i in isas())}")
        self._struct = layer_struct(arguments)
        self.address = ctypes.addressof(self._struct)
        self._attend = _library().chairlift_attend

    def attend(self, step: NativeStep, *, query: Strided, key: Strided, value: Strided, out: Strided) -> None:
        """Write the new keys and values of the packed tokens, attend, write `out`. The GIL is free meanwhile.

        Raises ValueError, having written nothing, for shapes or page tables that cannot be; MemoryError.
        """
        call = _Call(query, key, value, out)
        status = self._attend(step.address, self.address, ctypes.addressof(call))
        _check(status)


def has_isa(isa: Isa) -> bool:
    """Whether this machine and this build have it."""
    return bool(_library().chairlift_attention_has_isa(isa))


def isas() -> list[Isa]:
    """Those that this machine has, the best one last."""
    return [isa for isa in Isa if isa is not Isa.BEST and has_isa(isa)]


def shares_torch_threads() -> bool:
    """Whether parallel regions run in torch's own OpenMP pool; False: torch is not loaded."""
    return bool(_library().chairlift_parallel_pool())


def check_status(status: int, *, what: str, bad_shape: str) -> None:
    """Raises ValueError, or MemoryError, for a status that says that `what` was not done.

    `bad_shape` says what there is no shape for.
    """
    if status == _Status.OK:
        return
    if status == _Status.NO_MEMORY:
        raise MemoryError(f"no memory for the scratch space of {what}")
    meanings = {
        _Status.BAD_SHAPE: bad_shape,
        _Status.NO_ISA: "this machine lacks the instruction set asked for",
        _Status.BAD_TABLE: "a page table lacks a page that is needed, or points outside the cache",
    }
    raise ValueError(f"{what} refused: {meanings[_Status(status)]}")


def _check(status: int) -> None:
    check_status(
        status, what="attention", bad_shape="a size below 1, or query heads that are no multiple of the others"
    )


@cache
def _library() -> ctypes.CDLL:
    library = load()
    library.chairlift_attend.restype = ctypes.c_int32
    library.chairlift_attend.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    library.chairlift_attention_has_isa.restype = ctypes.c_int32
    library.chairlift_attention_has_isa.argtypes = (ctypes.c_int32,)
    library.chairlift_parallel_pool.restype = ctypes.c_int32
    library.chairlift_parallel_pool.argtypes = ()
    for name in ("chairlift_attention_exp", "chairlift_attention_tanh"):
        function = getattr(library, name)
        function.restype = ctypes.c_int32
        function.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    return library


def map_values(function: str, isa: Isa, values: int, out: int, n: int) -> None:
    """The kernels' own `exp` or `tanh` on n float32 at an address; for tests."""
    status = getattr(_library(), f"chairlift_attention_{function}")(isa, values, out, n)
    _check(status)

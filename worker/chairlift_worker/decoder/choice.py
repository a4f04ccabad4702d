"""Whether the native decoder runs a model, with which instruction set, and with weights of how many bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from chairlift_worker.attention.choice import Chosen
from chairlift_worker.attention.native_kernel import Isa, isas

ModelImpl = Literal["native", "transformers"]
Quantization = Literal["none", "int8", "int4"]

_BEST: Final = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplOptions:
    """How the model is computed."""

    impl: ModelImpl = "transformers"
    quantization: Quantization = "none"
    isa: Isa = Isa.BEST


def choose_impl(asked: str, *, fault: str | None, backend: str, are_plain: bool) -> Chosen[ModelImpl]:
    """`fault` is why the native decoder cannot compute the model; `are_plain`: nothing is to be compiled or captured.

    Raises ValueError where the native decoder was asked for by name and cannot run.
    """
    if fault is None and backend != "native":
        fault = f"it attends with its own kernel, not with {backend}"
    if fault is None and not are_plain:
        fault = "what is to be compiled or captured is the transformers module"
    if asked == "native" and fault is not None:
        raise ValueError(f"model_impl = native: the native decoder cannot run here: {fault}")
    if asked == "transformers":
        return Chosen("transformers", "as set")
    if fault is not None:
        return Chosen("transformers", f"default, as the native decoder cannot run: {fault}")
    return Chosen("native", "as set" if asked == "native" else "default: the whole pass in native code")


def choose_quantization(asked: Quantization, *, impl: ModelImpl, why: str) -> Chosen[Quantization]:
    """`why` is the reason for the implementation. Raises ValueError where it has no quantised weights."""
    if asked != "none" and impl != "native":
        raise ValueError(f"quantization = {asked}: only model_impl = native has it, and that is not taken: {why}")
    return Chosen(asked, "as set, or the default")


def choose_isa(asked: str) -> Chosen[Isa]:
    """The instruction set of the native kernels. Raises ValueError for one that this machine lacks."""
    there = {isa.name.lower(): isa for isa in isas()}
    if asked == _BEST:
        best = isas()[-1]
        return Chosen(best, "default: the best that this processor has")
    if asked not in there:
        raise ValueError(f"cpu_isa = {asked}: this machine lacks it; it has {', '.join(there)}")
    return Chosen(there[asked], "as set")

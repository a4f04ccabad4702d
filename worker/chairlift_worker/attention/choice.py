"""Which attention backend runs, and whether batches of single tokens take the in-place path; each with its reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch

from chairlift_worker.attention.native_kernel import isas
from chairlift_worker.kv.layout import CacheLayout, KvCacheType

FALLBACK_BLOCKS: Final = 32  # table entries for each row where no lengths are known
_ALIASES: Final = {"paged|eager": "eager"}
FLASH: Final = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}  # the best first
IN_PLACE: Final = frozenset({"native"})
_NATIVE_TYPES: Final = frozenset({torch.float32, torch.bfloat16})


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chosen(Generic[T]):
    """A setting's value, why it is that, and what the user has to be told because it is not what was asked."""

    value: T
    reason: str
    warning: str | None = None


def find_faults(*, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The backends that cannot run a model of this type there, and why not."""
    faults = {name: fault for name in FLASH if (fault := _flash_fault(name, device))}
    if device.type != "cpu":
        faults["native"] = f"it computes on the CPU, not on {device.type}"
    elif dtype not in _NATIVE_TYPES:
        faults["native"] = f"it computes in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    return faults


def choose_backend(asked: str, *, auto_switch: bool, faults: Mapping[str, str]) -> Chosen[str]:
    """The backend's name. Raises ValueError where what was asked by name is among the faults."""
    name = _ALIASES.get(asked, asked)
    flash = next((flash for flash in FLASH if flash not in faults), None)
    if name == "auto":
        if flash is not None:
            return Chosen(flash, "default: FlashAttention is installed")
        if "native" in faults:
            return Chosen("sdpa", f"default, as native cannot run: {faults['native']}")
        return Chosen("native", f"default on a CPU: reads and writes pages in place, with {isas()[-1].name}")
    if name in {"sdpa", "eager"} and auto_switch and flash is not None:
        return Chosen(
            flash,
            f"{asked} replaced: FlashAttention is installed",
            f"attn_implementation = {asked} is replaced by {flash}; auto_switch_to_flash = false keeps what was asked",
        )
    if name in faults:
        raise ValueError(f"attn_implementation = {asked}: cannot run here: {faults[name]}")
    return Chosen(name, "as set" if name == asked else f"as set ({asked})")


def choose_kv_cache(asked: KvCacheType, *, backend: str) -> Chosen[KvCacheType]:
    """What keys and values are kept as. Raises ValueError where the backend cannot read what was asked."""
    if asked == "auto":
        return Chosen(asked, "default: the model's own type")
    if backend != "native":
        raise ValueError(f"kv_cache_dtype = {asked}: attention backend {backend} cannot read it, native can")
    return Chosen(asked, "as set")


def choose_max_blocks(
    asked: int | None,
    *,
    backend: str,
    layout: CacheLayout,
    context_len: int,
    max_lengths: tuple[int | None, int | None],
) -> Chosen[int]:
    """Pages that a row of the in-place path may have; 0: every batch takes the general path.

    `max_lengths` are those of prompt and output, as far as they are known.
    """
    chosen = _unbounded_max_blocks(asked, backend=backend, layout=layout, max_lengths=max_lengths)
    most = -(-context_len // layout.page_size)
    if chosen.value <= most:
        return chosen
    return Chosen(most, f"{chosen.value} lowered to the pages of a whole context")


def choose_sharing(asked: bool, *, layout: CacheLayout) -> Chosen[bool]:  # noqa: FBT001 - a setting's value
    """Whether requests with the same beginning share its pages."""
    if asked and any(group.window is not None for group in layout.groups):
        return Chosen(False, "turned off: the model has sliding-window layers, which keep only their window")  # noqa: FBT003
    if asked and not layout.is_uniform:
        return Chosen(False, "turned off: the model's layers differ in shape")  # noqa: FBT003
    return Chosen(asked, "as set, or the default")


def _unbounded_max_blocks(
    asked: int | None, *, backend: str, layout: CacheLayout, max_lengths: tuple[int | None, int | None]
) -> Chosen[int]:
    fault = _in_place_fault(backend, layout)
    if fault is not None:
        warning = f"max_blocks_per_request = {asked} is not used: {fault}" if asked else None
        return Chosen(0, f"decode fast path is off: {fault}", warning)
    if asked is not None:
        return Chosen(asked, "as set" if asked else "as set: decode fast path is off")
    prompt, generated = max_lengths
    if prompt is None or generated is None:
        return Chosen(FALLBACK_BLOCKS, "default where max_prompt_length and max_generated_length are not both set")
    return Chosen(-(-(prompt + generated) // layout.page_size), "room for max_prompt_length + max_generated_length")


def _in_place_fault(backend: str, layout: CacheLayout) -> str | None:
    if any(group.window is not None for group in layout.groups):
        return "the model has sliding-window layers, whose pages come and go"
    if backend not in IN_PLACE:
        return f"attention backend {backend} does not read block tables"
    return None


def _flash_fault(name: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"FlashAttention needs a GPU, and the model is on the {device.type}"
    module = FLASH[name]
    return None if importlib.util.find_spec(module) else f"FlashAttention is not installed (module {module})"

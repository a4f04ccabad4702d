"""The service's settings as a user of the manager states them; stated ones are compared with those that hold."""

from __future__ import annotations

import enum
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from chairlift_client._types import Setting


class _Unset(enum.Enum):
    """The value of a field that was not stated; None has a meaning of its own in some fields."""

    UNSET = enum.auto()

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset.UNSET


@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """Settings of continuous batching, by transformers' names (transformers' own object will do as well).

    They belong to the service, which is started with them and shared by many clients. A manager therefore cannot set
    them: it compares what you state here with what holds there, and raises ValueError where they differ. Three it
    sees to itself: `return_logprobs` (asked with each request), `seed` (request number i of the manager samples with
    seed + i), and `per_request_processors` (always on).
    """

    page_size: int | _Unset = UNSET
    num_blocks: int | _Unset | None = UNSET
    max_batch_tokens: int | _Unset | None = UNSET
    max_memory_percent: float | _Unset | None = UNSET
    max_requests_per_batch: int | _Unset | None = UNSET
    max_blocks_per_request: int | _Unset | None = UNSET
    allow_block_sharing: bool | _Unset = UNSET
    use_async_batching: bool | _Unset | None = UNSET
    use_cuda_graph: bool | tuple[bool, bool] | _Unset | None = UNSET
    q_padding_interval_size: int | _Unset = UNSET
    kv_padding_interval_size: int | _Unset = UNSET
    varlen_compile_config: Any = UNSET
    decode_compile_config: Any = UNSET
    default_compile_level: int | _Unset = UNSET
    scheduler_type: str | _Unset = UNSET
    safety_margin: float | _Unset | None = UNSET
    return_logprobs: bool | _Unset = UNSET
    seed: int | _Unset | None = UNSET
    auto_switch_to_flash: bool | _Unset = UNSET
    cpu_offload_space: float | _Unset | None = UNSET
    cpu_offload_space_safety_threshold: float | _Unset = UNSET
    max_queue_size: int | _Unset = UNSET
    per_request_processors: bool | _Unset = UNSET
    drop_unsupported_processors: bool | _Unset = UNSET
    disable_nccl_graph_mixing: bool | _Unset = UNSET
    cpu_group_timeout: float | _Unset | None = UNSET
    block_size: int | _Unset | None = UNSET

    def __post_init__(self) -> None:
        if not isinstance(self.page_size, _Unset) and self.page_size < 4:
            raise ValueError(f"page_size must be at least 4, not {self.page_size}")
        if self.block_size not in (UNSET, None):
            warnings.warn("block_size is deprecated, use page_size", FutureWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The part of a ContinuousBatchingConfig that the manager sees to itself."""

    return_logprobs: bool = False
    seed: int | None = None


# What a service does that does not know the setting: stating just that is no difference.
_WITHOUT: Final[dict[str, tuple[object, ...]]] = {
    "per_request_processors": (True,),
    "drop_unsupported_processors": (False,),
    "auto_switch_to_flash": (True, False),
    "use_async_batching": (False,),
    "use_cuda_graph": (False, (False, False)),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "default_compile_level": (0,),
    "max_blocks_per_request": (0,),
    "cpu_offload_space": (0, 0.0),
    "cpu_offload_space_safety_threshold": (0.8,),
    "max_queue_size": (0,),
    "disable_nccl_graph_mixing": (True, False),
    "cpu_group_timeout": (300.0, None),
}
_NO_PREFERENCE_IF_NONE: Final = {
    "num_blocks",
    "max_batch_tokens",
    "max_memory_percent",
    "max_requests_per_batch",
    "max_blocks_per_request",
    "use_async_batching",
    "use_cuda_graph",
    "safety_margin",
    "seed",
    "block_size",
}
_NO_PREFERENCE_IF_0: Final = {"q_padding_interval_size", "kv_padding_interval_size"}


def stated(config: object) -> dict[str, Any]:
    """The fields of a config, ours or transformers', that differ from that class's defaults."""
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"expected a ContinuousBatchingConfig, got {type(config).__name__}")
    found = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    return {
        name: value
        for name, value in found.items()
        if not (value is None and name in _NO_PREFERENCE_IF_NONE) and not (value == 0 and name in _NO_PREFERENCE_IF_0)
    }


def compare(config: object, settings: Iterable[Setting]) -> SessionConfig:
    """Compare what a config states with the service's settings. Raises ValueError that names every difference."""
    asked = stated(config)
    own = SessionConfig(return_logprobs=bool(asked.pop("return_logprobs", False)), seed=asked.pop("seed", None))
    if "block_size" in asked:
        asked.setdefault("page_size", asked.pop("block_size"))
    held = {setting.name.replace("-", "_"): setting.value for setting in settings}
    differences = []
    for name, value in asked.items():
        if name in held:
            if not _same(value, held[name]):
                differences.append(f"{name} is {held[name]}, not {value}")
        elif value not in _WITHOUT.get(name, ()):
            differences.append(f"{name}={value} is not something that this service can do")
    if differences:
        raise ValueError(
            "the service does not run with this ContinuousBatchingConfig: "
            + "; ".join(differences)
            + ". Start it with these settings, or leave them out."
        )
    return own


def _same(stated_value: object, held: str) -> bool:
    """Whether a value and a setting's text mean the same."""
    if isinstance(stated_value, tuple) and len(set(stated_value)) == 1:
        stated_value = stated_value[0]  # a switch for each path, both alike
    if isinstance(plain := getattr(stated_value, "to_dict", lambda: stated_value)(), dict):  # a CompileConfig
        return held.startswith("{") and bool(json.loads(held) == plain)
    if isinstance(stated_value, bool) or stated_value is None:
        return held.lower() == str(stated_value).lower()
    if isinstance(stated_value, int | float):
        try:
            return float(held) == float(stated_value)
        except ValueError:
            return False
    return held == str(stated_value)

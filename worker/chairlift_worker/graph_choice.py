"""Whether steps are captured as graphs of padded shapes, on which paths, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift_worker.attention.choice import IN_PLACE, Chosen

Q_INTERVAL: Final = 64  # tokens
KV_INTERVAL: Final = 16_384  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Which paths are captured, and to what their batches are padded."""

    varlen: bool = False
    decode: bool = False
    q_interval: int = Q_INTERVAL  # tokens, and rows, of the varlen path; the decode path pads to powers of two
    kv_interval: int = KV_INTERVAL  # tokens of the longest context of the varlen path

    @property
    def are_on(self) -> bool:
        """Whether any path is captured."""
        return self.varlen or self.decode

    @property
    def pair(self) -> bool | tuple[bool, bool]:
        """Both switches as a setting has them: varlen and decode, or one for both."""
        return self.varlen if self.varlen == self.decode else (self.varlen, self.decode)


def choose_graphs(
    asked: bool | tuple[bool, bool] | None,  # noqa: FBT001 - a setting's value, not a switch
    *,
    intervals: tuple[int, int],
    backend: str,
    has_fast_path: bool,
) -> Chosen[GraphOptions]:
    """Switches and padding intervals (query tokens, context tokens; 0: the default).

    Raises ValueError where what was asked for cannot be.
    """
    q_interval, kv_interval = intervals[0] or Q_INTERVAL, intervals[1] or KV_INTERVAL
    off = GraphOptions(q_interval=q_interval, kv_interval=kv_interval)
    wanted = any(intervals) if asked is None else asked
    varlen, decode = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    if not (varlen or decode):
        return Chosen(off, "default: off unless asked for" if asked is None else "as set")
    if backend not in IN_PLACE:
        fault = f"attention backend {backend} does not read block tables, its work has another shape in each step"
        if asked is not None:
            raise ValueError(f"use_cuda_graph = {asked}: {fault}")
        return Chosen(off, f"off: {fault}", f"padding intervals are set, but there are no graphs to pad for: {fault}")
    on = GraphOptions(varlen=varlen, decode=decode and has_fast_path, q_interval=q_interval, kv_interval=kv_interval)
    reason = "on, as a padding interval is set" if asked is None else "as set"
    if decode and not has_fast_path:
        reason += "; the decode fast path is off"
    return Chosen(on, f"{reason}; on a CPU a stand-in that only checks what a GPU would replay")

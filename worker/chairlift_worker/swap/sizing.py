"""How many sectors the swap pool holds."""

from __future__ import annotations

from typing import Final, Literal

GIB: Final = 1 << 30


def size_pool(
    *, space: float | Literal["auto"], threshold: float, available_bytes: int, sector_bytes: int
) -> tuple[int, str]:
    """Sectors, and the reason.

    `space` is in GiB, 0 is off, "auto" is all that `threshold` allows of the available bytes; a larger number is
    lowered to that. Source: transformers' cpu_offload_space, whose None is "auto" here.
    """
    allowed = int(max(0, available_bytes) * threshold)
    if space == "auto":
        return allowed // sector_bytes, f"auto: {threshold} of {available_bytes} bytes available beside the cache"
    asked = int(space * GIB)
    if asked == 0:
        return 0, "cpu_offload_space is 0: off"
    if asked > allowed:
        return allowed // sector_bytes, (
            f"{space} GiB lowered to {threshold} of {available_bytes} bytes available beside the cache"
        )
    return asked // sector_bytes, f"what {space} GiB hold"

"""Which of a worker's processes this is, by the variables that torchrun would set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of `size` ranks, and where they meet."""

    number: int  # 0 leads
    size: int
    address: str
    port: int
    listen_fd: int | None = None  # of rank 0: a socket that listens there already, so that nobody else can

    @classmethod
    def of(cls, environment: Mapping[str, str], *, listen_fd: int | None = None) -> Rank:
        """The rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name. Raises KeyError or ValueError."""
        return cls(
            number=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            listen_fd=listen_fd,
        )

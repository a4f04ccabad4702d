"""The ranks of one worker, joined by gloo over the loopback interface."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.distributed.checks import check_settings
from chairlift_worker.distributed.errors import RanksApartError
from chairlift_worker.distributed.rank import Rank
from chairlift_worker.ipc.settings import WorkerSettings

JOIN_S: Final = 300.0  # for the slowest rank to come; the service's start_timeout ends that earlier where it is shorter
HEAD_BYTES: Final = 4096  # of a first broadcast, which most messages fit
_LENGTH_BYTES: Final = 8
_NO_BOUND: Final = timedelta(days=3650)  # gloo takes no other


def join(settings: WorkerSettings, *, listen_fd: int | None = None) -> RankGroup | None:
    """The group of this worker's ranks; None where it has but one. Raises SettingError, RanksApartError."""
    check_settings(settings)
    return RankGroup(Rank.of(os.environ, listen_fd=listen_fd)) if settings.tp_size > 1 else None


class RankGroup:
    """All ranks, to one of them. Every rank calls the same in the same order; one thread of it at a time.

    What fails raises RanksApartError.
    """

    def __init__(self, rank: Rank) -> None:
        """Waits until all ranks are there."""
        self.number = rank.number
        self.size = rank.size
        self._timeout_s: float | None = None
        self._groups: list[dist.ProcessGroup] = []
        with _told():
            store = dist.TCPStore(  # type: ignore[attr-defined]  # it has no __all__
                rank.address,
                rank.port,
                rank.size,
                is_master=rank.number == 0,
                timeout=timedelta(seconds=JOIN_S),
                wait_for_workers=False,
                master_listen_fd=rank.listen_fd,
            )
            dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size, timeout=_NO_BOUND)
        assert dist.group.WORLD is not None  # there is one from now on
        self._groups.append(dist.group.WORLD)
        self._bound(None)

    def adopt(self, module: PreTrainedModel) -> None:
        """Has what holds for the group hold for the sums of this module's layers, too."""
        mesh = module._device_mesh  # noqa: SLF001 - where transformers keeps it
        assert mesh is not None, "a module that is not split"
        self._groups.append(mesh["tp"].get_group())
        self._bound(self._timeout_s)

    def set_timeout(self, timeout_s: float | None) -> None:
        """How long one rank waits for another, from now on; None: as long as it takes, as at first."""
        self._timeout_s = timeout_s
        self._bound(timeout_s)

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Without that bound meanwhile: for what takes ranks differently long."""
        self._bound(None)
        yield
        self._bound(self._timeout_s)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Rank 0 does what is inside before the others do."""
        if self.number > 0:
            self.share()
        yield
        if self.number == 0:
            self.share(b"")

    def wait_for_all(self) -> None:
        """Until every rank has come here."""
        self.gather("")

    def share(self, content: bytes | None = None) -> bytes:
        """What rank 0 calls it with, at every rank."""
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        if content is not None:
            first = len(content).to_bytes(_LENGTH_BYTES, "little") + content[: HEAD_BYTES - _LENGTH_BYTES]
            head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        self._broadcast(head)
        received = head.numpy().tobytes()
        length = int.from_bytes(received[:_LENGTH_BYTES], "little")
        received = received[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(received) == length:
            return received
        rest = torch.empty(length - len(received), dtype=torch.uint8)
        if content is not None:
            rest.copy_(torch.frombuffer(bytearray(content[len(received) :]), dtype=torch.uint8))
        self._broadcast(rest)
        return received + rest.numpy().tobytes()

    def gather(self, text: str) -> list[str]:
        """What each rank calls it with, by rank, as far as `HEAD_BYTES` bytes hold it."""
        own = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        content = text.encode()[:HEAD_BYTES]
        if content:
            own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everybodys = [torch.empty_like(own) for _ in range(self.size)]
        with _told(self._timeout_s):
            dist.all_gather(everybodys, own)
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="ignore") for one in everybodys]

    def close(self) -> None:
        """Leaves it."""
        dist.destroy_process_group()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with _told(self._timeout_s):
            dist.broadcast(tensor, src=0)

    def _bound(self, timeout_s: float | None) -> None:
        timeout = _NO_BOUND if timeout_s is None else timedelta(seconds=timeout_s)
        for group in self._groups:
            _set_pg_timeout(timeout, group)


@contextlib.contextmanager
def _told(timeout_s: float | None = None) -> Iterator[None]:
    """What gloo raises becomes a RanksApartError of one line."""
    try:
        yield
    except RuntimeError as error:
        raise RanksApartError(describe(error, timeout_s)) from error


def describe(error: Exception, timeout_s: float | None) -> str:
    """Why ranks could not exchange something, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if timeout_s is not None and "Timed out" in lines[0]:
        return f"another rank did not answer within cpu_group_timeout = {timeout_s:g} s"
    return f"the ranks of this worker are apart: {lines[0]}"

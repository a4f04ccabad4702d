"""One worker and all that joins it to the service."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Final

import msgspec
from chairlift_worker.ipc.channel import DEFAULT_RING_BYTES, ServiceChannel
from chairlift_worker.ipc.messages import ModelCardMsg, SettingMsg
from chairlift_worker.ipc.rank_channel import ServiceRankChannel
from chairlift_worker.ipc.settings import WorkerSettings

from chairlift_service.workers.link import Link, StepSink
from chairlift_service.workers.ranks import RankLaunch
from chairlift_service.workers.supervisor import Supervisor, WorkerStartError

COMMAND: Final = (sys.executable, "-m", "chairlift_worker")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Its processes, their rings, and who watches them. Used once: the next one gets everything anew."""

    channel: ServiceChannel  # to rank 0
    others: Sequence[ServiceRankChannel]  # to the ranks from 1 on
    link: Link
    supervisor: Supervisor

    async def end(self, *, patience_s: float) -> None:
        """Ends the processes, and gives back what joined them to the service. A second call does nothing."""
        await self.supervisor.stop(patience_s=patience_s)
        self.close()

    def close(self) -> None:
        """Gives back what joined it to the service: it is gone."""
        self.link.close()
        self.channel.close()
        for other in self.others:
            other.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFactory:
    """Makes workers that are all alike. `command` and `request_bytes` are replaced by tests."""

    settings: WorkerSettings
    start_timeout_s: float
    step_timeout_s: float
    command: Sequence[str] = COMMAND
    request_bytes: int = DEFAULT_RING_BYTES

    def make(self, *, sink: StepSink, incarnation: int) -> Worker:
        """A worker that is yet to be started, the service's `incarnation`-th. Raises OSError: no memory or descriptors.

        What it says of steps goes to `sink`. Needs a running event loop.
        """
        with contextlib.ExitStack() as made:
            channel = made.enter_context(contextlib.closing(ServiceChannel.create(request_bytes=self.request_bytes)))
            others = [
                made.enter_context(contextlib.closing(ServiceRankChannel.create()))
                for _ in range(1, self.settings.tp_size)
            ]
            made.pop_all()
        joined: list[ServiceChannel | ServiceRankChannel] = [channel, *others]
        link = Link(channel=channel)
        link.open(sink=sink)
        supervisor = Supervisor(
            link=link,
            launches=[self._launch(ends, incarnation) for ends in joined],
            start_timeout_s=self.start_timeout_s,
            step_timeout_s=self.step_timeout_s,
        )
        return Worker(channel=channel, others=others, link=link, supervisor=supervisor)

    def like(self, settings: Sequence[SettingMsg]) -> WorkerFactory:
        """The same, with a cache as large as that of a worker with these resolved settings.

        Or else what fits the one might not fit the next, which may find less memory.
        """
        blocks = next((setting.value for setting in settings if setting.name == "num_blocks"), None)
        if blocks is None:
            return self
        fixed = msgspec.structs.replace(self.settings, num_blocks=int(blocks), max_memory_percent=None)
        return dataclasses.replace(self, settings=fixed)

    def _launch(self, channel: ServiceChannel | ServiceRankChannel, incarnation: int) -> RankLaunch:
        argv = [
            *self.command,
            *("--channel", channel.description),
            *("--settings", msgspec.json.encode(self.settings).decode()),
            *("--incarnation", str(incarnation)),
        ]
        return RankLaunch(argv=argv, pass_fds=channel.worker_fds, status=channel.status)


def check_same(before: ModelCardMsg, now: ModelCardMsg) -> None:
    """Raises WorkerStartError where the model is not the one by which requests were admitted."""
    names = ("architecture", "vocab_size", "context_len", "cache_len", "eos_token_ids", "dtype", "num_parameters")
    for name in names:
        was, has = getattr(before, name), getattr(now, name)
        if was != has:
            raise WorkerStartError(f"worker: the model is another one: its {name} was {was} and is {has}")

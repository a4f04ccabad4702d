"""The worker process. Started by the service; it lives no longer than the service does."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
from typing import Final

import msgspec
import structlog

from chairlift_worker.distributed.errors import RanksApartError
from chairlift_worker.ipc.channel import ServiceGoneError, WorkerChannel
from chairlift_worker.ipc.logs import adopt_libraries, setup_logging
from chairlift_worker.ipc.messages import StartFailedMsg, encode
from chairlift_worker.ipc.rank_channel import RankChannel
from chairlift_worker.ipc.settings import WorkerSettings

_PR_SET_PDEATHSIG: Final = 1

_log = structlog.get_logger(__name__)


def main() -> int:
    """Exit code: 0 after a shutdown, 1 if it could not start or the service is gone; an exception is a bug.

    One of several ranks ends with 1, too, where another one is gone or late.
    """
    parser = argparse.ArgumentParser(prog="chairlift_worker", description="started by chairlift-serve, not by hand")
    parser.add_argument("--channel", required=True, help="descriptors of the shared memory")
    parser.add_argument("--settings", required=True, help="WorkerSettings as JSON")
    parser.add_argument("--listen-fd", type=int, help="where rank 0 of several waits for the others")
    parser.add_argument("--incarnation", type=int, default=1, help="which of the service's workers this is, from 1")
    arguments = parser.parse_args()
    # The service's to handle: a terminal's Ctrl-C, and the SIGTERM that service managers send to every process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = msgspec.json.decode(arguments.settings, type=WorkerSettings)
    rank = int(os.environ["RANK"]) if settings.tp_size > 1 else 0
    channel = RankChannel.attach(arguments.channel) if rank else WorkerChannel.attach(arguments.channel)
    try:
        if channel.service_gone():  # it died before the line above asked to die with it
            return 1
        setup_logging(level=settings.log_level, log_format=settings.log_format)
        # OpenMP threads that spin at each barrier take the cores that the service, or whatever else runs on this
        # machine, needs to let them go on: on two busy cores a step took three to five times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if isinstance(channel, RankChannel):
            return _follow(channel, settings, rank)
        return _serve(channel, settings, arguments)
    except (ServiceGoneError, RanksApartError) as error:
        _log.warning("worker ends", reason=str(error), exc_info=error.__cause__)
        return 1
    finally:
        channel.close()
        gc.freeze()  # or the interpreter, before it ends, looks through all of torch for what it could give back


# Imports inside these: torch takes seconds, and the parent's death must be watched before that.


def _serve(channel: WorkerChannel, settings: WorkerSettings, arguments: argparse.Namespace) -> int:
    from chairlift_worker.assemble import build, make_engine  # noqa: PLC0415
    from chairlift_worker.distributed.group import join  # noqa: PLC0415
    from chairlift_worker.model.errors import ModelError  # noqa: PLC0415
    from chairlift_worker.setting_log import SettingError  # noqa: PLC0415

    adopt_libraries()
    try:
        group = join(settings, listen_fd=arguments.listen_fd)
        parts = build(settings, channel, incarnation=arguments.incarnation, group=group)
    except (ModelError, SettingError, MemoryError) as error:
        message = str(error) or type(error).__name__
        channel.send_result(encode(StartFailedMsg(message=message)), heartbeat=channel.status.beat)
        return 1
    channel.send_result(encode(parts.ready), heartbeat=channel.status.beat)
    make_engine(parts, channel).run()
    if parts.leader is not None and group is not None:
        parts.leader.end()
        group.close()
    return 0


def _follow(channel: RankChannel, settings: WorkerSettings, rank: int) -> int:
    from chairlift_worker.assemble import build_follower  # noqa: PLC0415
    from chairlift_worker.distributed.group import join  # noqa: PLC0415
    from chairlift_worker.model.errors import ModelError  # noqa: PLC0415
    from chairlift_worker.setting_log import SettingError  # noqa: PLC0415

    adopt_libraries()
    structlog.contextvars.bind_contextvars(rank=rank)
    try:
        group = join(settings)
        assert group is not None  # or it would be no rank
        follower = build_follower(settings, group, channel.status)
    except (ModelError, SettingError, MemoryError) as error:
        _log.warning("rank ends", reason=str(error) or type(error).__name__)  # as rank 0 says to the service
        return 1
    follower.run()
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The worker process. Started by the service; it lives no longer than the service does."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from typing import Final

import msgspec
import structlog

from chairlift_worker.ipc.channel import ServiceGoneError, WorkerChannel
from chairlift_worker.ipc.logs import setup_logging
from chairlift_worker.ipc.messages import StartFailedMsg, encode
from chairlift_worker.ipc.settings import WorkerSettings

_PR_SET_PDEATHSIG: Final = 1

_log = structlog.get_logger(__name__)


def main() -> int:
    """Exit code: 0 after a shutdown, 1 if it could not start or the service is gone; an exception is a bug."""
    parser = argparse.ArgumentParser(prog="chairlift_worker", description="started by chairlift-serve, not by hand")
    parser.add_argument("--channel", required=True, help="descriptors of the shared memory")
    parser.add_argument("--settings", required=True, help="WorkerSettings as JSON")
    parser.add_argument("--incarnation", type=int, default=1, help="which of the service's workers this is, from 1")
    arguments = parser.parse_args()
    # The service's to handle: a terminal's Ctrl-C, and the SIGTERM that service managers send to every process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = WorkerChannel.attach(arguments.channel)
    try:
        if channel.service_gone():  # it died before the line above asked to die with it
            return 1
        settings = msgspec.json.decode(arguments.settings, type=WorkerSettings)
        setup_logging(level=settings.log_level, log_format=settings.log_format)
        return _serve(channel, settings, arguments.incarnation)
    except ServiceGoneError as error:
        _log.warning("worker ends", reason=str(error))
        return 1
    finally:
        channel.close()


def _serve(channel: WorkerChannel, settings: WorkerSettings, incarnation: int) -> int:
    # OpenMP threads that spin at each barrier take the cores that the service, or whatever else runs on this machine,
    # needs to let them go on: on two busy cores a step took three to five times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here: torch takes seconds, and the parent's death must be watched before that.
    from chairlift_worker.assemble import build, make_engine  # noqa: PLC0415
    from chairlift_worker.model.errors import ModelError  # noqa: PLC0415
    from chairlift_worker.setting_log import SettingError  # noqa: PLC0415

    try:
        parts = build(settings, channel, incarnation=incarnation)
    except (ModelError, SettingError, MemoryError) as error:
        message = str(error) or type(error).__name__
        channel.send_result(encode(StartFailedMsg(message=message)), heartbeat=channel.status.beat)
        return 1
    channel.send_result(encode(parts.ready), heartbeat=channel.status.beat)
    make_engine(parts, channel).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

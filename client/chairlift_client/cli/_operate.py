"""Commands that act on the service, on its admin address: pause, resume, drain, stop, update-weights and so on."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from chairlift_client._sync_admin import AdminClient
from chairlift_client.cli import _input
from chairlift_client.cli._output import Commands, add_command, print_json


def add_flush_prefix_cache(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `flush-prefix-cache`."""
    summary = "Forget the cached prefixes that no request uses (admin address)."
    add_command(commands, common, "flush-prefix-cache", run_flush_prefix_cache, summary)


def run_flush_prefix_cache(options: argparse.Namespace) -> int:
    """Run `flush-prefix-cache`."""
    with AdminClient(options.target, **options.access) as admin:
        num_blocks = admin.flush_prefix_cache()
    return _tell(options, {"num_blocks": num_blocks}, f"{num_blocks} pages forgotten")


def add_pause(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `pause`."""
    summary = "Compute nothing until `resume`; new requests queue (admin address)."
    add_command(commands, common, "pause", run_pause, summary)


def run_pause(options: argparse.Namespace) -> int:
    """Run `pause`."""
    with AdminClient(options.target, **options.access) as admin:
        num_requests = admin.pause()
    return _tell(options, {"num_requests": num_requests}, f"paused; {num_requests} requests stand still")


def add_resume(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `resume`."""
    add_command(commands, common, "resume", run_resume, "End a pause, a drain or a stop (admin address).")


def run_resume(options: argparse.Namespace) -> int:
    """Run `resume`."""
    with AdminClient(options.target, **options.access) as admin:
        admin.resume()
    return _tell(options, {}, "resumed")


def add_drain(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `drain`."""
    summary = "Refuse new requests and wait until the others have ended (admin address)."
    parser = add_command(commands, common, "drain", run_drain, summary)
    parser.add_argument("--deadline", type=_input.positive_float, metavar="SECONDS", help="wait no longer; exit 1 then")


def run_drain(options: argparse.Namespace) -> int:
    """Run `drain`."""
    with AdminClient(options.target, **options.access) as admin:
        admin.drain(timeout=options.deadline)
    return _tell(options, {}, "drained")


def add_stop(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `stop`."""
    summary = "End every request now, and refuse new ones until `resume` (admin address)."
    add_command(commands, common, "stop", run_stop, summary)


def run_stop(options: argparse.Namespace) -> int:
    """Run `stop`."""
    with AdminClient(options.target, **options.access) as admin:
        num_requests = admin.stop()
    return _tell(options, {"num_requests": num_requests}, f"stopped; {num_requests} requests were ended")


def add_update_weights(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `update-weights`."""
    summary = "While paused, take the weights of a folder on the service's machine (admin address)."
    parser = add_command(commands, common, "update-weights", run_update_weights, summary)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="holds the weights as safetensors")


def run_update_weights(options: argparse.Namespace) -> int:
    """Run `update-weights`. A relative path is one of here."""
    with AdminClient(options.target, **options.access) as admin:
        update = admin.update_weights(options.folder.absolute())
    text = f"{update.num_tensors} tensors replaced; {update.num_requests} requests will be computed again"
    return _tell(options, dataclasses.asdict(update), text)


def _tell(options: argparse.Namespace, fields: dict[str, int], text: str) -> int:
    if options.json:
        print_json(fields)
    else:
        print(text)
    return 0

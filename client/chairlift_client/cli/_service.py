"""Commands about the service and its requests: health, info, cancel."""

from __future__ import annotations

import argparse
import contextlib

import grpc
from chairlift.v1 import info_service_pb2

from chairlift_client import _errors
from chairlift_client._access import Connection
from chairlift_client._stubs import Stubs
from chairlift_client._sync import Client
from chairlift_client._types import HealthStatus
from chairlift_client.cli import _input
from chairlift_client.cli._output import Commands, WrongUseError, add_command, print_json, to_dict


def add_health(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `health`."""
    parser = add_command(commands, common, "health", run_health, "Ask whether the service can serve; exit 1 if not.")
    parser.add_argument("--service", default="", metavar="NAME", help="one gRPC service (default: the server)")
    parser.add_argument("--deadline", type=_input.positive_float, default=5.0, metavar="SECONDS")


def run_health(options: argparse.Namespace) -> int:
    """Run `health`."""
    with Client(options.target, **options.access) as client:
        status = client.health(options.service, timeout=options.deadline)
    if options.json:
        print_json({"status": status.name})
    else:
        print(status.name)
    return 0 if status is HealthStatus.SERVING else 1


def add_info(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `info`."""
    add_command(commands, common, "info", run_info, "Show the server, its settings and statistics, and the model.")


def run_info(options: argparse.Namespace) -> int:
    """Run `info`: GetServer's fields, and GetModel's under `model`. Statistics are numbers in JSON, not strings."""
    connection = Connection.resolve(options.target, options.access)
    with contextlib.closing(connection.open()) as channel:
        stubs = Stubs(channel, metadata=connection.metadata)
        try:
            server = stubs.info.GetServer(info_service_pb2.GetServerRequest())
            model = stubs.info.GetModel(info_service_pb2.GetModelRequest())
        except grpc.RpcError as error:
            raise _errors.from_rpc_error(error) from None
    shown = to_dict(server)
    statistics = server.statistics
    shown["statistics"] = {field.name: getattr(statistics, field.name) for field in statistics.DESCRIPTOR.fields}
    shown["model"] = to_dict(model) | {"num_parameters": model.num_parameters}
    if options.json:
        print_json(shown)
        return 0
    print(f"version {server.version}, {shown['state'].removeprefix('SERVER_STATE_')}, worker {[*server.worker_pids]}")
    for title, rows in (
        ("model", [(name, value, "") for name, value in shown["model"].items()]),
        ("settings", [(setting.name, setting.value, setting.reason) for setting in server.config]),
        ("statistics", [(name, value, "") for name, value in shown["statistics"].items()]),
    ):
        print(f"\n{title}")
        width = max((len(name) for name, _, _ in rows), default=0)
        for name, value, reason in rows:
            print(f"  {name:{width}}  {value}" + (f"  ({reason})" if reason else ""))
    return 0


def add_cancel(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `cancel`."""
    parser = add_command(commands, common, "cancel", run_cancel, "Cancel requests, and let finished ones' results go.")
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--session", metavar="NAME", help="all requests of a session")


def run_cancel(options: argparse.Namespace) -> int:
    """Run `cancel`. An id that nobody knows is an outcome, not an error."""
    if not options.ids and not options.session:
        raise WrongUseError("name request ids, or a --session")
    with Client(options.target, **options.access) as client:
        outcomes = client.cancel(*options.ids, session=options.session)
    if options.json:
        print_json({"outcomes": [{"request_id": name, "status": status.name} for name, status in outcomes.items()]})
    else:
        for name, status in outcomes.items():
            print(name, status.name)
    return 0

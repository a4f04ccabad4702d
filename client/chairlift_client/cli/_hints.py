"""What a failure of the way to the service most likely means: gRPC's own words say little to who typed a command."""

from __future__ import annotations

import argparse
import os

import grpc

from chairlift_client import _channel
from chairlift_client._errors import ChairliftError


def explained(error: ChairliftError, options: argparse.Namespace) -> ChairliftError:
    """The same error, in better words where gRPC itself made it; what the service said stays as it is."""
    if error.reason is not None:
        return error
    told = _explanation(error, options)
    return type(error)(told, code=error.code) if told else error


def _explanation(error: ChairliftError, options: argparse.Namespace) -> str | None:
    target = _channel.resolve_target(options.target)
    deadline = getattr(options, "deadline", None)
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return f"no service answers at {target} ({_origin(options)}); is chairlift-serve there? {error.message}"
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{target} does not answer this; commands for operators take the service's --admin-listen as --target"
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline is not None:
        return f"the deadline of {deadline:g} s passed"
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in error.message:
        return f"{error.message}; {_channel.MAX_MESSAGE_BYTES} bytes here, --max-message-bytes at the service"
    return None


def _origin(options: argparse.Namespace) -> str:
    if options.target:
        return "from --target"
    return f"from {_channel.TARGET_VARIABLE}" if os.environ.get(_channel.TARGET_VARIABLE) else "the default"

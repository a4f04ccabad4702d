"""Options of every command: where the service is, and how to get in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from chairlift_client import _channel
from chairlift_client._access import TOKEN_VARIABLE, Access, Tls
from chairlift_client.cli._output import WrongUseError

_TLS_DETAILS: Final = ("ca", "cert", "key", "server_name")


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "--target",
        metavar="ADDR",
        help=f"HOST:PORT or unix:PATH; admin commands name the admin address (default: ${_channel.TARGET_VARIABLE}, "
        f"else {_channel.DEFAULT_TARGET})",
    )
    parser.add_argument("--tls", action="store_true", help="encrypt; the other --tls flags imply it")
    parser.add_argument("--tls-ca", metavar="FILE", help="whom to trust, PEM (default: the public authorities)")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate to show, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    parser.add_argument("--tls-server-name", metavar="NAME", help="the certificate's name, if not the target's")
    parser.add_argument("--token-file", metavar="FILE", help=f"file with the token alone (default: ${TOKEN_VARIABLE})")
    parser.add_argument("--token-in-clear", action="store_true", help="send it unencrypted to other machines, too")


def read_access(options: argparse.Namespace) -> Access:
    """What the options say. Raises WrongUseError."""
    details = {name: value for name in _TLS_DETAILS if (value := getattr(options, f"tls_{name}")) is not None}
    return Access(
        tls=Tls(**details) if options.tls or details else None,
        token=None if options.token_file is None else _read_token(options.token_file),
        token_in_clear=options.token_in_clear,
    )


def _read_token(path: str) -> str:
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUseError(f"--token-file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(words) != 1:
        raise WrongUseError(f"--token-file {path} must hold one token and nothing else")
    return words[0]

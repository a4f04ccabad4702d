"""What commands read: prompts, and lists of ids."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from chairlift_client._requests import Prompt
from chairlift_client.cli._output import WrongUseError


def token_ids(text: str) -> list[int]:
    """Argument type: ids between commas."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"not token ids between commas: {text!r}") from None


def bias(text: str) -> tuple[int, float]:
    """Argument type: a token id, =, a number."""
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not ID=BIAS: {text!r}") from None


def positive_float(text: str) -> float:
    """Argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"not a number above 0: {text!r}")
    return value


def positive_int(text: str) -> int:
    """Argument type: a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"not a whole number above 0: {text!r}")
    return int(text)


def read_text(text: str) -> str:
    """The text, or standard input for `-`."""
    return sys.stdin.read() if text == "-" else text


def read_prompt(options: argparse.Namespace) -> Prompt:
    """The one prompt that TEXT, --ids or --prompt-file give."""
    given = [source for source in (options.text, options.ids, options.prompt_file) if source is not None]
    if len(given) != 1:
        raise WrongUseError("give one of TEXT, --ids and --prompt-file")
    if options.ids is not None:
        ids: list[int] = options.ids
        return ids
    if options.prompt_file is None:
        return read_text(options.text)
    try:
        return Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUseError(f"cannot read the prompt: {error}") from None


def read_tools(path: str) -> list[dict[str, Any]]:
    """The list of tools in a JSON file."""
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongUseError(f"cannot read the tools in {path}: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise WrongUseError(f"{path} is not a list of tools")
    return tools

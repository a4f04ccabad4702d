"""`chairlift tokenize`: the model's own view of a text."""

from __future__ import annotations

import argparse

from chairlift_client._sync import Client
from chairlift_client.cli import _input
from chairlift_client.cli._output import Commands, add_command, print_json


def add_tokenize(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = add_command(commands, common, "tokenize", run, "Turn text into the model's token ids.")
    parser.add_argument("text", metavar="TEXT", help="the text; - reads standard input")
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="leave out what the tokenizer adds to a prompt"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    with Client(options.target, **options.access) as client:
        tokens = client.tokenize(_input.read_text(options.text), add_special_tokens=not options.no_special_tokens)
    if options.json:
        print_json({"token_ids": tokens.token_ids, "tokens": tokens.tokens})
    else:
        print(*tokens.token_ids)
    return 0

"""`chairlift tokenize`: the model's own view of a text."""

from __future__ import annotations

import argparse

from chairlift_client._sync import Client
from chairlift_client.cli import _input
from chairlift_client.cli._output import Commands, WrongUseError, add_command, print_json


def add_tokenize(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = add_command(commands, common, "tokenize", run, "Turn text into the model's token ids.")
    parser.add_argument("text", metavar="TEXT", help="the text; - reads standard input")
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="leave out what the tokenizer adds to a prompt"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the first ones only")
    parser.add_argument("--offsets", action="store_true", help="where each token stands in the text; needs --json")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.offsets and not options.json:
        raise WrongUseError("--offsets needs --json")
    with Client(options.target, **options.access) as client:
        tokens = client.tokenize(
            _input.read_text(options.text),
            add_special_tokens=not options.no_special_tokens,
            max_tokens=options.max_tokens,
            offsets=options.offsets,
        )
    if options.json:
        shown: dict[str, object] = {"token_ids": tokens.token_ids, "tokens": tokens.tokens}
        if options.offsets:
            shown["offsets"] = tokens.offsets
        print_json(shown | {"truncated": tokens.truncated})
    else:
        print(*tokens.token_ids)
    return 0

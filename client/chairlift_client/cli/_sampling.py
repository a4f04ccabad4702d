"""Options of every command that generates: how long, how, and by when."""

from __future__ import annotations

import argparse

from chairlift_client._requests import GenerateOptions
from chairlift_client.cli import _input


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="unset: the model's default, or all that fits")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="0 turns it off")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens of this share, up to 1")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens under this share of the likeliest one")
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampling noise")
    parser.add_argument("--deadline", type=_input.positive_float, metavar="SECONDS", help="of each answer")


def read_sampling(options: argparse.Namespace) -> GenerateOptions:
    """What they say, but for the deadline."""
    return GenerateOptions(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )

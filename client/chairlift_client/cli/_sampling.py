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
    parser.add_argument("--repetition-penalty", type=float, metavar="P", help="over 1: fewer tokens come again")
    parser.add_argument("--presence-penalty", type=float, metavar="P", help="-2 to 2, of tokens that are in the answer")
    parser.add_argument("--frequency-penalty", type=float, metavar="P", help="-2 to 2, for each time that they are")
    parser.add_argument("--no-repeat-ngram-size", type=int, metavar="N", help="no run of N tokens comes twice")
    parser.add_argument(
        "--logit-bias", type=_input.bias, action="append", metavar="ID=BIAS", help="added to its logit; repeatable"
    )
    parser.add_argument("--allowed-token-ids", type=_input.token_ids, metavar="1,2,3", help="choose nothing else")
    parser.add_argument("--banned-token-ids", type=_input.token_ids, metavar="1,2,3", help="never choose these")
    parser.add_argument("--banned-words", action="append", metavar="TEXT", help="a text that may not come; repeatable")
    parser.add_argument(
        "--banned-sequences",
        type=_input.token_ids,
        action="append",
        metavar="1,2,3",
        help="a run of ids that may not come; repeatable",
    )
    parser.add_argument("--min-new-tokens", type=int, metavar="N", help="nothing stops the answer before")
    parser.add_argument(
        "--stop-token-ids", type=_input.token_ids, metavar="1,2,3", help="further ids that end the answer"
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends the answer; repeatable")
    parser.add_argument("--include-stop", action="store_true", default=None, help="show the stop that ended it")
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
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        no_repeat_ngram_size=options.no_repeat_ngram_size,
        logit_bias=dict(options.logit_bias) if options.logit_bias else None,
        allowed_token_ids=options.allowed_token_ids,
        banned_token_ids=options.banned_token_ids,
        banned_words=options.banned_words,
        banned_sequences=options.banned_sequences,
        min_new_tokens=options.min_new_tokens,
        stop_token_ids=options.stop_token_ids,
        stop=options.stop,
        include_stop=options.include_stop,
        seed=options.seed,
    )

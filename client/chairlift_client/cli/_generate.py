"""`chairlift generate`: one prompt, its answer as it comes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from chairlift.v1 import generation_service_pb2

from chairlift_client import _requests
from chairlift_client._access import Connection
from chairlift_client._requests import GenerateOptions
from chairlift_client._streams import EventStream
from chairlift_client._stubs import Stubs
from chairlift_client.cli import _input
from chairlift_client.cli._choices import in_turn
from chairlift_client.cli._constraint_options import add_constraint, read_constraint
from chairlift_client.cli._output import Commands, WrongUseError, add_command, print_json, to_dict, write_text
from chairlift_client.cli._sampling import add_sampling, read_sampling


def add_generate(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = add_command(commands, common, "generate", run, "Generate from a prompt and stream the answer.")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the prompt; - reads standard input")
    parser.add_argument("--ids", type=_input.token_ids, metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    add_sampling(parser)
    add_constraint(parser)
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at the model's EOS")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="log-probabilities of the N likeliest tokens; needs --json"
    )
    parser.add_argument("--logprob-source", choices=["processed", "raw"], help="of which distribution they are")
    parser.add_argument(
        "--output", choices=["text", "ids", "both"], help="what to return (default: text; both in JSON)"
    )
    parser.add_argument("--keep-special-tokens", action="store_true", help="show special tokens in the text")
    parser.add_argument("--stream-interval", type=int, metavar="N", help="tokens that are shown together, at least")
    parser.add_argument("--echo", action="store_true", default=None, help="show the prompt's text first")
    parser.add_argument(
        "--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens; needs --json"
    )
    parser.add_argument("--num-choices", type=int, metavar="N", help="answers to give; shown one after the other")
    parser.add_argument("--request-id", metavar="ID", help="your own name for the request")
    parser.add_argument("--session", metavar="NAME", help="a name that groups requests")
    parser.add_argument("--priority", type=int, metavar="N", help="-10 to 10; higher ones start earlier")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    for name in ("logprobs", "prompt_logprobs"):
        if not options.json and getattr(options, name):
            raise WrongUseError(f"--{name.replace('_', '-')} needs --json")
    if not options.json and options.output == "both":
        raise WrongUseError("--output both needs --json")
    request = generation_service_pb2.GenerateRequest(
        request=_requests.generation_request(_input.read_prompt(options), _request_options(options))
    )
    show = _show_json if options.json else _show_ids if options.output == "ids" else _show_text
    connection = Connection.resolve(options.target, options.access)
    with contextlib.closing(connection.open()) as channel:
        call = Stubs(channel, metadata=connection.metadata).generation.Generate(request, timeout=options.deadline)
        events: EventStream[Any] = EventStream(call, lambda message: message)
        with events:
            if options.json:
                for event in events:
                    show(event)
            else:
                _stream(in_turn(events), show, headed=(options.num_choices or 1) > 1)
    return 0


def _stream(events: Iterable[Any], show: Any, *, headed: bool) -> None:
    """Show events; a line of text that has begun is ended, whatever happens, so that an error stands apart."""
    begun, choice = False, -1
    try:
        for event in events:
            if event.WhichOneof("event") == "delta":
                if headed and event.delta.choice != choice:
                    choice = event.delta.choice
                    print(f"--- choice {choice}", flush=True)
                begun = True
            show(event)
            if event.WhichOneof("event") == "finished" and begun:
                print(flush=True)
                begun = False
    finally:
        if begun:
            print(flush=True)


def _request_options(options: argparse.Namespace) -> GenerateOptions:
    output = options.output or ("both" if options.json else "text")
    return GenerateOptions(
        **read_sampling(options),
        ignore_eos=options.ignore_eos,
        constraint=read_constraint(options),
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        num_choices=options.num_choices,
        logprob_source=options.logprob_source,
        request_id=options.request_id,
        session=options.session,
        priority=options.priority,
        return_text=output in ("text", "both"),
        return_token_ids=output in ("ids", "both"),
        skip_special_tokens=not options.keep_special_tokens,
        stream_interval=options.stream_interval,
        echo=options.echo,
    )


def _show_json(event: generation_service_pb2.GenerateResponse) -> None:
    print_json(to_dict(event))


def _show_text(event: generation_service_pb2.GenerateResponse) -> None:
    if event.delta.text:
        write_text(event.delta.text)


def _show_ids(event: generation_service_pb2.GenerateResponse) -> None:
    if event.delta.token_ids:
        separator = " " if event.delta.index else ""
        sys.stdout.write(separator + " ".join(map(str, event.delta.token_ids)))
        sys.stdout.flush()

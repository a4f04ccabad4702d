"""The command `top`: what the service does, again and again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Final

from chairlift_client._sync import Client
from chairlift_client._types import ServerStats
from chairlift_client.cli import _input
from chairlift_client.cli._output import Commands, add_command, print_json

_BAR_WIDTH: Final = 30

# A screen of its own, without a cursor, which gives back what was there before; home; the end of a line, of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What `top` shows: gauges of the later of two looks, and what happened in between. Shares are from 0 to 1."""

    state: str
    uptime_s: float
    requests_waiting: int
    requests_running: int
    requests_swapped: int
    requests_held: int
    cache_use: float
    prefix_pages: float  # share of the cache that keeps prefixes and no request uses
    swap_use: float
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    prefix_hits: float | None  # share of the prompt tokens in between; None: there were none
    steps_per_s: float
    step_ms: float | None  # None: there were no steps
    preemptions_swap: int
    preemptions_recompute: int
    worker_restarts: int


def add_top(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add `top`."""
    parser = add_command(
        commands,
        common,
        "top",
        run_top,
        "Show what the service does, every second; Ctrl-C ends it. --json: a line each.",
    )
    parser.add_argument(
        "--interval", type=_input.positive_float, default=1.0, metavar="SECONDS", help="0.05 to 3600 (default: 1)"
    )
    parser.add_argument("--count", type=_input.positive_int, metavar="N", help="end after so many")


def run_top(options: argparse.Namespace) -> int:
    """Run `top`. Ctrl-C is its usual end, and no failure."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Client(options.target, **options.access) as client,
        client.watch_stats(interval=options.interval) as looks,
        _shown(options) as show,
    ):
        for before, after in itertools.islice(itertools.pairwise(looks), options.count):
            show(figures(before, after))
    return 0


def figures(before: ServerStats, after: ServerStats) -> Figures:
    """Of two looks at the same service. Counters of a worker that was replaced in between begin anew, at 0."""
    now, seconds = after.statistics, after.uptime - before.uptime
    grown = {name: max(0, value - before.statistics.get(name, 0)) for name, value in now.items()}
    used = now["blocks_total"] - now["blocks_free"] - now["blocks_cached"]
    return Figures(
        state=after.state.name,
        uptime_s=after.uptime,
        requests_waiting=now["requests_waiting"],
        requests_running=now["requests_running"],
        requests_swapped=now["requests_swapped"],
        requests_held=now["requests_held"],
        cache_use=_share(used, now["blocks_total"]) or 0.0,
        prefix_pages=_share(now["blocks_cached"], now["blocks_total"]) or 0.0,
        swap_use=_share(now["swap_blocks_used"], now["swap_blocks_total"]) or 0.0,
        generated_tokens_per_s=_share(grown["generated_tokens"], seconds) or 0.0,
        prompt_tokens_per_s=_share(grown["prompt_tokens"], seconds) or 0.0,
        prefix_hits=_share(grown["cached_prompt_tokens"], grown["prompt_tokens"]),
        steps_per_s=_share(grown["steps"], seconds) or 0.0,
        step_ms=_share(grown["busy_ns"] / 1e6, grown["steps"]),
        preemptions_swap=now["preemptions_swap"],
        preemptions_recompute=now["preemptions_recompute"],
        worker_restarts=now["worker_restarts"],
    )


def lines(shown: Figures) -> list[str]:
    """The view, for people."""
    minutes, seconds = divmod(int(shown.uptime_s), 60)
    hours, minutes = divmod(minutes, 60)
    requests = (
        f"{shown.requests_waiting} waiting, {shown.requests_running} running, {shown.requests_swapped} swapped; "
        f"{shown.requests_held} held"
    )
    preempted = f"{shown.preemptions_swap} preempted by swapping, {shown.preemptions_recompute} by recomputing"
    hits = "no prompts" if shown.prefix_hits is None else f"{shown.prefix_hits:.0%} of prompt tokens found"
    step = "no steps" if shown.step_ms is None else f"{shown.step_ms:.1f} ms, {shown.steps_per_s:.1f} a second"
    return [
        f"{shown.state}, up {hours}:{minutes:02}:{seconds:02}",
        "",
        f"requests  {requests}",
        f"cache     {_bar(shown.cache_use)}, prefixes {shown.prefix_pages:.0%}, {hits}",
        f"swap      {_bar(shown.swap_use)}",
        f"tokens/s  {shown.generated_tokens_per_s:.1f} generated, {shown.prompt_tokens_per_s:.1f} of prompts",
        f"step      {step}",
        f"so far    {preempted}; {shown.worker_restarts} workers replaced",
    ]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _bar(share: float) -> str:
    filled = round(_BAR_WIDTH * share)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}"


@contextlib.contextmanager
def _shown(options: argparse.Namespace) -> Iterator[Callable[[Figures], None]]:
    """How each is shown: a line of JSON, a screen that stays in its place, or, outside of terminals, a paragraph."""
    if options.json:
        yield lambda shown: print_json(dataclasses.asdict(shown))
    elif not sys.stdout.isatty():
        yield lambda shown: print("\n".join((*lines(shown), "")), flush=True)
    else:
        sys.stdout.write(_ENTER)
        try:
            yield _draw
        finally:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


def _draw(shown: Figures) -> None:
    size = os.get_terminal_size(sys.stdout.fileno())
    fitting = [line[: size.columns or None] for line in lines(shown)[: size.lines or None]]
    sys.stdout.write(_HOME + f"{_CLEAR_LINE}\n".join(fitting) + _CLEAR_LINE + _CLEAR_BELOW)
    sys.stdout.flush()

"""Parts of the check: each has its time, and its failure is noted and hurts no other."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType


class OutOfTimeError(Exception):
    """A part's time is over."""


@dataclass
class Item:
    """One thing that was looked at."""

    name: str
    ok: bool
    figures: dict[str, float | int | str] = field(default_factory=dict)
    error: str = ""


@dataclass
class Part:
    """What belongs together, and its time."""

    name: str
    seconds: float = 0.0
    items: list[Item] = field(default_factory=list)

    @contextmanager
    def item(self, name: str) -> Iterator[dict[str, float | int | str]]:
        """One thing to look at: the block fills in figures, and raises where something is wrong."""
        figures: dict[str, float | int | str] = {}
        try:
            yield figures
        except OutOfTimeError:
            self.items.append(Item(name, ok=False, figures=figures, error="out of time"))
            raise
        except Exception as error:  # noqa: BLE001 - the next thing may be fine
            traceback.print_exc()
            cause = " ".join(str(error).split())[:300]
            self.items.append(Item(name, ok=False, figures=figures, error=f"{type(error).__name__}: {cause}"))
        else:
            self.items.append(Item(name, ok=True, figures=figures))
        print(_line(self.items[-1]), flush=True)


class Report:
    """All parts."""

    def __init__(self, facts: dict[str, object]) -> None:
        self._facts = facts
        self._parts: list[Part] = []
        self._began = time.monotonic()

    def run(self, name: str, check: Callable[[Part], None], *, seconds: float) -> None:
        """Runs a part, for so long at most."""
        part = Part(name)
        self._parts.append(part)
        print(f"\n{name}", flush=True)
        began = time.monotonic()
        try:
            with _at_most(seconds):
                check(part)
        except OutOfTimeError:
            print(f"  out of time after {seconds:.0f} s", flush=True)
            if not part.items or part.items[-1].ok:
                part.items.append(Item("the rest", ok=False, error="out of time"))
        except Exception as error:  # noqa: BLE001 - the next part may be fine
            traceback.print_exc()
            part.items.append(Item("the rest", ok=False, error=f"{type(error).__name__}: {error}"))
        part.seconds = round(time.monotonic() - began, 2)

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return all(item.ok for part in self._parts for item in part.items)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(time.monotonic() - self._began, 1)
        parts = [asdict(part) for part in self._parts]
        content = {**self._facts, "ok": self.ok, "seconds": seconds, "parts": parts}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """As Markdown."""
        lines = ["| part | what | figures |", "|---|---|---|"]
        for part in self._parts:
            for item in part.items:
                figures = ", ".join(f"{name} {value}" for name, value in item.figures.items())
                told = figures if item.ok else f"FAILED: {item.error}"
                lines.append(f"| {part.name} | {item.name} | {told} |")
        return "\n".join(lines)


def _line(item: Item) -> str:
    figures = ", ".join(f"{name} {value}" for name, value in item.figures.items())
    return f"  {'ok    ' if item.ok else 'FAILED'} {item.name}: {figures} {item.error}".rstrip()


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def over(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

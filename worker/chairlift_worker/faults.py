"""Faults made on purpose, for tests. Off unless the setting `fault_injection` names some."""

from __future__ import annotations

import time
from typing import Final

KINDS: Final = ("forward", "sample", "memory", "slow")


class InjectedFaultError(Exception):
    """The fault that was asked for."""


class Faults:
    """Parses `KIND:NUMBER[,KIND:NUMBER...]`.

    forward:N   the forward pass of step N raises
    memory:N    the forward pass of step N raises MemoryError
    sample:N    sampling for the service's N-th request raises
    slow:N      each forward pass takes N milliseconds longer, so that a tiny model is as slow on every machine

    Raises ValueError for anything else.
    """

    def __init__(self, text: str) -> None:
        self._armed: set[tuple[str, int]] = set()
        self._delay_s = 0.0
        for part in filter(None, text.split(",")):
            kind, _, number = part.partition(":")
            if kind not in KINDS or not number.isdigit():
                raise ValueError(f"fault_injection = {text!r}: {part!r} is not one of {', '.join(KINDS)} with a number")
            if kind == "slow":
                self._delay_s = int(number) / 1e3
            self._armed.add((kind, int(number)))

    def before_forward(self, step: int) -> None:
        """Raises if this step is to fail; takes its time if all are to be slow."""
        if self._delay_s:
            time.sleep(self._delay_s)
        if ("memory", step) in self._armed:
            raise MemoryError(f"made to fail in step {step}")
        self._raise_if("forward", step)

    def before_sampling(self, uid: int) -> None:
        """Raises if this request's sampling is to fail."""
        self._raise_if("sample", uid)

    def _raise_if(self, kind: str, number: int) -> None:
        if (kind, number) in self._armed:
            raise InjectedFaultError(f"made to fail: {kind}:{number}")

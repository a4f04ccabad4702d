"""Settings as they were resolved, each with its reason, and what users have to be told of them."""

from __future__ import annotations

from typing import TypeVar

from chairlift_worker.attention.choice import Chosen
from chairlift_worker.ipc.messages import SettingMsg

T = TypeVar("T")


class SettingError(ValueError):
    """A setting cannot be met. The message is one line that names the setting and its value."""


class SettingLog:
    """Collects values with their reasons."""

    def __init__(self) -> None:
        self.entries: list[SettingMsg] = []
        self.warnings: list[str] = []

    def note(self, name: str, value: T, reason: str) -> T:
        """Notes a value as it is shown, and why it is that."""
        self.entries.append(SettingMsg(name=name, value=str(value), reason=reason))
        return value

    def choice(self, name: str, chosen: Chosen[T], *, shown: object = None) -> T:
        """Notes what was chosen, or how a user would say it, and what has to be said of it."""
        if chosen.warning is not None:
            self.warnings.append(chosen.warning)
        self.note(name, chosen.value if shown is None else shown, chosen.reason)
        return chosen.value

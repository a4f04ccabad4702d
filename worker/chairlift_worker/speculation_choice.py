"""Whether steps have drafts, and which."""

from __future__ import annotations

from typing import Final

from chairlift_worker.attention.choice import Chosen
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.setting_log import SettingError, SettingLog
from chairlift_worker.speculation.speculator import DraftLimits

_OFF: Final = "none"


def resolve_speculation(settings: WorkerSettings, log: SettingLog) -> DraftLimits | None:
    """The bounds of drafts, None where there are none, noted with the reasons.

    Raises SettingError where the shortest match is longer than the longest one.
    """
    as_set = "as set, or the default"
    mode = log.choice("speculative", _mode(settings))
    limits = DraftLimits(
        num_tokens=log.note("speculative_tokens", settings.speculative_tokens, as_set),
        min_len=log.note("prompt_lookup_min", settings.prompt_lookup_min, as_set),
        max_len=log.note("prompt_lookup_max", settings.prompt_lookup_max, as_set),
    )
    if limits.min_len > limits.max_len:
        raise SettingError(f"prompt_lookup_min = {limits.min_len}: prompt_lookup_max is {limits.max_len}")
    return None if mode == _OFF else limits


def _mode(settings: WorkerSettings) -> Chosen[str]:
    mode = settings.speculative
    if mode == _OFF or not settings.use_async_batching:
        return Chosen(mode, "as set, or the default")
    why = "with use_async_batching a step is planned before it is known what the one before it brings"
    return Chosen(_OFF, f"off: {why}", f"speculative = {mode} is not used: {why}")

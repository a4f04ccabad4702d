"""Workloads of `chairlift bench`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift_client.cli._output import WrongUseError


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload."""

    name: str
    prompt: list[int]
    max_new_tokens: int


def read_workload(path: str) -> list[WorkItem]:
    """Read `[{id, prompt: [ids], max_new_tokens}]`. Raises WrongUseError that says what is wrong with the file."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongUseError(f"cannot read the workload {path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise WrongUseError(f"{path} is not a list of requests")
    return [_item(entry, f"{path}[{i}]") for i, entry in enumerate(entries)]


def _item(entry: Any, where: str) -> WorkItem:
    match entry:
        case {"id": str(name), "prompt": list(prompt), "max_new_tokens": int(max_new_tokens), **rest} if not rest:
            if prompt and all(type(token_id) is int for token_id in prompt):
                return WorkItem(name=name, prompt=prompt, max_new_tokens=max_new_tokens)
    raise WrongUseError(f'{where} is not {{"id": "...", "prompt": [ids], "max_new_tokens": N}}')

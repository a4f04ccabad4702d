"""What goes over the socket between `renderer` and `render_program`: four bytes of length, then JSON."""

from __future__ import annotations

import struct
from typing import Any, Final, TypedDict

HEADER: Final = struct.Struct("=I")
MAX_TEXT_BYTES: Final = 16 * 2**20
"""No prompt is longer; a template that writes more is at fault."""
MAX_ANSWER_BYTES: Final = 16 * MAX_TEXT_BYTES
"""JSON takes up to six bytes for one, and the places of control tokens come to that."""


class AddedTokens(TypedDict):
    """First to a new process: what the tokenizer cuts out of a text before anything else."""

    added_tokens: dict[str, bool]  # by text, whether it is a special token
    control_tokens: list[str] | None  # those among them that are control tokens, where the model says so


class Question(TypedDict):
    """A conversation to render; see `rendering.rendered`."""

    template: str
    given: dict[str, Any]
    own: dict[str, Any]
    continued: bool
    allow_special_tokens: bool


class Answer(TypedDict, total=False):
    """`error`, or the other two."""

    text: str
    plain: list[tuple[int, int]]  # characters of it, from the first to before the second
    error: str

"""Which control tokens of a prompt the template wrote, and which a caller: marks around the callers' own.

A template joins its own control tokens and callers' texts to one string, in which the two look alike. So it is rendered
twice where a caller's text holds a control token: as it is, and with a mark on each side of every such token. The first
rendering is the prompt; the second tells whose each token is. The marks are two characters for private use that occur
nowhere in what the caller sent or in the template, so nobody can forge them.

Marks can change what a template does (it may strip or cut a text, or look at its beginning). Both renderings must agree
but for white space, which is all that stripping can change; else nobody knows whose the tokens are, and the
conversation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Span = tuple[int, int]
"""Characters of a text, from the first to before the second."""

_SPACE: Final = re.compile(r"\s+")
_FIRST_PRIVATE: Final = 0xF0000  # of 65,534 characters that have no meaning


class ControlTokens:
    """The control tokens that a template's callers may not write."""

    def __init__(self, *, texts: Collection[str]) -> None:
        pattern = _one_of(texts)
        self._exactly = re.compile(pattern)
        # A template may change the case.
        self._nearly = re.compile(pattern, re.IGNORECASE)

    def marked(self, value: Any, marks: Marks) -> Any:
        """`value`, which is made of lists, dicts and strings, with marks around each control token inside."""
        match value:
            case str():
                return self._nearly.sub(rf"{marks.before}\g<0>{marks.after}", value)
            case dict():
                return {self.marked(key, marks): self.marked(item, marks) for key, item in value.items()}
            case list():
                return [self.marked(item, marks) for item in value]
            case _:
                return value

    def callers(self, plain: str, marked: str, marks: Marks) -> list[Span] | None:
        """Where callers' control tokens are in `plain`, which `marked` is with marks; None if the two disagree."""
        unmarked = marked.translate({ord(marks.before): None, ord(marks.after): None})
        if _SPACE.sub("", plain) != _SPACE.sub("", unmarked):
            return None
        places, found = _Places(marked, marks), []
        num, end = 0, 0  # characters that are no white space, up to `end`
        for match in self._exactly.finditer(plain):
            num += len(_SPACE.sub("", plain[end : match.start()]))
            end = match.end()
            length = len(_SPACE.sub("", match[0]))
            # Nothing but white space cannot be told, and does no harm as text.
            if not length or _is_callers(marked, places.of(num), places.of(num + length - 1), marks):
                found.append(match.span())
            num += length
        return found


class _Places:
    """Where the characters of a marked text are that are neither marks nor white space; asked in rising order."""

    def __init__(self, marked: str, marks: Marks) -> None:
        self._runs = re.finditer(rf"[^\s{marks.before}{marks.after}]+", marked)
        self._run = next(self._runs, None)
        self._num_before = 0

    def of(self, number: int) -> int:
        """The place of the character of this number; there must be one."""
        while self._run is not None and number >= self._num_before + len(self._run[0]):
            self._num_before += len(self._run[0])
            self._run = next(self._runs, None)
        assert self._run is not None
        return self._run.start() + number - self._num_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Characters that occur nowhere else. `end` marks the end of a message that is to be continued."""

    before: str
    after: str
    end: str

    @classmethod
    def absent_from(cls, *values: Any) -> Marks:
        """Marks that do not occur in these values' strings, however written. Raises ValueError if there are none."""
        text = "\0".join(_strings(values))
        free = (chr(c) for c in range(_FIRST_PRIVATE, _FIRST_PRIVATE + 0xFFFE))
        absent = (c for c in free if not any(spelling in text for spelling in (c, *_spellings(c))))
        try:
            return cls(before=next(absent), after=next(absent), end=next(absent))
        except StopIteration:
            raise ValueError("every character for private use is taken") from None

    def written_out(self, text: str) -> str:
        """`text` with each mark as a character, also where JSON or Python wrote it as an escape."""
        if "\\" in text:
            for mark in (self.before, self.after, self.end):
                for spelling in _spellings(mark):
                    text = text.replace(spelling, mark)
        return text


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for item in (*value.keys(), *value.values()):
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _spellings(mark: str) -> tuple[str, str]:
    """How Python's repr and JSON in ASCII write a mark."""
    high, low = divmod(ord(mark) - 0x10000, 0x400)
    return f"\\U{ord(mark):08x}", f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def _is_callers(marked: str, first: int, last: int, marks: Marks) -> bool:
    """Whether a control token, from its first to its last character in the marked text, has a mark beside or inside.

    One mark is enough: the other may have been cut off. Marks whose own token was cut out, as templates do with the
    ends of reasoning, do not count where white space stands between.
    """
    inside = any(mark in marked[first : last + 1] for mark in (marks.before, marks.after))
    return inside or marked.endswith(marks.before, 0, first) or marked.startswith(marks.after, last + 1)


def _one_of(texts: Collection[str]) -> str:
    """A pattern for the longest of `texts`, as a tree: its time does not grow with their number."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree) if tree else "(?!)"


def _branches(node: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _branches(after) for character, after in node.items() if character]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")

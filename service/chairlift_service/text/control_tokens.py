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
        of_plain = [i for i, c in enumerate(plain) if not c.isspace()]
        of_marked = [i for i, c in enumerate(marked) if not c.isspace() and c not in marks]
        if [plain[i] for i in of_plain] != [marked[i] for i in of_marked]:
            return None
        place = {i: of_marked[n] for n, i in enumerate(of_plain)}
        spans = (match.span() for match in self._exactly.finditer(plain))
        return [span for span in spans if _is_callers(marked, place, span, marks)]


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

    def __contains__(self, character: str) -> bool:
        return character in (self.before, self.after)

    def written_out(self, text: str) -> str:
        """`text` with each mark as a character, also where JSON or Python wrote it as an escape."""
        if "\\" in text:
            for mark in (self.before, self.after, self.end):
                for spelling in _spellings(mark):
                    text = text.replace(spelling, mark)
        return text

    def removed_from(self, text: str) -> str:
        """`text` without marks."""
        return "".join(c for c in self.written_out(text) if c not in (self.before, self.after, self.end))


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


def _is_callers(marked: str, place: Mapping[int, int], span: Span, marks: Marks) -> bool:
    """Whether a control token in the plain text has a mark next to it, or inside, in the marked one.

    One mark is enough: the other may have been cut off. Marks whose own token was cut out, as templates do with the
    ends of reasoning, do not count where white space stands between.
    """
    places = [place[i] for i in range(*span) if i in place]
    if not places:
        return True  # nothing but white space: it cannot be told, and does no harm as text
    first, last = places[0], places[-1]
    if any(c in marks for c in marked[first : last + 1]):
        return True
    return marked.endswith(marks.before, 0, first) or marked.startswith(marks.after, last + 1)


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

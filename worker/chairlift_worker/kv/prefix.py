"""Which page holds which prefix.

A page's name is (name of the page before it, its tokens), so equal names mean equal tokens from the start on: the
dictionary compares the tokens themselves, not only their hash. Names are numbers that are never used twice; page
content that is lost and computed again gets a new one, which makes the pages behind it unreachable until they are
given away.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Final

ROOT: Final = 0  # the name before the first page

Key = tuple[int, bytes]  # (name of the page before, the page's tokens as int32)


@dataclass(frozen=True, slots=True)
class NamedPage:
    """A page whose content can be found again."""

    page: int
    name: int
    key: Key


class PrefixIndex:
    """Finds pages by their content, and knows which content is being computed right now."""

    def __init__(self) -> None:
        self._by_key: dict[Key, NamedPage] = {}
        self._by_page: dict[int, NamedPage] = {}
        self._promised: dict[Key, int] = {}
        self._names = count(ROOT + 1)

    def find(self, key: Key) -> NamedPage | None:
        """The page with this content."""
        return self._by_key.get(key)

    def is_promised(self, key: Key) -> bool:
        """Whether some request computes this content now."""
        return key in self._promised

    def promise(self, key: Key) -> int:
        """Announces that the caller will compute this content; returns the name it will have.

        Content that somebody else has promised, or computed, may be promised again: the first to publish wins.
        """
        name = next(self._names)
        self._promised.setdefault(key, name)
        return name

    def withdraw(self, key: Key, name: int) -> None:
        """Takes a promise back; does nothing if the promise was another's."""
        if self._promised.get(key) == name:
            del self._promised[key]

    def publish(self, key: Key, page: int, name: int | None = None) -> int:
        """Makes a computed page findable; returns the name of this content, an earlier one's if it was there before."""
        if name is not None:
            self.withdraw(key, name)
        known = self._by_key.get(key)
        if known is not None:
            return known.name
        entry = NamedPage(page=page, name=next(self._names) if name is None else name, key=key)
        self._by_key[key] = entry
        self._by_page[page] = entry
        return entry.name

    def has_page(self, page: int) -> bool:
        """Whether this page can be found by its content."""
        return page in self._by_page

    def forget(self, page: int) -> None:
        """The page's content is about to be overwritten."""
        entry = self._by_page.pop(page)
        del self._by_key[entry.key]

    def check(self) -> None:
        """Raises AssertionError unless both directions agree."""
        assert len(self._by_key) == len(self._by_page), "the two directions differ in size"
        for page, entry in self._by_page.items():
            assert entry.page == page, f"page {page} is filed as {entry.page}"
            assert self._by_key.get(entry.key) is entry, f"page {page} cannot be found by its key"

    @property
    def num_promised(self) -> int:
        """Contents being computed."""
        return len(self._promised)

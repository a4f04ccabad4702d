"""Prefix sharing: requests that begin alike use the same pages.

The names of a request's pages chain its contents: the page table holds one for each page that is published, and for
those that the request has promised to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift_worker.kv.prefix import ROOT, Key, NamedPage, PrefixIndex
from chairlift_worker.request import Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache knows of a request's beginning."""

    pages: tuple[NamedPage, ...]
    being_computed: bool  # the next page is promised by an active request: worth a short wait

    @property
    def num_pages(self) -> int:
        """Pages that need not be computed."""
        return len(self.pages)


NOTHING = PrefixMatch(pages=(), being_computed=False)


class PrefixSharing:
    """Matches, promises and publishes the pages of requests whose layers all share one page table."""

    def __init__(self, *, index: PrefixIndex, page_len: int) -> None:
        self.index = index
        self._page_len = page_len

    def match(self, request: Request) -> PrefixMatch:
        """The longest run of whole cached pages at the request's beginning that leaves a place whose logits are wanted.

        There is always one: that of its last token at the latest.
        """
        found: list[NamedPage] = []
        name = ROOT
        for number in range(request.first_wanted // self._page_len):
            key = self._key(request, number, name)
            entry = self.index.find(key)
            if entry is None:
                return PrefixMatch(pages=tuple(found), being_computed=self.index.is_promised(key))
            found.append(entry)
            name = entry.name
        return PrefixMatch(pages=tuple(found), being_computed=False)

    def attach(self, request: Request, names: Sequence[int]) -> None:
        """Names the request's first pages, which others have published, and promises the whole pages that follow."""
        table = request.table
        table.names.extend(names)
        table.num_published = len(names)
        for number in range(len(names), request.total // self._page_len):
            table.names.append(self.index.promise(self._key(request, number, self._name_before(request, number))))

    def publish(self, request: Request) -> None:
        """Makes the pages findable whose tokens are all computed."""
        table = request.table
        for number in range(table.num_published, request.computed // self._page_len):
            key = self._key(request, number, self._name_before(request, number))
            promised = table.names[number] if number < len(table.names) else None
            name = self.index.publish(key, table.sectors[0][number], promised)
            if promised is None:
                table.names.append(name)
            elif name != promised:  # somebody else published it first: what follows was promised under a wrong name
                self._withdraw(request, number + 1)
                table.names[number] = name
            table.num_published = number + 1

    def detach(self, request: Request) -> None:
        """Takes back the promises that are not kept yet."""
        self._withdraw(request, request.table.num_published)

    def forget(self, request: Request) -> list[int]:
        """Lets nobody find pages of the request's tokens any more, whoever computed them; returns these pages."""
        pages: list[int] = []
        name = ROOT
        for number in range(request.total // self._page_len):
            entry = self.index.find(self._key(request, number, name))
            if entry is None:
                break
            self.index.forget(entry.page)
            pages.append(entry.page)
            name = entry.name
        return pages

    def _withdraw(self, request: Request, start: int) -> None:
        names = request.table.names
        for number in range(start, len(names)):
            self.index.withdraw(self._key(request, number, self._name_before(request, number)), names[number])
        del names[start:]

    def _key(self, request: Request, number: int, name_before: int) -> Key:
        start = number * self._page_len
        return name_before, request.tokens[start : start + self._page_len].tobytes()

    @staticmethod
    def _name_before(request: Request, number: int) -> int:
        return request.table.names[number - 1] if number else ROOT

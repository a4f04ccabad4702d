"""A request's pages: found by prefix, grown, published when computed, released.

Reserve -> commit | abort: `grow` reserves pages for tokens about to be computed; `commit` publishes the pages whose
tokens are all computed; `release` lets everything go, computed or not. A page is shareable only after `commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chairlift_worker.kv.pool import PagePool
from chairlift_worker.kv.prefix import ROOT, Key, NamedPage, PrefixIndex
from chairlift_worker.request import PageTable, Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache knows of a request's beginning."""

    pages: tuple[NamedPage, ...]
    being_computed: bool  # the next page is promised by an active request: worth a short wait

    @property
    def num_pages(self) -> int:
        """Pages that need not be computed."""
        return len(self.pages)


class PagedMemory:
    """Page tables of full-attention requests over one pool, with prefix sharing.

    Owns the pool and the index; alone writes a request's page table and, in `attach` and `release`, its `computed`.
    """

    def __init__(self, *, num_pages: int, page_size: int, sharing: bool) -> None:
        self.pool = PagePool(num_pages=num_pages)
        self.index = PrefixIndex()
        self.page_size = page_size
        self.sharing = sharing

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> PrefixMatch:
        """The longest run of whole cached pages at the request's beginning that leaves a token to compute."""
        found: list[NamedPage] = []
        if not self.sharing:
            return PrefixMatch(pages=(), being_computed=False)
        name = ROOT
        for index in range((request.total - 1) // self.page_size):
            key = self._key(request, index, name)
            entry = self.index.find(key)
            if entry is None:
                return PrefixMatch(pages=tuple(found), being_computed=self.index.is_promised(key))
            found.append(entry)
            name = entry.name
        return PrefixMatch(pages=tuple(found), being_computed=False)

    def num_available_after(self, match: PrefixMatch) -> int:
        """Pages that can be taken once the match's pages are in use."""
        return self.pool.num_available - sum(1 for entry in match.pages if self.pool.is_kept(entry.page))

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Starts the request's page table with the matched pages, and promises the whole pages that follow."""
        assert not request.table.pages, "a request that starts has no pages"
        for entry in match.pages:
            self.pool.share(entry.page)
        request.table.pages.extend(entry.page for entry in match.pages)
        request.table.names.extend(entry.name for entry in match.pages)
        request.computed = match.num_pages * self.page_size
        request.table.num_published = match.num_pages
        if not self.sharing:
            return
        for index in range(match.num_pages, request.total // self.page_size):
            request.table.names.append(self.index.promise(self._key(request, index, self._name_before(request, index))))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's first num_tokens tokens; all or nothing."""
        missing = self.pages_for(num_tokens) - len(request.table.pages)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            request.table.pages.append(self._take())
        return True

    def commit(self, request: Request) -> None:
        """Publishes the pages whose tokens are all computed."""
        if not self.sharing:
            return
        for index in range(request.table.num_published, request.computed // self.page_size):
            key = self._key(request, index, self._name_before(request, index))
            promised = request.table.names[index] if index < len(request.table.names) else None
            name = self.index.publish(key, request.table.pages[index], promised)
            if promised is None:
                request.table.names.append(name)
            elif name != promised:  # somebody else published it first: what follows was promised under a wrong name
                self._withdraw(request, index + 1)
                request.table.names[index] = name
            request.table.num_published = index + 1

    def release(self, request: Request) -> None:
        """Lets all pages go; published ones are kept for a later match, the last page first to be given away."""
        self._withdraw(request, request.table.num_published)
        for page in reversed(request.table.pages):
            self.pool.drop(page, keep=self.index.has_page(page))
        request.table = PageTable()  # a new one: a plan in flight may still read the old
        request.computed = 0

    def flush(self) -> int:
        """Forgets the kept pages; returns their number. Pages in use stay findable until they are released."""
        pages = self.pool.clear_kept()
        for page in pages:
            self.index.forget(page)
        return len(pages)

    def check(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless pool, index and page tables agree."""
        self.pool.check()
        self.index.check()
        users: dict[int, int] = {}
        for request in requests:
            assert len(set(request.table.pages)) == len(request.table.pages), (
                f"request {request.uid} holds a page twice"
            )
            assert len(request.table.pages) >= self.pages_for(request.computed), f"request {request.uid} lacks pages"
            for page in request.table.pages:
                users[page] = users.get(page, 0) + 1
        for page in range(self.pool.num_pages):
            assert self.pool.refs(page) == users.get(page, 0), f"page {page} is counted wrongly"

    def _take(self) -> int:
        page = self.pool.take_free()
        if page is None:
            page = self.pool.take_kept()
            assert page is not None, "the caller has made sure that a page is available"
            self.index.forget(page)
        return page

    def _withdraw(self, request: Request, start: int) -> None:
        """Takes back the promises from this page on."""
        for index in range(start, len(request.table.names)):
            self.index.withdraw(
                self._key(request, index, self._name_before(request, index)), request.table.names[index]
            )
        del request.table.names[start:]

    def _key(self, request: Request, index: int, name_before: int) -> Key:
        start = index * self.page_size
        return name_before, request.tokens[start : start + self.page_size].tobytes()

    @staticmethod
    def _name_before(request: Request, index: int) -> int:
        return request.table.names[index - 1] if index else ROOT

"""A request's pages: found by prefix, grown, published or given back when computed, released.

Reserve -> commit | abort: `grow` reserves sectors for tokens about to be computed; `commit` publishes the pages whose
tokens are all computed, and gives back those that a window has left behind; `release` lets everything go, computed or
not. A page is shareable only after `commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from chairlift_worker.kv.layout import CacheLayout, LayerGroup
from chairlift_worker.kv.pool import PagePool
from chairlift_worker.kv.prefix import NamedPage, PrefixIndex
from chairlift_worker.kv.sharing import NOTHING, PrefixMatch, PrefixSharing
from chairlift_worker.request import PageTable, Request

GIVEN_BACK: Final = -1  # the table entry of a sector that the window has left behind


class PagedMemory:
    """Page tables of requests over one pool of sectors, one table for each group of layers.

    Owns the pool and the prefix index; alone writes a request's page table and, in `attach` and `release`, its
    `computed`.
    """

    def __init__(self, *, num_pages: int, layout: CacheLayout, sharing: bool) -> None:
        """`num_pages` counts sectors. Raises ValueError where layers of several kinds are to share prefixes."""
        if sharing and not layout.is_uniform:
            raise ValueError("prefix sharing needs layers that are all full attention and alike")
        self.pool = PagePool(num_pages=num_pages)
        self.layout = layout
        self.index = PrefixIndex()  # stays empty without sharing
        self.sharing = PrefixSharing(index=self.index, page_len=layout.groups[0].sector_len) if sharing else None
        self._sliding = [(number, group) for number, group in enumerate(layout.groups) if group.window is not None]
        self._no_table = PageTable(len(layout.groups))

    def match(self, request: Request) -> PrefixMatch:
        """The longest run of whole cached pages at the request's beginning that leaves a token to compute."""
        return self.sharing.match(request) if self.sharing else NOTHING

    def num_available_after(self, pages: Iterable[NamedPage]) -> int:
        """Sectors that can be taken once these pages are in use."""
        return self.pool.num_available - sum(1 for entry in pages if self.pool.is_kept(entry.page))

    def demand(self, requests: Iterable[Request], step_len: int) -> int:
        """Sectors that these requests do not hold yet and will, for the tokens they have, in steps of up to step_len.

        Sectors that a request's windows will give back before it takes others are not counted twice, so what all
        active requests demand can be had whatever their order, once it is available.
        """
        # Most active requests have room for their next token. This is asked for all of them in every step: no calls.
        lacking = [request for request in requests if len(request.tokens) + request.pending > request.table.room]
        return sum([self._missing(request, step_len)[0] for request in lacking])

    def demand_at_most(self, requests: Iterable[Request], step_len: int) -> int:
        """The same for all the tokens that they may ever get."""
        return sum([self._missing(request, step_len)[1] for request in requests])

    def _missing(self, request: Request, step_len: int) -> tuple[int, int]:
        table = request.table if request.table.sectors else self._no_table
        computed = request.saved.computed if request.saved else request.planned
        total, max_total = request.expected, request.max_total
        now = at_most = 0
        for group, sectors, first in zip(self.layout.groups, table.sectors, table.first, strict=True):
            held = len(sectors) - first
            peak, last = group.peaks(computed=computed, total=total, max_total=max_total, step_len=step_len)
            now += max(0, peak - held)
            at_most += max(0, last - held)
        return now, at_most

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Starts the request's page tables with the matched pages, and promises the whole pages that follow."""
        assert not request.table.sectors, "a request that starts has no pages"
        request.table = PageTable(len(self.layout.groups))
        if self.sharing:
            for entry in match.pages:
                self.pool.share(entry.page)
            request.table.sectors[0].extend(entry.page for entry in match.pages)
            request.computed = match.num_pages * self.layout.groups[0].sector_len
            self.sharing.attach(request, [entry.name for entry in match.pages])
        request.planned = request.computed

    def reattach(self, request: Request, match: PrefixMatch) -> None:
        """Starts the page tables of a request whose pages were saved, with room for all that it had computed.

        The room must be available. What the caller copies into it counts as computed.
        """
        saved = request.saved
        assert saved is not None, "only a request with saved pages gets them back"
        self.attach(request, match)
        for number, group in enumerate(self.layout.groups):
            first = group.first_needed(saved.computed)
            request.table.sectors[number].extend([GIVEN_BACK] * first)
            request.table.first[number] = first
        if not self.grow(request, saved.computed):
            raise RuntimeError("the cache has less room than was counted")
        request.computed = request.planned = max(request.computed, saved.computed)

    def fork(self, request: Request, source: Request, num_tokens: int) -> list[tuple[int, int]]:
        """Starts the request's page tables with those of another that has its first num_tokens tokens computed.

        Full sectors are shared. Returns the copies, (sector, sector), that bring what the others hold; the room for
        them must be available. What the caller copies counts as computed.
        """
        assert not request.table.sectors, "a request that starts has no pages"
        table = request.table = PageTable(len(self.layout.groups))
        copies: list[tuple[int, int]] = []
        for number, group in enumerate(self.layout.groups):
            first, full = group.first_needed(num_tokens), num_tokens // group.sector_len
            given = source.table.sectors[number]
            table.sectors[number].extend([GIVEN_BACK] * first + given[first:full].tolist())
            table.first[number] = first
            for sector in given[first:full]:
                self.pool.share(sector)
            if num_tokens % group.sector_len:
                table.sectors[number].append(_take(self.pool, self.index))
                copies.append((given[full], table.sectors[number][full]))
        table.room = _room(self.layout, table)
        request.computed = request.planned = num_tokens
        if self.sharing:
            self.sharing.attach(request, source.table.names[: num_tokens // self.layout.groups[0].sector_len])
        return copies

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's first num_tokens tokens; all or nothing."""
        table, groups = request.table, self.layout.groups
        if num_tokens <= table.room:
            return True
        missing = [
            -(-num_tokens // group.sector_len) - len(sectors)
            for group, sectors in zip(groups, table.sectors, strict=True)
        ]
        if sum([count for count in missing if count > 0]) > self.pool.num_available:
            return False
        for sectors, count in zip(table.sectors, missing, strict=True):
            for _ in range(count):
                sectors.append(_take(self.pool, self.index))
        table.room = _room(self.layout, table)
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Gives back the sectors behind the request's first num_tokens tokens: nothing in them counts as computed.

        No plan in flight may name them.
        """
        table = request.table
        for group, sectors in zip(self.layout.groups, table.sectors, strict=True):
            while len(sectors) > group.sectors_for(num_tokens):
                self.pool.drop(sectors.pop(), keep=False)
        table.room = _room(self.layout, table)

    def commit(self, request: Request) -> None:
        """Publishes the pages whose tokens are all computed; gives back what no later token looks at."""
        table, computed = request.table, request.computed
        if computed < table.due:  # most steps of most requests
            return
        if self.sharing:
            self.sharing.publish(request)
            table.due = (table.num_published + 1) * self.layout.groups[0].sector_len
            return
        for number, group in self._sliding:
            needed = group.first_needed(computed)
            for place in range(table.first[number], needed):
                self.pool.drop(table.sectors[number][place], keep=False)
                table.sectors[number][place] = GIVEN_BACK  # a plan in flight begins after these: it never looks here
            table.first[number] = needed
        table.due = min([group.next_change(computed) for _, group in self._sliding], default=request.max_total)

    def release(self, request: Request, *, sound: bool = True) -> None:
        """Lets all sectors go; published pages are kept for a later match, the last page first to be given away.

        Not `sound`: what the request computed, or looked at, is in doubt. Nobody finds pages of its tokens any more,
        whenever they were published, and by whom. Requests that share some go on with them.
        """
        table = request.table
        if self.sharing:
            self.sharing.detach(request)
            for page in () if sound else self.sharing.forget(request):
                if self.pool.is_kept(page):
                    self.pool.discard(page)
        for sectors, first in zip(table.sectors, table.first, strict=True):
            for sector in reversed(sectors[first:]):
                self.pool.drop(sector, keep=self.index.has_page(sector))
        request.table = PageTable(0)  # a new one: a plan in flight may still read the old
        request.computed = request.planned = 0

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
        users: dict[int, list[Request]] = {}
        for request in requests:
            held: list[int] = []
            table = request.table
            for group, sectors, first in zip(self.layout.groups, table.sectors, table.first, strict=True):
                _check_table(request, group, sectors.tolist(), first)
                held += sectors[first:]
            assert len(set(held)) == len(held), f"request {request.uid} holds a sector twice"
            for sector in held:
                users.setdefault(sector, []).append(request)
        for requests_of_it in () if self.sharing else users.values():
            kin = {request.params.fork_of or request.uid for request in requests_of_it}
            assert len(kin) == 1, "a sector is in two tables of no family"
        for page in range(self.pool.num_pages):
            assert not self.pool.is_kept(page) or self.index.has_page(page), f"page {page} is kept, and not to be found"
            assert self.pool.refs(page) == len(users.get(page, ())), f"page {page} is counted wrongly"


def _take(pool: PagePool, index: PrefixIndex) -> int:
    page = pool.take_free()
    if page is None:
        page = pool.take_kept()
        assert page is not None, "the caller has made sure that a sector is available"
        index.forget(page)
    return page


def _room(layout: CacheLayout, table: PageTable) -> int:
    """Tokens that have their entries in all tables."""
    return min([len(sectors) * group.sector_len for group, sectors in zip(layout.groups, table.sectors, strict=True)])


def _check_table(request: Request, group: LayerGroup, sectors: list[int], first: int) -> None:
    uid, window = request.uid, group.window
    assert len(sectors) * group.sector_len >= max(request.computed, request.table.room), f"request {uid} lacks pages"
    assert first == group.first_needed(request.computed), f"request {uid} holds sectors below its window of {window}"
    assert set(sectors[:first]) <= {GIVEN_BACK}, f"request {uid} still names sectors that it gave back"
    assert GIVEN_BACK not in sectors[first:], f"request {uid} gave back a sector that its window of {window} reaches"

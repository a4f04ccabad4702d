"""Page ids, their reference counts, and the order in which unused ones are given away."""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """Every page is in exactly one of three places: free, kept or used.

    free: holds nothing. kept: no request uses it, but its content is worth finding again; the page that was let go
    longest ago is given away first. used: one request or more refer to it.
    """

    def __init__(self, *, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """All pages."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Pages that nobody uses but that hold something worth keeping."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._kept)

    def is_kept(self, page: int) -> bool:
        """Whether the page counts as available although it holds something."""
        return page in self._kept

    def take_free(self) -> int | None:
        """A page that held nothing, now used once; None if there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def take_kept(self) -> int | None:
        """The kept page that was let go longest ago, now used once; its content is the taker's to forget."""
        if not self._kept:
            return None
        page, _ = self._kept.popitem(last=False)
        self._refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more user of a used or kept page."""
        if self._refs[page] == 0:
            del self._kept[page]
        self._refs[page] += 1

    def drop(self, page: int, *, keep: bool) -> None:
        """One user less; the last one's page is kept or becomes free."""
        if self._refs[page] < 1:
            raise ValueError(f"page {page} is dropped by more users than it had")
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if keep:
                self._kept[page] = None
            else:
                self._free.append(page)

    def discard(self, page: int) -> None:
        """Makes a kept page free."""
        del self._kept[page]
        self._free.append(page)

    def clear_kept(self) -> list[int]:
        """Makes all kept pages free; returns them."""
        pages = list(self._kept)
        self._kept.clear()
        self._free.extend(pages)
        return pages

    def refs(self, page: int) -> int:
        """Number of users."""
        return self._refs[page]

    def check(self) -> None:
        """Raises AssertionError unless free + kept + used = all and no page is in two places."""
        free, kept = set(self._free), set(self._kept)
        used = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & kept, f"pages free and kept: {free & kept}"
        assert not used & (free | kept), f"pages used and available: {used & (free | kept)}"
        assert len(free) + len(kept) + len(used) == len(self._refs), "pages are lost"

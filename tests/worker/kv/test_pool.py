import pytest
from chairlift_worker.kv.pool import PagePool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool against three plain collections."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=5)
        self.users: dict[int, int] = {}
        self.kept: list[int] = []

    @rule()
    def take_free(self) -> None:
        page = self.pool.take_free()
        if len(self.users) + len(self.kept) == 5:
            assert page is None
        else:
            assert page is not None
            assert page not in self.users
            assert page not in self.kept
            self.users[page] = 1

    @rule()
    def take_kept(self) -> None:
        page = self.pool.take_kept()
        assert page == (self.kept.pop(0) if self.kept else None)
        if page is not None:
            self.users[page] = 1

    @precondition(lambda self: self.users or self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.users) + self.kept))
        self.pool.share(page)
        if page in self.kept:
            self.kept.remove(page)
        self.users[page] = self.users.get(page, 0) + 1

    @precondition(lambda self: self.users)
    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data: st.DataObject, keep: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.drop(page, keep=keep)
        self.users[page] -= 1
        if self.users[page] == 0:
            del self.users[page]
            if keep:
                self.kept.append(page)

    @rule()
    def clear_kept(self) -> None:
        assert self.pool.clear_kept() == self.kept
        self.kept.clear()

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.kept))
        self.pool.discard(page)
        self.kept.remove(page)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_kept == len(self.kept)
        assert self.pool.num_free == 5 - len(self.users) - len(self.kept)
        assert self.pool.num_available == 5 - len(self.users)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_page_cannot_be_dropped_by_more_users_than_it_has() -> None:
    pool = PagePool(num_pages=1)
    page = pool.take_free()
    assert page is not None
    pool.drop(page, keep=False)
    with pytest.raises(ValueError, match="more users"):
        pool.drop(page, keep=False)


def test_the_check_finds_a_page_in_two_places() -> None:
    pool = PagePool(num_pages=2)
    page = pool.take_free()
    assert page is not None
    pool._free.append(page)
    with pytest.raises(AssertionError, match="used and available"):
        pool.check()

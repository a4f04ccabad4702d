from chairlift_worker.kv.prefix import ROOT, Key, PrefixIndex
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

KEYS: list[Key] = [(before, tokens) for before in (ROOT, 1, 2) for tokens in (b"aaaa", b"bbbb")]
NUM_PAGES = 4


class IndexAgainstModel(RuleBasedStateMachine):
    """The index against a list of what is published, and one of who has promised what, first ones first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.published: dict[Key, tuple[int, int]] = {}  # (page, name)
        self.promises: list[tuple[Key, int]] = []  # each caller's own, whether or not it was the first
        self.first: dict[Key, int] = {}  # the name that whoever waits for the content waits for
        self.names: set[int] = {ROOT}

    def _free_pages(self) -> list[int]:
        return [page for page in range(NUM_PAGES) if page not in {page for page, _ in self.published.values()}]

    @rule(key=st.sampled_from(KEYS))
    def promise(self, key: Key) -> None:
        name = self.index.promise(key)
        assert name not in self.names, "a name is used twice"
        self.names.add(name)
        self.promises.append((key, name))
        self.first.setdefault(key, name)

    @precondition(lambda self: self.promises)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key, name = data.draw(st.sampled_from(self.promises))
        self.promises.remove((key, name))
        self.index.withdraw(key, name)
        if self.first.get(key) == name:
            del self.first[key]

    @precondition(lambda self: self._free_pages())
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """What was promised, or content that nobody has promised."""
        page = data.draw(st.sampled_from(self._free_pages()))
        free: list[tuple[Key, int | None]] = [(key, None) for key in KEYS]
        key, name = data.draw(st.sampled_from(self.promises + free))
        told = self.index.publish(key, page, name)
        if name is not None:
            self.promises.remove((key, name))
            if self.first.get(key) == name:
                del self.first[key]
        if key in self.published:
            assert told == self.published[key][1], "the first to publish wins"
            return
        assert told == name if name is not None else told not in self.names
        self.names.add(told)
        self.published[key] = (page, told)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.published)))
        self.index.forget(self.published.pop(key)[0])

    @invariant()
    def the_same_is_found(self) -> None:
        self.index.check()
        for key in KEYS:
            found = self.index.find(key)
            assert (found and (found.page, found.name)) == self.published.get(key)
            assert self.index.is_promised(key) == (key in self.first)
        assert self.index.num_promised == len(self.first)
        pages = {page for page, _ in self.published.values()}
        assert [self.index.has_page(page) for page in range(NUM_PAGES)] == [page in pages for page in range(NUM_PAGES)]


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""The constrained requests of a worker: their grammars, compiled beside the steps, and which tokens may come next."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from chairlift_worker.constraint.errors import ConstraintError
from chairlift_worker.constraint.grammars import Grammars
from chairlift_worker.constraint.matcher import Matcher
from chairlift_worker.ipc.messages import AddRequestMsg
from chairlift_worker.plan import RowPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's grammar is compiled, and what it has generated before is read; or it has to end."""

    uid: int
    matcher: Matcher | None = None
    error: str = ""  # without a matcher: a reason of errors.py, a colon, a sentence

    @property
    def is_complete(self) -> bool:
        """Whether its output has its form already, and nothing can follow."""
        return self.matcher is not None and self.matcher.is_complete


class Constraints:
    """Prepares requests in a thread of its own, and computes masks in another while a forward pass runs.

    ```
    begin ─▶ (compile, read what was generated before) ─▶ finished ─▶ for each step: prepare · mask, chosen ─▶ forget
    ```
    All but `mask`, `chosen` and `prepare` are the step loop's; those are of the thread that runs steps. Requests come
    and go by the step loop alone.
    """

    def __init__(self, *, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}
        self._preparing: dict[int, Future[Prepared]] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._masks: Future[None] | None = None  # those of the step that is computed

    def begin(self, message: AddRequestMsg) -> None:
        """Begins to prepare a request."""
        self._preparing[message.uid] = self._compiler.submit(self._prepare, message)

    @property
    def is_preparing(self) -> bool:
        """Whether requests are being prepared."""
        return bool(self._preparing)

    def finished(self) -> Iterator[Prepared]:
        """Requests that are prepared, each once."""
        for uid in [uid for uid, future in self._preparing.items() if future.done()]:
            prepared = self._preparing.pop(uid).result()
            if prepared.matcher is not None:
                self._matchers[uid] = prepared.matcher
            yield prepared

    def forget(self, is_over: Callable[[int], bool]) -> None:
        """Lets go of requests that are over."""
        for uid in [uid for uid in self._matchers if is_over(uid)]:
            del self._matchers[uid]

    def prepare(self, rows: Iterable[RowPlan]) -> None:
        """Begins to compute the masks that a step needs first; each row's tokens so far are known."""
        wanted = [(row.uid, row.sample.index) for row in rows if row.sample is not None and row.sample.constrained]
        self._masks = self._masker.submit(self._compute, wanted) if wanted else None

    def mask(self, uid: int, index: int) -> int | None:
        """The address of the mask of output token number `index`; None where the request is over, and all may come.

        Raises ConstraintError.
        """
        if self._masks is not None:
            self._masks.result()
            self._masks = None
        matcher = self._matchers.get(uid)
        return None if matcher is None or _is_ahead(matcher, index) else matcher.mask(index)

    def chosen(self, uid: int, token_id: int) -> bool:
        """Notes that a token was chosen of a mask; whether the output is complete with it. Raises ConstraintError."""
        matcher = self._matchers.get(uid)
        if matcher is None:
            return False
        matcher.feed((token_id,))
        return matcher.is_complete

    def _compute(self, wanted: Iterable[tuple[int, int]]) -> None:
        for uid, index in wanted:
            try:
                matcher = self._matchers.get(uid)
                if matcher is not None and not _is_ahead(matcher, index):
                    matcher.mask(index)
            except ConstraintError:  # told where the row is sampled
                continue

    def _prepare(self, message: AddRequestMsg) -> Prepared:
        try:
            matcher = Matcher(self._grammars.matcher(message.grammar), num_tokens=self._grammars.num_tokens)
            if message.resumed is not None:
                matcher.feed(array("i", message.resumed.generated))
        except ConstraintError as error:
            return Prepared(message.uid, error=str(error))
        except BaseException as error:  # noqa: BLE001 - one request's trouble is its own, a panic of the library too
            return Prepared(message.uid, error=f"INTERNAL: the constraint raised {type(error).__name__}: {error}")
        return Prepared(message.uid, matcher)


def _is_ahead(matcher: Matcher, index: int) -> bool:
    """Whether that token is of a step that was planned before it was known that nothing can follow."""
    return matcher.is_complete and index >= matcher.num_tokens

"""A step that a device works on: what it sampled there, what is left to sample here, and its result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from chairlift_worker.plan import RowPlan, RowResult, StepPlan, StepResult
from chairlift_worker.queues import Mark, sent
from chairlift_worker.sampling import Sampler
from chairlift_worker.sampling.device import DeviceSampler, is_for_device


class LaunchedStep:
    """Made on the host; `sample` and `fetch` are done in the device's order."""

    computed: Mark  # behind its forward pass and what was sampled on the device
    fetched: Mark  # behind `fetch`

    def __init__(
        self, plan: StepPlan, *, before: LaunchedStep | None, sampler: DeviceSampler, host_sampler: Sampler
    ) -> None:
        """`before` is the step whose tokens its rows carry."""
        self.plan = plan
        self._before = before
        self.tokens: torch.Tensor | None = None  # (places,) sampled on the device, once it has done so
        self._sampler = sampler
        self._host_sampler = host_sampler
        self._there, self._here, self._places_there, self._places_here = _shared_out(plan)
        self._packed: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None  # of rows that are sampled here
        self._kept: tuple[torch.Tensor, torch.Tensor | None] | None = None  # what is being copied to the host
        self._result: StepResult | None = None

    @classmethod
    def known(cls, plan: StepPlan, rows: tuple[RowResult, ...], *, computed: Mark) -> LaunchedStep:
        """One that is done already."""
        step = cls(plan, before=None, sampler=DeviceSampler(), host_sampler=Sampler())
        step.computed = step.fetched = computed
        step._result = StepResult(step=plan.step, rows=rows)
        return step

    @property
    def is_known(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    @property
    def place_of(self) -> dict[int, int]:
        """Where among `tokens` a request's token is; of those that are sampled on the device."""
        uids = [row.uid for row in self._there for _ in range(row.num_sampled)]
        return {uid: place for place, uid in enumerate(uids)}

    def sample(self, logits: torch.Tensor) -> None:
        """Samples on the device what it can, (wanted places, vocabulary), and keeps what is needed of the rest."""
        if not self._here:
            chosen = self._sampler.sample(logits, self._there)
        else:
            places = sent(torch.tensor([*self._places_here, *self._places_there]), logits.device)
            num_here = len(self._places_here)
            self._logits = logits.index_select(0, places[:num_here])
            chosen = self._sampler.sample(logits.index_select(0, places[num_here:]), self._there)
        self.tokens, self._packed = chosen.tokens, chosen.packed

    def fetch(self) -> None:
        """Brings to the host what is needed there."""
        assert self._packed is not None, "a step is sampled before it is fetched"
        self._kept = (self._packed, self._logits)
        self._packed = _to_host(self._packed)
        self._logits = None if self._logits is None else _to_host(self._logits)

    def result(self) -> StepResult:
        """Waits for it. Raises what the step raised."""
        if self._result is None:
            self.fetched.wait()
            assert self._packed is not None, "a mark was passed before its work was done"
            found: dict[int, list[RowResult]] = {}
            for result in self._sampler.results(self._packed, self._there):
                found.setdefault(result.uid, []).append(result)
            if self._here:
                assert self._logits is not None, "logits are kept where rows are sampled on the host"
                carried = self._carried()
                for result in self._host_sampler.sample(self._logits, self._here, carried):
                    found.setdefault(result.uid, []).append(result)
            rows = tuple([result for row in self.plan.rows for result in found.get(row.uid, ())])
            self._result = StepResult(step=self.plan.step, rows=rows)
            self._before = self._kept = self._logits = None
        return self._result

    def _carried(self) -> dict[int, int]:
        return self._before.host_tokens(row.uid for row in self._here if row.carry) if self._before else {}

    def host_tokens(self, uids: Iterable[int]) -> dict[int, int]:
        """The newest tokens of these requests, of those that have some; waits for them if there are any."""
        wanted = set(uids)
        return {row.uid: row.token_id for row in self.result().rows if row.uid in wanted} if wanted else {}


def _shared_out(plan: StepPlan) -> tuple[list[RowPlan], list[RowPlan], list[int], list[int]]:
    """The rows that are sampled on the device and those on the host, and the wanted places of both."""
    there: list[RowPlan] = []
    here: list[RowPlan] = []
    places: tuple[list[int], list[int]] = ([], [])
    place = 0
    for row in plan.rows:
        if not row.num_wanted:
            continue
        device = is_for_device((row,))
        (there if device else here).append(row)
        places[not device].extend(range(place, place + row.num_wanted))
        place += row.num_wanted
    return there, here, *places


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, made in the order of the stream."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

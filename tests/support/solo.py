"""What each request would have got alone: from the engine itself, and from transformers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from chairlift_worker.ipc.messages import EndingReason
from chairlift_worker.plan import SampleSpec
from chairlift_worker.step_budget import StepLimits

from support.engine import Outcome, Rig, Shape, loaded
from support.exactness import TIE_GAP, Comparisons
from support.sampling_reference import gumbel_noise, processed, reference_choice, reference_top
from support.tiny_models import generate_ids, reference_logits
from support.workloads import Job

LOGPROB_TOLERANCE = 1e-4  # of logits that are taken as they are; a lower temperature makes rounding larger, too
CUT_OFF_ROUNDING = 1e-5  # relative
Top = Sequence[tuple[int, float]]
_ROOMY = Shape(
    num_sectors=64,
    page_size=16,
    limits=StepLimits(
        max_batch_tokens=512,
        max_prefill_chunk=512,
        max_requests_per_batch=1,
        scheduler_type="fifo",
        safety_margin=0.0,
    ),
)


def spec_of(job: Job, index: int) -> SampleSpec:
    """The sampler's parameters for one of a request's tokens."""
    sampling = job.sampling
    return SampleSpec(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        index=index,
        logprob=True,
        num_top=job.top_logprobs,
        raw=job.raw_logprobs,
        processors=sampling.processors,
    )


def tolerance(job: Job) -> float:
    """By how much a logprob may differ from another computation's in float32."""
    sampling = job.sampling
    near = LOGPROB_TOLERANCE / min(1.0, sampling.temperature) if sampling.temperature >= 1e-5 else LOGPROB_TOLERANCE
    penalty = sampling.processors.repetition_penalty if sampling.processors is not None else 1.0
    return near * max(penalty, 1 / penalty)


def gap_of(logits: torch.Tensor, spec: SampleSpec, tokens: Sequence[int]) -> float:
    """By how much the best token beats the next: of what is left of the logits, with its noise."""
    scores = processed(logits, spec, tokens).double().numpy()
    if spec.temperature >= 1e-5:
        scores = scores + gumbel_noise(len(logits), spec.seed, spec.index)
    best_two = np.sort(scores)[-2:]
    return float(best_two[1] - best_two[0])


def near_tops(one: Top, other: Top, near: float) -> bool:
    """Whether two lists of the likeliest tokens differ by no more than rounding explains."""
    return len(one) == len(other) and _has_all(one, other, near) and _has_all(other, one, near)


def _has_all(one: Top, other: Top, near: float) -> bool:
    """Whether the other has what stands in one, but for tokens that may have fallen off its end."""
    found, last = dict(other), other[-2:][0][1] if other else 0.0
    return all(abs(found[i] - value) < near if i in found else abs(value - last) < near for i, value in one)


def within_rounding(spec: SampleSpec) -> Iterator[SampleSpec]:
    """The parameters themselves; then with cut-offs moved so little that only a token right at one goes or comes."""
    yield spec
    if spec.temperature >= 1e-5 and (spec.min_p > 0 or spec.top_p < 1):
        for min_p, top_p in itertools.product((0, -CUT_OFF_ROUNDING, CUT_OFF_ROUNDING), repeat=2):
            yield msgspec.structs.replace(
                spec, min_p=spec.min_p * (1 + min_p), top_p=min(1.0, spec.top_p * (1 + top_p))
            )


@dataclass
class Solo:
    """Solo runs of one model's requests, each made once, and what was compared with them."""

    folder: Path
    comparisons: Comparisons = field(default_factory=Comparisons)
    num_generated: int = 0  # requests compared with transformers' generate
    num_cut_offs: int = 0  # tokens whose logprob depends on another one right at min_p or top_p

    def __post_init__(self) -> None:
        self._rig = Rig(loaded(self.folder), _ROOMY)
        self._uids = 0
        self.run = functools.lru_cache(maxsize=16_384)(self._run)

    def _run(self, job: Job) -> Outcome:
        """The request alone in a roomy cache, held to transformers' forward pass over the whole of it."""
        assert job == job.alone()
        self._uids += 1
        self._rig.add(job.message(self._uids))
        self._rig.run()
        self._rig.assert_idle()
        outcome = self._rig.outcomes.pop(self._uids)
        self._hold_to_definition(job, outcome)
        if job.sampling.temperature == 0 and job.sampling.processors is None and self._uids % 4 == 0:
            self._hold_to_generate(job, outcome)
        return outcome

    def _hold_to_definition(self, job: Job, outcome: Outcome) -> None:
        logits = reference_logits(self.folder, [*job.prompt, *outcome.ids])[len(job.prompt) - 1 :]
        for index, (token, logprob) in enumerate(zip(outcome.ids, outcome.logprobs, strict=True)):
            what, known = f"{self.folder.name} alone, {job}", [*job.prompt, *outcome.ids[:index]]
            self._excuse(job, logits[index], known, token, logprob, what=what)
            if job.top_logprobs:
                self._hold_top(job, logits[index], known, token, outcome.tops[index], what=f"{what}, token {index}")
        reason = EndingReason.STOP if outcome.ids[-1] in job.stop_ids else EndingReason.LENGTH
        assert outcome.ending is not None
        assert outcome.ending.reason is reason
        assert len(outcome.ids) == job.max_new_tokens or reason is EndingReason.STOP
        assert not set(outcome.ids[:-1]) & set(job.stop_ids)

    def _hold_to_generate(self, job: Job, outcome: Outcome) -> None:
        reference = generate_ids(self.folder, list(job.prompt), job.max_new_tokens)
        num = len(outcome.ids)
        self.comparisons.expect(
            outcome.ids, reference.ids[:num], reference.gaps[:num], what=f"{self.folder.name} alone"
        )
        self.num_generated += 1

    def expect(self, job: Job, outcome: Outcome, *, what: str) -> None:
        """Fails unless ids and logprobs are those of the solo run, up to a tie; of one cut short, as far as it came."""
        self.comparisons.num_sequences += 1
        alone, near = self.run(job.alone()), tolerance(job)
        assert outcome.ending is not None
        whole = outcome.ending.reason in {EndingReason.STOP, EndingReason.LENGTH}
        for index, (token, logprob) in enumerate(zip(outcome.ids, outcome.logprobs, strict=True)):
            assert math.isnan(logprob) != job.logprobs, f"{what}: logprob {index} is {logprob}"
            wanted, wanted_logprob = alone.ids[index], alone.logprobs[index]
            top_is_near = not outcome.tops[index] or near_tops(outcome.tops[index], alone.tops[index], near)
            if token == wanted and top_is_near and not abs(logprob - wanted_logprob) >= near:
                continue
            print(f"{what}: {index} is {token} ({logprob}), alone it is {wanted} ({wanted_logprob})")
            known = [*job.prompt, *outcome.ids[:index]]
            logits = reference_logits(self.folder, known)[-1]
            self._excuse(job, logits, known, token, logprob, what=what)
            if outcome.tops[index]:
                self._hold_top(job, logits, known, token, outcome.tops[index], what=what)
            if token != wanted:
                return  # what follows a tie is another text
        assert outcome.ids == alone.ids[: len(alone.ids) if whole else len(outcome.ids)]

    def _excuse(
        self, job: Job, logits: torch.Tensor, known: Sequence[int], token: int, logprob: float, *, what: str
    ) -> None:
        """Fails unless transformers' logits and processors give this token and logprob, up to a tie.

        `known` are the prompt and the output before the token.
        """
        index = len(known) - len(job.prompt)
        spec, near = spec_of(job, index), tolerance(job)
        choices = (reference_choice(logits, rounded, known) for rounded in within_rounding(spec))
        for number, (wanted, wanted_logprob) in enumerate(choices):
            if token == wanted and not abs(logprob - wanted_logprob) >= near:
                self.num_cut_offs += number > 0
                return
        gap = gap_of(logits, spec, known)
        wanted, wanted_logprob = reference_choice(logits, spec, known)
        assert token != wanted, f"{what}: {index} has logprob {logprob}, not {wanted_logprob}"
        assert gap < TIE_GAP, f"{what}: {index} is {token}, not {wanted}; the gap is {gap}"
        self.comparisons.num_ties += 1

    def _hold_top(
        self, job: Job, logits: torch.Tensor, known: Sequence[int], token: int, top: Top, *, what: str
    ) -> None:
        """The same of the likeliest tokens at its place."""
        spec = spec_of(job, len(known) - len(job.prompt))
        wanted = (reference_top(logits, rounded, known, chosen=token) for rounded in within_rounding(spec))
        assert any(near_tops(top, each, tolerance(job)) for each in wanted), f"{what}: {top}"

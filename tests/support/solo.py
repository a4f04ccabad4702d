"""What each request would have got alone: from the engine itself, and from transformers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
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
from support.sampling_reference import gumbel_noise, processed, reference_choice
from support.tiny_models import generate_ids, reference_logits
from support.workloads import Job

LOGPROB_TOLERANCE = 1e-4  # of logits that are taken as they are; a lower temperature makes rounding larger, too
CUT_OFF_ROUNDING = 1e-5  # relative
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
    )


def tolerance(temperature: float) -> float:
    """By how much a logprob may differ from another computation's in float32."""
    return LOGPROB_TOLERANCE / min(1.0, temperature) if temperature >= 1e-5 else LOGPROB_TOLERANCE


def gap_of(logits: torch.Tensor, spec: SampleSpec) -> float:
    """By how much the best token beats the next: of the logits, or of what is left of them with its noise."""
    if spec.temperature < 1e-5:
        best = logits.double().topk(2).values
        return float(best[0] - best[1])
    scores = processed(logits, spec).double().numpy() + gumbel_noise(len(logits), spec.seed, spec.index)
    best_two = np.sort(scores)[-2:]
    return float(best_two[1] - best_two[0])


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
        if job.sampling.temperature == 0 and self._uids % 10 == 0:
            self._hold_to_generate(job, outcome)
        return outcome

    def _hold_to_definition(self, job: Job, outcome: Outcome) -> None:
        logits = reference_logits(self.folder, [*job.prompt, *outcome.ids])[len(job.prompt) - 1 :]
        for index, (token, logprob) in enumerate(zip(outcome.ids, outcome.logprobs, strict=True)):
            self._excuse(job, logits[index], index, token, logprob, what=f"{self.folder.name} alone, {job}")
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
        alone, near = self.run(job.alone()), tolerance(job.sampling.temperature)
        assert outcome.ending is not None
        whole = outcome.ending.reason in {EndingReason.STOP, EndingReason.LENGTH}
        for index, (token, logprob) in enumerate(zip(outcome.ids, outcome.logprobs, strict=True)):
            assert math.isnan(logprob) != job.logprobs, f"{what}: logprob {index} is {logprob}"
            wanted, wanted_logprob = alone.ids[index], alone.logprobs[index]
            if token == wanted and not abs(logprob - wanted_logprob) >= near:
                continue
            print(f"{what}: {index} is {token} ({logprob}), alone it is {wanted} ({wanted_logprob})")
            logits = reference_logits(self.folder, [*job.prompt, *outcome.ids[:index]])[-1]
            self._excuse(job, logits, index, token, logprob, what=what)
            if token != wanted:
                return  # what follows a tie is another text
        assert outcome.ids == alone.ids[: len(alone.ids) if whole else len(outcome.ids)]

    def _excuse(self, job: Job, logits: torch.Tensor, index: int, token: int, logprob: float, *, what: str) -> None:
        """Fails unless transformers' logits and processors give this token and logprob, up to a tie."""
        spec, near = spec_of(job, index), tolerance(job.sampling.temperature)
        choices = (reference_choice(logits, rounded) for rounded in within_rounding(spec))
        for number, (wanted, wanted_logprob) in enumerate(choices):
            if token == wanted and not abs(logprob - wanted_logprob) >= near:
                self.num_cut_offs += number > 0
                return
        gap = gap_of(logits, spec)
        wanted, wanted_logprob = reference_choice(logits, spec)
        assert token != wanted, f"{what}: {index} has logprob {logprob}, not {wanted_logprob}"
        assert gap < TIE_GAP, f"{what}: {index} is {token}, not {wanted}; the gap is {gap}"
        self.comparisons.num_ties += 1

"""Comparing greedy ids with transformers' own, with a rule for ties."""

from __future__ import annotations

from collections.abc import Sequence

TIE_GAP = 1e-3  # where the reference's two best logits are this near, rounding may decide
MAX_TIE_SHARE = 0.01


class Comparisons:
    """Counts sequences compared, and those that only a tie excuses."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self.num_ties = 0

    def expect(self, ids: Sequence[int], reference: Sequence[int], gaps: Sequence[float], *, what: str) -> None:
        """Fails unless the ids are the reference's, up to a tie."""
        self.num_sequences += 1
        assert len(ids) == len(reference), f"{what}: {len(ids)} tokens, not {len(reference)}"
        for index, (got, wanted) in enumerate(zip(ids, reference, strict=True)):
            if got != wanted:
                print(f"{what}: token {index} is {got}, the reference's is {wanted}; its gap is {gaps[index]:.2e}")
                assert gaps[index] < TIE_GAP, f"{what}: token {index} is {got}, not {wanted}; the gap is {gaps[index]}"
                self.num_ties += 1
                return

    def check_ties(self) -> None:
        """Fails if more than one in a hundred sequences needed the rule."""
        assert self.num_ties <= MAX_TIE_SHARE * max(100, self.num_sequences), (
            f"{self.num_ties} of {self.num_sequences} sequences differ where the reference has a tie"
        )

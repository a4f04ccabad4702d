"""How many tokens of prompts a step may take in without holding up requests that are generating.

A step costs a fixed part, reading the weights, a part for each token, and one for each token that it looks back on:
all are measured when the worker warms up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# However slow the machine is: fewer tokens would read all weights for next to nothing.
LEAST_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps cost: step_ns + tokens * token_ns, about; and how much longer than usual one may take."""

    step_ns: float
    token_ns: float
    max_stretch: float  # at least 1
    context_ns: float = 0.0  # for each token that a token looks back on

    def prompt_tokens(self, num_decoding: int) -> int:
        """Tokens of prompts that may join a step of so many generating requests, at least 1."""
        usual_ns = self.step_ns + num_decoding * self.token_ns
        return max(LEAST_TOKENS, int((self.max_stretch - 1) * usual_ns / self.token_ns))

    def weight(self, context_len: int) -> float:
        """What a token behind so many others costs, in tokens that have none before them."""
        return 1.0 + context_len * self.context_ns / self.token_ns


def pace_of(
    *, one_token_ns: float, many_tokens_ns: float, num_tokens: int, max_stretch: float, context_ns: float = 0.0
) -> Pace:
    """The pace by the costs of two steps: one of one token, one of num_tokens (at least 2)."""
    token_ns = max(1.0, (many_tokens_ns - one_token_ns) / (num_tokens - 1))
    return Pace(
        step_ns=max(0.0, one_token_ns - token_ns),
        token_ns=token_ns,
        max_stretch=max_stretch,
        context_ns=max(0.0, context_ns),
    )

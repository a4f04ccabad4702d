"""Cases in which each value of each parameter meets each value of every other one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

Values = Mapping[str, Sequence[object]]
Pair = tuple[str, object, str, object]


def pairwise(parameters: Values, *, seed: int = 1) -> list[dict[str, object]]:
    """Few cases that cover all pairs; the same ones for the same arguments."""
    names = list(parameters)
    noise = random.Random(seed)
    left = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in parameters[a] for y in parameters[b]}
    order = sorted(left, key=repr)
    noise.shuffle(order)
    cases = []
    for pair in order:
        if pair in left:
            case = _grow(pair, parameters, left, noise)
            left.difference_update(pairs_of(case, names))
            cases.append(case)
    return cases


def pairs_of(case: Mapping[str, object], names: Sequence[str]) -> Iterable[Pair]:
    return ((a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2) if a in case and b in case)


def _grow(pair: Pair, parameters: Values, left: set[Pair], noise: random.Random) -> dict[str, object]:
    a, x, b, y = pair
    case = {a: x, b: y}
    names = list(parameters)
    for name in noise.sample(names, len(names)):
        if name in case:
            continue

        def gain(value: object, name: str = name) -> int:
            return sum(pair in left for pair in pairs_of(case | {name: value}, names))

        values = noise.sample(list(parameters[name]), len(parameters[name]))
        case[name] = max(values, key=gain)
    return {name: case[name] for name in names}

"""The native paged attention against the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from chairlift_worker.attention.native_kernel import Isa, isas, map_values
from support.pages import Geometry, Paged, Row, formula, make_rows, rounding_allowance, stored
from support.pairwise import pairs_of, pairwise

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
# (start, num_tokens) of the rows of one step
STEPS = {
    "first token": [(0, 1)],
    "one token, context 8192": [(8191, 1)],
    "one-token rows": [(0, 1), (5, 1), (254, 1), (255, 1), (256, 1), (700, 1)],
    "prompts": [(0, 2), (0, 131), (0, 64)],
    "chunks": [(3, 2), (100, 70), (1, 30), (64, 64)],
    "few tokens, long context": [(1500, 3), (2047, 2), (510, 4)],
    "all sorts": [(30, 1), (0, 1), (4, 1), (0, 5), (250, 12), (3, 4), (1023, 1), (60, 100)],
}
PARAMETERS = {
    "group": list(range(1, 18)),
    "head_dim": [64, 80, 96, 128, 256, 8, 24, 40, 7],
    "page_size": [4, 5, 16, 32, 100, 256],
    "step": list(STEPS),
    "window": [0, 1, 7, 100, 300, 5000],
    "softcap": [0.0, 1.5, 30.0],
    "sinks": [False, True],
    "cache_type": [F32, BF16, INT8],
    "io_type": [F32, BF16],
    "kv_heads": [1, 2, 3],
    "layer": [0, 1],
}
CASES = pairwise(PARAMETERS)
SAMPLE = Geometry(group=3, kv_heads=2, head_dim=64, page_size=16)


def case_name(case: dict[str, object]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


def geometry_of(case: dict[str, object]) -> Geometry:
    return Geometry(**{name: value for name, value in case.items() if name != "step"})


def assert_is(got: torch.Tensor, wanted: torch.Tensor, allowance: torch.Tensor | float = 0.0) -> None:
    """Equal to float64 as far as float32 sums go; a bfloat16 output is off by its rounding, half of 2^-7, as well.

    Each output may be off by its allowance, too.
    """
    rounding = 2**-8 if got.dtype == BF16 else 0.0
    over = ((got.double() - wanted).abs() - allowance).clamp(min=0)
    torch.testing.assert_close(wanted + over, wanted, atol=5e-6, rtol=1e-5 + rounding)


def allowance_of(geometry: Geometry, rows: Sequence[Row], isa: Isa) -> torch.Tensor:
    """Of all tokens: 0 unless the kernel multiplies bfloat16, which it does in rows of several tokens."""
    dots = geometry.cache_type != F32 and isa >= Isa.AVX512_BF16
    return torch.cat(
        [
            rounding_allowance(geometry, row) if dots and row.num_tokens > 1 else torch.zeros(row.query.shape).double()
            for row in rows
        ]
    )


def test_the_cases_cover_all_pairs() -> None:
    names = list(PARAMETERS)
    met = {pair for case in CASES for pair in pairs_of(case, names)}
    sizes = [len(values) for values in PARAMETERS.values()]
    assert len(met) == (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2


@pytest.mark.parametrize("case", CASES, ids=map(case_name, CASES))
def test_every_row_is_what_the_formula_says_and_threads_change_no_bit(case: dict[str, object]) -> None:
    geometry = geometry_of(case)
    rows = make_rows(geometry, STEPS[case["step"]])
    wanted = torch.cat([formula(geometry, row) for row in rows])
    for isa in isas():
        paged = Paged(geometry, rows)
        one = paged.attend(isa=isa, threads=1)
        assert_is(one, wanted, allowance_of(geometry, rows, isa))
        assert torch.equal(one, paged.attend(isa=isa, threads=2))


@pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("head_dim", [64, 7, 80])
@pytest.mark.parametrize(("step", "window"), [("prompts", 0), ("chunks", 50), ("few tokens, long context", 700)])
def test_where_bfloat16_holds_queries_and_weights_nothing_is_rounded(
    isa: Isa, head_dim: int, step: str, window: int
) -> None:
    """Scores are whole multiples of ln 2, so that all weights are powers of two: no key may be lost or misplaced."""
    sharpness = math.log(2) * head_dim**0.5
    geometry = replace(SAMPLE, cache_type=BF16, head_dim=head_dim, window=window, sharpness=sharpness)
    rows = make_rows(geometry, STEPS[step])
    for row in rows:
        row.query, row.key = row.query.round().clamp(-1, 1), row.key.round().clamp(-1, 1)
        row.value = row.value.to(BF16).float()
    wanted = torch.cat([formula(geometry, row) for row in rows])
    assert_is(Paged(geometry, rows).attend(isa=isa, threads=1), wanted)


@pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("cache_type", [F32, BF16, INT8], ids=str)
def test_a_row_alone_gets_the_very_bits_that_it_gets_among_others(
    isa: Isa, window: int, cache_type: torch.dtype
) -> None:
    geometry = replace(SAMPLE, window=window, cache_type=cache_type)
    rows = make_rows(geometry, STEPS["all sorts"])
    together = Paged(geometry, rows).attend(isa=isa, threads=2).split([row.num_tokens for row in rows])
    for row, among_others in zip(rows, together, strict=True):
        alone = Paged(geometry, [row], seed=9).attend(isa=isa, threads=1)  # in other pages, too
        assert torch.equal(alone, among_others)


@pytest.mark.parametrize("cache_type", [F32, BF16, INT8], ids=str)
@pytest.mark.parametrize("io_type", [F32, BF16], ids=str)
def test_new_keys_and_values_are_in_their_slots_and_nothing_else_changes(
    cache_type: torch.dtype, io_type: torch.dtype
) -> None:
    geometry = replace(SAMPLE, cache_type=cache_type, io_type=io_type, window=20)
    rows = make_rows(geometry, STEPS["all sorts"])
    paged, wanted = Paged(geometry, rows), Paged(geometry, rows)
    for number, row in enumerate(rows):
        for position in range(row.start, row.start + row.num_tokens):
            keys, values = wanted.slot(number, position)
            keys.copy_(stored(row.key[position], cache_type))
            values.copy_(stored(row.value[position], cache_type))
    paged.attend(isa=Isa.BEST, threads=2)
    torch.testing.assert_close(paged.cache, wanted.cache, rtol=0, atol=0, equal_nan=True)


def test_strides_of_the_tensors_change_no_bit() -> None:
    rows = make_rows(SAMPLE, STEPS["all sorts"])
    plain = Paged(SAMPLE, rows).attend(isa=Isa.BEST, threads=1)
    assert torch.equal(plain, Paged(SAMPLE, rows).attend(isa=Isa.BEST, threads=1, heads_first=True))


def test_keys_that_another_layer_wrote_are_attended_to_without_writing() -> None:
    rows = make_rows(SAMPLE, STEPS["all sorts"])
    paged = Paged(SAMPLE, rows)
    first = paged.attend(isa=Isa.BEST, threads=1)
    before = paged.cache.clone()
    assert torch.equal(first, paged.attend(isa=Isa.BEST, threads=1, write=False))
    torch.testing.assert_close(paged.cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("cache_type", [F32, BF16, INT8], ids=str)
def test_a_nan_in_one_row_stays_in_that_row_and_is_seen_there(num_tokens: int, cache_type: torch.dtype) -> None:
    geometry = replace(SAMPLE, cache_type=cache_type)
    rows = make_rows(geometry, [(70, num_tokens), (70, num_tokens)])
    paged = Paged(geometry, rows)
    key = rows[0].key[33].clone()
    key[1, 5] = float("nan")  # of the second head
    paged.slot(0, 33)[0].copy_(stored(key, cache_type))
    out = paged.attend(isa=Isa.BEST, threads=1)
    sick, well = out[:num_tokens], out[num_tokens:]
    assert sick[:, 3:].isnan().all()
    allowance = allowance_of(geometry, rows, isas()[-1])
    assert_is(sick[:, :3], formula(geometry, rows[0])[:, :3], allowance[:num_tokens, :3])
    assert_is(well, formula(geometry, rows[1]), allowance[num_tokens:])


@pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_scores_of_any_size_neither_overflow_nor_vanish(isa: Isa, num_tokens: int) -> None:
    geometry = replace(SAMPLE, sharpness=3000.0)
    rows = make_rows(geometry, [(600, num_tokens)])
    out = Paged(geometry, rows).attend(isa=isa, threads=1)
    wanted = formula(geometry, rows[0])
    # One key wins almost everything; a score of thousands has an error of thousandths.
    torch.testing.assert_close(out.double(), wanted, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)
def test_exp_is_within_two_ulp_and_zero_far_down(isa: Isa) -> None:
    x = torch.cat([torch.linspace(-87.29, 88.37, 1_000_003), torch.linspace(-1e-3, 1e-3, 100_001)])
    error = ulps(mapped("exp", isa, x), x.double().exp())
    assert error.max() < 2
    limits = torch.tensor([-87.4, -1000.0, -math.inf, math.nan, 0.0])
    torch.testing.assert_close(
        mapped("exp", isa, limits), torch.tensor([0.0, 0.0, 0.0, math.nan, 1.0]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)
def test_tanh_is_within_four_ulp(isa: Isa) -> None:
    x = torch.cat([torch.linspace(-20, 20, 1_000_003), torch.linspace(-1e-3, 1e-3, 100_001)])
    assert ulps(mapped("tanh", isa, x), x.double().tanh()).max() < 4
    limits = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e30])
    torch.testing.assert_close(
        mapped("tanh", isa, limits), torch.tensor([1.0, -1.0, math.nan, 0.0, 1.0]), rtol=0, atol=0, equal_nan=True
    )


def mapped(function: str, isa: Isa, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    map_values(function, isa, x.data_ptr(), out.data_ptr(), x.numel())
    return out


def ulps(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Distance in units of the last place of the float32 nearest to what is wanted."""
    near = wanted.float().abs()
    unit = torch.nextafter(near, torch.tensor(math.inf)).double() - near.double()
    return (got.double() - wanted).abs() / unit

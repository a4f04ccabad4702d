"""Products with packed weights against plain torch in float64."""

import pytest
import torch
from chairlift_worker.attention.native_kernel import Isa, isas
from chairlift_worker.decoder.native_decoder import multiply
from chairlift_worker.decoder.packing import Format, pack, paired
from support.pairwise import pairwise

PARAMETERS = {
    "isa": isas(),
    "packed_format": list(Format),
    "rows": [1, 2, 3, 4, 5, 6, 7, 12, 13, 33],
    "outputs": [1, 15, 16, 17, 31, 48, 64, 80, 100],
    "inputs": [1, 2, 31, 32, 33, 64, 100, 576],
}
# Relative to the norm of the product: sums of float32; activations rounded to bfloat16, or to bytes.
ROUNDING = {Format.FLOAT32: 2e-6, Format.BFLOAT16: 4e-3, Format.INT8: 1.5e-2, Format.INT4: 1.5e-2}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unpacked(weight: torch.Tensor, packed_format: Format) -> torch.Tensor:
    """The weights that a format can hold, by definition of the format and without its layout."""
    if packed_format is Format.FLOAT32:
        return weight
    if packed_format is Format.BFLOAT16:
        return weight.bfloat16().float()
    outputs, inputs = weight.shape
    groups = torch.zeros(outputs, -(-inputs // 32) * 32)
    groups[:, :inputs] = weight
    groups = groups.view(outputs, -1, 32)
    if packed_format is Format.INT8:
        scale = (groups.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
        offset, most = -128 * scale, 255
    else:
        offset = groups.amin(-1, keepdim=True).bfloat16().float()
        scale, most = ((groups.amax(-1, keepdim=True) - offset) / 15).bfloat16().float(), 15
    q = torch.where(scale > 0, (groups - offset) / scale, 0).round().clamp(0, most)
    return (q * scale + offset).view(outputs, -1)[:, :inputs]


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=lambda case: "-".join(str(v) for v in case.values()))
def test_a_product_is_that_of_the_weights_which_the_format_holds(case: dict[str, object]) -> None:
    isa, packed_format = Isa(case["isa"]), Format(case["packed_format"])
    weight = numbers(case["outputs"], case["inputs"], seed=1)
    rows = numbers(case["rows"], case["inputs"], seed=2)
    got = multiply(rows, pack(weight, packed_format), isa=isa)
    wanted = rows.double() @ unpacked(weight, packed_format).double().T
    assert got.shape == wanted.shape
    assert float((got - wanted).norm() / wanted.norm().clamp(min=1)) < ROUNDING[packed_format]


@pytest.mark.parametrize("packed_format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("isa", [isa for isa in isas() if isa < Isa.AVX512_BF16])
def test_without_dot_products_of_bytes_activations_are_not_rounded(isa: Isa, packed_format: Format) -> None:
    weight, rows = numbers(48, 96, seed=3), numbers(5, 96, seed=4)
    wanted = rows.double() @ unpacked(weight, packed_format).double().T
    torch.testing.assert_close(
        multiply(rows, pack(weight, packed_format), isa=isa).double(), wanted, atol=2e-4, rtol=1e-5
    )


@pytest.mark.parametrize("packed_format", list(Format))
@pytest.mark.parametrize("isa", isas())
def test_a_row_does_not_depend_on_the_others(isa: Isa, packed_format: Format) -> None:
    packed, rows = pack(numbers(100, 130, seed=5), packed_format), numbers(17, 130, seed=6)
    together = multiply(rows, packed, isa=isa)
    for number in range(17):
        assert torch.equal(multiply(rows[number : number + 1], packed, isa=isa)[0], together[number])


@pytest.mark.parametrize("packed_format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("isa", isas())
def test_groups_of_equal_weights_and_of_zeros_are_exact(isa: Isa, packed_format: Format) -> None:
    weight = torch.zeros(16, 96)
    weight[:, 32:64] = 0.5
    got = multiply(torch.full((2, 96), 2.0), pack(weight, packed_format), isa=isa)
    torch.testing.assert_close(got, torch.full((2, 16), 32.0), atol=0, rtol=1e-2)


def test_weights_that_are_not_numbers_cannot_be_quantised() -> None:
    with pytest.raises(ValueError, match="not finite"):
        pack(torch.tensor([[1.0, float("nan")]]), Format.INT8)


def test_gates_and_what_they_gate_stand_in_blocks_in_turn() -> None:
    gate, other = torch.arange(40.0)[:, None], 100 + torch.arange(40.0)[:, None]
    both = paired(gate, other)[:, 0].tolist()
    assert both[:16] == list(range(16))
    assert both[16:32] == list(range(100, 116))
    assert both[32:48] == list(range(16, 32))
    assert both[64:72] == list(range(32, 40))
    assert both[72:80] == [0] * 8
    assert len(both) == 128

"""Dynamic maps and the codes of nearest values."""

import pytest
import torch
from adamw8bit_reference import dynamic_map as slow_map
from adamw8bit_reference import nearest

from vescale_compile.optim.blockwise import block_scales, codebook, dequantize, quantize

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("signed", [True, False])


def numbers(signed: bool) -> torch.Tensor:
    """Some of every decade that a map knows, and below, of both signs or none."""
    torch.manual_seed(0)
    values = torch.randn(20_000).sign() * 10 ** (-9 * torch.rand(20_000))
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45])])
    return values if signed else values.abs()


@BOTH
def test_a_map_has_256_values_of_seven_decades(signed: bool) -> None:
    values = codebook(signed, CPU).values
    assert values.dtype == torch.float32 and values.shape == (256,)
    torch.testing.assert_close(values, torch.tensor(slow_map(signed)), rtol=1e-6, atol=0)


@BOTH
def test_codes_are_those_of_the_nearest_values(signed: bool) -> None:
    book, values = codebook(signed, CPU), numbers(signed)
    assert torch.equal(quantize(values, book).long(), nearest(values, book.values))


@BOTH
def test_every_map_value_is_its_own_code(signed: bool) -> None:
    book = codebook(signed, CPU)
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(quantize(dequantize(codes, book), book), codes)


@BOTH
def test_a_code_changes_at_its_border_and_nowhere_else(signed: bool) -> None:
    book = codebook(signed, CPU)
    borders, codes = book.borders[:-1], torch.arange(255)
    assert torch.equal(quantize(borders, book).long(), codes + 1)
    assert torch.equal(quantize(torch.nextafter(borders, torch.tensor(-2.0)), book).long(), codes)


@BOTH
def test_codes_equal_torchao(signed: bool) -> None:
    from torchao.optim import quant_utils as quantization

    theirs = torch.tensor(quantization.create_dynamic_map(signed))
    book = codebook(signed, CPU)
    assert torch.equal(book.values, theirs)
    near_borders = [torch.nextafter(book.borders[:-1], torch.tensor(end)) for end in (-2.0, 2.0)]
    for values in (numbers(signed), book.borders[:-1], *near_borders):
        assert torch.equal(quantize(values, book), quantization.quantize_8bit_with_qmap(values, theirs))


def test_a_block_of_zeros_has_a_scale_to_divide_by() -> None:
    assert block_scales(torch.zeros(1, 1, 2, 8), (1, 3)).flatten().tolist() == [pytest.approx(1e-12)] * 2


def test_a_scale_is_the_absolute_maximum_of_its_tile() -> None:
    matrix = torch.zeros(4, 6)
    matrix[1, 1], matrix[3, 5] = -7.0, 3.0
    tiles = matrix.as_strided((2, 2, 2, 3), (12, 6, 3, 1))
    assert block_scales(tiles, (1, 3)).flatten().tolist() == pytest.approx([7.0, 1e-12, 1e-12, 3.0])

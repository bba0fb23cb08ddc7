"""Blocks, codes and scales of whole tensors."""

import formats
import pytest
import torch

import vescale_compile as vc
from vescale_compile.quantize import _from_e4m3, _to_e4m3

QUANTIZERS = [vc.BlockInt8(32), vc.BlockInt8(7), vc.BlockFP8((16, 16)), vc.BlockFP8((3, 5)), vc.MXFP8()]
SHAPES = [(32, 64), (33, 70), (16, 33), (3, 20, 48), (2, 3, 17, 40)]


def example(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of magnitudes from 1e-6 to 1e6, with some zeros."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 12 - 6)
    return values.where(torch.rand(shape, generator=generator) > 0.1, 0).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_a_whole_tensor_is_quantized_block_by_block(quantizer, shape):
    tensor = example(shape)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(tensor)), formats.expected(quantizer, tensor))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_go_through_float32(quantizer, dtype):
    tensor = example((33, 70)).clamp(-100, 100).to(dtype)
    assert torch.equal(
        quantizer.dequantize(quantizer.quantize(tensor), dtype), formats.expected(quantizer, tensor, dtype)
    )


def test_codes_of_e4m3_are_those_of_pytorch():
    codes = torch.arange(256, dtype=torch.int32)
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(_from_e4m3(codes), values, rtol=0, atol=0, equal_nan=True)
    # Every pair of neighbours, its middle, and the floats beside that: where ties and borders are.
    finite = values[values.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    infinity = torch.tensor(torch.inf)
    probes = torch.cat([finite, middles, middles.nextafter(infinity), middles.nextafter(-infinity)])
    theirs = probes.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal((_to_e4m3(probes) & 0xFF).to(torch.uint8), theirs)


def test_what_exceeds_e4m3_saturates_and_nan_stays():
    codes = _to_e4m3(torch.tensor([1e9, -1e9, torch.nan])) & 0xFF
    assert _from_e4m3(codes).tolist()[:2] == [448.0, -448.0]
    assert _from_e4m3(codes)[2].isnan()


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_the_error_is_within_half_a_step_of_the_block(quantizer):
    tensor = example((32, 64))
    error = (quantizer.dequantize(quantizer.quantize(tensor)) - tensor).abs()
    step = {vc.BlockInt8: 1 / 127, vc.BlockFP8: 32 / 448, vc.MXFP8: 64 / 256}[type(quantizer)]
    assert error.max() <= tensor.abs().max() * step / 2 * (1 + 1e-6)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_comes_out_as_not_finite(quantizer, value):
    tensor = example((33, 70))
    tensor[5, 6] = value
    found = quantizer.dequantize(quantizer.quantize(tensor))
    others = quantizer.dequantize(quantizer.quantize(example((33, 70))))
    assert not found[5, 6].isfinite()
    finite = found.isfinite()
    assert finite.sum() >= tensor.numel() - 256
    assert torch.equal(found[finite], others[finite])


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_zeros_and_the_smallest_numbers_stay_finite(quantizer):
    tensor = torch.zeros(32, 64)
    tensor[0, 0], tensor[20, 40] = 1e-45, -1e-39
    found = quantizer.dequantize(quantizer.quantize(tensor))
    assert found.isfinite().all()
    assert (found - tensor).abs().max() <= 1e-38


def test_scales_of_mxfp8_are_powers_of_two_in_one_byte():
    tensor = torch.zeros(1, 64)
    tensor[0, 3], tensor[0, 40] = 448.0, 1.75 * 2**-20
    scales = vc.MXFP8().quantize(tensor).scales.flatten().tolist()
    assert scales == [127, 127 - 20 - 8]


def test_experts_have_tiles_of_their_own():
    quantizer, tensor = vc.BlockFP8((16, 16)), example((3, 20, 48))
    together = quantizer.dequantize(quantizer.quantize(tensor))
    apart = [quantizer.dequantize(quantizer.quantize(expert)) for expert in tensor]
    assert torch.equal(together, torch.stack(apart))


@pytest.mark.parametrize(
    ("quantizer", "shape", "granularity"),
    [
        (vc.BlockInt8(32), (10, 64), vc.Elements(32)),
        (vc.BlockFP8((16, 16)), (33, 70), vc.Rows(16)),
        (vc.BlockFP8((16, 16)), (4, 32, 70), vc.Rows(16)),
        (vc.BlockFP8((16, 16)), (4, 20, 70), vc.Rows(20)),  # tiles begin anew in each expert
        (vc.MXFP8(), (10, 64), vc.Elements(32)),
        (vc.MXFP8(), (10, 40), vc.Rows(1)),
        (vc.BlockInt8(32), (640,), None),
        (vc.BlockFP8((16, 16)), (640,), None),
    ],
)
def test_what_must_not_be_cut(quantizer, shape, granularity):
    assert quantizer.granularity("weight", torch.empty(shape)) == granularity


@pytest.mark.parametrize(
    ("quantizer", "shape", "message"),
    [
        (vc.BlockInt8(256), (3, 5), r"'up' of shape \(3, 5\): blocks of 256 are larger than it, 15 elements"),
        (vc.BlockFP8((16, 16)), (40, 8), r"tiles of 16 x 16 are larger than its matrices of 40 x 8"),
        (vc.BlockFP8((16, 16)), (4, 8, 40), r"tiles of 16 x 16 are larger than its matrices of 8 x 40"),
        (vc.MXFP8(), (64, 16), r"blocks of 32 elements, and its rows have 16"),
    ],
)
def test_blocks_larger_than_a_parameter_are_refused(quantizer, shape, message):
    with pytest.raises(ValueError, match=message):
        quantizer.granularity("up", torch.empty(shape))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: vc.BlockInt8(0), ValueError, "at least 1 element"),
        (lambda: vc.BlockInt8(2.0), TypeError, "whole numbers"),
        (lambda: vc.BlockInt8(True), TypeError, "whole numbers"),
        (lambda: vc.BlockInt8(seed="a"), TypeError, "seed is 'a'"),
        (lambda: vc.BlockFP8(128), TypeError, r"give \(rows, columns\)"),
        (lambda: vc.BlockFP8((128, 0)), ValueError, "at least 1 element"),
        (lambda: vc.BlockInt8().quantize(torch.ones(999)), ValueError, "two or more dimensions"),
    ],
)
def test_formats_check_themselves(make, kind, message):
    with pytest.raises(kind, match=message):
        make()

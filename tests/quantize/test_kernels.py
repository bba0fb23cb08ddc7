"""The three ways in which codes and scales are computed give the same bytes; and how many kernels each takes."""

import functools
import math
import re
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from test_formats import example
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import vescale_compile as vc
from vescale_compile.quantize import BlockQuantizer
from vescale_compile.runtime.block_arithmetic import uniform_at
from vescale_compile.runtime.block_places import full_width_strips_of
from vescale_compile.runtime.packing import Packing
from vescale_compile.runtime.quantizing import average_into, dequantize_into, quantize_into
from vescale_compile.runtime.strips import Kernels
from vescale_compile.torch_internals.autograd import below_autograd

WORLD = 2
MANY = 11  # ranks, over which a kernel loops
SHAPES = [(33, 70), (5,), (40, 48), (3, 20, 48)]
COMPILED = [Kernels.LINES, Kernels.TABLES]
FORMATS = [vc.BlockInt8(32), vc.BlockFP8((4, 16)), vc.MXFP8()]
# Each takes seconds to compile: every two of a format, kernels and a dtype are together, but not all three.
IN_PAIRS = [
    (quantizer, kernels, dtype)
    for number, quantizer in enumerate(FORMATS)
    for kernels, dtype in zip(COMPILED, [torch.float32, torch.bfloat16][:: (-1) ** number], strict=True)
]


def packed_form(
    quantizer: BlockQuantizer, dtype: torch.dtype = torch.float32, world: int = WORLD
) -> tuple[Packing, Tensor]:
    """Parameters on the first rank, 7 elements apart, and one on the second; and the buffer of all."""
    params, position = [], 0
    for shape in SHAPES:
        params.append((position, shape))
        position += math.prod(shape) + 7
    shard = -(-position // 16) * 16
    params.append((shard, (36, 32)))
    buffer = torch.full((world * shard,), torch.nan)
    for offset, shape in params:
        buffer[offset:][: math.prod(shape)] = example(shape).flatten()
    return Packing("test", quantizer, world, shard, params, dtype), buffer


@pytest.fixture(scope="module", autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@functools.cache
def generated(quantizer: BlockQuantizer, kernels: Kernels, dtype: torch.dtype) -> list[str]:
    """The code that the first quantization and dequantization compile, which all others run."""
    packing, buffer = packed_form(quantizer, dtype)
    packed, full = torch.zeros(packing.nbytes, dtype=torch.uint8), torch.zeros(len(buffer), dtype=dtype)
    _, (quantize,) = run_and_get_code(lambda: quantize_into(packing, None, buffer, packed, kernels))
    _, (dequantize,) = run_and_get_code(lambda: dequantize_into(packing, packed, full, kernels))
    return [quantize, dequantize]


def calls_of_kernels(code: str) -> list[str]:
    return re.findall(r"^\s+cpp_fused\w*\(", code, re.MULTILINE)


@pytest.mark.parametrize("quantizer", FORMATS, ids=repr)
def test_elements_that_no_parameter_has_are_left_alone(quantizer):
    packing, buffer = packed_form(quantizer)
    packed = torch.zeros(packing.nbytes, dtype=torch.uint8)
    full = torch.full_like(buffer, torch.nan)
    quantize_into(packing, None, buffer, packed, Kernels.EAGER)
    dequantize_into(packing, packed, full, Kernels.EAGER)
    assert torch.equal(full.isnan(), buffer.isnan())


@pytest.mark.parametrize("quantizer", FORMATS, ids=repr)
def test_a_rank_computes_its_own_part_of_the_whole(quantizer):
    packing, buffer = packed_form(quantizer)
    whole = torch.zeros(packing.nbytes, dtype=torch.uint8)
    quantize_into(packing, None, buffer, whole, Kernels.EAGER)
    for rank in range(WORLD):
        shard = buffer.narrow(0, rank * packing.shard_numel, packing.shard_numel)
        part = torch.zeros(packing.part, dtype=torch.uint8)
        quantize_into(packing, rank, shard, part, Kernels.EAGER)
        assert torch.equal(part, whole.view(WORLD, -1)[rank])


@pytest.mark.slow
@pytest.mark.parametrize(("quantizer", "kernels", "dtype"), IN_PAIRS, ids=str)
def test_compiled_kernels_give_the_same_bits(quantizer, kernels, dtype):
    generated(quantizer, kernels, dtype)
    packing, buffer = packed_form(quantizer, dtype)
    found = []
    for way in (Kernels.EAGER, kernels):
        packed = torch.zeros(packing.nbytes, dtype=torch.uint8)
        full = torch.zeros(len(buffer), dtype=dtype)
        quantize_into(packing, None, buffer, packed, way)
        dequantize_into(packing, packed, full, way)
        found.append((packed, full))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(got, expected)


class Reduced(NamedTuple):
    """What each rank sends to the first, what that one makes of it, and the code that was compiled to do so."""

    parts: Tensor
    shard: Tensor
    code: list[str]


@functools.cache
def reduced(world: int, kernels: Kernels) -> Reduced:
    packing, buffer = packed_form(vc.BlockInt8(32), world=world)
    parts = torch.zeros(world, packing.part, dtype=torch.uint8)
    for number, part in enumerate(parts):
        packed = torch.zeros(packing.nbytes, dtype=torch.uint8)
        quantize_into(packing, None, buffer, packed, kernels, (torch.tensor(number), torch.tensor(3_000_000_000)))
        part.copy_(packed[: packing.part])
    received, shard = parts.clone(), torch.zeros(packing.shard_numel)
    received[0] = 255  # nothing that is meant
    _, code = run_and_get_code(lambda: average_into(packing, 0, parts[0], received.view(-1), shard, kernels))
    return Reduced(parts, shard, code)


@pytest.mark.slow
def test_one_kernel_serves_buffers_wherever_they_begin_and_whoever_calls_it():
    """Of one strip or of several, from a parameter that records gradients, inside of operators and outside."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for rows in (4, 12):
        packing = Packing(f"{rows} rows", vc.BlockFP8((4, 16)), 1, 64 * rows, [(0, (rows, 64))], torch.float32)
        source = nn.Parameter(torch.ones(16 + packing.shard_numel))
        packed = torch.zeros(2 * packing.nbytes, dtype=torch.uint8)
        for start in (0, 16):
            for context in (nullcontext(), below_autograd()):
                own, place = source[start:][: packing.shard_numel], packed[start:][: packing.nbytes]
                with torch.no_grad(), context:
                    quantize_into(packing, None, own, place, Kernels.LINES)
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("kernels", COMPILED)
@pytest.mark.parametrize("world", [3, MANY])
def test_compiled_kernels_round_and_average_alike(world, kernels):
    expected, got = reduced(world, Kernels.EAGER), reduced(world, kernels)
    assert torch.equal(got.parts, expected.parts)
    assert torch.equal(got.shard, expected.shard)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", COMPILED)
def test_one_kernel_averages_over_many_ranks_and_dequantizes_no_part_into_memory(kernels):
    (code,) = reduced(MANY, kernels).code
    assert len(calls_of_kernels(code)) == 1
    assert f"empty_strided_cpu(({MANY}," not in code


@pytest.mark.slow
@pytest.mark.parametrize(("quantizer", "kernels", "dtype"), IN_PAIRS, ids=str)
def test_a_unit_takes_one_call_of_generated_code_each_way(quantizer, kernels, dtype):
    """For five parameters on two ranks, with blocks of all sizes at their edges."""
    for code in generated(quantizer, kernels, dtype):
        assert len(calls_of_kernels(code)) == 1
        assert "extern_kernels." not in code


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "eagerly"), [(Kernels.EAGER, True), (Kernels.LINES, False)])
def test_blocks_of_full_width_are_not_computed_operator_by_operator(kernels, eagerly):
    """Two parameters, the last row of blocks of the first one lower than the others."""
    params = [(0, (37, 64)), (37 * 64, (8, 32))]
    packing = Packing("full width", vc.BlockFP8((4, 16)), 1, 37 * 64 + 8 * 32, params, torch.float32)
    source, packed = torch.ones(37 * 64 + 8 * 32), torch.zeros(packing.nbytes, dtype=torch.uint8)
    quantize_into(packing, None, source, packed, kernels)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        quantize_into(packing, None, source, packed, kernels)
    assert ("aten::amax" in {event.key for event in profile.key_averages()}) == eagerly


def rounding(places: Tensor, keys: int) -> Tensor:
    """What decides at each place whether it is rounded up, from -1/2 to 1/2; [keys, places], float64."""
    words = torch.randint(1 << 32, (keys, 2), generator=torch.Generator().manual_seed(0))
    return torch.stack([uniform_at(places, (first, second)) for first, second in words]).double() - 0.5


@pytest.mark.parametrize("apart", [1, 2, 64, 4096, 1 << 17, 1 << 31, 1 << 32, 1 << 40])
def test_places_round_independently(apart):
    """Of neighbours in a line, and of those in a column of a matrix of some width."""
    places = torch.arange(1 << 18)
    correlation = 12 * (rounding(places, 20) * rounding(places + apart, 20)).mean(1)
    assert correlation.abs().max() < 5 / math.sqrt(len(places))


@pytest.mark.slow
def test_steps_round_independently():
    numbers = rounding(torch.arange(1 << 16), 40)
    correlations = 12 * (numbers @ numbers.T) / numbers.shape[1] - torch.eye(40)
    assert correlations.triu(1).abs().max() < 5 / math.sqrt(numbers.shape[1])
    places = torch.tensor([0, 1, 4096, 1 << 31, 1 << 32, (1 << 32) + 1])
    of_places = rounding(places, 20_000)
    assert torch.corrcoef(of_places.T).triu(1).abs().max() < 5 / math.sqrt(len(of_places))


def test_a_strip_of_lines_holds_as_many_blocks_as_waste_the_least():
    """Of five in a row and of ten in a row, five: no strip is filled up."""
    packing = Packing("rows", vc.BlockFP8((4, 16)), 1, 1920, [(0, (8, 80)), (640, (8, 160))], torch.float32)
    assert full_width_strips_of(packing, 0, torch.device("cpu")).blocks == 5

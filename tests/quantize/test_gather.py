"""What quantized gathers bring, on any number of ranks: the whole tensor quantized on one."""

import formats
import pytest
import torch
from ranks import fake_world, on_ranks
from test_formats import example
from torch import Tensor, nn

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

QUANTIZERS = [vc.BlockInt8(32), vc.BlockInt8(7), vc.BlockFP8((16, 16)), vc.BlockFP8((3, 5)), vc.MXFP8()]
SHAPES = [(33, 70), (40, 48), (3, 20, 48), (16, 33), (70,), (5,)]


class Holder(nn.Module):
    """Returns its parameters, computed with."""

    def __init__(self, dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"weight{number}", nn.Parameter(example(shape).clamp(-1e4, 1e4).to(dtype)))

    def forward(self) -> list[Tensor]:
        return [
            param * 1 for param in (self.weight0, self.weight1, self.weight2, self.weight3, self.weight4, self.weight5)
        ]


def check(quantizer, *, lowering: str | None, dtype: torch.dtype = torch.float32, **options) -> None:
    torch._dynamo.reset()
    module = vc.fully_shard(Holder(dtype), quantize=quantizer, **options)
    call = torch.compile(module, backend="vescale", options={"lowering": lowering}) if lowering else module
    policy = options.get("mp_policy")
    wanted = policy.param_dtype if policy else dtype
    with torch.no_grad():
        found = call()
    for param, got in zip(Holder(dtype).parameters(), found, strict=True):
        assert got.dtype == wanted
        assert torch.equal(got, formats.expected(quantizer, param.detach(), wanted)), (quantizer, param.shape)
    for name, param in Holder(dtype).named_parameters():
        assert torch.equal(module.get_parameter(name).full_tensor(), param)  # shards keep every bit


@on_ranks(1, 2, 3, 4)
def test_gathered_values_equal_the_whole_tensor_quantized_on_one_rank():
    for quantizer in QUANTIZERS:
        check(quantizer, lowering=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@on_ranks(3)
def test_shards_of_other_dtypes(dtype):
    for quantizer in QUANTIZERS:
        check(quantizer, lowering=None, dtype=dtype)


@on_ranks(2)
def test_mixed_precision_dequantizes_to_the_dtype_of_gathers():
    for quantizer in QUANTIZERS:
        check(quantizer, lowering="eager", mp_policy=vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@on_ranks(3)
def test_a_granularity_of_the_user_is_kept_as_well():
    for quantizer in QUANTIZERS:
        check(quantizer, lowering=None, granularity=lambda name, param: vc.Rows(2) if param.dim() > 1 else None)


@on_ranks(2)
def test_blocks_of_optimizers_are_kept_as_well():
    optimizers = [vc.optim.AdamW8bit.granularity, vc.optim.Muon.granularity]
    check(vc.BlockFP8((16, 16)), lowering=None, granularity=optimizers)


@on_ranks(3)
def test_shards_may_be_cut_for_a_format_that_does_not_travel():
    check(vc.MXFP8(), lowering=None, granularity=vc.BlockFP8((16, 16)).granularity)


@on_ranks(2, deadline_s=600)
def test_compiled_kernels_write_the_same_bits():
    check(vc.MXFP8(), lowering="inductor")


@on_ranks(2)
def test_tied_weights_are_gathered_once():
    module = Holder()
    module.weight1 = module.weight0
    vc.fully_shard(module, quantize=vc.BlockInt8(32))
    found = module()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], formats.expected(vc.BlockInt8(32), Holder().weight0.detach()))


@on_ranks(2)
def test_a_module_moved_to_another_dtype_is_quantized_there():
    module = vc.fully_shard(Holder(), quantize=vc.BlockInt8(32)).to(torch.bfloat16)
    for param, got in zip(Holder().parameters(), module(), strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, formats.expected(vc.BlockInt8(32), param.detach().bfloat16(), torch.bfloat16))


@on_ranks(2)
def test_a_function_gives_each_parameter_its_format_or_leaves_it_out():
    by_name = {"weight0": vc.BlockFP8((3, 5)), "weight2": vc.BlockInt8(7), "weight3": vc.BlockFP8((3, 5))}
    for lowering in (None, "eager"):
        torch._dynamo.reset()
        module = vc.fully_shard(Holder(), quantize=lambda name, param: by_name.get(name))
        call = torch.compile(module, backend="vescale", options={"lowering": lowering}) if lowering else module
        for (name, param), got in zip(Holder().named_parameters(), call(), strict=True):
            quantizer = by_name.get(name)
            assert torch.equal(got, formats.expected(quantizer, param) if quantizer else param), name


def test_what_travels_alike_is_one_buffer():
    def quantize(name: str, param: nn.Parameter) -> vc.BlockFP8 | None:
        return None if name == "weight3" else vc.BlockFP8((3, 5))

    with fake_world(2):
        module = vc.fully_shard(Holder(), quantize=quantize)
        packed, plain = module._vescale_unit.buffers
    assert {slot.name for slot in packed.slots} == {"weight0", "weight1", "weight2", "weight4", "weight5"}
    assert packed.packing is not None
    assert [slot.name for slot in plain.slots] == ["weight3"]
    assert plain.packing is None


def test_what_is_left_out_may_be_cut_anywhere():
    with fake_world(2):
        module = vc.fully_shard(nn.Linear(3, 21, bias=False), quantize=lambda name, param: None)
        (buffer,) = module._vescale_unit.buffers
    assert buffer.slots[0].local_numel == 32  # neither rows nor tiles


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"quantize": "fp8"}, TypeError, r"quantize is 'fp8'; give vc\.BlockFP8"),
        ({"quantize": vc.BlockInt8}, TypeError, r"give vc\.BlockFP8\(tile"),
        ({"quantize": vc.BlockInt8(seed=1)}, ValueError, "has a seed, but parameters are rounded to the nearest"),
        ({"quantize_gradients": vc.MXFP8()}, TypeError, r"quantize_gradients is MXFP8\(\); give vc\.BlockInt8"),
        ({"quantize": vc.BlockFP8()}, ValueError, r"parameter '1.weight0' of shape \(33, 70\): tiles of 128 x 128"),
        ({"quantize": vc.BlockInt8(9000)}, ValueError, r"parameter '1.weight0' .*blocks of 9000 are larger"),
        ({"quantize_gradients": vc.BlockInt8(9000)}, ValueError, r"parameter '1.weight0' .*blocks of 9000 are larger"),
        (
            {"quantize": vc.BlockFP8()},
            ValueError,
            r"leave it out, by a function of its name: quantize=lambda name, param",
        ),
        (
            {"quantize": lambda name, param: "fp8" if name == "1.weight0" else None},
            TypeError,
            r"\[rank 0\] fully_shard: parameter '1.weight0': quantize is 'fp8'; give vc\.BlockFP8",
        ),
        (
            {"quantize": lambda name, param: vc.BlockInt8(seed=1)},
            ValueError,
            r"\[rank 0\] fully_shard: parameter '0.0.weight': quantize=.* has a seed",
        ),
        (
            {"quantize_gradients": lambda name, param: vc.MXFP8()},
            TypeError,
            r"\[rank 0\] fully_shard: parameter '0.0.weight': quantize_gradients is MXFP8\(\); give vc\.BlockInt8",
        ),
    ],
)
def test_what_fully_shard_refuses(options, kind, message):
    with fake_world(2):
        first = nn.ModuleList([nn.Linear(128, 128)])  # a unit that nothing is wrong with
        module = nn.Sequential(first, Holder())
        with pytest.raises(kind, match=message):
            vc.fully_shard(module, **options)
        assert all(type(param) is nn.Parameter for param in module.parameters())
        vc.fully_shard(module, quantize=vc.BlockInt8(32))  # nothing was half done


def test_what_is_no_matrix_leaves_a_unit_as_it_was():
    with fake_world(2):
        module = vc.fully_shard(nn.LayerNorm(8), quantize=vc.BlockInt8(), quantize_gradients=vc.BlockInt8())
        (buffer,) = module._vescale_unit.buffers
        assert buffer.packing is None
        assert buffer.gradient_packing is None

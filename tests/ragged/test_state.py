"""Copies, dtypes, devices and files: a RaggedDTensor stays one, with its layout, buffers and attributes."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import numbered, shard, world_mesh
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_compile.mesh import whole_mesh
from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard, RaggedShardError
from vescale_compile.ragged.redistribute import to_ragged

LAYOUT = RaggedShard((0,), (1, 3))
OTHER = RaggedShard((0,), (2, 2))
FULL = numbered((4, 3)) + 1


def in_a_buffer() -> tuple[torch.Tensor, RaggedDTensor]:
    """A flat buffer and a tensor whose shard is a view into the middle of it."""
    buffer = torch.zeros(50)
    template = shard(FULL, LAYOUT)
    ragged = template.with_local(buffer[7 : 7 + template.to_local().numel()])
    return buffer, ragged.copy_(FULL)


def assert_same(first: torch.Tensor, second: torch.Tensor) -> None:
    assert type(first) is RaggedDTensor and first.placements == second.placements
    assert first.shape == second.shape and first.stride() == second.stride()
    assert torch.equal(first.to_local(), second.to_local())


@on_ranks(2)
def test_with_local_aliases_a_view_at_an_offset() -> None:
    buffer, ragged = in_a_buffer()
    assert ragged.to_local().data_ptr() == buffer[7:].data_ptr()
    buffer.fill_(5)
    assert (ragged == 5).all()
    assert ragged.with_local(ragged.to_local().to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"must be contiguous with shape"):
        ragged.with_local(buffer)


@on_ranks(2)
def test_from_local_checks_what_it_is_given() -> None:
    mesh, local = world_mesh(), shard(FULL, LAYOUT).to_local()
    RaggedDTensor.from_local(local, mesh, [LAYOUT], shape=(4, 3), stride=(3, 1))
    for message, arguments in {
        r"rank \d of 2: RaggedShard.*this rank elements \[.*shape \(.*got shape": {"local": local[1:]},
        r"strides \(1, 4\) for shape \(4, 3\)": {"stride": (1, 4)},
        "has one RaggedShard placement": {"placements": [Shard(0)]},
        "one-dimensional mesh": {"mesh": dist.device_mesh.init_device_mesh("cpu", (2, 1))},
        "do not divide the 15 elements": {"shape": (5, 3)},
    }.items():
        given = {"local": local, "mesh": mesh, "placements": [LAYOUT], "shape": (4, 3)} | arguments
        with pytest.raises(ValueError, match=message):
            RaggedDTensor.from_local(given.pop("local"), given.pop("mesh"), given.pop("placements"), **given)


@on_ranks(2)
def test_repr_says_what_is_where_without_gathering() -> None:
    ragged = shard(FULL, LAYOUT).requires_grad_()
    held = "[0, 3)" if dist.get_rank() == 0 else "[3, 12)"
    assert repr(ragged) == (
        f"RaggedDTensor(shape=(4, 3), dtype=torch.float32, device=cpu, {LAYOUT}, "
        f"rank {dist.get_rank()} of 2 holds {held}, requires_grad=True)"
    )


@on_ranks(2)
def test_like_and_new_functions_keep_the_layout() -> None:
    _, ragged = in_a_buffer()
    for made in (
        torch.zeros_like(ragged),
        torch.empty_like(ragged, dtype=torch.float64).zero_(),
        torch.ones_like(ragged) - 1,
        torch.full_like(ragged, 0.0),
        ragged.new_empty(4, 3).zero_(),
        ragged.new_empty_strided((4, 3), (3, 1)).zero_(),
        ragged.new_zeros((4, 3)),
        ragged.new_full((4, 3), 0, dtype=torch.float32),
        ragged.new_ones((4, 3)) - 1,
    ):
        assert_same(made.float(), torch.zeros_like(ragged))
    assert type(ragged.new_zeros(5)) is torch.Tensor and ragged.new_zeros(5).shape == (5,)


@on_ranks(2)
def test_conversions_and_copies_are_of_the_shard() -> None:
    _, ragged = in_a_buffer()
    assert_same(ragged.to(torch.float64).float(), ragged)
    assert_same(ragged.bfloat16().float(), ragged)
    assert_same(ragged.clone(), ragged)
    assert ragged.clone().to_local().data_ptr() != ragged.to_local().data_ptr()
    assert_same(ragged.detach(), ragged)
    assert ragged.detach().to_local().data_ptr() == ragged.to_local().data_ptr()
    assert ragged.to("meta").is_meta
    assert_same(ragged.view(4, 3), ragged)
    assert_same(ragged.expand_as(ragged), ragged)
    assert ragged.requires_grad_().requires_grad and ragged.is_leaf


@on_ranks(2)
def test_a_flattened_tensor_is_of_the_same_memory() -> None:
    _, ragged = in_a_buffer()
    for flat in (ragged.flatten(), ragged.view(12), ragged.reshape(-1)[::1]):
        assert flat.to_local().data_ptr() == ragged.to_local().data_ptr()
        assert torch.equal(flat.full_tensor(), ragged.full_tensor().flatten())
    ragged.flatten().mul_(2).add_(ragged.clone().flatten())
    assert torch.equal(ragged.full_tensor().flatten(), ragged.flatten().full_tensor())


@pytest.mark.parametrize("shape", [(2, 6), (3, 4), (1, 4, 3), (4, 1, 3), (2, 2, 3), (12,), (4, 3)])
@on_ranks(2)
def test_a_view_in_another_shape_is_of_the_same_elements(shape: tuple[int, ...]) -> None:
    _, ragged = in_a_buffer()
    for view in (ragged.view(shape), ragged.reshape(*shape[:-1], -1)):
        assert view.to_local().data_ptr() == ragged.to_local().data_ptr()
        assert torch.equal(view.full_tensor(), FULL.view(shape))
    assert_same(ragged.view(shape).view(4, 3), ragged)


@on_ranks(2)
def test_a_dimension_of_size_1_can_be_added_and_taken_away() -> None:
    _, ragged = in_a_buffer()
    for added in (ragged[None], ragged.unsqueeze(1), ragged.unsqueeze(-1)):
        for taken in (added.squeeze(), added.squeeze(added.shape.index(1)), added.squeeze((0, 1, 2))):
            assert_same(taken, ragged)
    assert_same(ragged.squeeze(), ragged)


@on_ranks(2)
def test_no_view_has_another_number_of_elements() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size 12"):
        shard(FULL, LAYOUT).view(5, 3)


@on_ranks(2)
def test_copy_takes_the_slice_of_a_whole_tensor() -> None:
    _, ragged = in_a_buffer()
    for source in (FULL.double(), torch.ones(4, 1), torch.ones(3), torch.tensor(2.0), FULL.t().clone().t()):
        assert torch.equal(ragged.copy_(source).full_tensor(), torch.empty(4, 3).copy_(source))
    assert_same(ragged.copy_(shard(FULL, LAYOUT).double()), shard(FULL, LAYOUT))


@on_ranks(2)
def test_copy_refuses_other_layouts_and_plain_targets() -> None:
    _, ragged = in_a_buffer()
    replicated = DTensor.from_local(FULL, world_mesh(), [Replicate()])
    for source, message in ((shard(FULL, OTHER), "redistribute"), (replicated, "to_ragged")):
        with pytest.raises(RaggedShardError, match=message):
            ragged.copy_(source)
    with pytest.raises(RaggedShardError, match="write to a plain tensor"):
        torch.zeros(4, 3).copy_(ragged)
    assert_same(ragged.copy_(to_ragged(replicated, LAYOUT)), shard(FULL, LAYOUT))


@on_ranks(2)
def test_parameters_keep_their_class_and_attributes() -> None:
    param = nn.Parameter(shard(FULL, LAYOUT))
    param.tag = {"name": "weight"}
    assert type(param) is RaggedDTensor
    assert isinstance(param, nn.Parameter) and isinstance(param, DTensor)
    copied = copy.deepcopy(param)
    assert isinstance(copied, nn.Parameter) and copied.tag == param.tag and copied.requires_grad
    assert_same(copied.detach(), param.detach())


@on_ranks(2)
def test_deepcopy_keeps_the_aliasing_of_a_buffer() -> None:
    buffer, ragged = in_a_buffer()
    module = nn.Module()
    module.weight, module.bias = (
        nn.Parameter(ragged),
        nn.Parameter(ragged.with_local(buffer[20:][: ragged.to_local().numel()])),
    )
    module.register_buffer("flat", buffer)
    copied = copy.deepcopy(module)
    assert copied.weight.placements == (LAYOUT,) and copied.weight.device_mesh == world_mesh()
    copied.flat.fill_(3)
    assert (copied.weight == 3).all() and (copied.bias == 3).all()
    assert_same(module.weight.detach(), shard(FULL, LAYOUT))
    assert torch.equal(copied.weight.redistribute(placements=[OTHER]).full_tensor(), torch.full((4, 3), 3.0))


@on_ranks(2)
def test_the_copy_of_a_parameter_has_no_gradient_as_that_of_another_tensor_has() -> None:
    param, other = nn.Parameter(shard(FULL, LAYOUT)), shard(FULL, LAYOUT).requires_grad_()
    for sharded in (param, other):
        sharded.grad = torch.ones_like(sharded)
    assert copy.deepcopy(param).grad is None
    assert (copy.deepcopy(other).grad == 1).all()


@on_ranks(2)
def test_pickle_and_torch_save_round_trips() -> None:
    _, ragged = in_a_buffer()
    for tensor in (ragged, nn.Parameter(ragged), ragged[2], shard(FULL, RaggedShard((), (0, 1)))):
        assert_same(pickle.loads(pickle.dumps(tensor.detach())), tensor.detach())
        torch.save({"x": tensor}, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)["x"]
        assert isinstance(loaded, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert_same(loaded.detach(), tensor.detach())
        assert loaded.device_mesh == tensor.device_mesh
        assert torch.equal(loaded.detach().full_tensor(), tensor.detach().full_tensor())


@on_ranks(2)
def test_what_another_rank_has_saved_is_refused(tmp_path: Path) -> None:
    tensor, rank = shard(FULL, RaggedShard((0,), (2, 2))), dist.get_rank()
    torch.save(tensor, tmp_path / f"{rank}.pt")
    dist.barrier()
    own, others = (torch.load(tmp_path / f"{each}.pt", weights_only=False) for each in (rank, 1 - rank))
    assert_same(tensor.copy_(own), shard(FULL, RaggedShard((0,), (2, 2))))
    with pytest.raises(RaggedShardError, match=rf"\[rank {rank}\] .*another rank.*torch\.save"):
        tensor.copy_(others)


@on_ranks(2)
def test_load_with_weights_only() -> None:
    torch.save(shard(FULL, LAYOUT), file := io.BytesIO())
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), shard(FULL, LAYOUT))


@on_ranks(2)
def test_load_state_dict_takes_whole_and_sharded_tensors() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(shard(torch.zeros(4, 3), LAYOUT))

    module = Module()
    module.load_state_dict({"weight": FULL})
    assert_same(module.weight.detach(), shard(FULL, LAYOUT))
    module.weight.data.zero_()
    module.load_state_dict({"weight": shard(FULL, LAYOUT)})
    assert_same(module.weight.detach(), shard(FULL, LAYOUT))
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"weight": FULL[:2]})


@on_ranks(2)
def test_flatten_and_unflatten_are_inverse() -> None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    _, ragged = in_a_buffer()
    names, context = ragged.__tensor_flatten__()
    inner = {name: getattr(ragged, name) for name in names}
    rebuilt = RaggedDTensor.__tensor_unflatten__(inner, context, ragged.shape, ragged.stride())
    assert_same(rebuilt, ragged)
    assert rebuilt.to_local().data_ptr() == ragged.to_local().data_ptr()
    assert is_traceable_wrapper_subclass(ragged)


@on_ranks(2)
def test_fake_tensor_mode_makes_fake_shards() -> None:
    from torch._subclasses import FakeTensorMode

    _, ragged = in_a_buffer()
    fake = FakeTensorMode().from_tensor(nn.Parameter(ragged))
    assert type(fake) is RaggedDTensor and fake.placements == (LAYOUT,)
    assert type(fake.detach().to_local()).__name__ == "FakeTensor"
    assert fake.shape == (4, 3) and fake.to_local().shape == ragged.to_local().shape


@on_ranks(4)
def test_all_that_is_made_of_a_tensor_with_replicas_has_them_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local, layout = torch.ones(6), RaggedShard((0,), (1, 1))
    given = RaggedDTensor.from_local(local, mesh["shard"], [layout], shape=(4, 3), whole=mesh, requires_grad=True)
    (given * given).to_local().sum().backward()
    tensor = given.detach()
    made = {
        "gradient": given.grad,
        "zeros": torch.zeros_like(tensor),
        "other dtype": tensor.to(torch.bfloat16),
        "flat": tensor.view(-1),
        "rows": tensor[1:3],
        "parameter": nn.Parameter(tensor),
        "redistributed": tensor.redistribute(placements=[RaggedShard((0,), (1, 3))]),
        "copy": copy.deepcopy(tensor),
        "file": pickle.loads(pickle.dumps(tensor)),
    }
    assert {name: whole_mesh(each) == mesh for name, each in made.items()} == dict.fromkeys(made, True)

"""What a shard can't do raises, names the tensor and the rank, and says what to call; nothing is gathered."""

from collections.abc import Callable

import pytest
import torch
from cases import shard
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard, RaggedShardError

LAYOUT = RaggedShard((0,), (1, 3))

NEEDS_OTHER_ELEMENTS: dict[str, Callable[[RaggedDTensor], object]] = {
    "allclose": lambda p: torch.allclose(p, p),
    "argmax": lambda p: p.argmax(),
    "cat": lambda p: torch.cat([p, p]),
    "column": lambda p: p[:, 0],
    "cumsum": lambda p: p.cumsum(0),
    "expand": lambda p: p.expand(2, 4, 3),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "equal": lambda p: torch.equal(p, p),
    "foreach_max": lambda p: torch._foreach_max([p]),
    "indexing": lambda p: p[torch.tensor([0, 1])],
    "item": lambda p: p[0][0].item(),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 3), p),
    "matmul": lambda p: p @ torch.ones(3, 3),
    "matrix product of itself": lambda p: p @ p,
    "largest of rows": lambda p: p.max(1),
    "mean of columns": lambda p: p.mean(1),
    "norm of rows": lambda p: p.norm(dim=1),
    "permute": lambda p: p.permute(1, 0),
    "softmax": lambda p: p.softmax(-1),
    "sort": lambda p: p.sort(),
    "split": lambda p: p.chunk(2),
    "stack": lambda p: torch.stack([p, p]),
    "std": lambda p: p.std(),
    "sum of rows": lambda p: p.sum(0),
    "topk": lambda p: p.topk(1),
    "transpose": lambda p: p.t(),
    "unbind": lambda p: p.unbind(),
    "view as complex": lambda p: torch.view_as_complex(p),
    "view as another dtype": lambda p: p.view(torch.int32),
}

MIXES = {
    "plain of the same shape": lambda p: p * torch.ones(4, 3),
    "plain that broadcasts": lambda p: p + torch.ones(3),
    "plain of one element": lambda p: p + torch.ones(1),
    "plain first": lambda p: torch.ones(4, 3) - p,
    "in place on plain": lambda p: torch.ones(4, 3).add_(p),
    "in place on a plain number": lambda p: torch.ones(()).add_(p),
    "plain in place": lambda p: p.add_(torch.ones(4, 3)),
    "out is plain": lambda p: torch.add(p, p, out=torch.empty(4, 3)),
    "out has another layout": lambda p: torch.add(p, p, out=shard(torch.ones(4, 3), RaggedShard((0,), (2, 2)))),
    "a number still to be reduced": lambda p: p * DTensor.from_local(torch.ones(()), p.device_mesh, [Partial()]),
    "where": lambda p: torch.where(torch.ones(4, 3, dtype=torch.bool), p, p),
    "masked_fill": lambda p: p.masked_fill(torch.ones(4, 3, dtype=torch.bool), 0),
    "mask assignment": lambda p: p.__setitem__(torch.ones(4, 3, dtype=torch.bool), 0),
    "assignment by indices": lambda p: p.__setitem__(shard(torch.zeros(4, 3, dtype=torch.int64), LAYOUT), 0),
    "assignment by a mask of columns": lambda p: p.__setitem__((slice(None), torch.ones(3, dtype=torch.bool)), 0),
    "another layout": lambda p: p + shard(torch.ones(4, 3), RaggedShard((0,), (2, 2))),
    "another shape": lambda p: p + shard(torch.ones(1, 3), RaggedShard((), (0, 1))),
    "foreach with plain": lambda p: torch._foreach_add([p], [torch.ones(4, 3)]),
    "foreach onto plain": lambda p: torch._foreach_add_([torch.ones(4, 3)], [p]),
    "foreach onto a plain number": lambda p: torch._foreach_copy_([torch.ones(())], [p]),
    "foreach with another layout": lambda p: torch._foreach_mul(
        [p], [shard(torch.ones(4, 3), RaggedShard((0,), (2, 2)))]
    ),
    "bernoulli with probabilities": lambda p: p.bernoulli_(torch.ones(4, 3)),
}


def assert_refused(operation: Callable[[RaggedDTensor], object]) -> None:
    ragged = shard(torch.ones(4, 3), LAYOUT)
    with CommDebugMode() as comms, torch.no_grad(), pytest.raises(RaggedShardError) as error:
        operation(ragged)
    assert comms.get_total_counts() == 0
    message = str(error.value)
    rank = torch.distributed.get_rank()
    assert "aten." in message and f"rank {rank} of 2" in message
    assert "shape=(" in message and ".full_tensor()" in message
    assert torch.equal(ragged.full_tensor(), torch.ones(4, 3))


@on_ranks(2)
@pytest.mark.parametrize("operations", ["NEEDS_OTHER_ELEMENTS", "MIXES"])
def test_operations_are_refused(operations: str) -> None:
    wrong = {}
    for name, operation in globals()[operations].items():
        try:
            assert_refused(operation)
        except (Exception, pytest.fail.Exception) as error:
            wrong[name] = error
    assert not wrong, wrong


@on_ranks(2)
def test_numbers_and_0_dim_tensors_mix_in() -> None:
    ragged = shard(torch.ones(4, 3), LAYOUT)
    for result in (
        ragged * 2,
        ragged * torch.tensor(2.0),
        torch.tensor(2.0, dtype=torch.float64) * ragged,
        torch._foreach_mul([ragged], torch.tensor(2.0))[0],
        torch._foreach_mul([ragged], [torch.tensor(2.0)])[0],
        torch.where(ragged > 0, 2.0, ragged),
    ):
        assert result.dtype == torch.float32 and result.placements == (LAYOUT,)
        assert torch.equal(result.full_tensor(), torch.full((4, 3), 2.0))


@on_ranks(2)
def test_0_dim_shards_promote_dtypes_as_0_dim_tensors_do() -> None:
    scalar = shard(torch.tensor(2.0), RaggedShard((), (0, 1)))
    product = scalar * torch.tensor(2.0, dtype=torch.float64)
    assert product.dtype == torch.float64 and product.full_tensor() == 4
    assert product.full_tensor().shape == ()


@on_ranks(2)
def test_0_dim_shards_are_filled_with_numbers_in_tensors() -> None:
    for dtype in (torch.float32, torch.float64):
        scalar = shard(torch.tensor(2.0), RaggedShard((), (0, 1)))
        scalar.fill_(torch.tensor(3.0, dtype=dtype))
        assert scalar.dtype == torch.float32 and scalar.full_tensor() == 3
    assert scalar.zero_().fill_(shard(torch.tensor(4.0), RaggedShard((), (0, 1)))).full_tensor() == 4
    ragged = shard(torch.ones(4, 3), LAYOUT)
    assert torch.equal(ragged.fill_(torch.tensor(3.0)).full_tensor(), torch.full((4, 3), 3.0))
    with pytest.raises(RuntimeError, match="only supports 0-dimension value"):
        ragged.fill_(ragged.clone())


@on_ranks(2)
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format, torch.preserve_format])
def test_copies_are_of_the_same_values_whatever_the_memory_format(memory_format: torch.memory_format) -> None:
    full = torch.arange(24.0).reshape(4, 3, 2, 1)
    ragged = shard(full, RaggedShard((0,), (1, 3)))
    for copied in (ragged.clone(memory_format=memory_format), ragged.to(torch.float64, memory_format=memory_format)):
        assert copied.is_contiguous() and torch.equal(copied.full_tensor(), full.to(copied.dtype))
    assert torch.zeros_like(ragged, memory_format=memory_format).placements == ragged.placements


@on_ranks(2)
def test_0_dim_shards_on_a_device_mix_with_numbers_on_the_cpu() -> None:
    scalar = shard(torch.tensor(2.0), RaggedShard((), (0, 1)))
    on_device = scalar.with_local(scalar.to_local().to("meta"))
    assert (on_device * torch.tensor(2.0)).to_local().is_meta
    on_device.mul_(torch.tensor(2.0))


def test_the_error_is_a_not_implemented_error() -> None:
    assert issubclass(RaggedShardError, NotImplementedError)


@on_ranks(2)
def test_how_to_shard_a_whole_tensor_alike_is_said():
    ragged, whole = shard(torch.ones(4, 3), LAYOUT), torch.ones(4, 3)
    with pytest.raises(RaggedShardError, match=r"rank \d of 2.*\(4, 3\).*torch\.zeros_like\(param\)\.copy_\(whole\)"):
        ragged + whole
    assert torch.equal((ragged + torch.zeros_like(ragged).copy_(whole)).full_tensor(), whole + whole)


@on_ranks(2)
def test_a_whole_gradient_that_was_set_is_refused_in_the_next_backward():
    param = nn.Parameter(shard(torch.ones(4, 3), LAYOUT))
    param.grad = torch.ones(4, 3)
    with pytest.raises(RaggedShardError, match=r"rank \d of 2.*A gradient that is set.* sharded like their parameter"):
        (param * 2).to_local().sum().backward()
    param.grad = torch.zeros_like(param).copy_(torch.ones(4, 3))
    (param * 2).to_local().sum().backward()
    assert torch.equal(param.grad.full_tensor(), torch.full((4, 3), 3.0))


@on_ranks(2)
def test_what_libraries_make_of_a_shards_layout_by_pytorchs_own_function_can_be_copied_from():
    """Of this rank's run; or of the whole, by those that cut by PyTorch's own placements alone."""
    whole = torch.arange(12.0).reshape(4, 3)
    source = shard(whole, LAYOUT)
    for local in (source.to_local(), whole):
        target = shard(torch.zeros(4, 3), LAYOUT)
        target.copy_(plain(local, source))
        assert torch.equal(target.full_tensor(), whole)
    with pytest.raises(RaggedShardError, match=r"of shape \(5,\), is neither this rank's run nor the whole"):
        target.copy_(plain(torch.zeros(5), source))
    elsewhere = shard(whole, RaggedShard((0,), (2, 2)))
    with pytest.raises(RaggedShardError, match="to_ragged places it alike"):
        target.copy_(plain(elsewhere.to_local(), elsewhere))


@on_ranks(2)
def test_what_else_they_do_with_it_is_refused():
    source = shard(torch.ones(4, 3), LAYOUT)
    with pytest.raises(RaggedShardError, match=r"a plain DTensor under RaggedShard.*RaggedDTensor\.from_local"):
        source.add_(plain(source.to_local(), source))


def plain(local: torch.Tensor, like: RaggedDTensor) -> DTensor:
    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(local, like.device_mesh, like.placements, **layout)


@on_ranks(2)
def test_data_is_read_and_not_assigned():
    param = nn.Parameter(shard(torch.ones(4, 3), LAYOUT))
    param.data.mul_(2)
    assert param.full_tensor().sum() == 24
    for value in (torch.zeros(4, 3), param.detach() * 0):
        with pytest.raises(RaggedShardError, match=r"param\.copy_"):
            param.data = value
    assert param.full_tensor().sum() == 24


@on_ranks(2)
def test_data_is_updated_in_place():
    param = nn.Parameter(shard(torch.ones(4, 3), LAYOUT))
    param.data *= 2
    param.data -= param.detach() / 2
    assert torch.equal(param.full_tensor(), torch.ones(4, 3))


@on_ranks(2)
def test_what_is_cut_elsewhere_mixes_in_when_redistributed_as_the_refusal_says() -> None:
    ragged, other = shard(torch.ones(4, 3), LAYOUT), shard(torch.ones(4, 3), RaggedShard((0,), (2, 2)))
    with pytest.raises(
        RaggedShardError, match=r"cut elsewhere: give other\.detach\(\)\.redistribute\(placements=tensor"
    ):
        ragged.add_(other)
    ragged.add_(other.detach().redistribute(placements=ragged.placements))
    assert torch.equal(ragged.full_tensor(), torch.full((4, 3), 2.0))

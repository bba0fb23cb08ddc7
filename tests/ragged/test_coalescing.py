"""Operations that do the same to every element of a list run on shards that touch as on one tensor."""

from collections.abc import Iterator

import pytest
import torch
from kernels import Kernels
from ranks import fake_world
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.ragged.lists import coalesced
from vescale_compile.ragged.placement import RaggedShard

OPERATIONS = {
    "zero": lambda tensors, scale: torch._foreach_zero_(tensors),
    "add a number": lambda tensors, scale: torch._foreach_add_(tensors, 0.3),
    "subtract a number": lambda tensors, scale: torch._foreach_sub_(tensors, 0.3),
    "multiply by a number": lambda tensors, scale: torch._foreach_mul_(tensors, 0.3),
    "multiply by a tensor": lambda tensors, scale: torch._foreach_mul_(tensors, scale),
    "divide by a number": lambda tensors, scale: torch._foreach_div_(tensors, 0.3),
    "divide by a tensor": lambda tensors, scale: torch._foreach_div_(tensors, scale),
}


@pytest.fixture(autouse=True)
def _rank() -> Iterator[None]:
    """Each test is one of two ranks: nothing here communicates."""
    with fake_world(2):
        yield


def pieces(flat: torch.Tensor, sizes: list[int]) -> list[vc.RaggedDTensor]:
    """Sharded tensors, this rank's part of which lies in `flat`, one after another."""
    mesh = init_device_mesh("cpu", (2,))
    return [
        vc.RaggedDTensor.from_local(local, mesh, [RaggedShard((0,), (size, size))], shape=(2 * size,))
        for size, local in zip(sizes, flat.split(sizes), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_are_those_of_separate_tensors(name, dtype):
    flat = torch.randn(203).to(dtype)
    separate = [piece.clone() for piece in flat.split([1, 3, 7, 13, 50, 129])]
    together = pieces(flat, [1, 3, 7, 13, 50, 129])
    operate, scale = OPERATIONS[name], torch.tensor(0.37, dtype=dtype)
    with Kernels() as kernels:
        operate(together, scale)
    operate(separate, scale)
    assert torch.equal(flat, torch.cat(separate))
    assert [tensors for _, tensors in kernels.ran] == [1]


def test_the_order_of_the_list_does_not_matter():
    flat = torch.ones(6)
    first, second, third = pieces(flat, [1, 2, 3])
    with Kernels() as kernels:
        torch._foreach_mul_([third, first, second], 2.0)
    assert flat.tolist() == [2.0] * 6
    assert kernels.ran == [("_foreach_mul_", 1)]


def test_a_tensor_that_was_left_out_is_left_alone():
    flat = torch.ones(6)
    first, _, third = pieces(flat, [1, 2, 3])
    torch._foreach_mul_([first, third], 2.0)
    assert flat.tolist() == [2.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_a_tensor_given_twice_is_operated_on_twice():
    flat = torch.ones(3)
    first, second = pieces(flat, [1, 2])
    torch._foreach_mul_([first, second, first], 2.0)
    assert flat.tolist() == [4.0, 2.0, 2.0]


def test_plain_tensors_in_the_list_are_operated_on_too():
    flat, matrix = torch.ones(3), torch.ones(2, 2)
    torch._foreach_mul_([*pieces(flat, [1, 2]), matrix], 2.0)
    assert flat.tolist() == [2.0] * 3
    assert matrix.tolist() == [[2.0, 2.0]] * 2


def test_a_write_to_the_whole_counts_as_a_write_to_each():
    flat = torch.ones(3)
    sharded = pieces(flat, [1, 2])
    before = [tensor._local_tensor._version for tensor in sharded]
    torch._foreach_mul_(sharded, 2.0)
    assert all(tensor._local_tensor._version > old for tensor, old in zip(sharded, before, strict=True))


def test_only_flat_tensors_of_one_dtype_that_touch_become_one():
    flat = torch.zeros(12)
    matrix, gap, after = flat[:4].view(2, 2), flat[5:6], flat[6:8]
    strided, double = flat[8:12:2], torch.zeros(2, dtype=torch.float64)
    kept = coalesced([matrix, gap, after, strided, double])
    assert [tensor.shape for tensor in kept if tensor.dtype == torch.float32] == [(2, 2), (3,), (2,)]
    assert len(kept) == 4


def test_empty_tensors_are_left_out_unless_all_are():
    flat = torch.zeros(4)
    assert [tensor.numel() for tensor in coalesced([flat[:2], flat[2:2], flat[2:]])] == [4]
    assert len(coalesced([flat[:0], flat[2:2]])) == 2

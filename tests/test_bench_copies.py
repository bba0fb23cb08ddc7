"""Which bytes count as copied on the communication path: of operators, in a profile, and inside Inductor's kernels."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from copies import Copies
from inductor_kernels import Kernel, read
from profiling import profiled

pytestmark = pytest.mark.slow  # left out of `make test-fast`

WORLD = 4
N = 4096  # elements of a shard
SHARD, FULL = 4 * N, 4 * N * WORLD  # bytes


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(WORLD):
        yield


def copies(step: Callable[[], object]) -> Copies:
    return profiled(step, WORLD, torch.device("cpu")).copies


def gathered(shard: torch.Tensor) -> torch.Tensor:
    full = torch.empty(WORLD * shard.numel(), dtype=shard.dtype)
    dist.all_gather_into_tensor(full, shard)
    return full


def reduced(full: torch.Tensor) -> torch.Tensor:
    shard = torch.empty(full.numel() // WORLD, dtype=full.dtype)
    dist.reduce_scatter_tensor(shard, full)
    return shard


def test_collectives_on_the_memory_that_is_computed_on_copy_nothing() -> None:
    shard = torch.ones(N)
    assert copies(lambda: reduced(gathered(shard) * 2)) == Copies()


def test_joining_before_a_reduction_is_a_copy() -> None:
    parts = [torch.ones(N * WORLD // 2) for _ in range(2)]
    assert copies(lambda: reduced(torch.cat(parts))).by_operator == {"aten::cat": FULL}


def test_splitting_after_a_gather_is_a_copy() -> None:
    shard, parts = torch.ones(N), [torch.empty(WORLD, N // 2) for _ in range(2)]
    found = copies(lambda: torch.split_with_sizes_copy(gathered(shard).view(WORLD, N), [N // 2] * 2, dim=1, out=parts))
    assert found.copied_bytes == FULL and found.cast_bytes == 0


def test_an_operator_that_copies_a_table_of_its_own_is_counted_by_what_it_moves() -> None:
    def joined_by_one_kernel(parts: list[torch.Tensor], dim: int, chunks: int, *, out: torch.Tensor) -> torch.Tensor:
        torch.empty(len(parts)).copy_(torch.ones(len(parts)))
        return torch.add(parts[0], 0, out=out)

    library = torch.library.Library("aten", "IMPL")  # as GPUs do it
    library.impl("_chunk_cat.out", joined_by_one_kernel, "CPU")
    full = torch.ones(N * WORLD)
    try:
        found = copies(lambda: reduced(torch._chunk_cat([full], 0, 1, out=torch.empty(N * WORLD))))
    finally:
        library._destroy()
    assert found.by_operator == {"aten::_chunk_cat": FULL}


def test_copying_a_shard_to_where_it_is_gathered_from_is_a_copy() -> None:
    sources = [torch.ones(N // 2) for _ in range(2)]

    def step() -> None:
        shard = torch.empty(N)
        torch._foreach_copy_(list(shard.chunk(2)), sources)
        gathered(shard)

    assert copies(step).copied_bytes == SHARD


def test_copying_a_shard_to_its_place_in_the_gathered_buffer_is_a_copy_in() -> None:
    source = torch.ones(N)

    def step() -> None:
        full = torch.empty(WORLD * N)
        own = full.narrow(0, 0, N)
        own.copy_(source)
        dist.all_gather_into_tensor(full, own)

    found = copies(step)
    assert (found.copied_bytes, found.copy_in_bytes) == (0, SHARD)


def test_a_copy_that_changes_the_dtype_is_a_cast_of_the_bytes_written() -> None:
    shard = torch.ones(N)
    found = copies(lambda: gathered(shard.bfloat16()))
    assert (found.copied_bytes, found.cast_bytes) == (0, SHARD // 2)


def test_copies_of_other_memory_do_not_count() -> None:
    shard, other = torch.ones(N), torch.ones(N)

    def step() -> None:
        gathered(shard)
        torch.cat([other.clone(), other])

    assert copies(step) == Copies()


def test_memory_that_is_allocated_where_a_buffer_was_is_other_memory() -> None:
    elements = 2**24  # 64 MiB, which malloc maps and unmaps: the next of that size is mapped where the last was
    shard, other = torch.ones(elements // WORLD), torch.ones(elements)

    def step() -> None:
        buffers, copied = set(), set()
        for _ in range(4):
            full = gathered(shard)
            buffers.add(full.data_ptr())
            del full
            copy = other.clone()
            copied.add(copy.data_ptr())
            del copy
        assert buffers & copied  # or this test shows nothing

    assert copies(step) == Copies()


def test_copying_out_of_a_buffer_that_was_written_anew_does_not_count() -> None:
    shard, matrix, vector = torch.ones(N), torch.ones(N, 4), torch.ones(4, WORLD)

    def step() -> None:
        full = gathered(shard).view(N, WORLD)
        torch.mm(matrix, vector, out=full)
        full.clone()

    assert copies(step) == Copies()


def test_a_fused_kernels_copies_are_counted_with_its_arguments() -> None:
    shard = torch.ones(N)

    @torch.compile(dynamic=False)
    def split_and_compute(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head = torch.empty(N // 2)
        head.copy_(full[: N // 2])
        return head, full * 2

    split_and_compute(gathered(shard))
    found = copies(lambda: split_and_compute(gathered(shard)))
    assert found.copied_bytes == SHARD // 2
    assert all(name.startswith("inductor::") for name in found.by_operator)


CPP = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       const at::BFloat16* in_ptr1,
                       float* out_ptr0,
                       float* out_ptr1,
                       float* out_ptr2,
                       float* out_ptr3,
                       const int64_t ks0)
{
    auto out_ptr4 = in_out_ptr0;
    {
        auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(16));
        tmp0.store(out_ptr0 + static_cast<int64_t>(x0));
    }
    {
        auto tmp0 = at::vec::Vectorized<at::BFloat16>::loadu(in_ptr1 + static_cast<int64_t>(x0), static_cast<int64_t>(16));
        auto tmp1 = at::vec::convert<float>(tmp0);
        auto tmp2 = tmp1 + tmp1;
        tmp1.store(out_ptr1 + static_cast<int64_t>(x0));
        tmp2.store(out_ptr2 + static_cast<int64_t>(x0));
    }
    {
        auto tmp0 = in_ptr1[static_cast<int64_t>(x0)];
        auto tmp1 = in_ptr0[static_cast<int64_t>(x1 + 32L*tmp0)];
        out_ptr2[static_cast<int64_t>(x1)] = tmp1;
    }
    {
        alignas(16) float tmp0[16*16];
        transpose_mxn<float,static_cast<int64_t>(16),static_cast<int64_t>(4L),false>(in_ptr0 + static_cast<int64_t>(x1 + 4L*x2), static_cast<int64_t>(4L), tmp0, static_cast<int64_t>(16));
        auto tmp1 = at::vec::Vectorized<float>::loadu(tmp0 + static_cast<int64_t>(16L*x1_inner), static_cast<int64_t>(16));
        tmp1.store(out_ptr4 + static_cast<int64_t>(x2 + 64L*x1));
    }
    {
        auto tmp0 = static_cast<float>(0.0);
        auto tmp1 = at::vec::Vectorized<float>(tmp0);
        tmp1.store(out_ptr3 + static_cast<int64_t>(x0));
    }
    {
        auto tmp0 = ks0;
        auto tmp1 = c10::convert<float>(tmp0);
        out_ptr3[static_cast<int64_t>(x0)] = tmp1;
    }
    {
        auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(16));
        auto tmp1 = tmp0 + tmp0;
        auto tmp0 =
        [&]()
        {
            return tmp1;
        }
        ()
        ;
        tmp0.store(out_ptr3 + static_cast<int64_t>(x0));
    }
}
"""  # noqa: E501

TRITON = """
import triton
@triton.jit
def triton_poi_fused_add_copy_0(in_ptr0, in_ptr1, out_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_ptr1 + (x0 + 512*x1), xmask, eviction_policy='evict_last').to(tl.float32)
    tmp2 = tmp0 + tmp1
    tl.store(out_ptr0 + (x0), tmp2, xmask)
    tl.store(out_ptr1 + (x0), tmp1, xmask)
"""


@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [
        # Loaded and stored; with a change of dtype; through a transposed tile. Not: sums, lookups, constants, sizes,
        # what takes several lines to compute.
        ("cpp_pybinding", CPP, Kernel(copies=((1, 3), (2, 4), (1, 0)), written=(3, 4, 5, 6))),
        ("triton", TRITON, Kernel(copies=((1, 3),), written=(2, 3))),
    ],
)
def test_a_kernels_copies_are_read_from_its_source(language: str, source: str, expected: Kernel) -> None:
    assert read(source, language) == expected

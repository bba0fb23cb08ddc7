"""In-place initialization of shards gives the slice of what the unsharded tensor would hold."""

from collections.abc import Callable

import pytest
import torch
from cases import random_placement, shard, uneven
from ranks import on_ranks
from torch import nn

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard, RaggedShardError

EXACT = {
    "constant": lambda t: nn.init.constant_(t, 0.3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "uniform": lambda t: nn.init.uniform_(t, -1, 2),
    "normal": lambda t: nn.init.normal_(t, 1, 2),
    "trunc_normal by rejection": lambda t: nn.init.trunc_normal_(t, std=1.5),
    "trunc_normal in the tail": lambda t: nn.init.trunc_normal_(t, std=1.5, a=2.5, b=4),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal": nn.init.kaiming_normal_,
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "random": lambda t: t.random_(17),
    "random from": lambda t: t.random_(5, 17),
    "random full range": lambda t: t.random_(),
    "exponential": lambda t: t.exponential_(2),
    "cauchy": lambda t: t.cauchy_(),
    "geometric": lambda t: t.geometric_(0.4),
    "log_normal": lambda t: t.log_normal_(),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
    "randn_like": lambda t: t.copy_(torch.randn_like(t)),
    "randint_like": lambda t: t.copy_(torch.randint_like(t, 3, 9)),
    "erfinv of uniform": lambda t: t.uniform_(-0.9, 0.9).erfinv_().mul_(2).add_(1).clamp_(-1, 2),
    "embedding with padding": lambda t: (t.normal_(), t[3].zero_(), t[-1:].fill_(7)),
}


@on_ranks(3)
@pytest.mark.parametrize("name", EXACT)
def test_values_are_the_unsharded_ones(name: str) -> None:
    initialize: Callable = EXACT[name]
    for dtype in (torch.float32, torch.bfloat16):
        full = torch.empty(7, 5, dtype=dtype)
        ragged = nn.Parameter(shard(torch.zeros_like(full)))
        for tensor in (full, ragged):
            torch.manual_seed(3)
            with torch.no_grad():
                initialize(tensor)
                tensor.add_(torch.rand(()).item())  # the generator ends in the same state
        assert torch.equal(ragged.full_tensor(), full)


@on_ranks(2)
def test_a_generator_is_respected() -> None:
    full, ragged = torch.empty(7, 5), shard(torch.zeros(7, 5))
    for tensor in (full, ragged):
        generator = torch.Generator().manual_seed(11)
        nn.init.trunc_normal_(tensor, generator=generator)
        nn.init.normal_(tensor[2], generator=generator)
    assert torch.equal(ragged.full_tensor(), full)


@on_ranks(2)
def test_dirac_initialization_of_convolutions() -> None:
    nn.init.dirac_(full := torch.ones(4, 3, 3, 3))
    assert torch.equal(nn.init.dirac_(shard(torch.ones(4, 3, 3, 3))).full_tensor(), full)


@on_ranks(2)
def test_initialization_that_needs_the_whole_tensor_says_so() -> None:
    for initialize in (nn.init.orthogonal_, lambda t: nn.init.sparse_(t, 0.5)):
        ragged = shard(torch.zeros(4, 3))
        with pytest.raises(RaggedShardError, match=r"full_tensor"):
            initialize(ragged)
        initialize(full := torch.zeros(4, 3))
        assert torch.equal(ragged.copy_(full).full_tensor(), full)  # the way out


@on_ranks(2)
def test_nothing_is_drawn_for_meta_tensors() -> None:
    ragged = shard(torch.zeros(4, 3)).with_local(torch.empty(12 * _rank(), device="meta"))
    before = torch.get_rng_state()
    nn.init.trunc_normal_(ragged.normal_())
    assert ragged.is_meta and torch.equal(torch.get_rng_state(), before)
    assert torch.empty_like(ragged, device="cpu").to_local().device.type == "cpu"


def _rank() -> int:
    return torch.distributed.get_rank()


@on_ranks(4)
def test_rows_alias_the_tensor() -> None:
    import random

    rng = random.Random(5)
    full = torch.randn(6, 4, 3)
    for _ in range(20):
        ragged = shard(full, random_placement(rng, tuple(full.shape), 4))
        for rows in (ragged[2], ragged[1:4], ragged[-2:], ragged[:1], ragged[5][3], ragged[5][3][-1]):
            assert isinstance(rows, RaggedDTensor) and rows.is_contiguous()
        assert torch.equal(ragged[2].full_tensor(), full[2])
        assert torch.equal(ragged[1:4][-1].full_tensor(), full[3])
        assert torch.equal(ragged[5][3].full_tensor(), full[5][3])
        ragged[1:4].mul_(2)
        expected = full.clone()
        expected[1:4] *= 2
        assert torch.equal(ragged.full_tensor(), expected)


@on_ranks(2)
def test_other_slices_are_refused() -> None:
    ragged = shard(torch.zeros(4, 3))
    for view in (lambda: ragged[:, 1], lambda: ragged[::2], lambda: ragged[2:2]):
        with pytest.raises(RaggedShardError):
            view()
    with pytest.raises(IndexError):
        ragged[4]
    assert uneven(4) == RaggedShard((0,), (0, 4))

"""AdamW8bit on shards: the bits of one rank, what is communicated, what is refused."""

import pytest
import torch
import torch.distributed as dist
from adamw8bit_cases import adamw8bit, assert_same_as_unsharded, full, gradient, model, sharded, train
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import vescale_compile as vc
from vescale_compile.optim.adamw8bit_runs import runs_of
from vescale_compile.optim.adamw8bit_state import Member, in_memory_order, new_states
from vescale_compile.optim.blocks import Blocks
from vescale_compile.optim.gradients import UnusableGradients
from vescale_compile.ragged.redistribute import distribute_ragged

pytestmark = pytest.mark.slow  # left out of `make test-fast`

BLOCKS = pytest.mark.parametrize("blocks", [{}, {"block": 96}, {"tile": (16, 32)}], ids=str)


def assert_trained_as_on_one_rank(blocks: dict, *, compile: bool) -> None:
    module, reference = sharded(blocks), model()
    optimizer = adamw8bit(module.parameters(), compile=compile, **blocks)
    expected = adamw8bit(reference.parameters(), **blocks)
    train(module, optimizer)
    train(reference, expected)
    assert_same_as_unsharded(module, optimizer, reference, expected)


@on_ranks(3)
@BLOCKS
def test_weights_and_states_have_the_bits_of_one_rank(blocks: dict) -> None:
    assert_trained_as_on_one_rank(blocks, compile=False)


@on_ranks(1, 4)
def test_so_they_have_on_other_numbers_of_ranks() -> None:
    assert_trained_as_on_one_rank({}, compile=False)


@on_ranks(2)
@pytest.mark.parametrize("blocks", [{}, {"tile": (16, 32)}], ids=str)
def test_compiled_steps_have_the_bits_of_one_rank(blocks: dict) -> None:
    assert_trained_as_on_one_rank(blocks, compile=True)


@on_ranks(2)
def test_a_step_counts_as_a_write_to_the_parameter() -> None:
    for compile in (False, True):
        module = sharded({})
        optimizer = adamw8bit(module.parameters(), compile=compile)
        before = [param.to_local()._version for param in module.parameters()]
        train(module, optimizer, range(1))
        held = [param.to_local() for param in module.parameters()]
        assert all(now._version > old for now, old in zip(held, before, strict=True) if now.numel())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        matrices = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.layers = nn.ModuleList(nn.Sequential(*pair) for pair in zip(matrices, matrices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(3)
def test_after_a_backward_all_matrices_of_a_unit_are_one_run() -> None:
    module = vc.fully_shard(Stack(), granularity=vc.optim.AdamW8bit.granularity)
    module(torch.ones(1, 64)).sum().backward()
    units = in_memory_order([Member.of(param, None, Blocks()) for param in module.parameters()])
    assert [len(unit) for unit in units] == [2, 2]
    assert all(len(runs_of(unit, new_states(unit), join=True)) == 1 for unit in units)


@on_ranks(2)
def test_the_check_of_gradients_is_all_that_is_communicated() -> None:
    module = sharded({})
    for check, expected in ((True, 1), (False, 0)):
        optimizer = adamw8bit(module.parameters(), check_gradients=check)
        with CommDebugMode() as comms:
            for param in module.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
        assert comms.get_total_counts() == expected


@on_ranks(2)
def test_states_take_at_most_2_1_bytes_for_a_parameter() -> None:
    module = vc.fully_shard(nn.Linear(256, 512), granularity=vc.optim.AdamW8bit.granularity)
    optimizer = adamw8bit(module.parameters())
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for state in optimizer.state.values()
        for tensor in state.values()
        for storage in [(tensor.to_local() if isinstance(tensor, vc.RaggedDTensor) else tensor).untyped_storage()]
    }
    held = sum(param.to_local().numel() for param in module.parameters())
    assert sum(storages.values()) <= 2.1 * held


@on_ranks(2)
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank() -> None:
    module = sharded({})
    optimizer = adamw8bit(module.parameters())
    train(module, optimizer, range(1))
    before = [full(t).clone() for p in module.parameters() for t in (p, *optimizer.state[p].values())]
    for param in module.parameters():
        param.grad = gradient(param, 7)
    rank = dist.get_rank()
    if rank == 1:
        last = module[1].ragged.grad.to_local()
        last[-1] = float("nan")
    with pytest.raises(UnusableGradients, match=rf"\[rank {rank}\] AdamW8bit.*'1\.ragged'.*NaN.*on rank 1"):
        optimizer.step()
    after = [full(t) for p in module.parameters() for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@on_ranks(3)
def test_a_shard_that_cuts_a_block_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    message = rf"\[rank {rank}\].*'0\.\w+'.*cut inside a block of 256 elements: rank \d of 3 holds.*granularity"
    with pytest.raises(ValueError, match=message):
        adamw8bit(vc.fully_shard(model(), granularity=lambda name, param: vc.Elements(100)).parameters())
    with pytest.raises(ValueError, match="cut inside a block of 16 x 32"):
        adamw8bit(sharded({}).parameters(), tile=(16, 32))


@on_ranks(2)
def test_a_gradient_of_another_layout_is_refused() -> None:
    module = sharded({})
    param = module[0].even
    units = [0, param.numel()]
    param.grad = distribute_ragged(torch.zeros(64, 96), param.device_mesh, vc.RaggedShard((0, 1), units))
    for check in (True, False):
        with pytest.raises(ValueError, match=r"'0\.even'.*not sharded as"):
            adamw8bit(module.parameters(), check_gradients=check).step()


@on_ranks(2)
def test_dtensors_of_other_placements_are_refused() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    param = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.zeros(64, 64), mesh))
    with pytest.raises(TypeError, match=r"\[rank \d\].*DTensor placed by.*fully_shard"):
        vc.optim.AdamW8bit([param])


@on_ranks(2)
def test_clipping_and_grad_scaler_reduce_over_the_ranks() -> None:
    module, reference = sharded({}), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.zeros(()))
    optimizer, expected = adamw8bit(module.parameters()), adamw8bit(reference.parameters())
    for each in (module, reference):
        for ordinal, param in enumerate(each.parameters()):
            param.grad = gradient(param, ordinal)
    for param in module.parameters():
        param.grad.mul_(256.0)
    scaler.unscale_(optimizer)
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (module, reference)]
    torch.testing.assert_close(*norms)
    scaler.step(optimizer)
    expected.step()
    for param, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param), other.detach())

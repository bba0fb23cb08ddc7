"""torch.optim on RaggedDTensors: the unsharded parameters' values, bit for bit, without communication."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import shard, uneven, world_mesh
from ranks import on_ranks
from torch import optim
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_compile.ragged.placement import RaggedShard, RaggedShardError

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHAPES = [(5, 3), (7,), (1, 2, 4), ()]
STEPS = 3

LOOP_AND_FOREACH = {
    "adadelta": optim.Adadelta,
    "adagrad": optim.Adagrad,
    "adam": optim.Adam,
    "adam amsgrad": lambda p, **form: optim.Adam(p, amsgrad=True, **form),
    "adam tensor lr": lambda p, **form: optim.Adam(p, lr=torch.tensor(1e-2), **_capturable(form)),
    "adamax": optim.Adamax,
    "adamw": optim.AdamW,
    "adamw amsgrad": lambda p, **form: optim.AdamW(p, amsgrad=True, weight_decay=0.1, **form),
    "asgd": optim.ASGD,
    "nadam": optim.NAdam,
    "radam": lambda p, **form: optim.RAdam(p, betas=(0.5, 0.6), **form),
    "rmsprop": lambda p, **form: optim.RMSprop(p, momentum=0.9, centered=True, **form),
    "rprop": optim.Rprop,
    "sgd": optim.SGD,
    "sgd nesterov": lambda p, **form: optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, **form),
    "sgd tensor lr": lambda p, **form: optim.SGD(p, lr=torch.tensor(1e-2), momentum=0.9, **form),
}
FUSED = {
    name: make for name, make in LOOP_AND_FOREACH.items() if name.split()[0] in ("adagrad", "adam", "adamw", "sgd")
}


def _capturable(form: dict[str, bool]) -> dict[str, bool]:
    return form | {"foreach": False} if form.get("foreach") else form


def random_tensors(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def placement(shape: tuple[int, ...]) -> RaggedShard:
    one_hot = (0,) * (world_mesh().size() - 1) + (1,)
    return uneven(shape[0]) if len(shape) and shape[0] > 1 else RaggedShard((), one_hot)


def train(
    make: Callable[..., optim.Optimizer],
    form: dict[str, Any],
    place: Callable[..., torch.Tensor],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Parameters and optimizer states after STEPS steps."""
    params = [torch.nn.Parameter(place(p)) for p in random_tensors(shapes, 0, dtype)]
    optimizer = make(params, **form)
    for step in range(1, STEPS + 1):
        for param, grad in zip(params, random_tensors(shapes, step, dtype), strict=True):
            param.grad = place(grad)
        optimizer.step()
    states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    return [
        t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()
        for t in [*params, *states]
        if isinstance(t, torch.Tensor)
    ]


def as_ragged(full: torch.Tensor) -> torch.Tensor:
    return shard(full, placement(tuple(full.shape)))


def mixed(full: torch.Tensor) -> torch.Tensor:
    """Plain, Shard(0) and ragged parameters in one list."""
    if full.ndim == 1:
        return full.clone()
    if full.ndim == 2:
        return distribute_tensor(full, world_mesh(), [Shard(0)])
    return as_ragged(full)


def assert_equal_to_unsharded(
    make: Callable[..., optim.Optimizer],
    form: dict[str, Any],
    shapes: list[tuple[int, ...]],
    **tolerance: float,
) -> None:
    expected = train(make, form, torch.clone, shapes)
    # DTensor itself can't run Rprop's loop.
    for place in (as_ragged,) if make is optim.Rprop else (as_ragged, mixed):
        for value, reference in zip(train(make, form, place, shapes), expected, strict=True):
            torch.testing.assert_close(value, reference, **tolerance)


@on_ranks(3)
@pytest.mark.parametrize("name", LOOP_AND_FOREACH)
def test_loop_and_foreach_steps_equal_the_unsharded_ones(name: str) -> None:
    for foreach in (False, True):
        # Rprop's loop indexes with masks, which for a 0-dim parameter means a change of shape.
        shapes = SHAPES[:-1] if name == "rprop" else SHAPES
        assert_equal_to_unsharded(LOOP_AND_FOREACH[name], {"foreach": foreach}, shapes, rtol=0, atol=0)


@on_ranks(3)
@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_equal_the_unsharded_ones(name: str) -> None:
    # PyTorch's fused CPU kernels round the elements past the last whole SIMD vector differently.
    whole_vectors = [(5, 16), (64,), (6, 2, 8)]
    assert_equal_to_unsharded(FUSED[name], {"fused": True}, whole_vectors, rtol=0, atol=0)
    assert_equal_to_unsharded(FUSED[name], {"fused": True}, SHAPES, rtol=1e-6, atol=1e-7)


@on_ranks(3)
@pytest.mark.parametrize("name", ["adam", "adamw amsgrad", "adagrad", "rmsprop", "sgd"])
def test_complex_parameters_step_as_unsharded_ones(name: str) -> None:
    for foreach in (False, True):
        expected, values = (
            train(LOOP_AND_FOREACH[name], {"foreach": foreach}, place, SHAPES, torch.complex64)
            for place in (torch.clone, as_ragged)
        )
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


class OfWholeParameters(optim.Optimizer):
    """Looks at norms, as LAMB does, and at a dot product with what was before, as Prodigy does."""

    def __init__(self, params: list[torch.nn.Parameter], **form: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["before"], state["moved"] = param.flatten().clone(), torch.zeros_like(param.flatten()[::1])
            along = torch.dot(param.grad.flatten(), state["before"] - param.flatten())
            state["moved"].add_(param.grad.flatten(), alpha=1 + along.item())
            param.sub_(param.grad * (0.1 * param.norm() / param.grad.norm() * (1 + state["moved"].abs().sum())))


@on_ranks(3)
def test_an_optimizer_that_takes_norms_and_dot_products_of_whole_parameters_steps_as_the_unsharded_one() -> None:
    expected, values = (train(OfWholeParameters, {}, place, SHAPES) for place in (torch.clone, as_ragged))
    torch.testing.assert_close(values, expected)


@on_ranks(2)
def test_a_step_communicates_nothing_and_keeps_states_sharded() -> None:
    param = torch.nn.Parameter(as_ragged(torch.randn(5, 3)))
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        optimizer = optim.AdamW([param], **form)
        param.grad = as_ragged(torch.randn(5, 3))
        with CommDebugMode() as comms:
            optimizer.step()
        assert comms.get_total_counts() == 0
        state = optimizer.state[param]
        assert state["exp_avg"].placements == param.placements
        assert type(state["step"]) is torch.Tensor and state["step"].ndim == 0


@on_ranks(2)
def test_a_loaded_state_is_compared_with_its_parameter_once() -> None:
    """After that they have one mesh."""
    param = torch.nn.Parameter(as_ragged(torch.randn(5, 3)))
    param.grad = as_ragged(torch.randn(5, 3))
    optimizer = optim.AdamW([param], fused=True)
    optimizer.step()
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    state = optimizer.state[param]["exp_avg"]
    assert state.device_mesh is not param.device_mesh
    optimizer.step()
    assert state.device_mesh is param.device_mesh and state.placements is param.placements


@on_ranks(2)
def test_foreach_is_the_default_where_it_is_for_plain_tensors() -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _has_foreach_support

    supported = "_get_foreach_kernels_supported_devices"  # not the CPU, unless this says so
    param = torch.nn.Parameter(as_ragged(torch.randn(5, 3)))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
            patch.setattr(sys.modules[module], supported, lambda: ["cpu"])
        assert _default_to_fused_or_foreach([param], differentiable=False) == (False, True)
        assert _has_foreach_support([param], param.device)


@on_ranks(2)
@pytest.mark.parametrize("make", [optim.Adafactor, optim.Muon])
def test_optimizers_that_need_matrices_say_so(make: Callable[..., optim.Optimizer]) -> None:
    param = torch.nn.Parameter(as_ragged(torch.randn(5, 3)))
    param.grad = as_ragged(torch.randn(5, 3))
    optimizer = make([param])
    with pytest.raises(RaggedShardError, match=rf"shape=\(5, 3\).*rank \d of 2.*{make.__name__} looks at more"):
        optimizer.step()


@on_ranks(2)
def test_gradients_of_another_layout_are_refused() -> None:
    param = torch.nn.Parameter(shard(torch.randn(5, 3), RaggedShard((0,), (5, 0))))
    param.grad = shard(torch.randn(5, 3), RaggedShard((0,), (4, 1)))
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        with pytest.raises(RaggedShardError, match="redistribute"):
            optim.SGD([param], **form).step()


@on_ranks(3)
def test_cosine_schedule_and_zero_grad() -> None:
    def run(place: Callable[..., torch.Tensor]) -> torch.Tensor:
        first, grad = random_tensors([(5, 3), (5, 3)], seed=0)
        param = torch.nn.Parameter(place(first))
        optimizer = optim.AdamW([param], lr=0.1)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        for set_to_none in (False, True, False):
            param.grad = place(grad)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert (param.grad is None) == set_to_none
            assert set_to_none or not param.grad.any()
        return param.full_tensor() if isinstance(param, DTensor) else param

    assert torch.equal(run(as_ragged), run(torch.clone))

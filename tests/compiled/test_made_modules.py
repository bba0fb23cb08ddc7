"""What the class of a sharded module makes: modules of the original class, which slices and copies are."""

import copy
import inspect

import pytest
import torch
from ranks import fake_world, on_ranks
from torch import nn
from torch.nn.utils import prune

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.parts[:2](x * self.scale)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x):
        for weight in self.weights[-2:]:
            x = x @ weight
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(4, 4) for name in "abc"})

    def forward(self, x):
        for weight in (self.weights | {"b": torch.eye(4)}).values():
            x = x @ weight
        return x


class Scaled(nn.Module):
    def __init__(self, size: int, *, start: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((size,), start))

    def forward(self, x):
        return x * self.scale


def trained(module: nn.Module, call) -> list[torch.Tensor]:
    """What a call gives, and the gradients that it gives the module."""
    output = call(torch.ones(2, 4))
    output.square().sum().backward()
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    return [output.detach(), *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]


def compiled_if(compiled: bool, module: nn.Module):
    torch._dynamo.reset()
    return torch.compile(module, backend="vescale", options={"lowering": "eager"}) if compiled else module


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [Sliced, Listed, Named])
@on_ranks(2)
def test_slices_and_copies_in_a_forward_train_the_sharded_parameters(make, compiled):
    plain = make()
    model = vc.fully_shard(copy.deepcopy(plain))
    torch.testing.assert_close(trained(model, compiled_if(compiled, model)), trained(plain, plain))


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_a_slice_of_a_sharded_sequential_trains_its_parameters(compiled):
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = vc.fully_shard(copy.deepcopy(plain))
    torch.testing.assert_close(trained(model, compiled_if(compiled, model[:2])), trained(plain, plain[:2]))


def test_a_slice_of_a_sharded_list_has_its_parameters() -> None:
    with fake_world(2):
        model = vc.fully_shard(Listed())
        assert [*model.weights[1:].parameters()] == [*model.parameters()][1:]


def test_the_class_of_a_sharded_module_makes_unsharded_ones() -> None:
    with fake_world(2):
        made = type(vc.fully_shard(Scaled(4)))(3, start=2.0)
        assert type(made) is Scaled
        assert made.scale.tolist() == [2.0] * 3
        assert type(vc.fully_shard(made)) is not Scaled


def test_the_class_of_a_sharded_module_takes_what_the_original_takes() -> None:
    with fake_world(2):
        assert inspect.signature(type(vc.fully_shard(Scaled(4)))) == inspect.signature(Scaled)


def test_a_module_that_is_initialized_again_says_that_it_is_sharded() -> None:
    with fake_world(2):
        model = vc.fully_shard(Scaled(4))
        with pytest.raises(RuntimeError, match="'scale' is sharded, and would be replaced"):
            model.__init__(4)


def test_to_prune_a_sharded_parameter_is_refused_by_name() -> None:
    with fake_world(2):
        model = vc.fully_shard(Scaled(4))
        with pytest.raises(RuntimeError, match="'scale' is sharded, and would be replaced by a plain attribute"):
            prune.identity(model, "scale")


@on_ranks(2)
def test_a_copy_that_begins_with_new_is_sharded_as_the_original():
    model = vc.fully_shard(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    copied = copy.deepcopy(model)  # by a method of PyTorch's, which calls __new__
    assert type(copied) is type(model)
    torch.testing.assert_close(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))

"""Methods that are registered as forwards, and forwards that are set on instances: they gather, read and cast as the
module's forward does."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Autoencoder(nn.Module):
    """Has parameters of its own, which its methods read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 4)])
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def encode(self, x, *, shift=0.0):
        return self.layers[0](x) * self.scale + shift

    def decode(self, code):
        return self.layers[1](code / self.scale)

    def forward(self, x):
        return self.decode(self.encode(x))


def sharded(**options):
    model = vc.fully_shard(Autoencoder(), **options)
    for name in ("encode", "decode"):
        vc.register_forward_method(model, name)
    return model


def inputs() -> torch.Tensor:
    return torch.arange(8.0).view(2, 4) + dist.get_rank()


def gradients_of_encode(model: nn.Module, encode) -> list[torch.Tensor]:
    encode(inputs(), shift=1.0).pow(2).sum().backward()
    grads = [param.grad for param in (model.layers[0].weight, model.scale)]
    return [grad.full_tensor() if isinstance(grad, vc.RaggedDTensor) else grad for grad in grads]


def averaged(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_a_registered_method_computes_and_trains_as_the_unsharded_one(compiled):
    torch._dynamo.reset()
    plain, model = Autoencoder(), sharded()
    encode = torch.compile(model.encode, backend="vescale", options={"lowering": "eager"}) if compiled else model.encode
    torch.testing.assert_close(encode(inputs()), plain.encode(inputs()))
    torch.testing.assert_close(gradients_of_encode(model, encode), averaged(gradients_of_encode(plain, plain.encode)))


@on_ranks(2)
def test_a_method_may_be_registered_with_a_model_that_is_compiled():
    torch._dynamo.reset()
    plain = Autoencoder()
    model = torch.compile(vc.fully_shard(Autoencoder()), backend="vescale", options={"lowering": "eager"})
    torch.testing.assert_close(model(inputs()), plain(inputs()))
    vc.register_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(inputs()), plain.encode(inputs()))
    torch.testing.assert_close(model(inputs()), plain(inputs()))


@on_ranks(2)
def test_a_registered_method_gathers_a_unit_once(monkeypatch):
    gathers = []
    gather = vc.runtime.eager._gather
    monkeypatch.setattr(vc.runtime.eager, "_gather", lambda buffer: gathers.append(buffer.name) or gather(buffer))
    sharded().encode(inputs())
    assert sorted(gathers) == ["(root)", "layers.0"]


@on_ranks(2)
def test_a_registered_method_casts_as_the_forward_does():
    model = sharded(mp_policy=vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64))
    assert model.encode(inputs()).dtype == torch.float64


@on_ranks(1)
def test_a_copy_has_the_methods_of_what_it_is_a_copy_of():
    model = sharded()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.scale.zero_()
    torch.testing.assert_close(copied.encode(inputs()), Autoencoder().encode(inputs()))


@on_ranks(1)
def test_what_cannot_be_registered_is_refused():
    with pytest.raises(ValueError, match="this Autoencoder is not sharded"):
        vc.register_forward_method(Autoencoder(), "encode")
    with pytest.raises(ValueError, match="Autoencoder has no method 'encod'"):
        vc.register_forward_method(sharded(), "encod")


def halved(model: Autoencoder) -> Autoencoder:
    """Its instance has a forward of its own, as libraries set that put their kernels into models."""
    forward = model.forward
    model.forward = lambda x: forward(x) / 2
    model.layers[0].forward = lambda x: nn.functional.linear(x, model.layers[0].weight)
    return model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_forward_that_is_set_on_an_instance_computes_and_casts_as_its_class_s(when, compiled):
    torch._dynamo.reset()
    policy = vc.MixedPrecisionPolicy(output_dtype=torch.float64)
    if when == "before":
        model = vc.fully_shard(halved(Autoencoder()), mp_policy=policy)
    else:
        model = halved(vc.fully_shard(Autoencoder(), mp_policy=policy))
    run = torch.compile(model, backend="vescale", options={"lowering": "eager"}) if compiled else model
    torch.testing.assert_close(run(inputs()), halved(Autoencoder())(inputs()).double())


@on_ranks(2)
def test_what_is_set_on_an_instance_casts_its_inputs():
    model = sharded(mp_policy=vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    for name in ("forward", "encode"):
        setattr(model, name, lambda x: seen.append(x.dtype))
        getattr(model, name)(inputs())
    assert seen == [torch.bfloat16] * 2


@on_ranks(2)
def test_a_forward_that_is_put_back_is_the_one_it_was():
    model = sharded()
    for forward in (model.forward, abs):
        model.forward = forward
        before = model.forward
        model.forward = len
        model.forward = before
        assert model.forward == before
    del model.forward
    assert model.forward.__func__ is type(model).forward

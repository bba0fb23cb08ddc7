"""What ``fully_shard`` refuses, and says of it."""

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import vescale_compile as vc
from vescale_compile.mesh import simulated_on
from vescale_compile.ragged.dtensor import RaggedDTensor


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def with_a_gradient() -> nn.Module:
    model = small()
    model[1].weight.grad = torch.zeros(2, 2)
    return model


def hooked(register: str) -> nn.Module:
    model = small()
    getattr(model[0].bias, register)(lambda each: None)
    return model


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"init_process_group"):
        vc.fully_shard(small())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: vc.fully_shard(vc.fully_shard(small())), ValueError, r"\[rank 0\].* is a unit already"),
        (
            lambda: vc.fully_shard(torch.compile(small())),
            RuntimeError,
            "the module is what torch.compile returned",
        ),
        (lambda: vc.fully_shard(nn.Sequential(torch.compile(small()))), RuntimeError, "0 is what torch.compile ret"),
        (lambda: vc.fully_shard(torch.jit.script(small())), ValueError, "0 is a torch.jit.ScriptModule, whose code"),
        (
            lambda: vc.fully_shard(nn.Sequential(DistributedDataParallel(small()))),
            ValueError,
            "0 is a DistributedDataParallel",
        ),
        (
            lambda: vc.fully_shard(small(), mesh=2),
            TypeError,
            r"\[rank 0\] fully_shard: mesh is 2; give a DeviceMesh, .*init_device_mesh",
        ),
        (lambda: vc.fully_shard(nn.ReLU()), ValueError, r"fully_shard\(ReLU\): no parameters left to shard"),
        (
            lambda: vc.fully_shard(vc.fully_shard(small())[0]),
            ValueError,
            r"\[rank 0\] fully_shard\(Linear\): .*'weight' is sharded already, .* around .* inner modules first",
        ),
        (lambda: vc.fully_shard(nn.ModuleList([small()])), ValueError, "each of its elements"),
        (
            lambda: vc.fully_shard([small()]),
            TypeError,
            r"give an nn.Module \(instead of several.*the one around",
        ),
        (lambda: vc.fully_shard(small(), reshard_after_forward=2), TypeError, "give True or False"),
        (
            lambda: vc.fully_shard(small(), mp_policy=torch.bfloat16),
            TypeError,
            "mp_policy is torch.bfloat16; give",
        ),
        *(
            (
                lambda policy=policy: vc.fully_shard(small(), mp_policy=vc.MixedPrecisionPolicy(**policy)),
                TypeError,
                "mp_policy has .*; give a floating-point dtype",
            )
            for policy in ({"param_dtype": "bfloat16"}, {"reduce_dtype": torch.int8}, {"output_dtype": 16})
        ),
        (
            lambda: vc.fully_shard(small(), ignored_params=["0.weight"]),
            TypeError,
            "has '0.weight'; give a set of param",
        ),
        (lambda: vc.fully_shard(small(), ignored_params="0.weight"), TypeError, "has '0.weight'; give a set"),
        (lambda: vc.fully_shard(m := small(), ignored_params=m[0].weight), TypeError, "has a Parameter; give a set"),
        (lambda: vc.fully_shard(m := small(), ignored_params=m.named_parameters()), TypeError, "; give a set"),
        (
            lambda: vc.fully_shard(small(), mesh=init_device_mesh("cpu", (2, 2))),
            ValueError,
            r"\[rank 0\].* two dimensions without names; name them",
        ),
        (
            lambda: vc.fully_shard(small(), mesh=init_device_mesh("cpu", (1, 2, 2))),
            ValueError,
            r"\[rank 0\].* has 3 dimensions; give a 1-D mesh",
        ),
        (
            lambda: vc.fully_shard(nn.ParameterList([nn.Parameter(torch.empty(0, 3))])),
            ValueError,
            r"parameter '0' of shape \(0, 3\) has no elements: pass it in ignored_params",
        ),
        (
            lambda: vc.fully_shard(nn.Sequential(nn.LazyLinear(2))),
            ValueError,
            r"\[rank 0\].*parameter '0.weight' is lazy: .* Run a forward once before fully_shard",
        ),
        (lambda: vc.fully_shard(with_a_gradient()), ValueError, r"\[rank 0\].*'1.weight' has a gradient.* to None"),
        *(
            (lambda r=r: vc.fully_shard(hooked(r)), ValueError, r"\[rank 0\].*'0.bias' has gradient hooks.* after")
            for r in ("register_hook", "register_post_accumulate_grad_hook")
        ),
    ],
)
def test_errors_say_what_to_do(make, error, message):
    with fake_world(4), pytest.raises(error, match=message):
        make()


class Codes(torch.Tensor):
    """8-bit codes, read times a scale, as quantized weights are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "Codes":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.codes * 0.5, (args, kwargs or {}))
        return func(*args, **kwargs)


class Overriding(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """Of a library, say: with attributes of its own."""


class Plain(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "param",
    [nn.Parameter(Codes(torch.ones(4, 4, dtype=torch.int8)), requires_grad=False), Overriding(torch.ones(4, 4))],
    ids=["dispatch", "function"],
)
def test_parameters_with_operations_of_their_own_are_refused(param):
    model = small()
    model[1].weight = param
    with fake_world(4):
        with pytest.raises(ValueError, match=rf"\[rank 0\] .*'1.weight' is a {type(param).__name__}, .*ignored_params"):
            vc.fully_shard(model)
        vc.fully_shard(model, ignored_params={param})
        assert model[1].weight is param


def test_parameters_of_subclasses_without_operations_of_their_own_are_sharded():
    model = nn.ParameterList([Named(torch.ones(4)), nn.Parameter(torch.ones(4).as_subclass(Plain))])
    assert [type(param) for param in model] == [Named, Plain]
    with fake_world(4):
        vc.fully_shard(model)
        assert all(isinstance(param, RaggedDTensor) for param in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (torch.complex64, "is complex, .*view_as_real"),
        (torch.int16, "is torch.int16, which NCCL does not send: .*int32"),
    ],
)
def test_parameters_that_nccl_does_not_send_are_refused_on_gpus(dtype, why):
    model = nn.ParameterList([nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=dtype.is_complex)])
    with fake_world(4):
        with simulated_on("cuda"), pytest.raises(ValueError, match=f"'0' {why}"):
            vc.fully_shard(model)
        vc.fully_shard(model)


def test_a_model_on_a_device_that_the_process_group_can_not_communicate_from(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with (
        fake_world(4),
        pytest.raises(ValueError, match=r"\[rank 0\].* is on cpu, and .*\(cuda:nccl\)\. Move the module"),
    ):
        vc.fully_shard(small())


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_model_left_on_the_cpu_beside_gpus_is_warned_of(backend, monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: f"cpu:gloo,cuda:{backend}")
    with fake_world(2):
        vc.fully_shard(small())
    told = [str(each.message) for each in recwarn if "the model is on the CPU" in str(each.message)]
    assert len(told) == (backend == "nccl")


def test_a_parameter_in_two_meshes():
    with fake_world(4):
        model = small()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        vc.fully_shard(model[0], mesh=mesh["shard"])
        with pytest.raises(ValueError, match=r"\[rank 0\].*parameter '0.weight' is sharded over"):
            vc.fully_shard(model, mesh=mesh["replicate"])

"""Experts that are spread over ranks by the program itself, and sharded among the ranks that hold the same ones."""

from pathlib import Path
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_

import vescale_compile as vc
from vescale_compile.ragged.placement import RaggedShardError

pytestmark = pytest.mark.slow  # left out of `make test-fast`

EXPERTS, WIDTH, VOCABULARY = 4, 13, 11


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """``tokens`` are so many for the first expert, and so on."""
        parts = zip(tokens.split(counts), self.weight, strict=True)
        return torch.cat([torch.tanh(part @ weight) for part, weight in parts])


class Layer(nn.Module):
    """Sends each token to the expert that its router likes best, on its rank of ``mesh["experts"]`` if there is one."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.spread = mesh["experts"].size() if mesh is not None else 1
        self.group = mesh.get_group("experts") if mesh is not None else None
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(EXPERTS // self.spread)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = F.one_hot(expert, EXPERTS).sum(0)
        results = self._computed(tokens[order], counts) * weight[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order, results).view_as(x)

    def _computed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            return self.experts(tokens, counts.tolist())
        even = [EXPERTS // self.spread] * self.spread
        arriving = wait_tensor(all_to_all_single(counts, even, even, self.group))  # by rank, and by expert
        sent, received = (each.view(self.spread, -1).sum(1).tolist() for each in (counts, arriving))
        arrived = all_to_all_single_autograd(tokens, received, sent, self.group)
        experts = torch.arange(even[0]).repeat(self.spread).repeat_interleave(arriving, output_size=sum(received))
        by_expert = experts.argsort(stable=True)
        results = self.experts(arrived[by_expert], arriving.view(self.spread, -1).sum(0).tolist())
        return all_to_all_single_autograd(results[by_expert.argsort()], sent, received, self.group)


class Mixture(nn.Module):
    def __init__(self, mesh: DeviceMesh | None = None, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def held(name: str, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """What the ranks with this one's experts have of a parameter between them."""
    if not name.endswith("experts.weight"):
        return whole
    return whole.chunk(mesh["experts"].size())[mesh.get_local_rank("experts")]


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for layer in model.layers for param in layer.experts.parameters()]


def sharded(
    mesh: DeviceMesh,
    over: str | tuple[str, ...] = "same experts",
    around: DeviceMesh | None = None,
    layers: int = 2,
) -> nn.Module:
    """Experts over such dimensions of a mesh, and the rest over ``around``."""
    model = Mixture(mesh, layers)
    state = models.build(lambda: Mixture(layers=layers)).state_dict()
    model.load_state_dict({name: held(name, whole, mesh) for name, whole in state.items()})
    for layer in model.layers:
        vc.fully_shard(layer.experts, mesh=mesh[over])
    spread = experts_of(model)
    for module in (*model.layers, model):
        vc.fully_shard(module, mesh=around, ignored_params=spread)
    for param in spread:  # averaged among the ranks that hold it: the losses of all reach it, on each of them
        param.register_hook(lambda grad: grad / mesh["experts"].size())
    return model


# Sizes are in the graph, which is of the whole model, or there is a graph break where they are read.
@pytest.mark.parametrize(("compiled", "sizes_in_graph", "layers"), [("whole", True, 1), ("layers", False, 2)])
@on_ranks(4)
def test_training_is_that_of_the_model_on_one_rank(compiled, sizes_in_graph, layers):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=sizes_in_graph):
        compare(compiled, layers)


@on_ranks(4)
def test_training_without_compilation_is_that_of_the_model_on_one_rank():
    compare("nothing")


def compare(compiled: str, layers: int = 2) -> None:
    data = models.batches(3, VOCABULARY)
    reference, expected = models.train_unsharded(lambda: Mixture(layers=layers), data)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    model, options = sharded(mesh, layers=layers), {"lowering": "eager"}
    call = torch.compile(model, backend="vescale", fullgraph=True, options=options) if compiled == "whole" else model
    for layer in model.layers if compiled == "layers" else ():
        layer.compile(backend="vescale", options=options)
    losses = models.train(call, model.parameters(), data)
    assert losses == pytest.approx(expected, rel=1e-6)
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), held(name, whole, mesh).detach(), rtol=0, atol=1e-6)


def beside_hybrid_sharding() -> tuple[nn.Module, DeviceMesh]:
    """Experts, and what is around them, are sharded over the same ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "same experts"))
    return sharded(mesh, around=mesh), mesh


def beside_one_mesh() -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    return sharded(mesh), mesh


def with_replicas_of_experts() -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("experts", "replicate", "shard"))
    return sharded(mesh, ("replicate", "shard")), mesh


each_layout = pytest.mark.parametrize("build", [beside_one_mesh, beside_hybrid_sharding, with_replicas_of_experts])


@each_layout
@on_ranks(4)
def test_gradients_are_clipped_by_the_norm_of_all_experts_and_the_rest(build):
    (model, mesh), reference = build(), models.build(Mixture)
    for each in (model, reference):
        each(*models.batches(1, VOCABULARY)[0]).backward()
    models.average_gradients(reference)
    clipped = [(param, param.grad.clone()) for each in (model, reference) for param in each.parameters()]
    for order in (2.0, 1.0, torch.inf):
        for param, grad in clipped:
            param.grad.copy_(grad)
        norm = vc.clip_grad_norm_(model.parameters(), 0.1, order)
        torch.testing.assert_close(norm, clip_grad_norm_(reference.parameters(), 0.1, order))
        for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), held(name, whole.grad, mesh), rtol=0, atol=1e-6)


@on_ranks(4)
def test_ranks_whose_experts_have_no_gradients_count_those_of_others():
    model, mesh = beside_one_mesh()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if mesh.get_local_rank("experts") == 1:
        for param in experts_of(model):
            param.grad = None
    experts = sum(param.numel() for param in experts_of(model))
    rest = sum(param.numel() for param in model.parameters()) - experts
    norm = vc.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm, torch.tensor(float(experts + rest)).sqrt())


@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_told_to():
    params = sharded_apart(torch.float32)
    if dist.get_rank() == 1:
        params[-1].grad.fill_(torch.nan)  # of an expert, which no other rank has
    with pytest.raises(RuntimeError, match=rf"\[rank {dist.get_rank()}\] The total norm of order 2.0 .* is non-finite"):
        vc.clip_grad_norm_(params, 0.1, error_if_nonfinite=True)
    assert params[0].grad.to_local().eq(1).all()
    assert vc.clip_grad_norm_(params, 0.1).isnan()


@pytest.mark.parametrize(("foreach", "calls"), [(None, 1), (True, 1), (False, 0)])
@on_ranks(2)
def test_gradients_are_scaled_together_or_one_by_one(foreach, calls):
    params = sharded_apart(torch.float32)
    with mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as together:
        norm = vc.clip_grad_norm_(params, 1.0, foreach=foreach)
    assert together.call_count == calls
    scaled = params[0].grad.to_local()
    torch.testing.assert_close(scaled * norm, torch.ones_like(scaled))


@each_layout
@on_ranks(4)
def test_norms_of_experts_are_refused_alone_too(build):
    """PyTorch asks for them one by one, or for those of each dtype, and adds up what differs between ranks."""
    model, _ = build()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    (weight, *_) = experts_of(model)
    flat = weight.grad.flatten()
    asked = [
        lambda: clip_grad_norm_(model.parameters(), 0.1),
        lambda: clip_grad_norm_(model.parameters(), 0.1, foreach=False),
        lambda: clip_grad_norm_(experts_of(model), 0.1),
        lambda: torch.linalg.vector_norm(weight.detach().bfloat16()),
        lambda: torch.dot(flat, flat),
    ]
    for ask in asked:
        with pytest.raises(
            RaggedShardError, match=r"tensors that other ranks have others of.*vescale_compile.clip_grad"
        ):
            ask()
    clip_grad_norm_(model.head.parameters(), 0.1)


@pytest.mark.parametrize("step", [1, -1])
@on_ranks(4)
def test_a_grad_scaler_refuses_experts_of_a_dtype_of_their_own(step):
    """Whichever it is asked to unscale first: those of a dtype are unscaled together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    experts, rest = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)
    vc.fully_shard(experts, mesh=mesh["same experts"])
    vc.fully_shard(nn.Sequential(experts, rest), ignored_params=experts.parameters())
    params = [*experts.parameters(), *rest.parameters()]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer, scaler = models.sgd(params[::step]), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(RaggedShardError, match=r"tensors that other ranks have others of.* no GradScaler"):
        scaler.step(optimizer)


def sharded_apart(dtype: torch.dtype) -> list[nn.Parameter]:
    """With gradients: of what all ranks train, then of experts of this rank, with no call around both."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "same experts"))
    rest, experts = nn.Linear(4, 4), nn.Linear(4, 4, dtype=dtype)
    vc.fully_shard(experts, mesh=mesh["same experts"])
    vc.fully_shard(rest)
    params = [*rest.parameters(), *experts.parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@pytest.mark.parametrize(("dtype", "foreach"), [(torch.float32, False), (torch.bfloat16, None), (torch.float32, None)])
@pytest.mark.parametrize("step", [1, -1])
@on_ranks(2)
def test_experts_sharded_apart_from_the_rest_are_refused_together_with_it(dtype, foreach, step):
    """Though PyTorch asks for them one by one, or for those of each dtype."""
    params = sharded_apart(dtype)[::step]
    optimizer, scaler = models.sgd(params), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    asked = [lambda: clip_grad_norm_(params, 0.1, foreach=foreach), lambda: scaler.step(optimizer)]
    for ask in asked:
        with pytest.raises(RaggedShardError, match=r"tensors that other ranks have others of"):
            ask()
    assert all(param.grad.to_local().eq(1).all() for param in params)
    torch.testing.assert_close(clip_grad_norm_(params[::step][:2], 9.0, foreach=foreach), torch.tensor(20.0).sqrt())
    torch.testing.assert_close(vc.clip_grad_norm_(params, 9.0), torch.tensor(60.0).sqrt())


@on_ranks(4)
def test_an_optimizer_that_tells_all_ranks_of_a_gradient_is_for_those_of_one_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    model = sharded(mesh)
    model(*models.batches(1, VOCABULARY)[0]).backward()
    with pytest.raises(ValueError, match=r"over meshes of different ranks.* build an optimizer for each mesh"):
        vc.optim.AdamW8bit(model.parameters()).step()
    vc.optim.AdamW8bit(experts_of(model), compile=False).step()


@on_ranks(4)
def test_a_checkpoint_holds_the_experts_of_all_ranks_by_names_of_their_own(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    model = sharded(mesh)

    def apart() -> dict[str, Tensor]:
        own, state = mesh.get_local_rank("experts"), get_model_state_dict(model)
        return {f"{name}@{own}" if ".experts." in name else name: value for name, value in state.items()}

    dcp.save(apart(), checkpoint_id=tmp_path)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.0)
    dcp.load(apart(), checkpoint_id=tmp_path)
    whole = models.build(Mixture)
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().full_tensor(), held(name, whole.get_parameter(name), mesh)), name


@on_ranks(4)
def test_experts_that_other_ranks_hold_are_not_taken_for_the_same():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    model = Mixture(mesh)
    vc.fully_shard(model.layers[0].experts, mesh=mesh["same experts"])
    remedy = r"is of other ranks, over which its gradients would not be averaged.*, pass it in ignored_params"
    with pytest.raises(
        ValueError, match=rf"\[rank {dist.get_rank()}\].* parameter 'layers.0.experts.weight' .*{remedy}"
    ):
        vc.fully_shard(model)

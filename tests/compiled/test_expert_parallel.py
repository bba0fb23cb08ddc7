"""Experts that are spread over ranks by the program itself, and sharded among the ranks that hold the same ones."""

from pathlib import Path

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
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

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
    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(2))
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


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = Mixture(mesh)
    state = models.build(Mixture).state_dict()
    model.load_state_dict({name: held(name, whole, mesh) for name, whole in state.items()})
    for layer in model.layers:
        vc.fully_shard(layer.experts, mesh=mesh["same experts"])
    spread = experts_of(model)
    for module in (*model.layers, model):
        vc.fully_shard(module, ignored_params=spread)
    for param in spread:  # averaged among the ranks that hold it: the losses of all reach it, on each of them
        param.register_hook(lambda grad: grad / mesh["experts"].size())
    return model


# Sizes are in the graph, which is of the whole model, or there is a graph break where they are read.
@pytest.mark.parametrize(("compiled", "sizes_in_graph"), [("whole", True), ("layers", False)])
@on_ranks(4)
def test_training_is_that_of_the_model_on_one_rank(compiled, sizes_in_graph):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=sizes_in_graph):
        compare(compiled)


@on_ranks(4)
def test_training_without_compilation_is_that_of_the_model_on_one_rank():
    compare("nothing")


def compare(compiled: str) -> None:
    data = models.batches(3, VOCABULARY)
    reference, expected = models.train_unsharded(Mixture, data, backend=None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    model, options = sharded(mesh), {"lowering": "eager"}
    call = torch.compile(model, backend="vescale", fullgraph=True, options=options) if compiled == "whole" else model
    for layer in model.layers if compiled == "layers" else ():
        layer.compile(backend="vescale", options=options)
    losses = models.train(call, model.parameters(), data)
    assert losses == pytest.approx(expected, rel=1e-6)
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), held(name, whole, mesh).detach(), rtol=0, atol=1e-6)


@on_ranks(4)
def test_gradients_are_clipped_by_the_norm_of_all_experts_and_the_rest():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    model, reference = sharded(mesh), models.build(Mixture)
    for each in (model, reference):
        each(*models.batches(1, VOCABULARY)[0]).backward()
    models.average_gradients(reference)
    with pytest.raises(RaggedShardError, match="tensors that other ranks have others of"):
        clip_grad_norm_(model.parameters(), 0.1)
    expected = clip_grad_norm_(reference.parameters(), 0.1)
    around = [param for name, param in model.named_parameters() if ".experts." not in name]
    squares = [get_total_norm([param.grad for param in params]) ** 2 for params in (experts_of(model), around)]
    dist.all_reduce(squares[0], group=mesh.get_group("experts"))
    norm = sum(squares).sqrt()
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    torch.testing.assert_close(norm, expected)
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), held(name, whole.grad, mesh), rtol=0, atol=1e-6)


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

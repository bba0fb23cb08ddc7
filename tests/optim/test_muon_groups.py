"""Which parameters Muon takes, by rule or as told, and what it refuses."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import give_grads, random_tensors, shard, uneven, whole, world_mesh
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_compile as vc
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.optim.hidden import is_hidden_matrix
from vescale_compile.optim.muon import Muon
from vescale_compile.runtime.writes import Watch

HIDDEN = {
    "layers.0.attention.out.weight": (8, 8),
    "model.layers.3.mlp.gate_proj.weight": (16, 8),
    "bert.encoder.layer.0.attention.output.dense.weight": (8, 8),
    "model.layers.1.mlp.experts.gate_up_proj": (4, 8, 16),
    "transformer.h.0.mlp.c_fc.weight": (8, 16),
    "layers.2.mlp.shared.weight": (8, 8),
    "fc1.weight": (8, 8),
    "0.weight": (8, 8),
}
NOT_HIDDEN = {
    "model.embed_tokens.weight": (100, 8),
    "transformer.wte.weight": (100, 8),
    "shared.weight": (100, 8),
    "model.shared.weight": (100, 8),
    "vit.embeddings.position_embeddings": (1, 10, 8),
    "lm_head.weight": (100, 8),
    "model.layers.61.shared_head.head.weight": (100, 8),
    "output.weight": (100, 8),
    "classifier.1.weight": (10, 8),
    "model.layers.1.mlp.experts.gate_up_proj_bias": (4, 16),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, 8),
    "layers.0.conv1d.weight": (16, 2, 4),
    "conv.weight": (8, 8, 3, 3),
    "layers.0.norm.weight": (8,),
    "layers.0.gate.weight": (1, 8),
    "scale": (),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_matrices(name: str) -> None:
    assert is_hidden_matrix(name, torch.zeros(HIDDEN[name]))


@pytest.mark.parametrize("name", NOT_HIDDEN)
def test_other_parameters(name: str) -> None:
    assert not is_hidden_matrix(name, torch.zeros(NOT_HIDDEN[name]))


def algorithms(optimizer: Muon) -> dict[nn.Parameter, str]:
    return {param: group["algorithm"] for group in optimizer.param_groups for param in group["params"]}


def tiny_llama() -> Llama:
    return Llama(LlamaConfig(vocab_size=32, dim=16, layers=1, heads=2, kv_heads=1))


IN_TINY_LLAMA = {
    f"layers.0.{name}.weight" for name in ("attention.q", "attention.k", "attention.v", "attention.out")
} | {f"layers.0.feed_forward.{name}.weight" for name in ("gate", "up", "down")}


def test_named_parameters_are_told_apart() -> None:
    model = tiny_llama()
    chosen = algorithms(Muon(model.named_parameters()))
    assert {name for name, param in model.named_parameters() if chosen[param] == "muon"} == IN_TINY_LLAMA


@on_ranks(2)
def test_sharded_parameters_are_told_apart_without_names() -> None:
    model = vc.fully_shard(tiny_llama(), granularity=Muon.granularity)
    with warnings.catch_warnings(action="error"):
        chosen = algorithms(Muon(model.parameters()))
    assert {name for name, param in model.named_parameters() if chosen[param] == "muon"} == IN_TINY_LLAMA


def test_without_names_shapes_decide_and_a_warning_says_so() -> None:
    matrix, vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    with pytest.warns(UserWarning, match="1 matrices have no names.*named_parameters"):
        chosen = algorithms(Muon([matrix, vector]))
    assert chosen == {matrix: "muon", vector: "adamw"}


def test_a_users_groups_say_the_algorithm() -> None:
    first, second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    groups = [{"params": [first], "algorithm": "adamw", "betas": (0.5, 0.6)}, {"params": [second], "algorithm": "muon"}]
    optimizer = Muon(groups, lr=0.1, weight_decay=0.2, adamw_lr=0.3)
    assert algorithms(optimizer) == {first: "adamw", second: "muon"}
    adamw, muon = optimizer.param_groups
    assert (adamw["lr"], adamw["weight_decay"], adamw["betas"], adamw["eps"]) == (0.3, 0.2, (0.5, 0.6), 1e-8)
    assert (muon["lr"], muon["weight_decay"], muon["momentum"], muon["eps"]) == (0.1, 0.2, 0.95, 1e-7)
    assert "betas" not in muon and "momentum" not in adamw


def test_a_group_of_both_becomes_two_with_its_options() -> None:
    named = [("layers.0.weight", nn.Parameter(torch.randn(4, 4))), ("layers.0.bias", nn.Parameter(torch.randn(4)))]
    optimizer = Muon([{"params": named, "lr": 0.5, "momentum": 0.8, "betas": (0.1, 0.2)}])
    muon, adamw = optimizer.param_groups
    assert (muon["algorithm"], muon["lr"], muon["momentum"], muon["param_names"]) == ("muon", 0.5, 0.8, [named[0][0]])
    assert (adamw["algorithm"], adamw["lr"], adamw["betas"], adamw["param_names"]) == (
        "adamw",
        0.5,
        (0.1, 0.2),
        [named[1][0]],
    )


def test_adamw_groups_step_as_torch_optim_adamw_does() -> None:
    fulls = random_tensors([(6, 4), (5,)], seed=0)
    matrix = nn.Parameter(torch.randn(3, 3))
    ours, theirs = ([nn.Parameter(full.clone()) for full in fulls] for _ in range(2))
    optimizer = Muon(
        [{"params": ours, "algorithm": "adamw"}, {"params": [matrix], "algorithm": "muon"}],
        adamw_lr=0.01,
        adamw_betas=(0.8, 0.95),
        adamw_eps=1e-6,
        adamw_weight_decay=0.3,
    )
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    for step in range(3):
        grads = random_tensors([(6, 4), (5,)], seed=step)
        give_grads(ours, grads)
        give_grads(theirs, grads)
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@on_ranks(2)
def test_foreach_steps_adamw_groups_at_once_without_changing_bits() -> None:
    shapes: list[tuple[int, ...]] = [(4, 4), (5,), (3, 7)]
    stepped = []
    for foreach in (True, False):
        params = [shard(full, uneven(tuple(full.shape), seed=1)) for full in random_tensors(shapes, seed=0)]
        groups = [{"params": params[:1], "algorithm": "muon"}, {"params": params[1:], "algorithm": "adamw"}]
        optimizer = Muon(groups, foreach=foreach)
        assert optimizer.param_groups[1]["foreach"] is foreach
        for step in range(3):
            give_grads(params, random_tensors(shapes, seed=step + 1))
            optimizer.step()
        stepped.append([whole(param) for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*stepped, strict=True))


@on_ranks(2)
def test_a_step_counts_as_a_write_to_parameters_of_every_group() -> None:
    matrix, vector = (shard(full, uneven(tuple(full.shape), seed=1)) for full in random_tensors([(4, 4), (5,)], seed=0))
    optimizer = Muon([{"params": [matrix], "algorithm": "muon"}, {"params": [vector], "algorithm": "adamw"}])
    give_grads([matrix, vector], random_tensors([(4, 4), (5,)], seed=1))
    watches = [Watch([param._local_tensor]) for param in (matrix, vector)]
    optimizer.step()
    assert all(watch.is_stale() for watch in watches)


def test_a_group_added_later() -> None:
    first, second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    optimizer = Muon([{"params": [first], "algorithm": "muon"}])
    give_grads([first], [torch.randn(4, 4)])
    optimizer.step()
    optimizer.add_param_group({"params": second, "algorithm": "muon", "lr": 0.5})
    give_grads([first, second], random_tensors([(4, 4)] * 2, seed=0))
    before = second.detach().clone()
    optimizer.step()
    assert not torch.equal(second, before)


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
    "lr NaN": ({"lr": float("nan")}, "lr is nan"),
    "lr tensor": ({"lr": torch.ones(2)}, "lr is a tensor of shape (2,)"),
    "weight_decay": ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    "momentum": ({"momentum": -0.1}, "momentum is -0.1"),
    "eps": ({"eps": -1e-9}, "eps is"),
    "ns_steps": ({"ns_steps": 100}, "ns_steps is 100; it must be an int from 1 to 99"),
    "no ns_steps": ({"ns_steps": 0}, "ns_steps is 0; it must be an int from 1 to 99"),
    "ns_coefficients": ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is (1.0, 2.0)"),
    "adjust_lr_fn": ({"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'; give 'original'"),
    "exchange_bytes": ({"exchange_bytes": 0}, "exchange_bytes is 0"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_a_wrong_option(name: str) -> None:
    options, message = WRONG_OPTIONS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        Muon([{"params": [nn.Parameter(torch.randn(4, 4))], "algorithm": "muon"}], **options)


MATRIX = nn.Parameter(torch.zeros(4, 4))
VECTOR = nn.Parameter(torch.zeros(4))
WRONG_GROUPS: dict[str, tuple[Any, str]] = {
    "a vector": ({"params": [VECTOR], "algorithm": "muon"}, "of shape (4,) is no matrix [m, n]"),
    "a named vector": ({"params": [("norm.weight", VECTOR)], "algorithm": "muon"}, "parameter 'norm.weight' of shape"),
    "a kernel": ({"params": [nn.Parameter(torch.zeros(4, 3, 2, 2))], "algorithm": "muon"}, "of shape (4, 3, 2, 2)"),
    "complex": ({"params": [MATRIX.detach().to(torch.complex64)], "algorithm": "muon"}, "is complex"),
    "transposed": ({"params": [nn.Parameter(torch.zeros(4, 3).T)], "algorithm": "muon"}, "is not contiguous"),
    "algorithm": ({"params": [MATRIX], "algorithm": "sgd"}, "algorithm is 'sgd'; give 'muon' or 'adamw'"),
    "another algorithm's option": (
        {"params": [MATRIX], "algorithm": "muon", "betas": (0.9, 0.9)},
        "'betas' of 'adamw'",
    ),
    "no parameter for an option": ({"params": [MATRIX], "betas": (0.9, 0.9)}, "'betas' of 'adamw', and no parameter"),
    "the optimizer's option": ({"params": [MATRIX], "exchange_bytes": 5}, "can't be options of a group"),
    "the optimizer's name of an option": (
        {"params": [VECTOR], "algorithm": "adamw", "adamw_lr": 0.1},
        "'adamw_lr' can't be an option of a group; in a group of 'algorithm': 'adamw' its name is 'lr'",
    ),
    "foreach": (
        {"params": [VECTOR], "algorithm": "adamw", "foreach": True, "lr": torch.tensor(0.1)},
        "foreach is True and lr a tensor",
    ),
    "betas": ({"params": [VECTOR], "algorithm": "adamw", "betas": (1.0, 0.9)}, "betas is (1.0, 0.9)"),
    "what AdamW alone has": (
        {"params": [VECTOR], "algorithm": "adamw", "maximize": True},
        "maximize is True, which is not supported; leave it out",
    ),
}


@pytest.mark.filterwarnings("ignore:Muon")
@pytest.mark.parametrize("name", WRONG_GROUPS)
def test_a_wrong_group(name: str) -> None:
    group, message = WRONG_GROUPS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        Muon([group])


def test_both_groups_of_a_list_have_a_learning_rate_of_their_own() -> None:
    optimizer = Muon([("a.weight", MATRIX), ("a.bias", VECTOR)], lr=torch.tensor(0.02))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for _ in range(2):
        schedule.step(1.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.002, 0.002])


def test_no_matrix_at_all() -> None:
    with pytest.raises(ValueError, match="of 1 parameters none is a hidden matrix"):
        Muon([VECTOR])


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = Muon([{"params": [MATRIX], "algorithm": "muon"}])
    mixed = [("a.weight", nn.Parameter(torch.zeros(4, 4))), ("a.bias", nn.Parameter(torch.zeros(4)))]
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group({"params": mixed, "betas": (2.0, 2.0)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("vector", [("b", VECTOR), ("b.bias", VECTOR * 2), ("b.bias", 3)], ids=["twice", "leaf", "int"])
def test_a_vector_that_is_refused_leaves_no_group_of_the_matrices_beside_it(vector: tuple[str, Any]) -> None:
    optimizer = Muon([("a.weight", MATRIX), ("a.bias", VECTOR)])
    with pytest.raises((ValueError, TypeError), match=r"more than one|non-leaf|'b\.bias' is a int; give a tensor"):
        optimizer.add_param_group({"params": [("b.weight", nn.Parameter(torch.zeros(4, 4))), vector]})
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]


@on_ranks(2)
def test_a_sharded_vector_is_refused_by_rank_and_name() -> None:
    vector = shard(torch.zeros(6), uneven((6,), seed=0))
    with pytest.raises(ValueError, match=rf"\[rank {dist.get_rank()}\] Muon: parameter 'norm.weight' of shape \(6,\)"):
        Muon([{"params": [("norm.weight", vector)], "algorithm": "muon"}])


@on_ranks(2)
def test_other_dtensors_are_refused() -> None:
    matrix = nn.Parameter(distribute_tensor(torch.zeros(4, 4), world_mesh(), [Shard(0)]))
    with pytest.raises(ValueError, match=r"\[rank \d\] Muon: .*Shard\(dim=0\).*fully_shard"):
        Muon([{"params": [matrix], "algorithm": "muon"}])


@on_ranks(2)
def test_parameters_on_two_meshes_are_refused() -> None:
    pairs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    layout = vc.RaggedShard((), (1,))
    other = vc.RaggedDTensor.from_local(torch.zeros(16), pairs["b"], [layout], shape=(4, 4))
    params = [shard(torch.zeros(4, 4), uneven((4, 4), seed=0)), nn.Parameter(other)]
    with pytest.raises(ValueError, match="an optimizer for each mesh"):
        Muon([{"params": params, "algorithm": "muon"}])


@on_ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(value: float, where: int) -> None:
    shapes = [(6, 8), (8, 6), (7,)]
    named = [
        (name, shard(full, uneven(tuple(full.shape), seed=2)))
        for name, full in zip("abc", random_tensors(shapes, 0), strict=True)
    ]
    params = [param for _, param in named]
    optimizer = Muon(named)
    give_grads(params, random_tensors(shapes, seed=1))
    optimizer.step()
    before = [whole(t).clone() for p in params for t in (p, *optimizer.state[p].values())]
    grads = random_tensors(shapes, seed=2)
    grads[where].view(-1)[-1] = value
    give_grads(params, grads)
    holder = max(rank for rank, (a, b) in enumerate(params[where].placement.intervals(shapes[where])) if b > a)
    name = named[where][0]
    with pytest.raises(
        RuntimeError, match=rf"\[rank {dist.get_rank()}\] Muon: the gradient of parameter '{name}'.* rank {holder}\."
    ):
        optimizer.step()
    after = [whole(t) for p in params for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_ranks(3)
def test_a_gradient_that_one_rank_lacks_is_named_on_every_rank() -> None:
    shapes = [(6, 8), (8, 6)]
    named = [
        (name, shard(full, uneven(tuple(full.shape), seed=2)))
        for name, full in zip("ab", random_tensors(shapes, 0), strict=True)
    ]
    optimizer = Muon(named)
    give_grads([param for _, param in named], random_tensors(shapes, seed=1))
    if dist.get_rank() == 1:
        named[1][1].grad = None
    with pytest.raises(
        RuntimeError, match=r"parameter 'b' of shape \(8, 6\) has a gradient on rank 2 and none on rank 1"
    ):
        optimizer.step()


@on_ranks(2)
def test_ranks_that_built_different_optimizers_are_named() -> None:
    params = [shard(full, uneven((4, 4), seed=0)) for full in random_tensors([(4, 4)] * 2, seed=0)]
    give_grads(params, random_tensors([(4, 4)] * 2, seed=1))
    kinds = ("muon", "adamw") if dist.get_rank() == 1 else ("muon", "muon")
    optimizer = Muon([{"params": [p], "algorithm": kind} for p, kind in zip(params, kinds, strict=True)])
    with pytest.raises(RuntimeError, match=r"\[rank \d\] Muon: .*adamw.*rank"):
        optimizer.step()


@on_ranks(2)
def test_a_gradient_of_another_layout_is_refused() -> None:
    param = shard(torch.zeros(4, 4), vc.RaggedShard((0,), (3, 1)))
    optimizer = Muon([{"params": [param], "algorithm": "muon"}])
    param.grad = shard(torch.zeros(4, 4), vc.RaggedShard((0,), (1, 3))).detach()
    with pytest.raises(ValueError, match=r"\[rank \d\] Muon: .* not sharded as the parameter is"):
        optimizer.step()

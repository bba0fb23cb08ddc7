"""``fully_shard``: parameters, ties, what a class keeps. Its units: test_units.py; state: test_module_state.py."""

import inspect
import io
from unittest import mock

import models
import pytest
import torch
from ranks import fake_world, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import vescale_compile as vc
from vescale_compile.sharded_module import buffers_in


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_calls_for_inner_modules_and_for_the_model_share_a_mesh(shape):
    """Whose ranks PyTorch would compare where two parameters meet."""
    with fake_world(8):
        mesh = None if shape == (8,) else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        vc.fully_shard(model[0], mesh=mesh)
        vc.fully_shard(model, mesh=mesh)
        assert len({id(param.device_mesh) for param in model.parameters()}) == 1


def test_a_process_group_that_is_initialized_again_has_a_mesh_of_its_own():
    def mesh():
        return next(vc.fully_shard(nn.Linear(4, 8)).parameters()).device_mesh

    with fake_world(8):
        first = mesh()
    with fake_world(8):
        assert mesh() is not first


@on_ranks(3)
def test_parameters_are_ragged_dtensors_and_views_of_one_buffer():
    model = vc.fully_shard(models.build(models.Uneven))
    for name, param in model.named_parameters():
        assert isinstance(param, vc.RaggedDTensor) and isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert isinstance(param.placements[0], vc.RaggedShard), name
    for buffer in buffers_in(model):
        storage = buffer.shard.untyped_storage().data_ptr()
        assert {p.to_local().untyped_storage().data_ptr() for p in buffer.params} == {storage}


@on_ranks(2)
def test_tied_parameters_stay_one_parameter():
    model = models.build(models.Uneven)
    model.head = nn.Linear(13, 11, bias=False)
    model.head.weight = model.embed.weight
    vc.fully_shard(model)
    assert model.head.weight is model.embed.weight
    assert sum(slot.shape == (11, 13) for buffer in buffers_in(model) for slot in buffer.slots) == 1


class Gains(nn.Module):
    """Computes with what was noted at its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.w.gain = 2.0

    def forward(self) -> float:
        return getattr(self.w, "gain", 1.0) + getattr(self.w, "shift", 0.0)


@on_ranks(2)
def test_what_was_noted_at_a_parameter_is_read_in_a_forward():
    model = vc.fully_shard(Gains())
    model.w.shift = 0.5
    assert model() == 2.5


@on_ranks(2)
def test_ignored_parameters_stay_as_they_are():
    model = models.build(models.Uneven)
    weight = model.head.weight
    vc.fully_shard(model, ignored_params=[weight])
    assert model.head.weight is weight


@on_ranks(4)
def test_granularity_keeps_rows_and_whole_tensors_together():
    model = nn.Linear(8, 10)
    sizes = {"weight": vc.Rows(3), "bias": vc.Whole()}
    vc.fully_shard(model, granularity=lambda name, param: sizes[name])
    starts = {start for start, stop in model.weight.placements[0].intervals((10, 8)) if stop > start}
    assert all(start % 24 == 0 for start in starts)
    assert sorted(model.bias.placements[0].local_units) == [0, 0, 0, 1]


@on_ranks(2)
def test_the_class_keeps_its_name_and_isinstance():
    model = vc.fully_shard(models.build(models.Uneven))
    assert type(model).__name__ == "Uneven" and isinstance(model, models.Uneven)
    assert type(model.head).__name__ == "Linear" and isinstance(model.head, nn.Linear)
    with pytest.raises(AttributeError, match="no attribute 'wait'"):
        _ = model.head.wait


def test_forward_has_the_signature_that_libraries_look_at():
    plain = models.build(models.Uneven)
    expected = [inspect.signature(each.forward) for each in (plain, plain.head)]
    with fake_world(2):
        model = vc.fully_shard(plain)
    assert [inspect.signature(each.forward) for each in (model, model.head)] == expected


@on_ranks(2)
def test_a_hugging_face_model_generates_the_text_of_the_unsharded_one():
    """Of prompts padded on the left, whose positions ``generate`` gives only to a forward that names them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=32, eos_token_id=None)
    prompts, given = torch.tensor([[0, 0, 0, 5], [1, 2, 3, 4]]), torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])

    def text_of(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            model.transformer.wpe.weight.mul_(100)
        return model.eval().generate(prompts, attention_mask=given, max_new_tokens=12, do_sample=False, pad_token_id=0)

    unsharded, sharded = (models.build(lambda: GPT2LMHeadModel(config)) for _ in range(2))
    assert torch.equal(text_of(vc.fully_shard(sharded)), text_of(unsharded))


def test_a_model_that_is_pickled_says_what_to_save_instead():
    with fake_world(2):
        model = vc.fully_shard(models.build(models.Uneven))
        with pytest.raises(RuntimeError, match=r"sharded Uneven can't be pickled.*torch\.distributed\.checkpoint"):
            torch.save(model, io.BytesIO())


def test_a_model_on_cpus_is_not_moved_away_from_its_mesh():
    def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
        return mock.Mock(dtype=tensor.dtype, device=torch.device("cuda:0"))

    with fake_world(2, rank=1):
        model = vc.fully_shard(nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match=r"\[rank 1\] .* a mesh of cpu devices, and would be moved to cuda:0"):
            model._apply(to_gpu)


@on_ranks(2)
def test_a_tie_holds_when_one_side_is_sharded_first():
    model = models.build(models.Uneven)
    model.head = nn.Linear(13, 11, bias=False)
    model.head.weight = model.embed.weight
    vc.fully_shard(model.embed)
    vc.fully_shard(model)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, vc.RaggedDTensor)

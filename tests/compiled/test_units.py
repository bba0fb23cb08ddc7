"""Which parameters make a unit, and which of them share a buffer."""

from typing import Any
from weakref import ref

import models
import pytest
import torch
from ranks import fake_world, on_ranks
from torch import nn

import vescale_compile as vc
from vescale_compile import sharding
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.mesh import simulated_on
from vescale_compile.sharded_module import buffers_in


def unit_names(module: nn.Module) -> list[str]:
    return sorted(buffer.name for buffer in buffers_in(module))


@on_ranks(2)
def test_called_on_the_root_each_element_of_a_module_list_is_a_unit_and_the_rest_another():
    model = vc.fully_shard(models.build(models.Uneven))
    assert unit_names(model) == ["(root)", "layers.0", "layers.1"]


@on_ranks(2)
def test_elements_of_a_list_in_a_list_are_units():
    model = nn.Sequential(nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)]))
    assert unit_names(vc.fully_shard(model)) == ["0.0.0", "0.0.1", "0.1"]


@on_ranks(2)
def test_elements_of_a_dict_are_units_if_all_their_names_are_numbers():
    layers = nn.ModuleDict({"2": nn.Linear(2, 2), "3": nn.Linear(2, 2)})
    towers = nn.ModuleDict({"2": nn.Linear(2, 2), "text": nn.Linear(2, 2)})
    assert unit_names(vc.fully_shard(nn.Sequential(layers, towers))) == ["(root)", "0.2", "0.3"]


@on_ranks(2)
def test_called_on_blocks_and_then_on_the_root_each_call_makes_a_unit():
    model = models.build(models.Uneven)
    vc.fully_shard(model.layers[0])
    assert vc.fully_shard(model) is model
    assert len(unit_names(model)) == 2
    rest = next(buffer for buffer in buffers_in(model) if "embed.weight" in {slot.name for slot in buffer.slots})
    assert "layers.1.up.weight" in {slot.name for slot in rest.slots}


def test_a_parameter_tied_to_one_of_a_sharded_module_makes_no_unit_of_what_holds_it():
    encoder, decoder = models.build(models.Uneven), models.build(models.Uneven)
    decoder.embed = encoder.embed
    with fake_world(2):
        vc.fully_shard(encoder)
        vc.fully_shard(decoder)
    assert unit_names(decoder) == ["(root)", "(root)", "layers.0", "layers.1"]
    assert decoder.embed.weight is encoder.embed.weight


def test_a_root_may_have_no_parameters_but_those_of_the_units_inside():
    with fake_world(2):
        model = nn.Sequential(vc.fully_shard(nn.Linear(2, 2)), vc.fully_shard(nn.Linear(2, 2)))
        vc.fully_shard(model)
        assert unit_names(model) == ["0", "1"]
        with pytest.raises(ValueError, match="is a unit already"):
            vc.fully_shard(model)


@on_ranks(2)
def test_units_and_parameters_have_the_names_of_the_outermost_module():
    model = models.build(models.Uneven)
    for layer in model.layers:
        vc.fully_shard(layer)
    vc.fully_shard(model)
    assert unit_names(model) == ["(root)", "layers.0", "layers.1"]
    names = {slot.name for buffer in buffers_in(model) for slot in buffer.slots}
    assert names == {name for name, _ in model.named_parameters()}


@on_ranks(2)
def test_dtypes_and_frozen_parameters_have_buffers_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[0].bias.requires_grad_(False)
    vc.fully_shard(model)
    contents = {frozenset(slot.name for slot in buffer.slots) for buffer in buffers_in(model)}
    assert contents == {frozenset({"0.weight"}), frozenset({"0.bias"}), frozenset({"1.weight", "1.bias"})}


def test_what_stands_before_and_after_the_units_inside_has_a_buffer_each():
    with fake_world(2):
        model = vc.fully_shard(models.build(models.many_words))
        assert unit_names(model) == ["(root)#0", "(root)#1", "layers.0", "layers.1"]
        contents = {buffer.name: [slot.name for slot in buffer.slots] for buffer in buffers_in(model)}
    assert contents["(root)#0"] == ["embedding.weight"]
    assert sorted(contents["(root)#1"]) == ["head.weight", "norm.weight"]


def test_a_tied_embedding_and_head_are_one_parameter_in_one_buffer():
    with fake_world(2):
        tied = Llama(LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=8192, tie_embeddings=True))
        assert unit_names(vc.fully_shard(tied)) == ["(root)", "layers.0", "layers.1"]


def test_units_of_earlier_calls_part_what_stands_before_and_after_them_too():
    with fake_world(2):
        model = models.build(models.many_words)
        for layer in model.layers:
            vc.fully_shard(layer)
        assert unit_names(vc.fully_shard(model)) == ["(root)#0", "(root)#1", "layers.0", "layers.1"]


def layer_of(*rows: int) -> nn.Sequential:
    """A norm, and parts of so many rows of 4 KiB."""
    layer = nn.Sequential()
    layer.norm = nn.LayerNorm(1024)
    for index, count in enumerate(rows):
        layer.add_module(f"part{index}", nn.Linear(1024, count, bias=False))
    return layer


def buffers_of_layer(layer: nn.Module, ranks: int = 2, **options: Any) -> dict[str, set[str]]:
    """What each buffer holds where the layer is the only element of a list."""
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    with fake_world(ranks):
        buffers = buffers_in(vc.fully_shard(model, **options))
    return {
        buffer.name.removeprefix("layers."): {slot.name.removeprefix("layers.0.") for slot in buffer.slots}
        for buffer in buffers
    }


def test_parts_of_a_block_have_a_buffer_each_and_what_is_small_stays_with_the_first():
    assert buffers_of_layer(layer_of(256, 512)) == {
        "0#0": {"norm.weight", "norm.bias", "part0.weight"},
        "0#1": {"part1.weight"},
    }


def test_a_part_of_little_of_its_block_stays_with_the_first():
    assert buffers_of_layer(layer_of(512, 1024, 256)) == {
        "0#0": {"norm.weight", "norm.bias", "part0.weight", "part2.weight"},
        "0#1": {"part1.weight"},
    }


def test_parts_of_less_than_a_mebibyte_share_a_buffer():
    assert list(buffers_of_layer(layer_of(255, 255))) == ["0"]


def test_on_gpus_parts_have_sixteen_mebibytes():
    with simulated_on("cuda"):
        assert list(buffers_of_layer(layer_of(4095, 4095))) == ["0"]
        assert list(buffers_of_layer(layer_of(4096, 4096))) == ["0#0", "0#1"]


def test_a_part_is_cut_into_its_own_parts():
    layer = layer_of(512)
    layer.mlp = layer_of(512, 512)
    assert buffers_of_layer(layer) == {
        "0#0": {"norm.weight", "norm.bias", "part0.weight"},
        "0#1": {"mlp.norm.weight", "mlp.norm.bias", "mlp.part0.weight"},
        "0#2": {"mlp.part1.weight"},
    }


def test_parameters_of_one_module_are_its_parts():
    layer = nn.Sequential()
    layer.experts = nn.Module()
    layer.experts.gate_up, layer.experts.down = (nn.Parameter(torch.ones(512, 1024)) for _ in range(2))
    assert buffers_of_layer(layer) == {"0#0": {"experts.gate_up"}, "0#1": {"experts.down"}}


def test_a_list_inside_a_part_is_not_cut_because_ranks_may_use_different_experts_of_it():
    layer = layer_of(1024)
    layer.moe = nn.Module()
    layer.moe.experts = nn.ModuleList(nn.Linear(1024, 512, bias=False) for _ in range(2))
    assert buffers_of_layer(layer)["0#1"] == {"moe.experts.0.weight", "moe.experts.1.weight"}


def test_on_more_ranks_parts_are_larger():
    assert list(buffers_of_layer(layer_of(512, 512), ranks=8)) == ["0#0", "0#1"]
    assert list(buffers_of_layer(layer_of(512, 512), ranks=16)) == ["0"]


def test_a_block_is_not_cut_where_its_parts_would_be_padded_more_than_the_whole():
    layer = layer_of(512, 512)  # two matrices, one for each rank
    assert list(buffers_of_layer(layer, granularity=lambda name, param: vc.Whole())) == ["0"]


def test_what_a_block_lists_are_its_parts():
    layer = nn.Sequential()
    layer.parts = nn.ModuleList(nn.Linear(1024, 512, bias=False) for _ in range(2))
    assert buffers_of_layer(layer) == {"0#0": {"parts.0.weight"}, "0#1": {"parts.1.weight"}}


def test_a_parameter_that_two_parts_share_has_one_buffer():
    layer = layer_of(512, 512)
    layer.part1.weight = layer.part0.weight
    assert list(buffers_of_layer(layer)) == ["0"]


def test_a_block_that_fully_shard_is_called_on_has_one_buffer():
    with fake_world(2):
        assert len(buffers_in(vc.fully_shard(layer_of(256, 512)))) == 1


def test_what_parameters_were_is_freed_with_their_unit(monkeypatch):
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)]), nn.Linear(4, 2))
    originals = {name: ref(param) for name, param in model.named_parameters()}
    left, sharded_alone = [], sharding.allocate

    def allocate(*args):
        left.append({name for name, original in originals.items() if original() is not None})
        return sharded_alone(*args)

    monkeypatch.setattr(sharding, "allocate", allocate)
    with fake_world(2):
        vc.fully_shard(model)
    first, second, last = {"0.0.weight", "0.0.bias"}, {"0.1.weight", "0.1.bias"}, {"1.weight", "1.bias"}
    assert left == [first | second | last, second | last, last]
    assert all(original() is None for original in originals.values())

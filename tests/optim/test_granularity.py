"""``fully_shard(granularity=...)``: from optimizers, and from several users of blocks."""

import pytest
import torch
from ranks import fake_world
from torch import nn

import vescale_compile as vc
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.optim import AdamW8bit, Shampoo
from vescale_compile.planner import combine


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(50, 200))
        self.stack = nn.Parameter(torch.zeros(3, 40, 72))
        self.long = nn.Parameter(torch.zeros(5000))
        self.bias = nn.Parameter(torch.zeros(70))


def stops(world_size: int, granularity: object) -> dict[str, list[int]]:
    """Where ranks end in each parameter, its end apart."""
    with fake_world(world_size):
        model = vc.fully_shard(Matrices(), granularity=granularity)
        return {
            name: [stop for _, stop in param.placement.intervals(param.shape) if stop < param.numel()]
            for name, param in model.named_parameters()
        }


@pytest.mark.parametrize(
    ("granularities", "shape", "expected"),
    [
        ([], (8, 6), None),
        ([None, None], (8, 6), None),
        ([vc.Elements(4), vc.Elements(6)], (8, 6), vc.Elements(12)),
        ([vc.Rows(4), vc.Rows(6), None], (8, 6), vc.Rows(12)),
        ([vc.Rows(2), vc.Elements(8)], (8, 6), vc.Rows(4)),
        ([vc.Rows(2), vc.Elements(8)], (48,), vc.Rows(8)),
        ([vc.Rows(2), vc.Whole(), None], (8, 6), vc.Whole()),
    ],
)
def test_several_granularities_combine_to_the_least_that_suits_all(
    granularities: list, shape: tuple[int, ...], expected: object
) -> None:
    assert combine(granularities, shape) == expected


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_optimizer_states_the_blocks_that_shards_keep(world_size: int) -> None:
    cuts = stops(world_size, AdamW8bit.granularity)
    assert all(stop % 256 == 0 for name in ("wide", "stack", "long") for stop in cuts[name])


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_tiles_keep_whole_rows(world_size: int) -> None:
    cuts = stops(world_size, AdamW8bit.granularity_for(tile=(16, 8), block=64))
    assert all(stop % (16 * 200) == 0 for stop in cuts["wide"])
    assert all(stop % (16 * 72) == 0 for stop in cuts["stack"])
    assert all(stop % 64 == 0 for stop in cuts["long"])


def test_small_parameters_are_cut_anywhere() -> None:
    assert AdamW8bit.granularity("bias", torch.zeros(70)) is None


def test_a_list_keeps_the_blocks_of_all() -> None:
    rows = {"wide": vc.Rows(3), "stack": vc.Whole()}
    cuts = stops(4, [AdamW8bit.granularity_for(block=64), lambda name, param: rows.get(name)])
    assert all(stop % 64 == 0 and stop % 600 == 0 for stop in cuts["wide"])
    assert set(cuts["stack"]) <= {0}


def test_a_granularity_is_a_function_or_a_list_of_them() -> None:
    with fake_world(2):
        for wrong in (vc.Rows(4), [AdamW8bit.granularity, vc.Rows(4)], "rows", AdamW8bit):
            with pytest.raises(TypeError, match=r"granularity is .*give a function"):
                vc.fully_shard(Matrices(), granularity=wrong)


def test_an_answer_that_is_no_granularity_names_the_parameter() -> None:
    with (
        fake_world(2),
        pytest.raises(TypeError, match=r"^\[rank 0\] fully_shard: parameter 'wide': granularity is 4; give Elements"),
    ):
        vc.fully_shard(Matrices(), granularity=[AdamW8bit.granularity, lambda name, param: 4])


def test_a_tile_larger_than_a_parameter_names_rank_and_parameter() -> None:
    with (
        fake_world(2),
        pytest.raises(ValueError, match=r"^\[rank 0\] fully_shard: .*'wide'.*64 x 64 is larger than the tensor"),
    ):
        vc.fully_shard(Matrices(), granularity=AdamW8bit.granularity_for(tile=(64, 64)))


def test_shampoo_takes_layers_that_were_sharded_one_by_one() -> None:
    # In a layer its "attention.out" has no number before it, as a model's head "out".
    granularity = Shampoo.granularity_for(block=8)
    with fake_world(4):
        model = Llama(LlamaConfig(vocab_size=32, dim=64, layers=2, heads=2, kv_heads=1))
        for module in (*model.layers, model):
            vc.fully_shard(module, granularity=granularity)
        optimizer = Shampoo(model.named_parameters(), block=8)
    (matrices,) = (group["params"] for group in optimizer.param_groups if group["algorithm"] == "shampoo")
    assert len(matrices) == 2 * 7

"""Published shapes, the padding reached on them, and what other systems pad."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, LlamaConfig, PreTrainedConfig

from vescale_compile.planner import Granularity, Rows, TensorSpec, plan_unit
from vescale_compile.planner.baselines import fsdp2_padding, megatron_fsdp_padding
from vescale_compile.planner.models import PUBLISHED, Shapes, published
from vescale_compile.planner.report import report


def on_matrices(rows: int):
    def rule(name: str, shape: tuple[int, ...]) -> Granularity | None:
        return Rows(rows) if len(shape) > 1 and not name.endswith("bias") else None

    return rule


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama-3-70b", 70.6), ("gpt-oss-120b", 116.8), ("deepseek-v3-671b", 671.0), ("kimi-k2-1t", 1026.4)],
)
def test_the_shapes_add_up_to_the_published_size(model: str, billions: float) -> None:
    assert published(model).numel / 1e9 == pytest.approx(billions, abs=0.05)


def parameters(config: PreTrainedConfig) -> Shapes:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


LLAMA = LlamaConfig(
    hidden_size=8192,
    vocab_size=128256,
    num_hidden_layers=1,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
)


@pytest.mark.parametrize(
    ("model", "config"), [("llama-3-70b", LLAMA), ("gpt-oss-120b", GptOssConfig(num_hidden_layers=1))]
)
def test_the_shapes_are_those_of_transformers(model: str, config: PreTrainedConfig) -> None:
    units = published(model).units
    assert units["model.layers.0"] | units["embedding"] | units["head"] == parameters(config)


def test_the_shapes_of_deepseek_v3_are_those_of_transformers_but_for_its_fused_experts() -> None:
    units = published("deepseek-v3-671b").units
    wanted = parameters(DeepseekV3Config(num_hidden_layers=4))
    for layer in ("model.layers.0", "model.layers.3"):
        ours = {name: shape for name, shape in units[layer].items() if ".experts." not in name}
        theirs = {name: shape for name, shape in wanted.items() if name.startswith(f"{layer}.")}
        fused = {name: shape for name, shape in theirs.items() if ".experts." in name}
        assert ours == {name: shape for name, shape in theirs.items() if name not in fused}
        experts = [shape for name, shape in units[layer].items() if ".experts." in name]
        assert sum(map(math.prod, experts)) == sum(map(math.prod, fused.values()))


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no model 'gpt-5' in the table; it has llama-3-70b, gpt-oss-120b"):
        published("gpt-5")


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-v3-671b", "kimi-k2-1t"])
def test_blocks_of_1_and_16_rows_pad_at_most_3_percent_up_to_1024_ranks(model: str, rows: int) -> None:
    units = published(model).specs(2, on_matrices(rows))
    for world_size in (8, 64, 128, 512, 1024):
        assert report(units, world_size, advise=False).total.padding_percent <= 3


def test_blocks_of_16_rows_of_llama_on_1024_ranks_pad_what_the_bound_demands() -> None:
    layer = published("llama-3-70b").specs(2, on_matrices(16))["model.layers.0"]
    plan = plan_unit(layer, 1024)
    assert plan.padding_percent == pytest.approx(9.80, abs=0.005)
    assert len(plan.buffers) == 1 and plan.shard_numel == plan.joint_lower_bound


def test_a_moe_layer_of_deepseek_v3_in_blocks_of_128_rows_on_512_ranks_is_at_the_bound() -> None:
    layer = published("deepseek-v3-671b").specs(2, on_matrices(128))["model.layers.3"]
    (buffer,) = plan_unit(layer, 512).buffers
    assert buffer.shard_numel == buffer.lower_bound
    assert buffer.padding_percent == pytest.approx(2.64, abs=0.005)


@pytest.mark.parametrize("world_size", [1024, 32768])
@pytest.mark.parametrize("model", PUBLISHED)
def test_shard_sizes_of_published_models_are_at_their_bound(model: str, world_size: int) -> None:
    units = published(model).specs(2, on_matrices(32))
    assert report(units, world_size, advise=False).total.gap_percent < 0.01


@pytest.mark.parametrize("shapes", [[(10, 3), (7,), (4, 2, 5), ()], [(16, 8)]])
def test_fsdp2_pads_what_chunking_dimension_0_pads(shapes: list[tuple[int, ...]]) -> None:
    world_size, expected = 4, 0
    for shape in shapes:
        tensor = torch.empty(shape or (1,))
        expected += world_size * tensor.chunk(world_size)[0].numel() - tensor.numel()
    specs = [TensorSpec(f"t{i}", shape, 4) for i, shape in enumerate(shapes)]
    assert fsdp2_padding(specs, world_size) == expected


def test_megatron_fsdp_rounds_up_to_ranks_times_the_common_multiple_of_rows() -> None:
    specs = [TensorSpec("a", (10, 6), 2), TensorSpec("b", (5, 4), 2), TensorSpec("c", (3,), 2)]
    assert megatron_fsdp_padding(specs, 4) == 96 - 83


def test_a_report_counts_equal_units_once_and_weighs_the_total_by_elements() -> None:
    units = {
        **{f"layers.{i}": [TensorSpec(f"layers.{i}.w", (24, 8), 4, Rows(1))] for i in range(3)},
        "rest": [TensorSpec("e", (1, 8), 4, Rows(1))],
    }
    planned = report(units, 2, advise=False)
    assert [(row.name, row.count, row.padding_percent) for row in planned.rows] == [
        ("layers.0", 3, 0),
        ("rest", 1, 100),
    ]
    assert planned.total.numel == 3 * 192 + 8
    assert planned.total.padding_percent == pytest.approx(100 * 8 / 584)

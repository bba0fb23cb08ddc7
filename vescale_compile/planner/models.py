"""Shapes of published models in units: each layer, and what stands before and after.

``fully_shard`` may gather large parts of a layer apart; here each layer is one unit.

Sources, read as ``torch.nn`` shapes (a linear layer from ``in`` to ``out`` is ``(out, in)``):

- Llama-3-70B: ``meta-llama/Meta-Llama-3-70B``, config.json; arXiv 2407.21783, table 3.
- GPT-OSS-120B: ``openai/gpt-oss-120b``, config.json; shapes of transformers' ``GptOssForCausalLM``, where the
  experts of a layer are one fused parameter for each projection, stored ``(experts, in, out)``.
- DeepSeek-V3-671B: ``deepseek-ai/DeepSeek-V3``, config.json; arXiv 2412.19437, section 4.2. As published, one
  matrix for each expert and projection; without the multi-token-prediction module.
- Kimi-K2-1T: ``moonshotai/Kimi-K2-Base``, config.json; arXiv 2507.20534. DeepSeek-V3's architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vescale_compile.planner.spec import Granularity, TensorSpec

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelShapes:
    """Names and shapes of a model's parameters, unit by unit; names are unique within the model."""

    units: Mapping[str, Shapes]

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for unit in self.units.values() for shape in unit.values())

    def specs(
        self, itemsize: int, granularity: Callable[[str, tuple[int, ...]], Granularity | None]
    ) -> dict[str, list[TensorSpec]]:
        """The units as the planner takes them; ``granularity`` maps a name and a shape to a block."""
        return {
            unit: [TensorSpec(name, shape, itemsize, granularity(name, shape)) for name, shape in shapes.items()]
            for unit, shapes in self.units.items()
        }


def published(model: str) -> ModelShapes:
    """The shapes of one of ``PUBLISHED``.

    Raises:
        KeyError: the model is not in the table.
    """
    if model not in PUBLISHED:
        raise KeyError(f"no model {model!r} in the table; it has {', '.join(PUBLISHED)}")
    layers, config = PUBLISHED[model]
    units = {
        f"model.layers.{i}": {f"model.layers.{i}.{key}": shape for key, shape in layer.items()}
        for i, layer in enumerate(layers(config))
    }
    embedding = (config["vocab_size"], config["hidden_size"])
    head: Shapes = {"model.norm.weight": embedding[1:], "lm_head.weight": embedding}
    return ModelShapes({**units, "embedding": {"model.embed_tokens.weight": embedding}, "head": head})


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _norms(hidden: int) -> Shapes:
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _attention(config: Mapping[str, Any]) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }


def _llama(config: Mapping[str, Any]) -> list[Shapes]:
    hidden = config["hidden_size"]
    layer = _attention(config) | _mlp("mlp", hidden, config["intermediate_size"]) | _norms(hidden)
    return [layer] * config["num_hidden_layers"]


def _gpt_oss(config: Mapping[str, Any]) -> list[Shapes]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    attention = _attention(config)
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in attention.items()}
    sinks: Shapes = {"self_attn.sinks": (config["num_attention_heads"],)}
    mlp: Shapes = {
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    return [sinks | attention | biases | mlp | _norms(hidden)] * config["num_hidden_layers"]


def _deepseek_v3(config: Mapping[str, Any]) -> list[Shapes]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query_rank, value_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    inner, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    attention: Shapes = {
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), query_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (value_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (value_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), value_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    dense = attention | _mlp("mlp", hidden, config["intermediate_size"]) | _norms(hidden)
    sparse = attention | {"mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        sparse |= _mlp(f"mlp.experts.{expert}", hidden, inner)
    sparse |= _mlp("mlp.shared_experts", hidden, inner * config["n_shared_experts"]) | _norms(hidden)
    first = config["first_k_dense_replace"]
    return [dense] * first + [sparse] * (config["num_hidden_layers"] - first)


_LLAMA_3_70B = {
    "hidden_size": 8192,
    "vocab_size": 128256,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

_GPT_OSS_120B = {
    "hidden_size": 2880,
    "vocab_size": 201088,
    "num_hidden_layers": 36,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,  # of every other layer, the first among them
}

_DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_KIMI_K2 = _DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
}

PUBLISHED: dict[str, tuple[Callable[[Mapping[str, Any]], list[Shapes]], Mapping[str, Any]]] = {
    "llama-3-70b": (_llama, _LLAMA_3_70B),
    "gpt-oss-120b": (_gpt_oss, _GPT_OSS_120B),
    "deepseek-v3-671b": (_deepseek_v3, _DEEPSEEK_V3),
    "kimi-k2-1t": (_deepseek_v3, _KIMI_K2),
}

"""The mixture of experts of the examples."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from vescale_compile.examples.moe import SIZES, Experts, MoeConfig, MoeLlama

TINY = SIZES["tiny"]
ROOMY = replace(TINY, capacity_factor=float(TINY.experts))  # room for every token in every expert


def experts_of(config: MoeConfig) -> Experts:
    torch.manual_seed(0)
    experts = Experts(config)
    experts.reset_parameters(0.02)
    return experts


def test_with_room_for_all_each_token_gets_its_experts_weighted() -> None:
    experts, x = experts_of(ROOMY), torch.randn(2, 5, TINY.dim)
    weights, chosen = experts.router(x).softmax(-1).topk(TINY.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    every = torch.einsum(
        "bleh,ehd->bled",
        F.silu(torch.einsum("bld,edh->bleh", x, experts.gate)) * torch.einsum("bld,edh->bleh", x, experts.up),
        experts.down,
    )
    expected = (every * torch.zeros(2, 5, TINY.experts).scatter(2, chosen, weights).unsqueeze(-1)).sum(2)
    torch.testing.assert_close(experts(x), expected)


def test_tokens_beyond_an_experts_capacity_pass_by_it() -> None:
    config = replace(TINY, experts=2, top_k=1, capacity_factor=0.5)  # 1 of 4 tokens for each expert
    slots, sources = experts_of(config).assign(torch.tensor([[1], [0], [1], [0]]))
    assert slots.tolist() == [[1], [0], [2], [2]]
    assert sources.tolist() == [[1], [0]]


def test_the_slot_of_a_token_holds_that_token() -> None:
    chosen = torch.randint(TINY.experts, (40, 1), generator=torch.Generator().manual_seed(3))
    slots, sources = experts_of(replace(TINY, top_k=1)).assign(chosen)
    capacity = sources.shape[1]
    for token, (slot,) in enumerate(slots.tolist()):
        if slot < sources.numel():
            assert sources.flatten()[slot] == token and slot // capacity == chosen[token]
    empty_or_used = sources.flatten().tolist()
    assert sorted(token for token in empty_or_used if token < 40) == [
        token for token, (slot,) in enumerate(slots.tolist()) if slot < sources.numel()
    ]


@pytest.mark.parametrize("size", SIZES)
def test_expert_weights_are_fused(size: str) -> None:
    with torch.device("meta"):
        model = MoeLlama(SIZES[size])
    config, experts = SIZES[size], model.layers[0].get_submodule("feed_forward")
    assert isinstance(experts, Experts)
    assert experts.gate.shape == experts.up.shape == (config.experts, config.dim, config.ffn_dim)
    assert experts.down.shape == (config.experts, config.ffn_dim, config.dim)


def test_the_larger_size_has_the_parameters_that_it_is_named_for() -> None:
    with torch.device("meta"):
        model = MoeLlama(SIZES["50M"])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(50e6, rel=0.01)


def test_one_static_graph_computes_the_same_as_the_module() -> None:
    torch.manual_seed(0)
    model = MoeLlama(TINY)
    tokens = torch.randint(TINY.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    expected, found = model(tokens, tokens), compiled(tokens, tokens)
    torch.testing.assert_close(found, expected)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    for gradient, wanted in zip(torch.autograd.grad(found, list(model.parameters())), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)
        assert wanted.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"top_k": 5}, "top_k is 5 of 4 experts"), ({"capacity_factor": 0.0}, "capacity_factor is 0.0")],
)
def test_shapes_that_make_no_sense_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)  # type: ignore[arg-type]

"""Training through the backend gives the numbers of the unsharded model."""

import functools

import models
import pytest
import torch
from ranks import on_ranks
from torch import nn

import vescale_compile as vc
from vescale_compile.examples.llama import Llama, LlamaConfig

STEPS = 10
ONE_LAYER = functools.partial(models.Uneven, 1)


def many_words_of_one_layer() -> nn.Module:
    return Llama(LlamaConfig(layers=1, dim=32, heads=4, kv_heads=2, vocab_size=8192))


@functools.cache
def reference_run(
    build: models.Model, backend: str | None, vocab: int, steps: int, make_optimizer: models.MakeOptimizer
):
    """The unsharded model and its losses, of all that this rank's process compares with it."""
    data = models.batches(steps, vocab)
    return models.train_unsharded(build, data, backend, make_optimizer=make_optimizer)


def compare(
    name: str | models.Model,
    lowering: str | None,
    reference: str | None,
    vocab: int,
    steps: int = STEPS,
    make_optimizer: models.MakeOptimizer = models.sgd,
    **options,
):
    torch._dynamo.reset()
    build = getattr(models, name) if isinstance(name, str) else name
    data = models.batches(steps, vocab)
    model, call = models.sharded(build, compile=lowering, **options)
    losses = models.train(call, model.parameters(), data, make_optimizer)
    unsharded, expected = reference_run(build, reference, vocab, steps, make_optimizer)
    worst_loss = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return worst_loss, models.largest_difference(model, unsharded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_llama_of_one_layer", "hf_gpt_oss_of_one_layer"])
@on_ranks(2)
def test_ten_adamw_steps_are_bit_equal_on_two_ranks(name):
    assert compare(name, "eager", "aot_eager", 64, make_optimizer=models.adamw) == (0.0, 0.0)


@pytest.mark.slow
@on_ranks(2)
def test_parameters_kept_for_the_backward_give_the_same_bits():
    assert compare("Uneven", "eager", None, 11, reshard_after_forward=False) == (0.0, 0.0)


@on_ranks(2)
def test_uneven_sizes_are_bit_equal_on_two_ranks():
    assert compare("Uneven", "eager", None, 11) == (0.0, 0.0)


@pytest.mark.slow
@on_ranks(2)
def test_an_embedding_and_a_head_with_a_buffer_each_are_bit_equal_on_two_ranks():
    assert compare(many_words_of_one_layer, "eager", None, 8192, steps=3) == (0.0, 0.0)


@pytest.mark.slow
@on_ranks(2)
def test_blocks_gathered_in_parts_are_bit_equal_on_two_ranks():
    assert compare("wide", "eager", None, 64, steps=3) == (0.0, 0.0)


@pytest.mark.slow
@on_ranks(4)
def test_uneven_sizes_on_more_ranks_are_within_rounding():
    loss, params = compare(ONE_LAYER, "eager", None, 11)
    assert loss < 1e-6
    assert params < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reference"), [("one_layer_llama", None), ("hf_gpt_oss_of_one_layer", "aot_eager")])
@on_ranks(2, deadline_s=300)
def test_inductor_lowering_is_within_rounding_of_the_unsharded_model(name, reference):
    loss, params = compare(name, "inductor", reference, 64, steps=3)
    assert loss < 1e-6
    assert params < 1e-6


@pytest.mark.slow
@on_ranks(2, deadline_s=300)
def test_inductor_lowering_infers_what_the_unsharded_model_does():
    """Of four layers, for which slots change hands."""
    torch._dynamo.reset()
    build = functools.partial(Llama, LlamaConfig(layers=4, dim=32, heads=4, kv_heads=2))
    call = torch.compile(vc.fully_shard(models.build(build)), backend="vescale", dynamic=False)
    tokens = models.batches(1, 200)[0][0]
    with torch.no_grad():
        torch.testing.assert_close(call(tokens), models.build(build)(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@on_ranks(3, deadline_s=300)
def test_inductor_lowering_of_uneven_sizes_is_within_rounding():
    loss, params = compare(ONE_LAYER, "inductor", None, 11, steps=3)
    assert loss < 1e-6
    assert params < 1e-6


@pytest.mark.slow
@on_ranks(2, deadline_s=300)
def test_inductor_lowering_trains_in_mixed_precision():
    policy = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch._dynamo.reset()
    data = models.batches(3, 11)
    losses, params = [], []
    for lowering in ("inductor", None):
        model, call = models.sharded(ONE_LAYER, compile=lowering, mp_policy=policy)
        losses.append(models.train(call, model.parameters(), data, models.gentle_sgd))
        params.append([param.full_tensor() for param in model.parameters()])
    # bf16: Inductor keeps some intermediates in fp32
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)
    for pair in zip(*params, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "hf_llama", pytest.param("hf_gpt_oss", marks=pytest.mark.slow), "many_words"]
)
@on_ranks(2)
def test_without_compile_the_numbers_are_those_of_the_unsharded_model(name):
    assert compare(name, None, None, 64, steps=3) == (0.0, 0.0)

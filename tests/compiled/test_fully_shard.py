"""``fully_shard``: parameters, state dicts, meta initialization, conversions, errors. Its units: test_units.py."""

import copy
import inspect
import io
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import vescale_compile as vc
from vescale_compile.mesh import simulated_on
from vescale_compile.runtime import agreement
from vescale_compile.sharded_module import buffers_in

# Parameters


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


# State


@on_ranks(3)
def test_state_dict_has_the_original_names_and_values():
    model, whole = vc.fully_shard(models.build(models.Uneven)), models.build(models.Uneven)
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in whole.state_dict().items())


@on_ranks(3)
def test_load_state_dict_takes_sharded_and_whole_tensors():
    source, whole = vc.fully_shard(models.build(models.Uneven, 1)), models.build(models.Uneven, 1)
    for state in (source.state_dict(), whole.state_dict()):
        model = vc.fully_shard(models.build(models.Uneven, 2))
        buffer = buffers_in(model)[0].shard.data_ptr()
        model.load_state_dict(state)
        assert models.largest_difference(model, whole) == 0.0
        assert buffers_in(model)[0].shard.data_ptr() == buffer


@pytest.mark.parametrize("name", ["Uneven", "llama"])
@on_ranks(2, 3)
def test_meta_initialization_gives_the_values_of_the_unsharded_one(name):
    def initialize(model: nn.Module) -> None:
        torch.manual_seed(5)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    with torch.device("meta"):
        model = getattr(models, name)()
    vc.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    initialize(model)
    whole = getattr(models, name)()
    with torch.no_grad():
        for param in whole.parameters():
            param.fill_(1.0)
    initialize(whole)
    assert models.largest_difference(model, whole) == 0.0


@on_ranks(2)
def test_hugging_face_models_initialize_from_meta():
    from transformers import LlamaForCausalLM

    config = models.hf_llama().model.config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    vc.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    whole = LlamaForCausalLM(config)
    for each in (model, whole):
        torch.manual_seed(5)
        with torch.no_grad():
            for module in each.modules():
                each._init_weights(module)
    assert models.largest_difference(model, whole) == 0.0


@on_ranks(2)
def test_a_parameter_that_has_no_memory_yet_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.ModuleList([nn.Linear(4, 8)]), nn.Linear(4, 8))
    vc.fully_shard(model)
    model.forward = lambda x: model[1](model[0][0](x))
    with pytest.raises(RuntimeError, match=r"\[rank \d\] .*'0\.0\.weight' of unit '0\.0', of shape \(8, 4\).* meta"):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_to_dtype_converts_the_buffer_and_the_parameters_stay_views_of_it():
    model, whole = vc.fully_shard(models.build(models.Uneven)), models.build(models.Uneven).double()
    params = list(model.parameters())
    model.double()
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert {p.dtype for p in params} == {buffer.shard.dtype for buffer in buffers_in(model)} == {torch.float64}
    assert models.largest_difference(model, whole) < 1e-7
    for buffer in buffers_in(model):
        assert {p.to_local().untyped_storage().data_ptr() for p in buffer.params} == {
            buffer.shard.untyped_storage().data_ptr()
        }


@on_ranks(2)
def test_a_compiled_model_converts_and_trains_on():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    data = models.batches(2, 11)
    models.train(call, model.parameters(), data[:1])
    model.double()
    losses = models.train(call, model.parameters(), data[1:])
    whole, _ = models.train_unsharded(models.Uneven, data[:1])
    whole.double()
    assert losses[0] == pytest.approx(whole(*data[1]).item(), rel=1e-12)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@on_ranks(2)
def test_converting_a_part_whose_buffer_others_share_is_refused():
    model = vc.fully_shard(models.build(models.Uneven))
    with pytest.raises(RuntimeError, match=r"'layers\.0\..* dtype .* same buffer.*before fully_shard"):
        model.layers[0].up.to(torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model.layers[0].to(torch.bfloat16)  # a whole unit
    assert {param.dtype for param in model.layers[0].parameters()} == {torch.bfloat16}


@on_ranks(2)
def test_converting_a_part_of_a_copy_whose_buffer_others_share_is_refused():
    copied = copy.deepcopy(vc.fully_shard(models.build(models.Uneven)))
    with pytest.raises(RuntimeError, match=r"'layers\.0\..* dtype .* same buffer.*before fully_shard"):
        copied.layers[0].up.to(torch.bfloat16)
    assert {param.dtype for param in copied.parameters()} == {torch.float32}
    assert {param.dtype for param in copied.to(torch.bfloat16).parameters()} == {torch.bfloat16}


@on_ranks(2)
def test_a_model_that_has_lost_a_parameter_of_a_buffer_converts():
    model = vc.fully_shard(models.build(models.Uneven))
    del model.layers[0].up
    assert {param.dtype for param in model.to(torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_module_that_has_lost_a_parameter_does_not_have_it() -> None:
    with fake_world(2):
        module = vc.fully_shard(nn.Linear(4, 8))
        del module._parameters["bias"]
        assert not hasattr(module, "bias")
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'bias'"):
            module(torch.ones(4))


@on_ranks(2)
def test_ranks_compare_their_layouts_again_once_a_model_was_converted():
    model = vc.fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4))
    (buffer,) = buffers_in(model)
    assert buffer.agreed
    model.to(torch.float32)
    assert buffer.agreed
    model.to(torch.float64)
    assert not buffer.agreed


@on_ranks(2)
def test_a_recurrent_network_runs_after_it_was_given_memory_or_another_dtype():
    with torch.device("meta"):
        model = torch.nn.LSTM(4, 4)
    vc.fully_shard(model).to_empty(device="cpu")
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.5)
    reference = torch.nn.LSTM(4, 4)
    for param in reference.parameters():
        torch.nn.init.constant_(param, 0.5)
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(3, 2, 4, dtype=dtype)
        assert torch.equal(model.to(dtype)(x)[0], reference.to(dtype)(x)[0])


@on_ranks(2)
def test_a_recurrent_network_keeps_no_gathered_parameters_after_its_forward():
    model = vc.fully_shard(torch.nn.LSTM(4, 4))
    for _ in range(2):
        model(torch.ones(3, 2, 4))
        assert all(kept is param for kept, param in zip(model._flat_weights, model.parameters(), strict=True))


@on_ranks(2)
def test_a_copy_leaves_no_compiled_code_that_ran_for_the_original_alone():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    data = models.batches(1, 11)
    call(*data[0])
    twin = copy.deepcopy(model)
    with mock.patch.object(agreement, "agree", side_effect=AssertionError):
        twin(*data[0])


@on_ranks(2)
def test_deepcopy_gives_a_model_of_its_own():
    model = vc.fully_shard(models.build(models.Uneven))
    twin = copy.deepcopy(model)
    data = models.batches(1, 11)
    before = model(*data[0]).item()
    models.train(twin, twin.parameters(), data)
    assert model(*data[0]).item() == before
    assert twin(*data[0]).item() != before


@on_ranks(2)
def test_a_write_to_a_parameter_of_a_copy_is_one_to_its_shard():
    copied = copy.deepcopy(vc.fully_shard(models.build(models.Uneven)))
    for buffer in buffers_in(copied):
        before = buffer.shard._version
        for written, param in enumerate(buffer.params, 1):
            torch.nn.init.zeros_(param)
            assert buffer.shard._version == before + written
        assert not buffer.shard.any()


@on_ranks(2)
def test_what_is_not_sharded_may_be_assigned():
    model = vc.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model.load_state_dict({"1.running_mean": torch.full((4,), 3.0)}, strict=False, assign=True)
    assert torch.equal(model[1].running_mean, torch.full((4,), 3.0))


@on_ranks(2)
def test_what_would_replace_a_sharded_parameter_is_refused():
    model = vc.fully_shard(models.build(models.Uneven))
    with pytest.raises(RuntimeError, match=r"rank \d\] parameter 'head\.weight' is sharded.*copy_\(full_tensor\)"):
        model.head.weight = nn.Parameter(torch.ones(11, 13))
    with pytest.raises(RuntimeError, match=r"rank \d\] parameter '.*weight'.*Leave assign out"):
        model.load_state_dict(model.state_dict(), assign=True)
    strangers = {name: param * 1 for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match="fully_shard did not make it"):
        torch.func.functional_call(model, strangers, models.batches(1, 11)[0])


@on_ranks(2)
def test_an_optimizer_built_before_is_refused_at_its_first_step():
    model = models.build(models.Uneven)
    optimizer = models.adamw(model.parameters())
    vc.fully_shard(model)
    model(*models.batches(1, 11)[0]).backward()
    with pytest.raises(RuntimeError, match=rf"\[rank {dist.get_rank()}\] AdamW: 11 of its 11 .* after fully_shard"):
        optimizer.step()


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_ranks(2)
def test_an_optimizer_of_torchao_is_refused_at_its_first_step(name):
    import torchao.optim

    model = vc.fully_shard(nn.Linear(256, 64))
    optimizer = getattr(torchao.optim, name)(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    with pytest.raises(RuntimeError, match=rf"rank \d\] {name} of torchao .*vescale_compile\.optim\.AdamW8bit"):
        optimizer.step()


@on_ranks(2)
def test_a_state_dict_with_the_parameters_themselves_can_be_saved(tmp_path):
    model = vc.fully_shard(models.build(models.Uneven))
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(model.state_dict(keep_vars=True), path)
    loaded = torch.load(path, weights_only=False)
    assert torch.equal(loaded["head.weight"].to_local(), model.head.weight.to_local())


# Errors


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def compiled_in_place() -> nn.Module:
    model = small()
    model[0].compile()
    return model


def with_a_gradient() -> nn.Module:
    model = small()
    model[1].weight.grad = torch.zeros(2, 2)
    return model


def hooked(register: str) -> nn.Module:
    model = small()
    getattr(model[0].bias, register)(lambda each: None)
    return model


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"init_process_group"):
        vc.fully_shard(small())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: vc.fully_shard(vc.fully_shard(small())), ValueError, r"\[rank 0\].* is a unit already"),
        (
            lambda: vc.fully_shard(torch.compile(small())),
            RuntimeError,
            "fully_shard first, then torch.compile",
        ),
        (lambda: vc.fully_shard(compiled_in_place()), RuntimeError, "0 was compiled already"),
        (lambda: vc.fully_shard(torch.jit.script(small())), ValueError, "0 is a torch.jit.ScriptModule, whose code"),
        (
            lambda: vc.fully_shard(nn.Sequential(DistributedDataParallel(small()))),
            ValueError,
            "0 is a DistributedDataParallel",
        ),
        (lambda: vc.fully_shard(nn.ReLU()), ValueError, r"fully_shard\(ReLU\): no parameters left to shard"),
        (
            lambda: vc.fully_shard(vc.fully_shard(small())[0]),
            ValueError,
            r"\[rank 0\] fully_shard\(Linear\): .*'weight' is sharded already, .* around .* inner modules first",
        ),
        (lambda: vc.fully_shard(nn.ModuleList([small()])), ValueError, "each of its elements"),
        (lambda: vc.fully_shard([small()]), TypeError, "give an nn.Module"),
        (lambda: vc.fully_shard(small(), reshard_after_forward=2), TypeError, "give True or False"),
        (
            lambda: vc.fully_shard(small(), mp_policy=torch.bfloat16),
            TypeError,
            "mp_policy is torch.bfloat16; give",
        ),
        *(
            (
                lambda policy=policy: vc.fully_shard(small(), mp_policy=vc.MixedPrecisionPolicy(**policy)),
                TypeError,
                "mp_policy has .*; give a floating-point dtype",
            )
            for policy in ({"param_dtype": "bfloat16"}, {"reduce_dtype": torch.int8}, {"output_dtype": 16})
        ),
        (
            lambda: vc.fully_shard(small(), ignored_params=["0.weight"]),
            TypeError,
            "has '0.weight'; give a set of param",
        ),
        (lambda: vc.fully_shard(small(), ignored_params="0.weight"), TypeError, "has '0.weight'; give a set"),
        (lambda: vc.fully_shard(m := small(), ignored_params=m[0].weight), TypeError, "has a Parameter; give a set"),
        (lambda: vc.fully_shard(m := small(), ignored_params=m.named_parameters()), TypeError, "; give a set"),
        (
            lambda: vc.fully_shard(small(), mesh=init_device_mesh("cpu", (2, 2))),
            ValueError,
            r"\[rank 0\].* two dimensions without names; name them",
        ),
        (
            lambda: vc.fully_shard(small(), mesh=init_device_mesh("cpu", (1, 2, 2))),
            ValueError,
            r"\[rank 0\].* has 3 dimensions; give a 1-D mesh",
        ),
        (
            lambda: vc.fully_shard(nn.ParameterList([nn.Parameter(torch.empty(0, 3))])),
            ValueError,
            r"parameter '0' of shape \(0, 3\) has no elements: pass it in ignored_params",
        ),
        (lambda: vc.fully_shard(with_a_gradient()), ValueError, r"\[rank 0\].*'1.weight' has a gradient.* to None"),
        *(
            (lambda r=r: vc.fully_shard(hooked(r)), ValueError, r"\[rank 0\].*'0.bias' has gradient hooks.* after")
            for r in ("register_hook", "register_post_accumulate_grad_hook")
        ),
    ],
)
def test_errors_say_what_to_do(make, error, message):
    with fake_world(4), pytest.raises(error, match=message):
        make()


def test_complex_parameters_are_refused_on_gpus():
    model = nn.ParameterList([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with fake_world(4), simulated_on("cuda"), pytest.raises(ValueError, match=r"'0' is complex, .*view_as_real"):
        vc.fully_shard(model)


def test_a_model_on_a_device_that_the_process_group_can_not_communicate_from(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with (
        fake_world(4),
        pytest.raises(ValueError, match=r"\[rank 0\].* is on cpu, and .*\(cuda:nccl\)\. Move the module"),
    ):
        vc.fully_shard(small())


def test_a_parameter_in_two_meshes():
    with fake_world(4):
        model = small()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        vc.fully_shard(model[0], mesh=mesh["shard"])
        with pytest.raises(ValueError, match=r"\[rank 0\].*parameter '0.weight' is sharded over"):
            vc.fully_shard(model, mesh=mesh["replicate"])

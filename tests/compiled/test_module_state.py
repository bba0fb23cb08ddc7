"""A sharded module's state: state dicts, meta initialization, conversions, copies, assignments."""

import copy
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize

import vescale_compile as vc
from vescale_compile.ragged.placement import RaggedShardError
from vescale_compile.runtime import agreement
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@on_ranks(3)
def test_state_dict_has_the_original_names_and_values():
    model, whole = vc.fully_shard(models.build(models.Uneven)), models.build(models.Uneven)
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in whole.state_dict().items())


@on_ranks(2)
def test_what_one_rank_has_is_loaded_tensor_by_tensor():
    checkpoint = models.build(models.Uneven, 1).state_dict() if dist.get_rank() == 0 else None
    model = vc.fully_shard(models.build(models.Uneven, 2))
    for name, value in model.state_dict().items():
        whole = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if checkpoint is not None:
            whole.copy_(checkpoint[name])
        dist.broadcast(whole, 0)
        model.load_state_dict({name: whole}, strict=False)
    assert models.largest_difference(model, models.build(models.Uneven, 1)) == 0.0


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
def test_hooks_of_parameters_that_get_memory_later_run():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    vc.fully_shard(model)
    ran: list[str] = []
    model.weight.register_hook(lambda grad: 3 * grad)
    model.weight.register_post_accumulate_grad_hook(lambda param: ran.append("accumulated"))
    model.to_empty(device="cpu")
    model.bias.register_hook(lambda grad: 2 * grad)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[3.0] * 3] * 2
    assert model.bias.grad.full_tensor().tolist() == [2.0] * 2
    assert ran == ["accumulated"]


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


class CallsTwice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = torch.nn.GRU(4, 4)

    def forward(self, x):
        return self.recurrent(self.recurrent(x)[0])[0]


@on_ranks(2)
def test_a_recurrent_network_may_run_twice_in_one_forward():
    model, reference = vc.fully_shard(models.build(CallsTwice)), models.build(CallsTwice)
    for _ in range(2):
        assert torch.equal(model(torch.ones(3, 2, 4)), reference(torch.ones(3, 2, 4)))


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


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_copied_model_is_converted_as_a_whole_alone(optimizer_first):
    """Also if it is a part of what is copied, and its parameters were come upon before it."""
    with fake_world(2):
        model = vc.fully_shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
        before = torch.optim.SGD(model.parameters()) if optimizer_first else None
        _, copied = copy.deepcopy((before, model))
        with pytest.raises(
            RuntimeError, match=r"a conversion of a part of the model would give parameter '0\.0\.weight'"
        ):
            copied[0][0].to(torch.bfloat16)


@on_ranks(2)
def test_a_copy_that_is_made_under_no_sync_averages_its_gradients():
    model = vc.fully_shard(nn.Linear(3, 1))
    with vc.no_sync(model):
        copied = copy.deepcopy(model)
    copied(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    assert copied.weight.grad.full_tensor().tolist() == [[0.5] * 3]


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


class Adapted(nn.Module):
    """Computes with another weight for the length of a forward, as LoRA of PEFT's ``target_parameters`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.base, "weight", self.scale)
        y = self.base(x)
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return y


@on_ranks(2)
def test_a_parametrization_that_a_forward_makes_is_refused():
    model = vc.fully_shard(Adapted())
    with pytest.raises(RuntimeError, match=r"rank \d\] .* register a parametrization.* before fully_shard"):
        model(torch.ones(1, 4))


@on_ranks(2)
def test_an_optimizer_built_before_is_refused_at_its_first_step():
    model = models.build(models.Uneven)
    optimizer = models.adamw(model.parameters())
    vc.fully_shard(model)
    model(*models.batches(1, 11)[0]).backward()
    with pytest.raises(RuntimeError, match=rf"\[rank {dist.get_rank()}\] AdamW: 11 of its 11 .* after fully_shard"):
        optimizer.step()


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@on_ranks(2)
def test_the_state_of_an_optimizer_of_whole_parameters_is_refused_at_the_first_step(form):
    model, whole = (models.build(models.Uneven) for _ in range(2))
    loaded = torch.optim.AdamW(whole.parameters(), **form)
    whole(*models.batches(1, 11)[0]).backward()
    loaded.step()
    optimizer = torch.optim.AdamW(vc.fully_shard(model).parameters(), **form)
    optimizer.load_state_dict(loaded.state_dict())
    model(*models.batches(1, 11)[0]).backward()
    first = next(name for name, _ in whole.named_parameters())
    message = (
        rf"rank \d of 2.* AdamW has a whole tensor as state 'exp_avg' of .*\({first}, .*set_optimizer_state_dict\)$"
    )
    with pytest.raises(RaggedShardError, match=message):
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

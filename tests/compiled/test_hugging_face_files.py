"""Checkpoints of Hugging Face's, in safetensors, by torch.distributed.checkpoint."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

TOKENS = torch.arange(12)[None]


def whole(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 67, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied))


def rows(name: str, param: nn.Parameter) -> vc.Elements:
    return vc.Elements(math.prod(param.shape[1:]))


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_a_pretrained_model_is_loaded_by_each_rank_in_its_part_alone(tied: bool, tmp_path: Path) -> None:
    reference = whole(tied)
    if dist.get_rank() == 0:
        reference.save_pretrained(tmp_path)
    dist.barrier()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    vc.fully_shard(model)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    model.init_weights()
    planner = DefaultLoadPlanner(allow_partial_load=tied)  # a tied head is in no file
    dcp.load(get_model_state_dict(model), storage_reader=HuggingFaceStorageReader(str(tmp_path)), planner=planner)
    found, expected = (each(input_ids=TOKENS, labels=TOKENS).loss for each in (model, reference))
    assert torch.equal(found, expected)


@on_ranks(3)
def test_shards_of_whole_rows_are_saved_as_hugging_face_saves_them(tmp_path: Path) -> None:
    model = vc.fully_shard(whole(), granularity=rows)
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, enable_consolidation=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    saved = load_file(tmp_path / "model-00001-of-00001.safetensors")
    for name, value in whole().state_dict().items():
        assert torch.equal(saved[name], value), name


@pytest.mark.parametrize(
    ("granularity", "options", "problem"),
    [
        (
            None,
            {"save_distributed": True},
            "boxes of it, and HuggingFaceStorageWriter writes one .* Shard between whole",
        ),
        (rows, {}, "HuggingFaceStorageWriter has all ranks write the same files: give it save_distributed=True"),
    ],
)
@on_ranks(3)
def test_what_such_files_would_lose_is_refused_on_every_rank(granularity, options, problem, tmp_path: Path) -> None:
    model = vc.fully_shard(whole(), granularity=granularity)
    writer = HuggingFaceStorageWriter(str(tmp_path), **options)
    with pytest.raises(CheckpointException, match=problem):
        dcp.save(get_model_state_dict(model), storage_writer=writer)
    assert not list(tmp_path.glob("**/*.safetensors"))
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "by another writer")


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_a_model_saves_itself_whole_or_not_at_all(tied: bool, tmp_path: Path) -> None:
    model = vc.fully_shard(whole(tied))
    message = (
        rf"\[rank {dist.get_rank()}\] save_pretrained of LlamaForCausalLM: .*'model.embed_tokens.weight' is sharded"
    )
    for state in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(RuntimeError, match=message + r".*state_dict=get_model_state_dict\(model, options"):
            model.save_pretrained(tmp_path, **state)
    assert not list(tmp_path.iterdir())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.save_pretrained(tmp_path, state_dict=state)
    if dist.get_rank() == 0:
        save_file(state, tmp_path / "by itself")
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in whole(tied).state_dict().items():
        assert torch.equal(saved[name], value), name

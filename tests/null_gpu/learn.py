"""Ranks that learn on GPUs, or on null GPUs that compute, and how far they are from what the unsharded model learns."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from computing import compute
from gpus import take_gpu
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import vescale_compile as vc
from vescale_compile.examples.moe import SIZES, MoeLlama
from vescale_compile.local_ranks import start_local_ranks

STEPS = 2
VOCABULARY = 64
NULL_GPUS = "NULL_GPU_COUNT" in os.environ


class Biased(nn.Module):
    """Layers and norms with biases, embeddings that are the head too, and a parameter that is read in part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gains = nn.Embedding(VOCABULARY, 32), nn.Parameter(torch.ones(3, 32))
        self.layers = nn.ModuleList(BiasedLayer() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.gains[1]
        for layer in self.layers:
            x = x + layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class BiasedLayer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def mixture() -> nn.Module:
    return MoeLlama(replace(SIZES["tiny"], vocab_size=VOCABULARY))


MODELS = {"llama": models.llama, "biased": Biased, "mixture": mixture}


def learn(rank: int, folder: str, how: dict[str, Any], world_size: int, rendezvous: str) -> None:
    if NULL_GPUS:
        compute()
    device = take_gpu(rank, world_size)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size)
    ours, theirs = (models.build(MODELS[how["model"]]) for _ in range(2))
    ours.to(device)
    mesh = init_device_mesh("cuda", tuple(how["mesh"]), mesh_dim_names=("replicate", "shard")[-len(how["mesh"]) :])
    policy = vc.MixedPrecisionPolicy(**{name: getattr(torch, dtype) for name, dtype in how["policy"].items()})
    codes = vc.BlockInt8(32) if how["quantized"] else None
    how_sharded = {"mp_policy": policy, "reshard_after_forward": how["reshard"], "quantize_gradients": codes}
    for layer in ours.layers if how["layers_over_all"] else ():
        vc.fully_shard(layer, **how_sharded)
    vc.fully_shard(ours, mesh=mesh, **how_sharded)
    compiled = torch.compile(ours, backend="vescale", options=how["options"])
    mine, whole = (torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (ours, theirs))
    for batches in zip(*(models.batches(STEPS, VOCABULARY, each) for each in range(world_size)), strict=True):
        mine.zero_grad()
        whole.zero_grad()
        # On null GPUs of matrix products and kernels of Inductor's.
        with sdpa_kernel(SDPBackend.MATH) if NULL_GPUS else contextlib.nullcontext():
            compiled(*(each.to(device) for each in batches[rank])).backward(torch.ones(()).to(device))
        torch.stack([theirs(*batch) for batch in batches]).mean().backward()
        mine.step()
        whole.step()
    errors = {name: _error(param, theirs.get_parameter(name)) for name, param in ours.named_parameters()}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


def _error(param: vc.RaggedDTensor, theirs: nn.Parameter) -> float:
    """The larger of the last gradient's error in this shard, relative to the whole gradient, and of the parameter's."""
    start, stop = param.placement.interval(param.shape, param.device_mesh.get_local_rank())
    found = [(param.grad, theirs.grad), (param, theirs)]
    pairs = [(ours.to_local().detach().cpu(), whole.detach().flatten()) for ours, whole in found]
    return max(((ours - whole[start:stop]).norm() / whole.norm()).item() for ours, whole in pairs)


if __name__ == "__main__":
    os.environ["NULL_GPU_COMPUTES"] = sys.argv[1]
    how = json.loads(sys.argv[2])
    ranks = torch.Size(how["mesh"]).numel()
    start_local_ranks(learn, (sys.argv[1], how), ranks)

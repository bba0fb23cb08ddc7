"""What a step on GPUs computes: gradients and parameters beside the unsharded model's.

On this machine's GPUs, or GPU, which ranks then share. Where there is none, on null GPUs, which compute what they are
asked for: matrix products, collectives, Triton's kernels by its interpreter. Where PyTorch is built with CUDA:
``make test TORCH=torch==2.11.0 VENV=.venv-cuda ARGS=tests/test_gpu_numbers.py``.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from null_gpu.build import build, python

LEARN = Path(__file__).parent / "null_gpu" / "learn.py"
MODELS = str(Path(__file__).parent / "compiled")
ROUNDING = {"float32": 1e-5, "bfloat16": 0.03}
"""of gradients, relative"""
HALF = {"param_dtype": "bfloat16"}

pytestmark = [
    pytest.mark.slow,  # left out of `make test-fast`
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of PyTorch can't use GPUs"),
]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with GPUs that compute."""
    if torch.cuda.is_available():
        return dict(os.environ)
    interpreted = {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "NULL_GPU_COUNT": "4"}
    return {**os.environ, **build(tmp_path_factory.mktemp("null_gpu")), **interpreted}


def errors(environment: dict[str, str], folder: Path, **how: Any) -> dict[str, float]:
    """By parameter, the largest on any rank after some steps."""
    defaults = {"model": "llama", "mesh": [2], "policy": {}, "reshard": True, "quantized": False, "options": {}}
    defaults |= {"layers_over_all": False}
    environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": MODELS}
    python(environment, LEARN, str(folder), json.dumps(defaults | how))
    ranks = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", ["llama", "biased"])
@pytest.mark.parametrize("policy", [{}, HALF, HALF | {"reduce_dtype": "float32"}], ids=["fp32", "bf16", "mixed"])
def test_gradients_and_parameters_are_those_of_the_unsharded_model(
    model: str, policy: dict[str, str], reshard: bool, gpus: dict[str, str], tmp_path: Path
) -> None:
    found = errors(gpus, tmp_path, model=model, policy=policy, reshard=reshard)
    assert max(found.values()) < ROUNDING[policy.get("param_dtype", "float32")]


def test_so_they_are_of_a_mixture_of_experts(gpus: dict[str, str], tmp_path: Path) -> None:
    assert max(errors(gpus, tmp_path, model="mixture").values()) < ROUNDING["float32"]


def test_so_they_are_over_replicas(gpus: dict[str, str], tmp_path: Path) -> None:
    assert max(errors(gpus, tmp_path, mesh=[2, 2]).values()) < ROUNDING["float32"]


def test_so_they_are_where_layers_are_sharded_over_more_ranks_than_the_rest(
    gpus: dict[str, str], tmp_path: Path
) -> None:
    assert max(errors(gpus, tmp_path, mesh=[2, 2], layers_over_all=True).values()) < ROUNDING["float32"]


def test_so_they_are_in_registered_memory(gpus: dict[str, str], tmp_path: Path) -> None:
    try:
        found = errors(gpus, tmp_path, options={"registered_memory": True})
    except AssertionError as failure:
        if torch.cuda.is_available() and "has no registered memory" in str(failure):
            pytest.skip("NCCL registers no memory with this machine's GPUs")
        raise
    assert max(found.values()) < ROUNDING["float32"]


def test_gradients_that_are_sent_in_8_bits_are_off_by_no_more_than_their_rounding(
    gpus: dict[str, str], tmp_path: Path
) -> None:
    found = errors(gpus, tmp_path, model="biased", quantized=True)
    assert ROUNDING["float32"] < max(found.values()) < 0.03

"""A step on GPUs, on a machine without one: what is launched, on which streams, and what memory it takes.

Where PyTorch is built with CUDA: ``make test TORCH=torch==2.11.0 VENV=.venv-cuda ARGS=tests/test_null_gpu.py``.
"""

import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from null_gpu.build import build, python
from scripts import BENCH

from vescale_compile.examples import llama

RANKS = 2
TRAIN = Path(__file__).parent / "null_gpu" / "train.py"
FP32 = "0"
"""as cuBLAS numbers types"""
WORKSPACES = 2 * (32 << 20)
"""bytes that PyTorch gives cuBLAS on an H100, once for the thread of the forward and once for the backward's"""

pytestmark = [
    pytest.mark.slow,  # left out of `make test-fast`
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of PyTorch can't use GPUs"),
]


@dataclass
class Trained:
    """What a rank said, and its log."""

    peak: int
    planned: int
    states: int
    units: int
    found: int
    """graphs in AOTAutograd's cache"""
    launches: list[list[Any]]
    """by the schedule: each collective's kind, and the elements of a shard"""
    log: list[list[str]]
    code: list[str]
    """that Inductor generated for its graphs"""

    @property
    def gathers(self) -> int:
        """Of a step: two of each unit, but one of the unit that the backward reads first."""
        return 2 * self.units - 1

    @property
    def step(self) -> list[list[str]]:
        """The last step's lines."""
        return self.log[self.log.index(["step", "2"]) : self.log.index(["step", "3"])]

    def of(self, *kinds: str) -> list[list[str]]:
        return [line for line in self.step if line[0] in kinds]

    def counted(self, *kinds: str) -> dict[str, int]:
        return dict(Counter(line[0] for line in self.of(*kinds)))


class Access(NamedTuple):
    """What an operation does to memory."""

    start: int
    size: int
    writes: bool

    def meets(self, other: "Access") -> bool:
        """Whether the two must happen one after the other."""
        apart = self.start + self.size <= other.start or other.start + other.size <= self.start
        return (self.writes or other.writes) and not apart


def _of_product(*operands: str) -> list[Access]:
    """Of a product's operands only the first byte is known. What follows is the type of the last."""
    return [Access(int(each, 16), 1, place == 2) for place, each in enumerate(operands[:3])]


def _of_collective(sent: str, sent_bytes: str, received: str, received_bytes: str) -> list[Access]:
    return [Access(int(sent, 16), int(sent_bytes), False), Access(int(received, 16), int(received_bytes), True)]


ACCESSES: dict[str, Callable[..., list[Access]]] = {
    "product": _of_product,
    "all_gather": _of_collective,
    "reduce_scatter": _of_collective,
    "all_reduce": _of_collective,
    "all_to_all": _of_collective,
}


@pytest.fixture(scope="module")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with GPUs that do nothing.

    Triton launches its kernels itself, and refuses pointers to memory that is not the GPU's; PyTorch's launcher would
    not ask.
    """
    folder = tmp_path_factory.mktemp("null_gpu")
    launcher = {"TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
    return {**os.environ, **build(folder), **launcher, "NULL_GPU_COUNT": str(2 * RANKS)}


def trained(
    environment: dict[str, str],
    folder: Path,
    *,
    quantized: bool = False,
    micro_batches: int = 1,
    replicas: int = 1,
    optimizer: str = "AdamW",
    scaled: bool = False,
    own_kernels: bool = False,
    wide: bool = False,
    by_layer: bool = False,
    kept: bool = False,
    **options: object,
) -> Trained:
    """Rank 0 of some that train for three steps, on graphs lowered for them unless others did so in the same folder."""
    how = {
        "quantized": quantized,
        "micro_batches": micro_batches,
        "replicas": replicas,
        "optimizer": optimizer,
        "scaled": scaled,
        "own_kernels": own_kernels,
        "wide": wide,
        "by_layer": by_layer,
        "kept": kept,
        "options": options,
    }
    environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    said = python(environment, TRAIN, str(RANKS * replicas), str(folder), json.dumps(how)).stdout.splitlines()[-1]
    log = [line.split() for line in (folder / "rank0.log").open()]
    modules = [path.read_text() for path in folder.rglob("*.py")]
    return Trained(**json.loads(said), log=log, code=[module for module in modules if "def call(" in module])


@pytest.fixture(scope="module")
def run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(null_gpu, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def quantized_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """In so little memory that what is gathered and what is reduced use some of it in turn."""
    return trained(null_gpu, tmp_path_factory.mktemp("quantized"), quantized=True, memory_budget=6_400_000)


@pytest.fixture(scope="module")
def accumulating_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(null_gpu, tmp_path_factory.mktemp("accumulating"), micro_batches=2)


@pytest.fixture(scope="module")
def replicated_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With an optimizer whose states are 8-bit codes."""
    return trained(null_gpu, tmp_path_factory.mktemp("replicated"), replicas=2, optimizer="AdamW8bit")


@pytest.fixture(scope="module")
def scaled_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """In float16, with a GradScaler."""
    return trained(null_gpu, tmp_path_factory.mktemp("scaled"), scaled=True)


@pytest.fixture(scope="module")
def own_kernels_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With norms by kernels of the program's own."""
    return trained(null_gpu, tmp_path_factory.mktemp("own_kernels"), own_kernels=True)


@pytest.fixture(scope="module")
def wide_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With matrices as wide, and tokens as many, as GPUs are given: what Inductor generates depends on it."""
    return trained(null_gpu, tmp_path_factory.mktemp("wide"), wide=True)


@pytest.fixture(scope="module")
def layers_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With layers that are compiled one by one."""
    return trained(null_gpu, tmp_path_factory.mktemp("layers"), by_layer=True)


@pytest.fixture(scope="module")
def kept_layers_run(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With layers that are compiled one by one, and keep their parameters for the backward."""
    return trained(null_gpu, tmp_path_factory.mktemp("kept_layers"), by_layer=True, kept=True)


@pytest.fixture(
    params=[
        "run",
        "quantized_run",
        "accumulating_run",
        "replicated_run",
        "scaled_run",
        "own_kernels_run",
        "wide_run",
    ]
)
def each_run(request: pytest.FixtureRequest) -> Trained:
    return request.getfixturevalue(request.param)


def test_a_step_gathers_each_unit_twice_but_for_the_one_that_is_kept_and_reduces_it_once(run: Trained) -> None:
    found = run.counted("all_gather", "reduce_scatter", "all_reduce")
    assert found == {"all_gather": run.gathers, "reduce_scatter": run.units}


@pytest.mark.parametrize("name", ["run", "scaled_run", "own_kernels_run", "wide_run"])
def test_collectives_are_launched_in_the_order_of_the_schedule(name: str, request: pytest.FixtureRequest) -> None:
    """Gathered in two bytes an element, reduced in four."""
    each_run = request.getfixturevalue(name)
    sizes = {"all_gather": (3, 2), "reduce_scatter": (5, 4)}
    launched = [[line[0], int(line[sizes[line[0]][0]]) // sizes[line[0]][1]] for line in each_run.of(*sizes)]
    assert len(launched) > 2 and launched == each_run.launches


def test_what_crosses_to_the_backward_is_gathered_while_the_head_and_the_loss_are_computed(run: Trained) -> None:
    """The last gather of the forward, which the schedule has before the first of the backward."""
    kinds = [line[0] for line in run.of("all_gather", "product", "reduce_scatter")]
    carried = [place for place, kind in enumerate(kinds) if kind == "all_gather"][run.units]
    forward = 7 * llama.SIZES["small"].layers + 1  # products: of each layer, and of the head
    assert kinds[:carried].count("product") < forward


def test_what_is_reduced_of_a_unit_is_averaged_over_its_replicas_at_once(replicated_run: Trained) -> None:
    found = replicated_run.counted("all_gather", "reduce_scatter", "all_reduce")
    units = replicated_run.units
    assert found == {"all_gather": replicated_run.gathers, "reduce_scatter": units, "all_reduce": units}


def test_the_last_micro_batch_reduces_each_unit_while_it_computes(accumulating_run: Trained) -> None:
    kinds = [line[0] for line in accumulating_run.of("micro_batch", "reduce_scatter", "product")]
    assert kinds.count("reduce_scatter") == accumulating_run.units
    first = kinds.index("reduce_scatter")
    assert kinds.index("micro_batch") < first and "product" in kinds[first:]


def test_gathers_that_are_joined_cast_their_shards_in_one_kernel(run: Trained) -> None:
    streams = {line[1] for line in run.of("all_gather")}
    kinds = [line[0] for line in run.of("kernel", "all_gather") if line[1] in streams]
    joined = [kind for kind, _ in itertools.groupby(kinds)].count("all_gather")
    assert kinds.count("kernel") == joined < kinds.count("all_gather")


def test_of_gradients_that_accumulate_the_first_are_copied_once_a_unit(accumulating_run: Trained) -> None:
    assert len(accumulating_run.of("copy")) == accumulating_run.units


def test_a_quantized_step_takes_a_kernel_for_each_conversion_of_a_unit(quantized_run: Trained) -> None:
    found = quantized_run.counted("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    assert found == {"all_gather": quantized_run.gathers, "all_to_all": quantized_run.units}
    conversions = [line[2] for line in quantized_run.of("kernel") if "index_put" in line[2] and "minimum" in line[2]]
    # Gathers are quantized and dequantized, gradients are quantized and averaged.
    assert len(conversions) == 2 * quantized_run.gathers + 2 * quantized_run.units


def test_a_quantized_step_sends_codes(run: Trained, quantized_run: Trained) -> None:
    """A byte and a scale in the place of two bytes gathered, and of four bytes reduced."""

    def received(run: Trained, kind: str) -> int:
        return sum(int(line[5]) for line in run.of(kind))

    assert received(quantized_run, "all_gather") < 0.6 * received(run, "all_gather")
    reduced = sum(int(line[3]) for line in run.of("reduce_scatter"))
    assert received(quantized_run, "all_to_all") < 0.3 * reduced


@pytest.mark.parametrize("name", ["run", "quantized_run", "replicated_run", "own_kernels_run", "wide_run"])
def test_nothing_is_copied_from_one_place_on_the_gpu_to_another(name: str, request: pytest.FixtureRequest) -> None:
    each_run = request.getfixturevalue(name)
    assert each_run.of("product") and not each_run.of("copy")


def test_of_what_generated_code_computes_nothing_is_dropped(each_run: Trained) -> None:
    """As a gradient would be that is computed into a tensor of its own, and not where it is reduced."""
    assert each_run.code
    for code in each_run.code:
        named = Counter(re.findall(r"\bbuf\d+\b", code))
        assert [name for name in re.findall(r"^ *(buf\d+) = ", code, re.MULTILINE) if named[name] == 1] == []


def test_kernels_of_the_programs_own_are_launched_once_for_each_parameter_that_they_read(
    own_kernels_run: Trained,
) -> None:
    launched = Counter(line[2] for line in own_kernels_run.of("kernel"))
    norms = 2 * llama.SIZES["small"].layers + 1
    assert launched["rms_norm"] == launched["rms_norm_backward"] == norms


def test_products_of_gradients_write_the_fp32_that_is_reduced(run: Trained) -> None:
    """Of seven matrices in a layer, and of the head."""
    written = Counter(line[5] for line in run.of("product"))
    assert written[FP32] == 7 * llama.SIZES["small"].layers + 1


def test_what_computes_gradients_of_an_attention_transposes_them_for_the_products_that_read_them(
    each_run: Trained,
) -> None:
    assert not [line[2] for line in each_run.of("kernel") if "unsafe_view_clone" in line[2]]


def test_no_step_waits_for_what_a_gpu_computes(each_run: Trained) -> None:
    assert not each_run.of("transfer")


def test_collectives_are_on_other_streams_than_computation_and_reductions_on_another_than_gathers(
    each_run: Trained,
) -> None:
    gathers, reductions, products = (
        {line[1] for line in each_run.of(*kinds)}
        for kinds in (("all_gather",), ("reduce_scatter", "all_to_all"), ("product",))
    )
    assert len(products) == 1 and gathers.isdisjoint(reductions) and products.isdisjoint(gathers | reductions)


def test_no_stream_reads_or_writes_memory_that_another_may_still_be_writing(each_run: Trained) -> None:
    assert_ordered(each_run)


def assert_ordered(each_run: Trained) -> None:
    """Streams wait for one another where they share memory."""
    clocks: dict[str, Counter[str]] = defaultdict(Counter)  # by stream or event: what it has waited for, by stream
    done: list[tuple[Access, str, int]] = []
    checked = 0
    for line in each_run.log[each_run.log.index(["step", "0"]) :]:
        stream = line[1]
        if line[0] == "record":
            clocks[line[2]] = clocks[stream].copy()
        elif line[0] == "wait":
            clocks[stream] |= clocks[line[2]]
        elif accesses := ACCESSES[line[0]](*line[2:]) if line[0] in ACCESSES else ():
            clocks[stream][stream] += 1
            for access in accesses:
                for before, other, time in done:
                    if other != stream and access.meets(before):
                        assert clocks[stream][other] >= time, line
                        checked += 1
            done += [(access, stream, clocks[stream][stream]) for access in accesses]
    assert checked > 0


def test_layers_that_are_compiled_one_by_one_gather_the_next_before_they_compute_and_reduce_while_it_does(
    layers_run: Trained,
) -> None:
    assert_ordered(layers_run)
    launched = [line[0] for line in layers_run.of("all_gather", "reduce_scatter", "product")]
    assert [(kind, len(list(group))) for kind, group in itertools.groupby(launched)] == [
        *(("all_gather", 3), ("product", 7)),  # what is in no layer, and two layers
        *(("all_gather", 1), ("product", 7)),
        *(("all_gather", 1), ("product", 7 + 7 + 3)),  # of two layers, and of the head, forward and backward
        *(("all_gather", 2), ("product", 14), ("reduce_scatter", 1)),
        *(("all_gather", 1), ("product", 14), ("reduce_scatter", 1)),
        *(("all_gather", 1), ("product", 14), ("reduce_scatter", 1)),
        *(("product", 14), ("reduce_scatter", 2)),
    ]


def test_so_are_those_that_are_kept_for_the_backward(kept_layers_run: Trained) -> None:
    assert_ordered(kept_layers_run)
    launched = [line[0] for line in kept_layers_run.of("all_gather", "product")]
    assert [(kind, len(list(group))) for kind, group in itertools.groupby(launched)] == [
        *(("all_gather", 3), ("product", 7)),  # what is in no layer, and two layers
        *(("all_gather", 1), ("product", 7)),
        *(("all_gather", 1), ("product", 7 + 7 + 3 + 4 * 14)),
    ]


def test_the_peak_is_what_was_planned_with_the_workspaces_of_cublas(each_run: Trained) -> None:
    assert each_run.peak - WORKSPACES == pytest.approx(each_run.planned + each_run.states, rel=0.03)


def test_as_wide_as_gpus_are_given_no_less_is_taken_than_was_planned(wide_run: Trained) -> None:
    assert wide_run.peak - WORKSPACES >= wide_run.planned + wide_run.states


def test_registered_memory_is_what_is_gathered_into_and_reduced_out_of_but_for_what_is_kept(
    null_gpu: dict[str, str], tmp_path: Path
) -> None:
    run = trained(null_gpu, tmp_path, registered_memory=True)
    registered = [(int(line[1], 16), int(line[2])) for line in run.log if line[0] == "registered"]

    def elsewhere(kind: str, operand: int) -> list[list[str]]:
        """Collectives with an operand outside registered memory."""
        places = [(line, int(line[operand], 16)) for line in run.of(kind)]
        return [line for line, at in places if not any(start <= at < start + size for start, size in registered)]

    assert run.of("all_gather") and run.of("reduce_scatter")
    assert len(elsewhere("all_gather", 4)) == 1  # what is kept for the backward
    assert not elsewhere("reduce_scatter", 2)


def test_an_optimizer_that_refuses_gradients_waits_for_them_when_the_backward_has_launched_all(
    null_gpu: dict[str, str], tmp_path: Path
) -> None:
    kinds = [line[0] for line in trained(null_gpu, tmp_path, optimizer="Muon").step]
    optimizer = kinds.index("optimizer")
    assert "transfer" not in kinds[:optimizer] and "transfer" in kinds[optimizer:]


def test_a_second_start_finds_the_graphs_of_the_first_and_launches_the_same(
    null_gpu: dict[str, str], tmp_path: Path
) -> None:
    cold, warm = trained(null_gpu, tmp_path), trained(null_gpu, tmp_path)
    assert (cold.found, warm.found) == (0, 1)
    assert [line[0] for line in warm.step] == [line[0] for line in cold.step]


def test_graphs_whose_kernels_come_out_of_inductors_cache_are_kept_too(
    null_gpu: dict[str, str], tmp_path: Path
) -> None:
    """With PyTorch's launcher of kernels, which is what a GPU has."""
    launcher = null_gpu | {"TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "1"}
    trained(launcher | {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}, tmp_path)
    assert [trained(launcher, tmp_path).found for _ in range(2)] == [0, 1]


@pytest.fixture(scope="module")
def compared(null_gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a profiled step of each of the benchmark's systems does, as one rank of eight: by system."""
    found = tmp_path_factory.mktemp("compared") / "found.json"
    systems = ("vescale", "fsdp2", "simplefsdp", "simplefsdp-bucketed")
    arguments = "--device cuda --world 8 --model tiny --seq 32 --steps 1 --warmup 1 --warm-starts 1 --policies reshard"
    python(null_gpu, BENCH / "compare.py", *arguments.split(), "--systems", ",".join(systems), "--json", str(found))
    results = json.loads(found.read_text())["results"]
    assert {result["system"]: result["error"] for result in results} == dict.fromkeys(systems)
    return {result["system"]: result["profile"] for result in results}


def total(profile: dict[str, Any], what: str) -> float:
    return sum(kind[what] for kind in profile["collectives"].values())


def test_the_benchmark_counts_what_fsdp2_copies_on_a_gpu(compared: dict[str, dict[str, Any]]) -> None:
    assert compared["fsdp2"]["copies"]["copied_bytes"] >= total(compared["fsdp2"], "sent_bytes")


def test_of_ours_the_benchmark_counts_nothing_as_copied_on_a_gpu(compared: dict[str, dict[str, Any]]) -> None:
    assert compared["vescale"]["copies"]["copied_bytes"] == 0


def test_the_benchmark_has_inductor_bucket_simple_fsdp_on_a_gpu(compared: dict[str, dict[str, Any]]) -> None:
    apart, bucketed = (compared[system] for system in ("simplefsdp", "simplefsdp-bucketed"))
    assert total(bucketed, "payload_bytes") == total(apart, "payload_bytes")
    assert total(bucketed, "calls") < total(apart, "calls")


def test_the_benchmark_measures_a_predicted_step_on_a_gpu(null_gpu: dict[str, str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = "--models tiny --world 8 --cluster h100 --seq 32 --steps 2"
    python(null_gpu, BENCH / "predict_gpu.py", *options.split(), "--json", str(found))
    (cell,) = json.loads(found.read_text())["cells"]
    assert len(cell["steps"]) == 2 and min(cell["steps"]) > cell["optimizer"] / 2 > 0
    assert min(cell["by_table"], cell["by_calibration"]) > 0
    # Workspaces are there since the calibration; a tiny step takes half a megabyte, in pieces of 512 bytes.
    assert cell["peak"] == pytest.approx(cell["planned"], rel=0.1)

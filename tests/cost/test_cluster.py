"""Devices, links and clusters check themselves; their figures are the published ones."""

import argparse
import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vescale_compile import doctor_command, hardware
from vescale_compile.cost import (
    DEVICES,
    PRESETS,
    Calibration,
    Cluster,
    Device,
    Link,
    MeasuredCollective,
    device,
    gpu_cluster,
    wire_cluster,
)
from vescale_compile.hardware import cluster_for

H100_BYTES = DEVICES["h100"].memory_bytes
NVLINK = Link("NVLink", 450e9, 1e-6)


@pytest.mark.parametrize(
    ("name", "teraflops", "terabytes_per_second", "gibibytes"),
    [
        ("a100", 312, 2.039, 79.15),
        ("a100-40gb", 312, 1.555, 39.49),
        ("h100", 989.4, 3.35, 79.11),
        ("h200", 989.4, 4.8, 139.80),
        ("b200", 2250, 8.0, 178.35),
        ("mi300x", 1307.4, 5.3, 191.98),
    ],
)
def test_the_table_has_the_datasheets_figures_and_the_memory_that_pytorch_says(
    name: str, teraflops: float, terabytes_per_second: float, gibibytes: float
) -> None:
    figures = device(name)
    assert figures.peak_flops["bfloat16"] == pytest.approx(teraflops * 1e12)
    assert figures.memory_bandwidth == pytest.approx(terabytes_per_second * 1e12)
    assert figures.memory_bytes == int(gibibytes * 2**30)


def test_a_kernel_takes_the_larger_of_its_arithmetic_and_its_traffic_and_its_launch() -> None:
    unit = Device("unit", {"bfloat16": 100.0}, 10.0, None, 0.5, 0.5, 1.0)
    assert unit.seconds(200, 5, "bfloat16") == 200 / 50 + 1
    assert unit.seconds(200, 50, "bfloat16") == 50 / 5 + 1
    assert unit.seconds(0, 0, "") == 1


@pytest.mark.parametrize(
    ("dtype", "like"),
    [("float8", "bfloat16"), ("float16", "bfloat16"), ("bool", "bfloat16"), ("int32", "float32"), ("int64", "float32")],
)
def test_a_dtype_without_a_figure_is_as_fast_as_the_narrowest_that_is_as_wide(dtype: str, like: str) -> None:
    unit = Device("unit", {"bfloat16": 4.0, "tf32": 2.0, "float32": 1.0}, 1.0, None, 1.0, 1.0, 0.0)
    assert unit.seconds(100, 0, dtype) == unit.seconds(100, 0, like)


def test_a_device_without_figures_is_bound_by_memory() -> None:
    assert Device("unit", {}, 10.0, None, 1.0, 1.0, 0.0).seconds(1e9, 50, "float32") == 5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"memory_bandwidth": 0.0}, "memory_bandwidth is 0.0"),
        ({"peak_flops": {"float32": -1.0}}, "float32 is -1.0"),
        ({"compute_efficiency": 1.5}, r"compute_efficiency is 1.5; it must be in \(0, 1\]"),
        ({"launch_overhead": -1.0}, "launch_overhead is -1.0"),
        ({"issue": -1.0}, "issue is -1.0"),
    ],
)
def test_a_senseless_device_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=f"device 'h100': {problem}"):
        dataclasses.replace(device("h100"), **change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bandwidth": 0.0}, "bandwidth is 0.0"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"efficiency": 0.0}, "efficiency is 0.0"),
        ({"load": 1.0}, "load is 1.0"),
    ],
)
def test_a_senseless_link_is_refused(change: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=f"link 'NVLink': {problem}"):
        dataclasses.replace(NVLINK, **change)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no device 'tpu' in the table; it has a100, h100, h800, h200, b200, mi300x"):
        device("tpu")


def test_the_last_node_may_have_fewer_ranks() -> None:
    ragged = gpu_cluster("h100", 12)
    assert (ragged.nodes, ragged.local_ranks, ragged.last_ranks) == (2, 8, 4)


def test_a_cluster_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        Cluster(device("h100"), 0, 8, NVLINK, NVLINK)


def test_every_gpu_of_the_table_has_a_cluster() -> None:
    assert PRESETS.keys() == DEVICES.keys()
    assert PRESETS["h100"](64) == gpu_cluster("h100", 64)
    assert (PRESETS["h100"](64).nodes, PRESETS["h100"](4).local_ranks) == (8, 4)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    unit = Device("cpu", {"float32": 1e11}, 1e10, None, 1.0, 1.0, 1e-6)
    calibration = Calibration(unit, 2, {"all_gather": MeasuredCollective(1e-4, 2e8, 0.3)})
    calibration.save(tmp_path / "this.json")
    assert Calibration.load(tmp_path / "this.json") == calibration
    assert wire_cluster(unit, 2, 2.0, measured=calibration.collectives).measured == calibration.collectives


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}'])
def test_another_file_is_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no calibration"):
        Calibration.load(path)


def test_a_calibration_is_for_the_ranks_that_it_was_measured_on(tmp_path: Path) -> None:
    unit = Device("cpu", {"float32": 1e11}, 1e10, None, 1.0, 1.0, 1e-6)
    path = tmp_path / "this.json"
    Calibration(unit, 2, {"all_gather": MeasuredCollective(1e-4, 2e8)}).save(path)
    assert cluster_for(str(path), torch.device("cpu"), 2).measured.keys() == {"all_gather"}
    with pytest.raises(ValueError, match="measured on 2 ranks, and 4 shard the parameters"):
        cluster_for(str(path), torch.device("cpu"), 4)
    cluster = wire_cluster(unit, 2, 1.0, measured={"all_gather": MeasuredCollective(1e-4, 2e8)})
    assert cluster_for(cluster, torch.device("cpu"), 2) == cluster
    with pytest.raises(ValueError, match="measured on 2 ranks, and 4 shard the parameters"):
        cluster_for(cluster, torch.device("cpu"), 4)
    assert cluster_for(wire_cluster(unit, 2, 1.0), torch.device("cpu"), 4).ranks == 4


def test_errors_name_a_command_that_makes_a_calibration(tmp_path: Path) -> None:
    unit = Device("cpu", {"float32": 1e11}, 1e10, None, 1.0, 1.0, 1e-6)
    of_two, other = tmp_path / "of_two.json", tmp_path / "other.json"
    Calibration(unit, 2, {"all_gather": MeasuredCollective(1e-4, 2e8)}).save(of_two)
    other.write_text("")
    parser = argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    for wrong in (
        lambda: cluster_for(str(of_two), torch.device("cpu"), 4),
        lambda: Calibration.load(other),
        lambda: device("cray"),
    ):
        with pytest.raises(ValueError) as error:
            wrong()
        found = re.search("python -m vescale_compile doctor (.*?), or", str(error.value))
        assert found is not None
        args = parser.parse_args(found[1].replace("N", "4").split())
        assert args.ranks == 4 and args.calibrate is not None


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four GPUs on this host, and no launcher that says anything."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=H100_BYTES))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def test_what_a_calibration_lacks_goes_over_the_links_of_this_machine(gpus: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unit = replace(gpu_cluster("h100", 1).device, launch_overhead=1e-5)
    measured = {"all_gather": MeasuredCollective(1e-4, 2e8)}
    Calibration(unit, 8, measured).save(tmp_path / "this.json")
    found = cluster_for(str(tmp_path / "this.json"), torch.device("cuda"), 8)
    assert found == replace(gpu_cluster("h100", 8), device=unit, ranks_per_node=4, measured=measured)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_gpu_has_a_presets_links_if_its_name_says_that_nvlink_joins_all_of_its_board(
    name: str, preset: str | None
) -> None:
    assert hardware._preset_of(name) == preset


@pytest.mark.parametrize(
    ("name", "gibibytes", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.25, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.5, None),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
    ],
)
def test_boards_of_one_name_are_told_apart_by_their_memory(name: str, gibibytes: float, preset: str | None) -> None:
    assert hardware._preset_of(name, int(gibibytes * 2**30)) == preset


def test_a_gpus_calibration_is_simulated_over_the_links_of_its_preset(tmp_path: Path) -> None:
    unit = replace(gpu_cluster("h100", 1).device, name="NVIDIA H100 80GB HBM3")
    Calibration(unit, 1, {}).save(tmp_path / "gpu.json")
    found = cluster_for(str(tmp_path / "gpu.json"), torch.device("cpu"), 64)
    assert found == replace(gpu_cluster("h100", 64), device=unit)


def test_a_calibration_of_a_gpu_whose_links_nobody_knows_is_refused(tmp_path: Path) -> None:
    unit = replace(gpu_cluster("h100", 1).device, name="NVIDIA L40S")
    Calibration(unit, 1, {}).save(tmp_path / "gpu.json")
    with pytest.raises(ValueError, match=r"gpu\.json.*'NVIDIA L40S'.*Cluster"):
        cluster_for(str(tmp_path / "gpu.json"), torch.device("cpu"), 64)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 1), (6, 2), (12, 3), (16, 4)])
def test_a_node_is_taken_to_have_a_rank_for_each_gpu(gpus: pytest.MonkeyPatch, ranks: int, nodes: int) -> None:
    assert cluster_for(None, torch.device("cuda"), ranks).nodes == nodes


@pytest.mark.parametrize(("launched", "nodes"), [("2", 6), ("", 3)])
def test_a_launcher_knows_the_ranks_of_a_node(gpus: pytest.MonkeyPatch, launched: str, nodes: int) -> None:
    gpus.setenv("LOCAL_WORLD_SIZE", launched)
    assert cluster_for(None, torch.device("cuda"), 12).nodes == nodes


def test_a_gpu_has_the_memory_that_it_says_and_the_bandwidth_of_the_board_that_has_so_much(
    gpus: pytest.MonkeyPatch,
) -> None:
    gpus.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=40 << 30))
    found = cluster_for(None, torch.device("cuda"), 8).device
    assert (found.memory_bytes, found.memory_bandwidth) == (40 << 30, DEVICES["a100-40gb"].memory_bandwidth)


def test_a_gpu_alone_in_sight_says_nothing_of_its_node(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert cluster_for(None, torch.device("cuda"), 12) == gpu_cluster("h100", 12)


@pytest.mark.parametrize(
    ("stride", "ranks", "local", "nodes"), [(8, 4, 1, 4), (16, 2, 1, 2), (4, 4, 2, 2), (2, 4, 4, 1), (3, 4, 2, 2)]
)
def test_ranks_with_others_between_them_are_on_more_nodes(stride: int, ranks: int, local: int, nodes: int) -> None:
    apart = gpu_cluster("h100", 16).of(ranks, stride=stride)
    assert (apart.ranks, apart.local_ranks, apart.nodes) == (ranks, local, nodes)


def test_some_ranks_of_a_cluster_were_not_measured_as_all_were() -> None:
    all_ranks = replace(gpu_cluster("h100", 16), measured={"all_gather": MeasuredCollective(1e-6, 1e9)})
    assert all_ranks.of(16) is all_ranks
    assert all_ranks.of(8) == gpu_cluster("h100", 8)
    assert not all_ranks.of(16, stride=2).measured


def test_a_cluster_says_what_it_is() -> None:
    assert str(gpu_cluster("h100", 64)) == "64 x h100 on 8 nodes over NVLink and network"
    assert str(gpu_cluster("h100", 4)) == "4 x h100 on 1 node over NVLink"

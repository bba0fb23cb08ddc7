"""``python -m vescale_compile plan``."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from ranks import fake_world
from torch import nn

import vescale_compile as vc
from vescale_compile import plan_command


class Small(nn.Module):
    """Two blocks in a list, and an embedding and a norm beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.norm = nn.LayerNorm(16).half()


def not_a_module() -> int:
    return 3


def plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    return plan_command.run(parser.parse_args(arguments))


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert plan(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_units_totals_and_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "gpt-oss-120b", "--world", "1024", "--rows", "128") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("gpt-oss-120b on 1,024 ranks, blocks: Rows(count=128); planned in ")
    assert lines[2].split()[:5] == ["model.layers.0", "36", "3,213,080,192", "3", "3,842,048"]
    assert lines[6].split()[:3] == ["total", "38", "116,829,156,672"]
    assert "  2 such units as one: padding 5.74 %, 0.86 times the memory" in lines


def test_json_has_the_same_figures_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--model", "gpt-oss-120b", "--world", "8", "1024", "--rows", "128")
    assert [f["world_size"] for f in found] == [8, 1024]
    layer = found[1]["units"][0]
    assert (layer["count"], layer["buffers"], layer["shard_numel"]) == (36, 3, 3842048)
    assert layer["padding_percent"] == pytest.approx(22.45, abs=0.005)
    assert found[1]["total"]["numel"] == 116_829_156_672


@pytest.mark.parametrize(
    ("options", "granularity", "shard_numel"),
    [
        (["--rows", "32"], "Rows(count=32)", 32 * 2880),
        (["--tile", "32x64"], "BlockFP8(tile=(32, 64))", 32 * 2880),
        (["--elements", "7168"], "Elements(count=7168)", 7168),
        (["--whole"], "Whole()", 201088 * 2880),
        ([], "None", 17680),
    ],
)
def test_block_options(
    capsys: pytest.CaptureFixture[str], options: list[str], granularity: str, shard_numel: int
) -> None:
    (found,) = figures(capsys, "--model", "gpt-oss-120b", "--world", "32768", *options)
    assert found["granularity"] == granularity
    embedding = found["units"][1]
    assert embedding["name"] == "embedding" and embedding["shard_numel"] % shard_numel == 0


class Experts(nn.Module):
    """A stack of matrices whose rows tiles of 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(8, 6, 16))


def test_tiles_are_planned_as_quantized_gathers_are_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--module", "test_plan_command:Experts", "--world", "3")
    (tiled,) = figures(capsys, *where, "--tile", "4x4")
    with fake_world(3):
        model = vc.fully_shard(Experts(), quantize=vc.BlockFP8(tile=(4, 4)))
        assert model.stack.to_local().numel() == 3 * 6 * 16
    assert tiled["units"][0]["shard_numel"] == 3 * 6 * 16


def test_only_gives_blocks_to_the_names_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "gpt-oss-120b", "--world", "1024", "--rows", "128"]
    (found,) = figures(capsys, *options, "--only", r"experts\.(gate_up|down)_proj$")
    assert found["units"][0]["padding_percent"] == pytest.approx(5.74, abs=0.005)
    assert found["units"][1]["padding_percent"] < 0.001


def test_a_module_is_planned_in_the_units_that_fully_shard_makes(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = figures(capsys, "--module", "test_plan_command:Small", "--world", "4", "--rows", "2")
    assert [(row["name"], row["count"], row["numel"]) for row in found["units"]] == [
        ("layers.0", 2, 16 * 48 + 48),
        ("(root)#0", 1, 1600),
        ("(root)#1", 1, 32),
    ]


class Layer(nn.Module):
    """Two matrices of 2 MiB, which are parts of their own on CPUs, and not on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))])


def test_a_module_is_planned_for_the_devices_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def units(*device: str) -> list[str]:
        (found,) = figures(capsys, "--module", "test_plan_command:Layer", "--world", "2", *device)
        return [row["name"] for row in found["units"]]

    assert units() == units("--device", "cuda") == ["layers.0"]
    assert units("--device", "cpu") == ["layers.0#0", "layers.0#1"]


def test_a_hugging_face_config_is_built_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    (found,) = figures(capsys, "--hf-config", str(config), "--world", "2")
    assert [(row["name"], row["count"]) for row in found["units"]] == [("model.layers.0", 3), ("(root)", 1)]
    assert found["units"][0]["numel"] == 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64


def test_draw_shows_the_buffers_of_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--module", "test_plan_command:Small", "--world", "2", "--draw", "layers.1") == 0
    drawing = capsys.readouterr().out.split("\n\n")[1]
    assert "layers.1.weight [48, 16]" in drawing and "      1 |" in drawing


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "gpt-oss-120b"], "give the number of ranks with --world N"),
        (["--module", "json:loads", "--world", "2", "--itemsize", "4"], "--itemsize goes with --model alone"),
        (["--model", "gpt-oss-120b", "--world", "2", "--device", "cpu"], "--device goes with --module and"),
        (["--module", "json", "--world", "2"], "'json' is not of the form package.module:factory"),
        (["--module", "json:no_such", "--world", "2"], "no attribute 'no_such'"),
        (["--module", "no_such_module:f", "--world", "2"], "No module named 'no_such_module'"),
        (["--module", "test_plan_command:not_a_module", "--world", "2"], "must return an nn.Module"),
        (["--module", "torch.nn:Linear", "--world", "2"], "'in_features' and 'out_features' (it is called without"),
        (["--hf-config", "/nonexistent/config.json", "--world", "2"], "No such file"),
        (
            ["--model", "gpt-oss-120b", "--world", "2", "--draw", "x"],
            "--draw x: no such unit; there are model",
        ),
        (
            ["--model", "gpt-oss-120b", "--world", "2", "--only", "x"],
            "--only says which parameters have blocks",
        ),
        (
            ["--module", "test_plan_command:Small", "--world", "2", "--rows", "2", "--only", "expert"],
            "--only expert: no such parameter; there are layers.N.weight, layers.N.bias, embed.weight, norm.weight",
        ),
        (
            ["--model", "llama-3-70b", "--plot", "p.png", "--only", "expert"],
            "--only expert: no such parameter; there are model.layers.N.self_attn.q_proj.weight",
        ),
        (["--model", "gpt-oss-120b", "--world", "2", "--json", "--draw", "head"], "leave one of them out"),
        (["--model", "gpt-oss-120b", "--world", "2", "--tile", "256x256"], "--only leaves parameters out"),
        (["--model", "gpt-oss-120b", "--plot", "p.png", "--rows", "2"], "--plot draws its own granularities"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert plan(*arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (["--rows", "0"], "0 is not at least 1"),
        (["--tile", "32"], "'32' is not of the form HxW"),
        (["--only", "("], "'(' is no regular expression"),
        (["--model", "gpt-5"], "invalid choice: 'gpt-5'"),
    ],
)
def test_values_that_cannot_be_read_are_refused(
    capsys: pytest.CaptureFixture[str], option: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        plan("--model", "gpt-oss-120b", "--world", "2", *option)
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_model_config_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 64}')
    assert plan("--hf-config", str(config), "--world", "2") == 2
    assert "no model_type in it" in capsys.readouterr().err


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "padding.png"
    assert plan("--model", "llama-3-70b", "--world", "8", "64", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


def test_plot_says_when_matplotlib_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plan("--model", "llama-3-70b", "--world", "8", "--plot", str(tmp_path / "p.png")) == 2
    assert "--plot needs matplotlib: pip install 'vescale-compile[plot]'" in capsys.readouterr().err

"""`python bench/optimizers.py`: its figures, its table, and a small run."""

import json
import sys
from pathlib import Path

import pytest
import torch
from ranks import fake_world, on_ranks
from scripts import BENCH, run_script
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.append(str(BENCH))

import optimizers
from copies import Copies
from optimizer_trainer import CONTENDERS
from optimizers import OptimizerResult, table
from profiling import StepProfile, profiled
from states import state_bytes
from traffic import Traffic
from workload import Policy

import vescale_compile as vc
from vescale_compile.optim import AdamW8bit

MB = 10**6


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_states_of_plain_tensors_count_with_the_step_counters() -> None:
    model = nn.Linear(10, 10)
    assert state_bytes([stepped(model, torch.optim.AdamW(model.parameters()))]) == 2 * 4 * 110 + 2 * 4


def test_memory_that_states_share_counts_once() -> None:
    model = nn.Linear(10, 10)
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    state = optimizer.state[model.bias]
    state["exp_avg_sq"] = state["exp_avg"]
    assert state_bytes([optimizer]) == 2 * 4 * 110 + 2 * 4 - 4 * 10


@on_ranks(2)
def test_of_sharded_states_the_ranks_own_part_counts() -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    (optimizer := torch.optim.AdamW([weight])).step()
    assert state_bytes([optimizer]) == 2 * 4 * 16 + 4


@on_ranks(2)
def test_of_quantized_states_codes_and_scales_count() -> None:
    model = vc.fully_shard(nn.Linear(64, 256, bias=False), granularity=AdamW8bit.granularity)
    optimizer = stepped(model, AdamW8bit(model.parameters(), compile=False))
    held = 64 * 256 // 2
    assert state_bytes([optimizer]) == 2 * held + 2 * 4 * held // 256 + 4


def test_memory_of_a_step_is_what_was_there_and_the_most_that_came_at_once() -> None:
    before = torch.ones(1000)

    def step() -> None:
        first = before.clone()
        del first
        second, third = before.clone(), before.clone()
        del second, third

    step()
    with fake_world(1):
        found = profiled(step, 1, torch.device("cpu"))
    assert found.tensors_before >= before.nbytes
    assert found.tensor_peak - found.tensors_before == 2 * 4000


@pytest.mark.parametrize("name", ["torch.optim.AdamW", "torch.optim.AdamW, FSDP2", "torch.optim.Muon, FSDP2"])
def test_every_adamw_of_torch_is_the_fused_one(name: str) -> None:
    adamw = CONTENDERS[name].build(nn.Linear(4, 4))[-1]
    assert isinstance(adamw, torch.optim.AdamW) and adamw.defaults["fused"]


def measured(name: str, ranks_sent: tuple[float, ...] = (3 * MB, 1 * MB)) -> OptimizerResult:
    profiles = [
        StepProfile({"all_to_all": Traffic(8, 5 * MB, sent)}, Copies(), MB, (i + 2) * MB, None)
        for i, sent in enumerate(ranks_sent)
    ]
    return OptimizerResult(
        name,
        Policy.KEEP,
        warmup_s=[6.0],
        steps_s=[1.0, 0.5, 2.0],
        losses=[5.0, 4.5],
        parameters=100,
        state_bytes=[450, 350],
        profiles=profiles,
    )


def test_figures_stand_in_their_columns() -> None:
    headings, _, ours, failed = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table(
            [measured("vc.optim.Muon"), OptimizerResult("torch.optim.Muon, FSDP2", Policy.KEEP, error="it failed")]
        ).splitlines()
    )
    assert dict(zip(headings, ours, strict=True)) == {
        "optimizer": "vc.optim.Muon",
        "sharded by": "fully_shard",
        "state, bytes a parameter": "8.000",
        "step ms": "1000.0",
        "min to max": "500.0 to 2000.0",
        "extra MB": "2.00",
        "collectives": "8 A2A",
        "sent MB": "2.00",
        "first steps s": "5.0",
        "loss": "4.5000",
    }
    assert failed[:3] == ["torch.optim.Muon", "FSDP2", "failed"]


def test_a_package_that_is_not_there_is_said_once_and_its_optimizer_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    present, absent = optimizers._installed(list(CONTENDERS))
    assert absent == ["torchao AdamW8bit, FSDP2: left out, torchao is not installed."]
    assert set(CONTENDERS) - set(present) == {"torchao AdamW8bit, FSDP2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizers", "lion"), "no optimizer lion; there are torch.optim.AdamW; "),
        (("--model", "70B"), "invalid choice: '70B'"),
        (("--wire", "2gbit", "--ranks", "1"), "--wire: needs at least 2 --ranks"),
        (("--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["optimizers.py", *options])
    with pytest.raises(SystemExit) as ended:
        optimizers.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_muon_sends_less_than_torch_optim_muon_and_learns_the_same(tmp_path: Path) -> None:
    written = tmp_path / "measured.json"
    tiny = ("--model", "tiny", "--batch", "1", "--seq", "16", "--steps", "2", "--warmup", "1")
    chosen = ("--optimizers", "vc.optim.Muon;torch.optim.Muon, FSDP2")
    done = run_script(BENCH / "optimizers.py", *tiny, *chosen, "--json", str(written), deadline_s=300)
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(written.read_text())["results"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["state_bytes"] == pytest.approx(theirs["state_bytes"], rel=0.1)
    assert 0 < 10 * ours["sent_bytes"] < theirs["sent_bytes"]
    assert {"all_reduce", "all_to_all"} == set(ours["collectives"])
    assert len(ours["steps_s"]) == 2 and min(ours["steps_s"]) > 0

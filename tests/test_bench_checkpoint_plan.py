"""Planning of checkpoints for many ranks."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import checkpoint_plan


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_save_a_whole_layer_and_its_states_between_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, replicas: int
) -> None:
    plans = checkpoint_plan.Layer("gpt-oss-120b", 16 // replicas).shared_plans(replicas)
    sizes = [item.tensor_data.chunk.sizes for plan in plans for item in plan.items]
    assert sum(map(math.prod, sizes)) == pytest.approx(3 * 3 * 128 * 2880 * 2880, rel=0.02)  # but for attention
    monkeypatch.setattr(sys, "argv", ["checkpoint_plan.py", "--ranks", "16", "--replicas", str(replicas)])
    checkpoint_plan.main()
    ranks, by_default, _, _, shared, *_ = capsys.readouterr().out.splitlines()[-1].split()
    assert ranks == "16"
    assert int(shared) == len(sizes) < int(by_default)

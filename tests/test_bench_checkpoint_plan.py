"""Planning of checkpoints for many ranks."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import checkpoint_plan


def test_ranks_save_a_whole_layer_between_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    plans = checkpoint_plan.plans_of_ranks("gpt-oss-120b", 16)
    sizes = [item.tensor_data.chunk.sizes for plan in plans for item in plan.items]
    assert sum(map(math.prod, sizes)) == pytest.approx(3 * 128 * 2880 * 2880, rel=0.02)  # but for attention
    monkeypatch.setattr(sys, "argv", ["checkpoint_plan.py", "--ranks", "16"])
    checkpoint_plan.main()
    assert f"16{len(sizes):10,}" in capsys.readouterr().out

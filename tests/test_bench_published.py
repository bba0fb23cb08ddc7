"""Predicted steps of published models."""

import sys
from pathlib import Path

import pytest
from ranks import fake_world

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import published

pytestmark = pytest.mark.slow  # left out of `make test-fast`


def test_a_published_models_own_code_is_what_is_predicted() -> None:
    parameters = sum(param.numel() for param in published.build("gpt-oss-120b", None).parameters())
    assert parameters == pytest.approx(116.8e9, rel=1e-3)
    cell = published.predicted("gpt-oss-120b", 1024, "h100", 128, 1, budget=40 * 10**9)
    found = cell.predicted
    gathered_and_reduced = 2 * 201088 * 2880 + 128 * 3 * 2880 * 2880  # head and embedding, and the experts of a layer
    assert found.communication > gathered_and_reduced * (2 + 4) / 450e9  # a GPU's NVLink, which nothing exceeds
    assert found.step >= found.least > found.compute > 0
    assert 4 * gathered_and_reduced < found.peak < 1.01 * 40 * 10**9  # and states of an optimizer
    line = published.table([cell]).splitlines()[-1]
    assert line.startswith("| gpt-oss-120b | 1024 |") and f"{found.step / found.least:.3f}" in line


def test_what_is_around_the_experts_may_be_sharded_by_fewer_ranks() -> None:
    with fake_world(16):
        model = published.shard(published.build("gpt-oss-120b", 1), shards=8)
    sizes = {name: param.device_mesh.size() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    assert {size for name, size in sizes.items() if ".experts." in name} == {16}
    assert {size for name, size in sizes.items() if ".experts." not in name} == {8}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--models", "llama-5"], "no model llama-5; there are llama-3-70b, gpt-oss-120b, deepseek-v3"),
        (["--worlds", "64,100", "--shards", "8"], "--shards 8: it does not divide 100 GPUs"),
    ],
)
def test_what_can_not_be_predicted_is_refused(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    with pytest.raises(SystemExit):
        published.main()
    assert problem in capsys.readouterr().err

"""Predicted steps of published models."""

import sys
from pathlib import Path

import pytest

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


def test_a_model_that_is_not_among_them_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["published.py", "--models", "llama-5"])
    with pytest.raises(SystemExit):
        published.main()
    assert "no model llama-5; there are llama-3-70b, gpt-oss-120b, deepseek-v3" in capsys.readouterr().err

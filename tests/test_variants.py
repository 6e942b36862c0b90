"""The variants of `epikv-fit`: their scores by hand from its own, and the command."""

import json
import math
import sys

import pytest
import tiny
import torch

import variants
from epikv import POLICIES, CacheShape, EvictionConfig, LastBlocks, Tokens, hash_uniform

SHAPE = CacheShape(n_layers=3, n_kv_heads=2, head_dim=4, hidden_size=8, dtype=torch.float64)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, policy in variants.POLICIES_BESIDE.items():
        monkeypatch.setitem(POLICIES, name, policy)


def make_policy(name, **options):
    config = EvictionConfig(64, name, calibration=tiny.calibration(3), **options)
    return POLICIES[name](config, SHAPE)


def tokens(n_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    position = torch.arange(n_tokens)[None]
    k, v = draw(1, 3, 2, n_tokens, 4), draw(1, 3, 2, n_tokens, 4)
    return Tokens(position, draw(1, n_tokens, 3), k, v)


def test_a_smoothed_score_is_the_mean_of_the_last_ones():
    """Of up to eight, in each head."""
    plain = make_policy("epikv-fit").score(tokens(20))
    smoothed = make_policy("fit-smoothed").score(tokens(20))
    for t in (0, 5, 7, 19):
        wanted = plain[..., max(0, t - 7) : t + 1].mean(-1)
        torch.testing.assert_close(smoothed[..., t], wanted)


def test_a_span_has_one_score():
    score = torch.tensor([1.0, 2, 9, 0, 4, 4], dtype=torch.float64).view(1, 1, 2, 3)
    last = LastBlocks(torch.tensor([True]), torch.tensor([[0, 1, 2]]), score, None, None)
    revised = make_policy("fit-spans", lag=3).revise(last)
    assert revised.squeeze().tolist() == [[4, 4, 4], [pytest.approx(8 / 3)] * 3]


def test_a_lot_is_gumbel_noise_by_position():
    plain = make_policy("epikv-fit").score(tokens(9))
    added = make_policy("fit-lots").score(tokens(9)) - plain
    for t in range(9):
        uniform = hash_uniform(0, torch.tensor(t)).item()
        wanted = -0.5 * math.log(-math.log(uniform))
        assert added[..., t].flatten().tolist() == pytest.approx([wanted] * 6, rel=1e-4)


def test_the_command(tmp_path, monkeypatch, capsys):
    """All variants over the traces that are long enough, in a file and a table."""
    folder = tiny.make_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    records = [
        {"id": str(i), "prompt": "Problem", "trace": f"Thought {i} " * n}
        for i, n in enumerate((20, 30, 2))
    ]
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / "traces.jsonl").write_text(lines + "\n", encoding="utf-8")
    tiny.write_calibration(tmp_path / "calibration.json", tiny.calibration(3))
    options = ["--traces", "traces.jsonl", "--calibration", "calibration.json", "--no-compile"]
    options += ["--checkpoint", str(folder), "--budget", "64", "--tokens", "100"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["variants.py", *options])
    variants.main()
    result = json.loads((tmp_path / "variants.json").read_text(encoding="utf-8"))
    assert result["settings"]["budget"] == 64
    assert [*result["loss_gap"]] == [*variants.VARIANTS]
    assert all([*gaps] == ["0", "1"] for gaps in result["loss_gap"].values())
    table = capsys.readouterr().out
    for name, gaps in result["loss_gap"].items():
        assert f"| {name} | {sum(gaps.values()) / 2:.4f} |" in table
    assert len({tuple(gaps.values()) for gaps in result["loss_gap"].values()}) > 4

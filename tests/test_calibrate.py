"""Calibration: correlations against scipy-free definitions, planted signals, and noise."""

import json
import math
import statistics
import sys

import pytest
import tiny
import torch
import transformers

from calibrate import (
    Bands,
    band_score,
    calibrate,
    choose_bands,
    correlate,
    halves,
    main,
    over_window,
    peak_band,
    ranks,
    read_changes,
    spearman,
    verdict,
)
from epikv import rolling_mean, rolling_zscore
from model import Transformer


def test_ranks_by_hand():
    """Ties have their mean rank: of 3, 1, 3, 2, 3 the threes stand at 2, 3 and 4."""
    assert ranks(torch.tensor([3.0, 1, 3, 2, 3])).tolist() == [3, 0, 3, 1, 3]
    x = torch.tensor([[1.0, 5], [1, 4], [0, 3]])
    assert ranks(x).tolist() == [[1.5, 2], [1.5, 1], [0, 0]]


def slow_ranks(values):
    return [sum(v < x for v in values) + (values.count(x) - 1) / 2 for x in values]


def test_spearman_is_the_correlation_of_ranks():
    """By Python's own, ties included, and 1 for any rising function."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(8, (50, 3), generator=generator).float()
    y = torch.randint(5, (50,), generator=generator).float()
    wanted = [
        statistics.correlation(slow_ranks(x[:, i].tolist()), slow_ranks(y.tolist()))
        for i in range(3)
    ]
    assert spearman(x, y).tolist() == pytest.approx(wanted)
    rising = torch.linspace(0.1, 3, 20)
    assert spearman(rising[:, None].exp(), rising).item() == pytest.approx(1)
    assert spearman(torch.ones(20, 1), rising).item() == 0


@pytest.mark.parametrize(
    "values, band",
    [
        ([0.2, 0.3, 0.1, 0.5, 0.25, 0.24, 0.4], [3, 4]),
        ([-2.0, -1, -3], [1]),
        ([1.0, 1, 1], [0, 1, 2]),
        ([0.0, 0.0], [0]),
    ],
)
def test_the_band_around_a_peak(values, band):
    assert peak_band(values) == band


def test_bands_by_hand():
    """Mean 0.2 against 0.1: weights 1 and a half; a band of the wrong sign weighs nothing."""
    bands = choose_bands([0.0, 0.1, 0.24, 0.16, -0.04, -0.1, 0.0])
    assert (bands.band_a, bands.band_b) == ([2, 3], [5])
    assert (bands.weight_a, bands.weight_b) == (1, pytest.approx(0.5))
    bands = choose_bands([-0.2, -0.1])
    assert (bands.weight_a, bands.weight_b) == (0, 1)


def test_the_score_of_bands_by_hand():
    """With windows of two, z is +-1 where a mean rises or falls (but for 1e-6 beside it)."""
    change = torch.tensor([[1.0, 3, 0], [2, 4, 0], [1, 3, 5]], dtype=torch.float64)
    bands = Bands([0, 1], [2], weight_a=1.0, weight_b=0.5)
    found = band_score(change, bands, 2)[:, 0].tolist()
    assert found == pytest.approx([0, 1, -1 - 0.5], abs=1e-5)
    means = over_window(change, 2, rolling_mean)
    assert means.tolist() == [[1, 3, 0], [1.5, 3.5, 0], [1.5, 3.5, 2.5]]


def test_halves_share_no_problem():
    first, second = halves(["a", "b", "a", "c", "b", "d"])
    assert (first, second) == ([0, 2, 3], [1, 4, 5])


def smooth(x, size=32):
    """Moving sums, as labels have them whose windows overlap."""
    return x.unfold(0, size, 1).sum(-1)


def make_traces(seed, planted=None, n_traces=12, n_tokens=400, n_blocks=16):
    """Noisy changes of every block, and labels of which `planted` blocks decide a part."""
    generator = torch.Generator().manual_seed(seed)
    changes, labels = [], []
    for _ in range(n_traces):
        change = torch.randn(n_tokens, n_blocks, generator=generator).abs() + 5
        label = torch.randn(n_tokens + 31, generator=generator)
        label = smooth(label) / 32**0.5
        for block, sign in (planted or {}).items():
            label = label + sign * (change[:, block] - 5)
        changes.append(change)
        labels.append(label)
    return changes, labels


def calibrated(changes, labels, seed=0):
    """Bands from the first half of the traces, and the evidence of the second."""
    half = len(changes) // 2
    z = [over_window(change, 64, rolling_zscore) for change in changes]
    bands = choose_bands(correlate(z[:half], labels[:half], seed).mean.tolist())
    scores = [band_score(change, bands, 64) for change in changes[half:]]
    return bands, verdict(correlate(scores, labels[half:], seed))


def test_a_planted_block_is_found():
    """Block 5 for, block 11 against."""
    bands, (reliable, words) = calibrated(*make_traces(0, {5: 1.0, 11: -1.0}))
    assert 5 in bands.band_a and 11 in bands.band_b and len(bands.band_a + bands.band_b) < 6
    assert reliable and words.startswith("a reliable signal: on held-out traces")


def test_noise_is_no_signal():
    """In at least 95 of 100 seeds, labels as alike among neighbours as real ones."""
    said = [
        calibrated(*make_traces(seed, n_traces=8, n_tokens=200), seed)[1] for seed in range(100)
    ]
    assert sum(not reliable for reliable, _ in said) >= 95
    assert any(words.startswith("no reliable signal") for _, words in said)


def test_chance_is_the_largest_of_all_channels():
    """A correlation that one channel would be proud of is nothing among many."""
    changes, labels = make_traces(3, n_traces=4)
    alone = [change[:, :1] for change in changes]
    many = [torch.cat([one, change], dim=1) for one, change in zip(alone, changes, strict=True)]
    assert correlate(many, labels).p > 0.01
    planted = make_traces(3, {0: 2.0}, n_traces=4)
    assert correlate(*planted).p == pytest.approx(1 / 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def test_changes_are_those_of_the_residuals(folder, monkeypatch):
    """By transformers' hidden states, of which the last is normalised: that block is left out."""
    monkeypatch.setattr("calibrate.CHUNK", 16)
    tokens = torch.randint(256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    found = read_changes(Transformer.from_pretrained(folder), tokens)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = peer(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert found.shape == (50, 3) and found[0].eq(0).all()
    for block in range(2):
        h = states[block + 1][0]
        torch.testing.assert_close(
            found[1:, block], (h[1:] - h[:-1]).norm(dim=-1), rtol=1e-3, atol=1e-4
        )


def test_tokens_without_label_do_not_count():
    """Whatever is put in their place, nothing changes."""
    changes, labels = make_traces(1, {2: 1.0, 7: -1.0})
    prompts = [str(i % 4) for i in range(len(labels))]
    for label in labels:
        label[-50:] = math.nan
    result = calibrate(changes, labels, prompts, 64)
    shorter = [change[:-50] for change in changes], [label[:-50] for label in labels]
    assert calibrate(*shorter, prompts, 64) == result
    assert result["band_a"] == [2] and result["band_b"] == [7] and result["reliable"]
    assert result["traces"] == {"chosen_on": 6, "checked_on": 6}
    with pytest.raises(ValueError, match="all on one problem"):
        calibrate(changes, labels, ["same"] * len(labels), 64)


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    """Labels and traces in, a small file and a plot out, and a verdict in words."""
    records = [
        {"id": str(i), "prompt": f"Problem {i // 2}", "trace": f"Thought {i} " * 12}
        for i in range(6)
    ]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "labels").mkdir()
    labels = [
        {"trace": str(i), "filler": "drop", "loss": [(7 * n * (i + 3)) % 11 for n in range(80)]}
        for i in range(6)
    ]
    lines = [json.dumps(label) for label in labels] + [json.dumps(labels[0] | {"filler": "eos"})]
    (tmp_path / "labels/records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--labels", "labels", "--traces", "traces.jsonl", "--output", "c.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--checkpoint", str(folder), *options])
    main()
    result = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert capsys.readouterr().out.strip() == result["verdict"]
    assert "signal: on held-out traces the score's correlation" in result["verdict"]
    assert (tmp_path / "c.json").stat().st_size < 8000 and (tmp_path / "c.png").is_file()
    assert result["n_layers"] == 3 and {*result["band_a"], *result["band_b"]} <= {0, 1, 2}
    assert len(result["correlation"]["z-score"]["within_trace"]) == 3
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--filler", "pad"])
    with pytest.raises(SystemExit):
        main()
    assert "labels has no losses for filler 'pad'" in capsys.readouterr().err

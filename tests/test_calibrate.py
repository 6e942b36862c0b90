"""Calibration: correlations against scipy-free definitions, planted signals, and noise."""

import json
import math
import statistics
import sys
from dataclasses import replace

import pytest
import tiny
import torch
import transformers

from calibrate import (
    STRENGTHS,
    Bands,
    Text,
    band_score,
    calibrate,
    choose_bands,
    choose_ridge,
    correlate,
    fit,
    halves,
    head_correlation,
    head_scores,
    main,
    over_window,
    peak_band,
    ranks,
    read_signals,
    regression,
    ridge,
    spearman,
    tune,
    verdict,
)
from epikv import Calibration, EvictionConfig, rolling_mean, rolling_zscore
from model import Transformer
from replay import Trace


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
    monkeypatch.setattr("label_importance.CHUNK", 16)
    tokens = torch.randint(256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    found, _ = read_signals(Transformer.from_pretrained(folder), tokens, 64)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = peer(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert found.shape == (50, 3) and found[0].eq(0).all()
    for block in range(2):
        h = states[block + 1][0]
        torch.testing.assert_close(
            found[1:, block], (h[1:] - h[:-1]).norm(dim=-1), rtol=1e-3, atol=1e-4
        )


def test_features_are_those_that_the_cache_scores_by(folder, monkeypatch):
    """A prompt's scores in a cache with all its tokens, whose chunks are others."""
    monkeypatch.setattr("label_importance.CHUNK", 16)
    model = Transformer.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.randint(256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    _, features = read_signals(model, tokens, window=8)
    calibration = replace(tiny.calibration(3, seed=1), window=8)
    cache = model.new_cache(EvictionConfig(64, "epikv-fit", calibration=calibration))
    with torch.no_grad():
        model.prefill(torch.tensor([tokens]), cache)
    text = Text(None, "", features, features, None, None)
    wanted = head_scores(text, calibration.fit).T.unflatten(0, (3, 2))
    torch.testing.assert_close(cache.score[0, ..., :50], wanted, rtol=1e-6, atol=1e-6)


def make_texts(seed, planted=None, **sizes):
    """Texts of `make_traces` with six features a block, of which five are noise of their own.

    Each block has two heads, on which the effect is the fourth power of what the label plants; on
    the second head of block 0 of its negative.
    """
    changes, labels = make_traces(seed, planted, **sizes)
    generator = torch.Generator().manual_seed(seed + 1)
    texts = []
    for i, (change, label) in enumerate(zip(changes, labels, strict=True)):
        z = over_window(change, 64, rolling_zscore)
        noise = torch.randn(len(change), 5 * change.shape[1], generator=generator)
        features, label = torch.cat([z, noise], dim=1), label.double()
        effects = (label - label.min())[:, None, None].repeat(1, change.shape[1], 2) ** 4
        effects[:, 0, 1] = (label.max() - label) ** 4
        trace = Trace(str(i), [], [])
        texts.append(
            Text(trace, str(i % 6), change, features, label, effects.expand(2, -1, -1, -1))
        )
    return texts


def calibrated_texts(texts):
    """Chosen on one half of the problems, checked on the other."""
    first, second = halves([text.prompt for text in texts])
    return calibrate([texts[i] for i in first], [texts[i] for i in second], 64)


def test_the_regression_by_hand():
    """Two delays of three tokens and one head; fourth roots 2 and 4, and 1, 0 and 2."""
    features = torch.tensor([[1.0], [2.0], [6.0]])
    effects = torch.tensor([[16, math.nan, 256], [1.0, 0, 16]]).view(2, 3, 1, 1)
    x, y = regression(Text(None, "", features, features, None, effects))
    assert x[:, 0].tolist() == pytest.approx([-2.5, 2.5, -2, -1, 3])
    assert y[:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, -1, 1])


def test_a_ridge_by_hand():
    """One feature of deviation 2: (x.y / 2) / (x.x / 4 + strength * n) in units of 2; others 0."""
    x = torch.tensor([[-2.0, 0, 5], [0, 0, -9], [2, 0, 4]], dtype=torch.float64)
    y = torch.tensor([[-1.0, 1], [0, 5], [3, 1]], dtype=torch.float64)
    columns = torch.tensor([True, True, False])
    weights = ridge([(x[:2], y[:2]), (x[2:], y[2:])], columns, strength=0.5)
    assert weights[:, 0].tolist() == pytest.approx([(8 / 2) / (8 / 4 + 1.5) / 2, 0, 0])
    assert weights[:, 1].tolist() == pytest.approx([0, 0, 0])


EVERY = torch.ones(16 * 6, dtype=torch.bool)


def test_a_planted_block_is_fitted():
    """Block 5 for and block 11 against, twice as much; the other way round for one of the heads."""
    texts = make_texts(0, {5: 1.0, 11: -2.0})
    by_feature, by_head = fit(texts, EVERY).tensors(torch.float64)
    weights = torch.einsum("rfl,rbh->flbh", by_feature, by_head)
    first, other = weights[..., 0], weights[..., 0, 1]
    torch.testing.assert_close(other, -first[..., 0], rtol=0, atol=0.05)
    others = weights.clone()
    others[0, [5, 11]] = 0
    assert first[0, 5].min() > 4 * others.abs().max()
    assert ((first[0, 11] / first[0, 5] + 2).abs() < 0.3).all()
    for text in texts[:2]:
        assert head_scores(text, fit(texts, EVERY)).shape == (len(text.labels), 32)
    scores = torch.cat([head_scores(text, fit(texts, EVERY)) for text in texts])
    assert scores.std(0).tolist() == pytest.approx([1.0] * 32, rel=1e-2)


def test_a_head_without_any_effect_scores_nothing():
    texts = make_texts(0, {5: 1.0})
    for text in texts:
        text.effects = text.effects.clone()
        text.effects[:, :, 2, 1] = 0
    _, by_head = fit(texts, EVERY).tensors(torch.float64)
    assert by_head[:, 2, 1].eq(0).all() and by_head[:, 2, 0].abs().max() > 0.1
    for text in texts:
        text.effects = torch.zeros_like(text.effects)
    assert fit(texts, EVERY).tensors(torch.float64)[1].eq(0).all()


def test_few_sums_lose_the_least(monkeypatch):
    """Two blocks make two kinds of heads; with two sums all is there, with one the larger part."""
    texts = make_texts(0, {3: 1.0})
    others = make_texts(0, {8: 1.0})
    for text, other in zip(texts, others, strict=True):
        text.features = torch.cat([text.features[:, :8], other.features[:, 8:]], dim=1)
        text.effects = torch.cat([text.effects[:, :, :11], other.effects[:, :, :5]], dim=2)
    correlations = {}
    for n_sums in (1, 2, 16):
        monkeypatch.setattr("calibrate.N_SUMS", n_sums)
        found = fit(texts, EVERY)
        assert len(found.heads) == len(found.change) == n_sums
        correlations[n_sums] = head_correlation(texts, found)[0]
    assert correlations[2] == pytest.approx(correlations[16], abs=0.02)
    assert correlations[1] < 0.8 * correlations[2]


def test_a_ridge_is_chosen_for_what_it_has_not_seen():
    """Noise alone wants the strongest; a plain signal a weak one, whatever the units."""
    noise = make_texts(2, n_traces=8, n_tokens=100)
    plain = make_texts(2, {3: 50.0}, n_traces=8, n_tokens=100)
    data = [regression(text) for text in noise]
    assert choose_ridge(noise, EVERY).norm() <= ridge(data, EVERY, STRENGTHS[2]).norm()
    weights = choose_ridge(plain, EVERY)
    for text in plain:
        text.features[:, 3] *= 1000
    scaled = choose_ridge(plain, EVERY)
    torch.testing.assert_close(scaled[3] * 1000, weights[3], rtol=1e-3, atol=0)


def test_tokens_without_label_do_not_count():
    """Whatever is put in their place: neither bands nor weights of the features change.

    A score's deviation is of all tokens, and so are the sums that its heads share.
    """
    texts = make_texts(1, {2: 1.0, 7: -1.0})
    for text in texts:
        text.effects = text.effects.clone()
        for label in (text.labels, *text.effects):
            label[-50:] = math.nan
    result = calibrated_texts(texts)
    shorter = [
        Text(
            text.trace,
            text.prompt,
            text.changes[:-50],
            text.features[:-50],
            text.labels[:-50],
            text.effects[:, :-50],
        )
        for text in texts
    ]
    found = calibrated_texts(shorter)
    for name in ("band_a", "band_b", "weight_a", "weight_b", "correlation"):
        assert found[name] == result[name]
    assert found["checked"]["bands"] == result["checked"]["bands"]
    torch.testing.assert_close(choose_ridge(shorter, EVERY), choose_ridge(texts, EVERY))
    assert result["band_a"] == [2] and result["band_b"] == [7]
    assert result["reliable"] == {"bands": True, "fit": True}
    assert result["chosen_on"] == ["0", "2", "4", "6", "8", "10"]
    assert result["checked_on"] == ["1", "3", "5", "7", "9", "11"]
    held_out = {name: found["within_trace"][0] for name, found in result["checked"].items()}
    assert held_out["fit"] > 0.5 > 0.1 > held_out["keys and values"]


def test_a_trend_is_told_before_and_after_the_z_score():
    """Changes that grow along the text, in one band more than in the other."""
    texts = make_texts(1, {2: 1.0, 7: -1.0})
    for text in texts:
        text.changes[:, 2] += torch.arange(len(text.changes)) / 20
    trend = calibrated_texts(texts)["trend"]
    assert trend["raw"] > 0.9 and abs(trend["z-score"]) < 0.1


def test_noise_fits_nothing():
    """The fit's verdict, in at least 19 of 20 seeds."""
    said = [
        calibrated_texts(make_texts(seed, n_traces=8, n_tokens=150, n_blocks=4))["reliable"]["fit"]
        for seed in range(20)
    ]
    assert said.count(False) >= 19


def test_the_weight_of_age_is_the_one_that_loses_least(folder, monkeypatch):
    """The replayed gap is worst for all weights but one here; that one comes out."""
    model = Transformer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    traces = [
        Trace(str(i), [1, 2], torch.randint(256, (n,), generator=generator).tolist())
        for i, n in enumerate((30, 40, 50, 60))
    ]
    texts = [Text(trace, "", None, None, None, None) for trace in traces]
    calibration = tiny.calibration(3)
    asked, tried = [], []

    def replay(model, traces, configs, compile_mode):
        asked.append([(trace.id, len(trace.tokens)) for trace in traces])
        tried.append(
            [(config.calibration.fit.log_age, config.recent) for config in configs.values()]
        )
        assert {(config.budget, config.policy) for config in configs.values()} == {
            (16, "epikv-fit")
        }
        gaps = [1.0] * 6
        gaps[3] = 0.5
        return {name: torch.full((4, 1, 2), gap) for name, gap in zip(configs, gaps, strict=True)}

    monkeypatch.setattr("calibrate.replay", replay)
    tuned, gaps = tune(model, texts, calibration, 16)
    # The median of four lengths is 50, the higher one: two are long enough, and cut.
    assert asked == [[("2", 50), ("3", 50)]] * 2
    assert [age for age, _ in tried[0]] == [0, -0.5, -1, -1.5, -2, -3] == [*gaps["age"]]
    assert tried[0][0][1] == 4 and len({recent for _, recent in tried[0]}) == 1
    # The recency windows are tried with the best age.
    assert tried[1] == [(tuned.fit.log_age, recent) for recent in (4, 2, 6, 8, 10, 11)]
    assert [*gaps["recent"]] == [0.25, 0.125, 0.375, 0.5, 0.625, 0.75]
    assert tuned.fit.log_age == -1.5 and tuned.recent == 0.5
    untuned = replace(tuned, recent=0.25, fit=replace(tuned.fit, log_age=calibration.fit.log_age))
    assert untuned == calibration
    assert [*gaps["age"].values()] == [*gaps["recent"].values()] == [1, 1, 1, 0.5, 1, 1]
    with pytest.raises(ValueError, match="^budget 50 holds the traces' 50 tokens; lower it$"):
        tune(model, texts, calibration, 50)


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    """Labels and traces in, a small file and a plot out, and a verdict in words."""
    records = [
        {"id": str(i), "prompt": f"Problem {i // 2}", "trace": f"Thought {i} " * 12}
        for i in range(7)
    ]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "labels").mkdir()
    labels = [
        {"trace": str(i), "filler": "drop", "delay": delay}
        | {"effect": [(7 * n * (i + 3)) % 11 for n in range(80 - delay)] + [None] * delay}
        for i in range(6)
        for delay in (0, 20)
    ]
    short = {"trace": "6", "filler": "drop", "delay": 0, "effect": [None, 1.0, None]}
    lines = [json.dumps(label) for label in [*labels, short]] + [
        json.dumps(labels[0] | {"filler": "eos"})
    ]
    (tmp_path / "labels/records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--labels", "labels", "--traces", "traces.jsonl", "--output", "c.json"]
    options += ["--budget", "32", "--held-out", "held-out.jsonl"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--checkpoint", str(folder), *options])
    main()
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert said.strip() == result["verdict"]
    for line, name in zip(result["verdict"].splitlines(), ("bands", "fit"), strict=True):
        assert line.startswith(f"{name}: ")
        assert "signal: on held-out traces the score's correlation" in line
    assert (tmp_path / "c.json").stat().st_size < 8000 and (tmp_path / "c.png").is_file()
    calibration = Calibration.read("c.json")
    assert calibration.n_layers == 3 and calibration.band_a == tuple(result["band_a"])
    assert calibration.fit.log_age == result["fit"]["log_age"]
    assert result["n_layers"] == 3 and {*result["band_a"], *result["band_b"]} <= {0, 1, 2}
    assert len(result["correlation"]["z-score"]["within_trace"]) == 3
    assert result["chosen_on"] == ["0", "1", "4", "5"] and result["checked_on"] == ["2", "3"]
    held_out = (tmp_path / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in held_out] == records[2:4]
    for name, value in (("age", result["fit"]["log_age"]), ("recent", result["recent"])):
        gaps = result["tuned"][name]
        assert min(gaps, key=gaps.get) == str(value)
    assert calibration.recent == result["recent"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--swap"])
    main()
    swapped = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert swapped["chosen_on"] == ["2", "3"] and swapped["checked_on"] == ["0", "1", "4", "5"]
    for changed, words in (
        ([records[0] | {"id": "another"}], "traces.jsonl has no trace that labels tells of"),
        ([records[0] | {"trace": "Thought"}], "trace '0' has fewer tokens than labels"),
    ):
        lines = [json.dumps(record) for record in changed]
        (tmp_path / "traces.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--filler", "pad"])
    with pytest.raises(SystemExit):
        main()
    assert "no labels of outcome 'effect' and filler 'pad'" in capsys.readouterr().err

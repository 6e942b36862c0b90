"""The cache and its policies: against the twin, by hand, and by what must hold for any input."""

import ast
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import twin
from hypothesis import given, settings
from hypothesis import strategies as st

import epikv
from epikv import EvictionConfig, SlotCache, hash_uniform

SOURCE = Path(epikv.__file__)
EVICTING = [name for name in epikv.POLICIES if name != "full"]
SCORING = [name for name, policy in epikv.POLICIES.items() if policy.bands]
ROUNDING = dict(rtol=1e-9, atol=1e-9)  # float64, sums in another order


# Driving a cache without a model ---------------------------------------------------------------


def settings_for(policy, **options):
    """A configuration for a model of 4 blocks, in which bands are blocks 0, 1 and blocks 2, 3."""
    if policy in SCORING:
        options = dict(band_a=(0, 1), band_b=(2, 3)) | options
    return EvictionConfig(policy=policy, **options)


def make_cache(config, batch_size=1, n_layers=4, hidden_size=3, dtype=torch.float64):
    return SlotCache(
        config,
        n_layers=n_layers,
        n_kv_heads=2,
        head_dim=2,
        hidden_size=hidden_size,
        batch_size=batch_size,
        dtype=dtype,
    )


def random_walk(cache, n_tokens, seed=0, batch_size=None):
    """Residuals [B, N, len(reads), hidden] that move by steps of widely different length."""
    generator = torch.Generator().manual_seed(seed)
    _, n_blocks, hidden_size = cache.previous.shape
    shape = (batch_size or cache.length.shape[0], n_tokens, n_blocks)
    length = torch.randn(*shape, 1, generator=generator, dtype=torch.float64).exp()
    direction = torch.randn(*shape, hidden_size, generator=generator, dtype=torch.float64)
    return (length * direction).cumsum(dim=1)


def keys_and_values(cache, position):
    """Per layer k and v [B, 2, T, 2] that tell the `position` [B, T] they were made for."""
    head = torch.arange(2)[None, :, None, None]
    k = [
        (position[:, None, :, None] * 16 + head * 4 + layer)
        .expand(-1, -1, -1, 2)
        .to(cache.layers[0].k.dtype)
        for layer in range(len(cache.layers))
    ]
    return k, [-layer - 1 for layer in k]


def admit(cache, residuals):
    """Take the residuals [B, T, len(reads), hidden] of T prompt tokens at once."""
    position = cache.length[:, None] + torch.arange(residuals.shape[1])
    cache.admit(*keys_and_values(cache, position), list(residuals.unbind(2)))


def prefill(cache, residuals, chunk):
    cache.protect_prompt(residuals.shape[1])
    for part in residuals.split(chunk, dim=1) if residuals.shape[1] else ():
        admit(cache, part)


def decode(cache, residuals, write=True):
    """Take one token per row by its residuals [B, len(reads), hidden].

    Returns the position of every row's victim, None for a row that had a free slot.
    """
    before = cache.position.clone()
    slot, position = cache.begin_step()
    if write:
        contents = zip(*keys_and_values(cache, position[:, None]), strict=True)
        for layer, (k, v) in zip(cache.layers, contents, strict=True):
            layer.write(slot, k, v)
    cache.end_step(slot, position, list(residuals[:, None].unbind(2)))
    victims = before.gather(1, slot[:, None])[:, 0].tolist()
    return [None if victim == epikv.NO_POSITION else victim for victim in victims]


def held(cache, row=0):
    """The positions that a row holds, oldest first."""
    return sorted(p for p in cache.position[row].tolist() if p != epikv.NO_POSITION)


def score_of(cache, row=0):
    """The score of each position that a row holds."""
    scores = zip(cache.position[row].tolist(), cache.score[row].tolist(), strict=True)
    return {position: score for position, score in scores if position != epikv.NO_POSITION}


# Against the twin ------------------------------------------------------------------------------


def as_twin(residuals, reads):
    """Residuals [T, len(reads), hidden] in the twin's form: per token, a list for each block."""
    return [dict(zip(reads, token, strict=True)) for token in residuals.tolist()]


def assert_same_row(cache, row, reference):
    """The same tokens with the same scores."""
    expected = {token["position"]: token["score"] for token in reference.tokens}
    actual = score_of(cache, row)
    assert sorted(actual) == sorted(expected)
    for position, score in expected.items():
        assert actual[position] == pytest.approx(score, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("prompts", [(0,), (17, 55, 230)], ids=["one row", "ragged"])
@pytest.mark.parametrize("policy", epikv.POLICIES)
def test_victims_are_the_twins(policy, prompts):
    """2,000 steps with the defaults: no prompt; one below half the budget, one above, one over."""
    n_steps = 2000
    budget = 80 if policy != "full" else n_steps + max(prompts)
    config = EvictionConfig(budget=budget, policy=policy, seed=3)
    cache = make_cache(config, len(prompts), n_layers=32)
    walk = random_walk(cache, max(prompts) + n_steps, seed=1)
    twins, streams = [], []
    for row, n_prompt in enumerate(prompts):
        source = make_cache(config, n_layers=32)
        tokens = as_twin(walk[row], cache.reads)
        twins.append(twin.TwinRow(policy, budget=budget, seed=3, n_prompt=n_prompt))
        prefill(source, walk[row : row + 1, :n_prompt], chunk=80)
        for start in range(0, n_prompt, 80):
            twins[row].admit(start, tokens[start : min(start + 80, n_prompt)])
        assert_same_row(source, 0, twins[row])
        cache.load_row(row, source)
        streams.append(tokens)

    for step in range(n_steps):
        at = [n_prompt + step for n_prompt in prompts]
        residuals = torch.stack([walk[row, t] for row, t in enumerate(at)])
        expected = [twins[row].append(t, streams[row][t]) for row, t in enumerate(at)]
        assert decode(cache, residuals, write=False) == expected, f"step {step}"
    for row, reference in enumerate(twins):
        assert_same_row(cache, row, reference)


@st.composite
def cases(draw):
    """Options of a configuration that can work, a prompt and how to take it."""
    budget = draw(st.integers(1, 14))
    sinks = draw(st.integers(0, min(4, budget - 1)))
    recent = draw(st.integers(0, budget - sinks - 1))
    options = dict(budget=budget, sinks=sinks, recent=recent, window=draw(st.integers(2, 6)))
    n_prompt = draw(st.integers(0, 3 * budget))
    chunk = draw(st.integers(1, 2 * budget))
    return options, n_prompt, chunk, draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("policy", EVICTING)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=cases())
def test_victims_are_the_twins_for_any_settings(policy, case):
    """Small budgets, windows and chunks, where the protections meet each other."""
    options, n_prompt, chunk, seed = case
    cache = make_cache(settings_for(policy, seed=seed, **options))
    bands = ([0, 1], [2, 3]) if policy in SCORING else ()
    reference = twin.TwinRow(policy, seed=seed, bands=bands, n_prompt=n_prompt, **options)
    walk = random_walk(cache, n_prompt + 2 * options["budget"], seed)
    tokens = as_twin(walk[0], cache.reads)

    cache.protect_prompt(n_prompt)
    for start in range(0, n_prompt, chunk):
        end = min(start + chunk, n_prompt)
        admit(cache, walk[:, start:end])
        reference.admit(start, tokens[start:end])
        assert_same_row(cache, 0, reference)
    for position in range(n_prompt, walk.shape[1]):
        expected = reference.append(position, tokens[position])
        assert decode(cache, walk[:, position]) == [expected], f"position {position}"
    assert_same_row(cache, 0, reference)


# By hand ---------------------------------------------------------------------------------------

# Changes g of tokens 1 to 7 at two blocks, and with a window of 2 the z-scores: of two values the
# newer one is a standard deviation above the mean, below it, or they are equal (the 1e-6 moves
# every +1 and -1 here by the same amount, so it changes no order and no tie).
#   token        0   1   2   3   4   5   6   7
#   z_a          -   0  +1  -1  +1  -1   0  +1
#   z_b          -   0   0  +1  -1   0  +1  -1
#   z_a - z_b    0   0   1  -2   2  -1  -1   2
#   smooth       0   0  .5 -.5   0  .5  -1  .5
CHANGES = [[1, 3, 1, 3, 1, 1, 3], [1, 1, 3, 1, 1, 3, 1]]

# Window 3 at block 0; block 1 is constant, so its z is 0. Of three values two are equal:
#   token        0   1   2     3     4     5     6     7     8     9
#   g            -   0   0     3     3     0     3     0     0     6
#   mean         -   0   0     1     2     2     2     1     1     2
#   std          -   -   0    √2    √2    √2    √2    √2    √2    √8
#   z            0   0   0    √2   .71   -√2   .71  -.71  -.71    √2
OF_THREE = [[0, 0, 3, 3, 0, 3, 0, 0, 6], [1] * 9]

# Means of two:
#   token        0   1   2   3   4   5   6   7
#   mean g_a     -   4   2   1   4   3   4
#   mean g_b     -   1   1   2   2   1   1
#   difference   0   3   1  -1   2   2   3
RAW = [[4, 0, 2, 6, 0, 8, 1], [1, 1, 3, 1, 1, 1, 1]]

# Bands of two blocks, whose means count: block 0 falls where the mean of band A rises. Window 2:
#   token            0   1    2     3     4      5   6
#   mean of A        -   2    4     2     4      2   2
#   mean of B        -   2    4     2     1      2   2
#   1.29 z_A - z_B   0   0  .29  -.29  2.29  -2.29   0
BAND = [
    [3, 1, 3, 1, 3, 2, 2],
    [1, 7, 1, 7, 1, 2, 2],
    [1, 4, 3, 0, 2, 2, 2],
    [3, 4, 1, 2, 2, 2, 2],
]

# name: policy, options, changes (or only a number of tokens), prompt length, victims of the tokens
# that find the cache full.
BY_HAND = {
    # Token 0 is a sink, then the oldest goes. Slots are reused, so at token 7 the oldest, 3, is in
    # slot 3 and slot 1 holds token 5.
    "streaming": ("streaming", dict(budget=5, sinks=1, recent=2), 12, 0, [1, 2, 3, 4, 5, 6, 7]),
    # Two prompt tokens are half of the budget, rounded down: tokens 0 and 1 stay for ever.
    "prompt": ("streaming", dict(budget=5, sinks=1, recent=1), 12, 2, [2, 3, 4, 5, 6, 7, 8]),
    # Three are more: only the sink stays.
    "long prompt": ("streaming", dict(budget=5, sinks=1, recent=1), 12, 3, [1, 2, 3, 4, 5, 6, 7]),
    # 8 - 5 - 1 = 2 prompt tokens at most leave a choice beside 5 recent ones, though half is 4.
    # Token 8 sees 4 to 8 as recent.
    "two of eight": ("streaming", dict(budget=8, sinks=1, recent=5), 12, 2, [2, 3, 4, 5]),
    "three of eight": ("streaming", dict(budget=8, sinks=1, recent=5), 12, 3, [1, 2, 3, 4]),
    # More sinks than prompt: the first tokens generated are sinks as well.
    "short prompt": ("streaming", dict(budget=6, sinks=3, recent=1), 10, 1, [3, 4, 5, 6]),
    # CHANGES. Tokens that may go, as token: score, when each token comes in:
    #   4   1: 0, 2: 1, 3: -2    3 goes
    #   5   1: 0, 2: 1, 4: 2     1
    #   6   2: 1, 4: 2, 5: -1    5
    #   7   2: 1, 4: 2, 6: -1    6
    "epikv": ("epikv", dict(budget=4, sinks=1, recent=1, window=2), CHANGES, 0, [3, 1, 5, 6]),
    #   4   1: 0, 2: 1           1: token 3 is among the last two, 3 and 4
    #   5   2: 1, 3: -2          3
    #   6   2: 1, 4: 2           2
    #   7   4: 2, 5: -1          5
    "recency": ("epikv", dict(budget=4, sinks=1, recent=2, window=2), CHANGES, 0, [1, 3, 2, 5]),
    #   4   2: 1, 3: -2          3: the prompt, 0 and 1, is protected
    #   5   2: 1, 4: 2           2
    #   6   4: 2, 5: -1          5
    #   7   4: 2, 6: -1          6
    "kept prompt": ("epikv", dict(budget=4, sinks=1, recent=1, window=2), CHANGES, 2, [3, 2, 5, 6]),
    # A prompt of 6 competes: 0 and 5 are protected; of 1: 0, 2: 1, 3: -2, 4: 2 stay 2 and 4.
    #   6   2: 1, 4: 2, 5: -1    5
    #   7   2: 1, 4: 2, 6: -1    6
    "over budget": ("epikv", dict(budget=4, sinks=1, recent=1, window=2), CHANGES, 6, [5, 6]),
    # Every change the same at each block: all scores 0, the oldest goes.
    "ties": ("epikv", dict(budget=3, sinks=0, recent=1), [[2] * 6, [5] * 6], 0, [0, 1, 2, 3]),
    #   4   1: 0, 2: 0, 3: √2        1, the older of equals
    #   5   2: 0, 3: √2, 4: .71      2
    #   6   3: √2, 4: .71, 5: -√2    5
    #   7   3: √2, 4: .71, 6: .71    4, the older of equals
    #   8   3: √2, 6: .71, 7: -.71   7
    #   9   3: √2, 6: .71, 8: -.71   8
    "of three": (
        "epikv",
        dict(budget=4, sinks=1, recent=1, window=3),
        OF_THREE,
        0,
        [1, 2, 5, 4, 7, 8],
    ),
    #   4   1: 0, 2: .5, 3: -.5   3
    #   5   1: 0, 2: .5, 4: 0     1
    #   6   2: .5, 4: 0, 5: .5    4
    #   7   2: .5, 5: .5, 6: -1   6
    "smooth": (
        "epikv-smooth",
        dict(budget=4, sinks=1, recent=1, window=2),
        CHANGES,
        0,
        [3, 1, 4, 6],
    ),
    #   4   0: 0, 1: 3, 2: 1, 3: -1   3
    #   5   0: 0, 1: 3, 2: 1, 4: 2    0
    #   6   1: 3, 2: 1, 4: 2, 5: 2    2
    #   7   1: 3, 4: 2, 5: 2, 6: 3    4
    "raw": ("epikv-raw", dict(budget=4, sinks=0, recent=1, window=2), RAW, 0, [3, 0, 2, 4]),
    #   4   0: 0, 1: 0, 2: .29, 3: -.29     3
    #   5   0: 0, 1: 0, 2: .29, 4: 2.29     0
    #   6   1: 0, 2: .29, 4: 2.29, 5: -2.29   5
    #   7   1: 0, 2: .29, 4: 2.29, 6: 0     1
    "band": ("epikv-band", dict(budget=4, sinks=0, recent=1, window=2), BAND, 0, [3, 0, 5, 1]),
}


@pytest.mark.parametrize("example", BY_HAND)
def test_victims_worked_out_by_hand(example):
    """Residuals of one number that grows by g; the first token has some residual, but no change."""
    policy, options, changes, n_prompt, victims = BY_HAND[example]
    if policy in SCORING:
        half = len(changes) // 2
        options = options | dict(band_a=tuple(range(half)), band_b=tuple(range(half, len(changes))))
        growth = torch.tensor(changes, dtype=torch.float64)  # [blocks, N-1]
        growth = torch.cat([torch.full((len(changes), 1), 7.0), growth], dim=1)
        residuals = growth.cumsum(dim=1).T[None, :, :, None]  # [1, N, blocks, 1]
    else:
        residuals = torch.zeros(1, changes, 0, 1)
    cache = make_cache(EvictionConfig(policy=policy, **options), hidden_size=1)

    prefill(cache, residuals[:, :n_prompt], chunk=options["budget"])
    decoded = [decode(cache, token)[0] for token in residuals[0, n_prompt:, None]]
    assert [victim for victim in decoded if victim is not None] == victims


@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
@pytest.mark.parametrize(
    "policy, recent, kept",
    [
        # Protected: 0 and 7. Of 1: 0, 2: 1, 3: -2, 4: 2, 5: -1, 6: -1 the best two stay.
        ("epikv", 1, [0, 2, 4, 7]),
        # Protected: 0, 6 and 7. The best one of the others stays.
        ("epikv", 2, [0, 4, 6, 7]),
        # Of equal scores the oldest go.
        ("streaming", 1, [0, 5, 6, 7]),
    ],
)
def test_a_long_prompt_by_hand(policy, recent, kept, chunk):
    """The best of a prompt of 8 stay; here it does not matter in how many chunks it comes."""
    bands = dict(band_a=(0,), band_b=(1,)) if policy == "epikv" else {}
    config = EvictionConfig(budget=4, policy=policy, sinks=1, recent=recent, window=2, **bands)
    cache = make_cache(config, hidden_size=1)
    growth = torch.tensor([[7.0, *series] for series in CHANGES], dtype=torch.float64)
    residuals = growth.cumsum(dim=1).T[None, :, : len(cache.reads), None]
    prefill(cache, residuals, chunk)
    assert held(cache) == kept


@pytest.mark.parametrize("n_prompt", [1, 2, 5])
def test_without_recent_tokens_the_newest_prompt_token_stays(n_prompt):
    """It is the one the next token follows, and the lowest score must not cost it its place.

    Raw scores fall from token to token: the newest one has the lowest.
    """
    bands = dict(band_a=(0,), band_b=(1,))
    config = EvictionConfig(budget=2, policy="epikv-raw", sinks=1, recent=0, window=2, **bands)
    cache = make_cache(config, hidden_size=1)
    time = torch.arange(n_prompt, dtype=torch.float64)
    residuals = torch.stack([time, time**2], dim=1)[None, :, :, None]
    prefill(cache, residuals, chunk=2)
    assert held(cache) == sorted({0, n_prompt - 1})


# Rolling statistics ----------------------------------------------------------------------------


def statistics_of(signal, size, chunk):
    """Rolling mean and z-score of a signal [N], the first value being no change, in chunks."""
    window = epikv.RollingWindow(size, 1, 1, signal.dtype)
    means, zscores = [], []
    for start in range(0, len(signal), chunk):
        part = signal[start : start + chunk]
        position = torch.arange(start, start + len(part))[None]
        windows = window(part[None, :, None], position)
        means += epikv.rolling_mean(*windows).flatten().tolist()
        zscores += epikv.rolling_zscore(*windows).flatten().tolist()
    return means, zscores


@pytest.mark.parametrize("size", [2, 3, 64])
@pytest.mark.parametrize("chunk", [1, 7, 150])
def test_rolling_statistics_equal_the_textbook(size, chunk):
    """Against exact means and population deviations, from an empty window to a full one."""
    generator = torch.Generator().manual_seed(size)
    signal = torch.rand(150, generator=generator, dtype=torch.float64).exp()
    means, zscores = statistics_of(signal, size, chunk)
    assert means[0] == 0 and zscores[0] == 0  # no value
    assert means[1] == signal[1].item() and zscores[1] == 0  # one
    for t in range(2, 150):
        values = signal[max(1, t - size + 1) : t + 1].tolist()
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        assert means[t] == pytest.approx(mean, rel=1e-12)
        assert zscores[t] == pytest.approx((values[-1] - mean) / (deviation + 1e-6), abs=1e-9)


def test_zscore_of_two_values():
    """(3, 1): mean 2, deviation 1. (3, 3.000002): deviation 1e-6, as large as the epsilon."""
    for newest, expected in ((1.0, -1 / (1 + 1e-6)), (3.000002, 0.5)):
        _, zscores = statistics_of(torch.tensor([9.0, 3.0, newest], dtype=torch.float64), 64, 3)
        assert zscores == pytest.approx([0, 0, expected], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [0.0, 0.1, 3.3, 1000.1])
@pytest.mark.parametrize("size", [7, 64])
def test_zscore_of_a_constant_is_zero(size, value, dtype):
    """Rounding of the mean must not pass for a deviation: it is above 1e-6 for large values."""
    means, zscores = statistics_of(torch.full((150,), value, dtype=dtype), size, chunk=150)
    assert means[1:] == pytest.approx([value] * 149, rel=1e-6)
    assert zscores == pytest.approx([0] * 150, abs=1e-5)


@pytest.mark.parametrize("size", [3, 64])
def test_rolling_statistics_of_large_values_in_float32(size):
    """A deviation of 1 around 30,000, where a difference of squares would leave no digit."""
    generator = torch.Generator().manual_seed(size)
    signal = (torch.randn(150, generator=generator) + 30_000).float()
    means, zscores = statistics_of(signal, size, chunk=1)
    for t in range(2, 150):
        values = signal[max(1, t - size + 1) : t + 1].tolist()
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        assert means[t] == pytest.approx(mean, rel=1e-6)
        # The mean of numbers near 2^15 is good to some 2^-9, a few thousandths.
        assert abs(zscores[t] * (deviation + 1e-6) - (values[-1] - mean)) < 0.01 * (1 + deviation)


@pytest.mark.parametrize("policy", SCORING)
def test_scores_equal_the_textbook(policy):
    """Every formula on its own, from signals to scores, with exact means and deviations."""
    size = 5
    generator = torch.Generator().manual_seed(0)
    signal = torch.rand(1, 40, 2, generator=generator, dtype=torch.float64)
    scorer = epikv.POLICIES[policy](EvictionConfig(budget=64, window=size), 1, torch.float64)
    scores = scorer.score(signal, torch.arange(40)[None])[0].tolist()

    def past(values, t):
        return values[max(1, t - size + 1) : t + 1]

    def zscore(values):
        if len(values) < 2:
            return 0.0
        return (values[-1] - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-6)

    a, b = signal[0].T.tolist()
    weight = 1.29 if policy == "epikv-band" else 1.0
    flat = [weight * zscore(past(a, t)) - zscore(past(b, t)) for t in range(40)]
    expected = {
        "epikv": flat,
        "epikv-band": flat,
        "epikv-smooth": [0.0, *(statistics.fmean(past(flat, t)) for t in range(1, 40))],
        "epikv-raw": [0.0]
        + [statistics.fmean(past(a, t)) - statistics.fmean(past(b, t)) for t in range(1, 40)],
    }
    assert scores == pytest.approx(expected[policy], abs=1e-9)


def test_changes_that_a_policy_gets(monkeypatch):
    """The distance to the token before, across chunks and steps; the mean over a band; first 0."""
    seen = []

    class Recorder(epikv.EpiKV):
        def score(self, change, position):
            seen.append((position, change))
            return super().score(change, position)

    monkeypatch.setitem(epikv.POLICIES, "recorder", Recorder)
    config = EvictionConfig(budget=8, policy="recorder", band_a=(3, 0), band_b=(0, 2))
    cache = make_cache(config, batch_size=2)
    assert cache.reads == (0, 2, 3)
    walk = random_walk(cache, 20)
    prefill(cache, walk[:, :11], chunk=4)
    for t in range(11, 20):
        decode(cache, walk[:, t])

    assert torch.cat([p for p, _ in seen], dim=1).tolist() == [list(range(20))] * 2
    change = torch.cat([change for _, change in seen], dim=1)
    assert change[:, 0].eq(0).all()
    for row, t in ((row, t) for row in range(2) for t in range(1, 20)):
        g = [math.dist(walk[row, t, i].tolist(), walk[row, t - 1, i].tolist()) for i in range(3)]
        expected = [(g[2] + g[0]) / 2, (g[0] + g[1]) / 2]
        assert change[row, t].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scores_of_any_cache_are_computed_in_float32(dtype):
    """The same residuals give the same scores whatever precision the cache has."""
    config = settings_for("epikv", budget=32, window=8)
    caches = [make_cache(config, dtype=kind) for kind in (dtype, torch.float32)]
    walk = random_walk(caches[0], 30).to(dtype)
    for cache in caches:
        assert cache.score.dtype == torch.float32
        prefill(cache, walk.to(cache.layers[0].k.dtype), chunk=7)
    assert caches[0].score.abs().max() > 1
    assert torch.equal(caches[0].score, caches[1].score)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
@pytest.mark.parametrize("budget", [60, 20], ids=["all stay", "some go"])
@pytest.mark.parametrize("policy", EVICTING)
def test_scores_do_not_depend_on_chunks(policy, budget, chunk):
    """The rolling state crosses every bound, also that from prefill to decode."""
    whole = make_cache(settings_for(policy, budget=60, window=8))
    walk = random_walk(whole, 60)
    prefill(whole, walk, chunk=60)
    cache = make_cache(settings_for(policy, budget=budget, window=8))
    prefill(cache, walk[:, :45], chunk)
    for t in range(45, 60):
        decode(cache, walk[:, t])
    expected = score_of(whole)
    assert len(held(cache)) == budget
    for position, score in score_of(cache).items():
        assert score == pytest.approx(expected[position], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", SCORING)
def test_a_broken_residual_is_forgotten(policy, poison):
    """NaN and infinity spoil no score for longer than the windows last, and none is not finite."""
    config = settings_for(policy, budget=64, window=4)
    clean, broken = make_cache(config), make_cache(config)
    walk = random_walk(clean, 40)
    prefill(clean, walk, chunk=40)
    walk[0, 10, :, 1] = poison
    prefill(broken, walk, chunk=6)
    assert broken.score.isfinite().all()
    # Changes 10 and 11 are broken, z-scores up to 14, their means up to 17.
    for part in (slice(0, 10), slice(18, 40)):
        torch.testing.assert_close(broken.score[:, part], clean.score[:, part], **ROUNDING)
    assert not torch.allclose(broken.score[:, 10:18], clean.score[:, 10:18])


# What always holds -----------------------------------------------------------------------------


def assert_consistent(cache, n_prompt):
    """Everything that a cache of rows of equal length promises at any time."""
    config, n_seen = cache.config, cache.length[0].item()
    n_held = min(config.budget, n_seen)
    must_stay = {*range(min(config.sinks, n_seen)), *range(max(0, n_seen - config.recent), n_seen)}
    if n_prompt <= min(config.budget // 2, config.budget - config.recent - 1):
        must_stay |= set(range(min(n_prompt, n_seen)))
    if n_seen:
        must_stay.add(n_seen - 1)

    occupied = torch.arange(config.budget) < n_held
    for row in range(cache.length.shape[0]):
        assert cache.length[row] == n_seen
        positions = held(cache, row)
        assert len(positions) == len(set(positions)) == n_held
        assert set(positions) <= set(range(n_seen)) and must_stay <= set(positions)
        assert torch.equal(cache.position[row] != epikv.NO_POSITION, occupied)
        assert torch.equal(cache.attention_mask(config.budget)[row, 0, 0], occupied)
    assert cache.score.isfinite().all()

    for layer, k, v in zip(cache.layers, *keys_and_values(cache, cache.position), strict=True):
        assert torch.equal(layer.k[:, :, :n_held], k[:, :, :n_held])
        assert torch.equal(layer.v[:, :, :n_held], v[:, :, :n_held])


@pytest.mark.parametrize("policy", EVICTING)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    case=cases(),
    batch_size=st.integers(1, 3),
    poison=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)
def test_invariants(policy, case, batch_size, poison):
    """Protected and newest tokens stay, each slot holds the keys and values of its position.

    Whatever the settings and the residuals, some of which are not finite.
    """
    options, n_prompt, chunk, seed = case
    cache = make_cache(settings_for(policy, **options), batch_size)
    walk = random_walk(cache, n_prompt + 2 * options["budget"], seed)
    walk[torch.rand(walk.shape, generator=torch.Generator().manual_seed(seed)) < 0.03] += poison

    cache.protect_prompt(n_prompt)
    for start in range(0, n_prompt, chunk):
        admit(cache, walk[:, start : min(start + chunk, n_prompt)])
        assert_consistent(cache, n_prompt)
    for t in range(n_prompt, walk.shape[1]):
        victims = decode(cache, walk[:, t])
        assert all((victim is None) == (t < options["budget"]) for victim in victims)
        assert_consistent(cache, n_prompt)


@pytest.mark.parametrize("policy", epikv.POLICIES)
def test_a_budget_for_everything_keeps_everything_in_order(policy):
    """Then slot and position are the same, as in a cache that never evicts."""
    cache = make_cache(settings_for(policy, budget=40), batch_size=2)
    walk = random_walk(cache, 40)
    prefill(cache, walk[:, :25], chunk=10)
    for t in range(25, 40):
        assert decode(cache, walk[:, t]) == [None, None]
    assert cache.position.tolist() == [list(range(40))] * 2
    assert_consistent(cache, n_prompt=25)


def run(cache, seed):
    """Prefill, decode; returns every step's victims."""
    walk = random_walk(cache, 90, seed)
    prefill(cache, walk[:, :40], chunk=9)
    return [decode(cache, walk[:, t]) for t in range(40, 90)]


@pytest.mark.parametrize("policy", EVICTING)
def test_reset_forgets_everything_and_moves_nothing(policy):
    """Every buffer stays where it is; a second run equals the first, even after one with NaN."""
    config = settings_for(policy, budget=16, window=8)
    cache, fresh = make_cache(config, batch_size=2), make_cache(config, batch_size=2)
    addresses = {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}
    assert len(set(addresses.values()) - {0}) >= 4 + 2 * len(cache.layers)

    def same_addresses():
        return addresses == {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}

    expected = run(fresh, seed=1)
    assert len({victim for victims in expected for victim in victims}) > 40
    assert run(cache, seed=1) == expected and same_addresses()
    short = random_walk(cache, 5, seed=2)
    for residuals in (short, short * math.nan):
        cache.reset()
        prefill(cache, residuals, chunk=3)  # protected, unlike the prompt of `run`
    cache.load_row(1, make_cache(config))
    assert same_addresses()

    cache.reset()
    assert same_addresses()
    untouched = dict(make_cache(config, batch_size=2).named_buffers())
    for name, buffer in cache.named_buffers():
        assert torch.equal(buffer, untouched[name]), name
    assert run(cache, seed=1) == expected and same_addresses()


def first_row(config, dtype, others):
    """Victims and scores of a row at 60 steps, with `others`, residuals [N, len(reads), hidden].

    The length of another row's prompt is what it has more than these 60.
    """
    batch_size, n_steps = 1 + len(others), 60
    cache = make_cache(config, batch_size, dtype=dtype)
    mine = random_walk(cache, 10 + n_steps, seed=5, batch_size=1)[0]
    streams = [mine, *others]
    for row, stream in enumerate(streams):
        source = make_cache(config, dtype=dtype)
        prefill(source, stream[None, :-n_steps].to(dtype), chunk=16)
        cache.load_row(row, source)
    trace = []
    for t in range(-n_steps, 0):
        victims = decode(cache, torch.stack([stream[t] for stream in streams]).to(dtype))
        trace.append((victims[0], score_of(cache, 0)))
    return trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("policy", EVICTING)
def test_rows_are_independent(policy, dtype):
    """To the last bit: alone, beside ordinary rows, and beside rows that are new, long or NaN."""
    config = settings_for(policy, budget=20, window=8)
    shape = make_cache(config)
    plain = [random_walk(shape, 70 + n, seed=n)[0] for n in (0, 3)]
    strange = [random_walk(shape, 60, seed=8)[0], random_walk(shape, 110, seed=9)[0] * math.nan]
    alone = first_row(config, dtype, [])
    assert sum(victim is not None for victim, _ in alone) == 50  # 10 + 60 tokens, 20 slots
    assert first_row(config, dtype, plain) == alone
    assert first_row(config, dtype, strange) == alone


def test_load_row_touches_one_row():
    """It takes over everything of the one-row cache, and the others keep what they had."""
    config = settings_for("epikv-smooth", budget=12, window=4)
    cache, source = make_cache(config, batch_size=3), make_cache(config)
    run(cache, seed=1)
    run(source, seed=2)
    before = {name: buffer.clone() for name, buffer in cache.named_buffers()}
    cache.load_row(1, source)
    sources = dict(source.named_buffers())
    for name, buffer in cache.named_buffers():
        assert torch.equal(buffer[1], sources[name][0]), name
        assert torch.equal(buffer[[0, 2]], before[name][[0, 2]]), name


# Configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(budget=64, policy="h2o"), ["'h2o'", *epikv.POLICIES]),
        (dict(budget=0), ["budget", "at least 1", "0"]),
        (dict(budget=-5), ["budget", "at least 1", "-5"]),
        (dict(budget=64, sinks=-1), ["sinks", "0 or more", "-1"]),
        (dict(budget=64, recent=-2), ["recent", "0 or more", "-2"]),
        (dict(budget=14, sinks=4, recent=10), ["budget 14", "sinks 4", "recent 10"]),
        (dict(budget=4), ["budget 4", "sinks 4", "recent 1"]),
        (dict(budget=64, window=1), ["window", "from 2 to 4096", "1"]),
        (dict(budget=64, policy="streaming", band_a=(3,)), ["'streaming'", "band_a"]),
        (dict(budget=64, policy="random", band_b=(3,)), ["'random'", "band_b"]),
        (dict(budget=64, policy="full", band_a=(1,), band_b=(3,)), ["'full'", "no blocks"]),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(options, words):
    """In one line that names the culprit and its value."""
    with pytest.raises(ValueError) as error:
        EvictionConfig(**options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("bands", [dict(band_a=(8,)), dict(band_b=(2, 9)), dict(band_a=(-1,))])
def test_a_band_outside_the_model_is_refused(bands):
    """When the model's depth is known: by the configuration, and so by the cache."""
    config = EvictionConfig(budget=64, **bands)
    wrong = next(layer for band in bands.values() for layer in band if layer not in range(8))
    for build in (config.bands, lambda n_layers: make_cache(config, n_layers=n_layers)):
        with pytest.raises(ValueError, match=rf"block {wrong}; the model has 0 to 7$"):
            build(8)


@pytest.mark.parametrize(
    "budget, recent", [(64, 16), (66, 16), (511, 127), (512, 128), (4096, 128)]
)
def test_default_recency_is_a_quarter_up_to_128(budget, recent):
    """None stands for min(128, budget // 4)."""
    assert EvictionConfig(budget=budget).recent == recent


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_the_smallest_budget_that_works(sinks):
    """One slot beside the sinks: every new token drives out the one before it."""
    cache = make_cache(settings_for("epikv", budget=sinks + 1, sinks=sinks, recent=0))
    walk = random_walk(cache, 20)
    victims = [decode(cache, walk[:, t])[0] for t in range(20)]
    assert victims == [None] * (sinks + 1) + list(range(sinks, 19))


@pytest.mark.parametrize(
    "policy, n_layers, bands",
    [
        ("epikv", 32, ((10,), (21,))),
        ("epikv", 30, ((9,), (20,))),  # 9.375 and 19.6875
        ("epikv", 28, ((9,), (18,))),  # 8.75 and 18.375
        ("epikv", 16, ((5,), (10,))),  # 5 and 10.5, a half to the even neighbour
        ("epikv-smooth", 28, ((9,), (18,))),
        ("epikv-raw", 28, ((9,), (18,))),
        ("epikv-band", 32, ((7, 8, 9, 10, 11, 12, 13), (18, 19, 20, 21, 22, 23, 24, 25))),
        # 3.5 4 4.5 5 5.5 6 6.5 and 9 9.5 10 10.5 11 11.5 12 12.5, each block once
        ("epikv-band", 16, ((4, 5, 6), (9, 10, 11, 12))),
        ("streaming", 32, ()),
        ("random", 32, ()),
        ("full", 32, ()),
    ],
)
def test_default_bands_scale_with_the_depth(policy, n_layers, bands):
    """round(layer * n_layers / 32)."""
    assert EvictionConfig(budget=64, policy=policy).bands(n_layers) == bands


def test_named_bands_are_not_scaled():
    """What the user names is taken as it is, the other band keeps its default."""
    assert EvictionConfig(budget=64, band_a=(3, 1)).bands(16) == ((3, 1), (10,))
    assert EvictionConfig(budget=64, band_b=(15,)).bands(16) == ((5,), (15,))


# The hash --------------------------------------------------------------------------------------


def test_hash_uniform_equals_integer_arithmetic():
    """Exactly, for one key and for two, at the ends of the 32 bits too."""
    keys = [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32 - 1]
    tensor = torch.tensor(keys)
    assert hash_uniform(tensor).dtype == torch.float32
    assert hash_uniform(tensor).tolist() == [twin.hash_uniform(key) for key in keys]
    for seed in (0, 7, 2**32 - 1, 2**40 + 5):
        expected = [twin.hash_uniform(seed, key) for key in keys]
        assert hash_uniform(seed, tensor).tolist() == expected
        assert hash_uniform(torch.tensor([[seed]]), tensor).tolist() == [expected]


def unhash(state):
    """The key whose hash ends in `state`: the rounds backwards."""
    state ^= state >> 15 ^ state >> 30
    state = state * pow(0x735A2D97, -1, 2**32) % 2**32
    state ^= state >> 15 ^ state >> 30
    state = state * pow(0x21F0AAAD, -1, 2**32) % 2**32
    state ^= state >> 16
    return (state - 0x9E3779B9) % 2**32


def test_hash_uniform_is_never_0_nor_1():
    """The smallest and the largest are half a step of 2^-23 from the ends."""
    ends = torch.tensor([unhash(0), unhash(2**32 - 1)])
    assert hash_uniform(ends).tolist() == [2**-24, 1 - 2**-24]


def test_hash_uniform_is_uniform():
    """2^16 numbers in 64 bins: chi-square has mean 63 and deviation √126; five of them away."""
    numbers = hash_uniform(0, torch.arange(2**16))
    assert torch.equal(numbers, hash_uniform(0, torch.arange(2**16)))
    counts = torch.histc(numbers, 64, 0, 1).double()
    chi_square = ((counts - 1024) ** 2 / 1024).sum().item()
    assert abs(chi_square - 63) < 5 * math.sqrt(126)


@pytest.mark.parametrize(
    "keys",
    [(1, 0), (2, 0), (123456789, 0), (0, 1), (0, 64)],
    ids=lambda keys: f"seed {keys[0]}, {keys[1]} later",
)
def test_hash_uniform_decorrelates_its_keys(keys):
    """Other seeds and shifted positions: a correlation of 2^16 pairs has a deviation of 1/256."""
    seed, shift = keys
    position = torch.arange(2**16)
    pair = torch.stack([hash_uniform(0, position), hash_uniform(seed, position + shift)])
    assert abs(torch.corrcoef(pair.double())[0, 1].item()) < 5 / 256


def test_hash_uniform_heeds_the_order_of_its_keys():
    """Seed 1 at position 2 is not seed 2 at position 1."""
    one, two = torch.tensor(1), torch.tensor(2)
    assert hash_uniform(one, two) != hash_uniform(two, one)


def test_the_seed_decides_for_random():
    """The same seed, the same victims; another one, others; the residuals play no part."""

    def victims(seed):
        return run(make_cache(settings_for("random", budget=24, seed=seed)), seed=0)

    assert victims(1) == victims(1)
    assert victims(1) != victims(2)


# The file --------------------------------------------------------------------------------------


def test_the_file_imports_torch_and_nothing_else():
    """It is meant to be copied: torch, the standard library, a licence in the first line."""
    tree = ast.parse(SOURCE.read_text("utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert "torch" in imported
    assert imported - {"torch"} <= sys.stdlib_module_names
    assert SOURCE.read_text("utf-8").splitlines()[0] == "# SPDX-License-Identifier: Apache-2.0"


def test_import_changes_nothing(tmp_path):
    """A copy of the file, alone in a folder, leaves torch's defaults and its compiler alone."""
    (tmp_path / "epikv.py").write_bytes(SOURCE.read_bytes())
    script = """
import json, sys
import torch

def state():
    return [
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(),
    ]

before, modules = state(), set(sys.modules)
sys.path.insert(0, sys.argv[1])
import epikv

print(json.dumps([before, state(), sorted(set(sys.modules) - modules), epikv.__file__]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    before, after, modules, file = json.loads(done.stdout)
    assert file == str(tmp_path / "epikv.py")
    assert before == after and before[0] == "torch.float32"
    assert "epikv" in modules and not any("torch" in name for name in modules)

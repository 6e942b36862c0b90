"""The cache and its policies: against the twin, by hand, and by what must hold for any input."""

import ast
import itertools
import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pytest
import tiny
import torch
import twin
from hypothesis import given, settings
from hypothesis import strategies as st

import epikv
from epikv import (
    CacheShape,
    Calibration,
    EvictionConfig,
    FitWeights,
    SlotCache,
    Tokens,
    hash_uniform,
)

SOURCE = Path(epikv.__file__)
EVICTING = [name for name in epikv.POLICIES if name != "full"]
SCORING = [name for name, policy in epikv.POLICIES.items() if policy.bands]
# Those that read keys or values.
READING = ["epikv-seg", "epikv-fit", "lag-kv", "key-diff", "k-norm", "key-var", "value-var"]
ROUNDING = dict(rtol=1e-9, atol=1e-9)  # float64, sums in another order


# Driving a cache without a model ---------------------------------------------------------------


def settings_for(policy, **options):
    """A configuration for a model of 4 blocks, in which bands are blocks 0, 1 and blocks 2, 3.

    A calibration among the options has its own bands.
    """
    if policy in SCORING and "calibration" not in options:
        options = dict(band_a=(0, 1), band_b=(2, 3)) | options
    return EvictionConfig(policy=policy, **tiny.needed(policy, 4) | options)


def only(n_layers, n_kv_heads=2, log_age=0.0, **weights):
    """A calibration for a model of `n_layers` blocks, in which no feature but these counts.

    There is one sum, which is every head's score.
    """
    fit = {field.name: ((0.0,) * n_layers,) for field in fields(FitWeights)}
    fit |= {name: (by_block,) for name, by_block in weights.items()}
    heads = (((1.0,) * n_kv_heads,) * n_layers,)
    fit = FitWeights(**fit | dict(heads=heads, log_age=log_age))
    return replace(tiny.calibration(n_layers), fit=fit)


def make_cache(config, batch_size=1, dtype=torch.float64, **sizes):
    sizes = dict(n_layers=4, n_kv_heads=2, head_dim=3, hidden_size=3) | sizes
    return SlotCache(config, CacheShape(batch_size=batch_size, dtype=dtype, **sizes))


@dataclass
class Text:
    """What a model makes of N tokens of every row.

    residuals: [B, N, len(reads), hidden]. k, v: [B, L, H_kv, N, D].
    """

    residuals: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __getitem__(self, rows_and_tokens):
        """Some rows and some tokens, numbers or slices."""
        rows, tokens = (
            slice(at, at + 1 or None) if isinstance(at, int) else at for at in rows_and_tokens
        )
        return Text(
            self.residuals[rows, tokens], self.k[rows, :, :, tokens], self.v[rows, :, :, tokens]
        )

    @property
    def n_tokens(self):
        return self.residuals.shape[1]

    def to(self, dtype):
        return Text(self.residuals.to(dtype), self.k.to(dtype), self.v.to(dtype))

    def __mul__(self, factor):
        return Text(self.residuals * factor, self.k * factor, self.v * factor)


def joined(texts):
    """The rows of all `texts` in one batch."""
    parts = zip(*((text.residuals, text.k, text.v) for text in texts), strict=True)
    return Text(*(torch.cat(part) for part in parts))


def with_contents(cache, residuals, generator=None):
    """A text of these residuals, with keys and values that no two tokens, heads or rows share.

    Their sizes are heavy-tailed, and each channel has its own centre.
    """
    generator = generator or torch.Generator().manual_seed(0)
    _, n_heads, _, head_dim = cache.layers[0].k.shape
    batch_size, n_tokens = residuals.shape[:2]
    contents = []
    for _ in range(2):
        shape = (batch_size, len(cache.layers), n_heads, n_tokens)
        size = torch.randn(*shape, 1, generator=generator, dtype=torch.float64) / 2
        of_token = torch.randn(batch_size, 1, 1, n_tokens, 1, generator=generator).double()
        centre = torch.randn(*shape[:3], 1, head_dim, generator=generator, dtype=torch.float64)
        x = torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64)
        contents.append((size + of_token).exp() * x + centre)
    return Text(residuals, *contents)


def random_text(cache, n_tokens, seed=0, batch_size=None):
    """Residuals that move by steps of widely different length, keys and values `with_contents`."""
    generator = torch.Generator().manual_seed(seed)
    _, n_blocks, hidden_size = cache.previous.shape
    shape = (batch_size or cache.length.shape[0], n_tokens, n_blocks)
    length = torch.randn(*shape, 1, generator=generator, dtype=torch.float64).exp()
    direction = torch.randn(*shape, hidden_size, generator=generator, dtype=torch.float64)
    return with_contents(cache, (length * direction).cumsum(dim=1), generator)


def admit(cache, text):
    """Take the tokens of `text` at once, as part of a prompt."""
    dtype = cache.layers[0].k.dtype
    k, v = ([*x.to(dtype).unbind(1)] for x in (text.k, text.v))
    cache.admit(k, v, [*text.residuals.unbind(2)])


def prefill(cache, text, chunk):
    cache.protect_prompt(text.n_tokens)
    for start in range(0, text.n_tokens, chunk):
        admit(cache, text[:, start : start + chunk])


def decode(cache, text, write=True):
    """Take one token per row.

    Returns the position of every row's victim, None for a row that had a free slot; positions
    [layer][head] where those have maps of their own.
    """
    before = cache.position.clone()
    slot, position = cache.begin_step()
    if write:
        parts = cache.layers, cache.per_layer(slot), text.k.unbind(1), text.v.unbind(1)
        for layer, at, k, v in zip(*parts, strict=True):
            layer.write(at, k.to(layer.k.dtype), v.to(layer.v.dtype))
    cache.end_step(slot, position, list(text.residuals.unbind(2)))
    if cache.block and (cache.length % cache.block == 0).any():
        cache.end_block()
    victims = before.gather(-1, slot[..., None])[..., 0]
    if cache.config.slot_map == "shared":
        victims = victims[:, 0, 0]
    free = victims == epikv.NO_POSITION
    pairs = zip(free, victims, strict=True)
    return [None if had_room.all() else victim.tolist() for had_room, victim in pairs]


def held(cache, row=0):
    """The positions that a row's first map holds, oldest first."""
    return sorted(p for p in cache.position[row, 0, 0].tolist() if p != epikv.NO_POSITION)


def score_of(cache, row=0, layer=0, head=0):
    """The score of each position that a map holds."""
    at = row, layer, head
    scores = zip(cache.position[at].tolist(), cache.score[at].tolist(), strict=True)
    return {position: score for position, score in scores if position != epikv.NO_POSITION}


def scores_of_maps(cache, row=0):
    """What `score_of` says of every map of a row."""
    _, n_layers, n_heads, _ = cache.position.shape
    return [score_of(cache, row, *at) for at in itertools.product(range(n_layers), range(n_heads))]


# Against the twin ------------------------------------------------------------------------------

# name: policy and options; every policy as it is, then those that can be had in other ways.
VARIANTS = {policy: (policy, tiny.needed(policy, 4)) for policy in epikv.POLICIES} | {
    "lag-kv previous": ("lag-kv", dict(lag_reference="previous")),
    "lag-kv per head": ("lag-kv", dict(slot_map="head")),
    "lag-kv per head previous": ("lag-kv", dict(slot_map="head", lag_reference="previous")),
    "key-diff per head": ("key-diff", dict(slot_map="head")),
    "k-norm per head": ("k-norm", dict(slot_map="head")),
    "epikv-seg with quotas": ("epikv-seg", dict(lag=5, quotas=(4, 3, 1))),
    "epikv-seg, blocks of one": ("epikv-seg", dict(lag=1, quotas=(1, 1, 0))),
    "epikv-seg without quotas": ("epikv-seg", dict(lag=7, quotas=(0, 0, 0))),
    "streaming, reserve": ("streaming", dict(value_reserve=5)),
    "epikv, reserve": ("epikv", dict(value_reserve=5)),
    "key-var, reserve": ("key-var", dict(value_reserve=1, value_statistic="var")),
    "epikv-seg, reserve": ("epikv-seg", dict(value_reserve=5, value_statistic="norm")),
    "lag-kv, reserve": ("lag-kv", dict(value_reserve=5, value_statistic="var")),
    "k-norm per head, reserve": ("k-norm", dict(slot_map="head", value_reserve=5)),
    "epikv-fit, reserve": ("epikv-fit", dict(value_reserve=5, calibration=tiny.calibration(4, 1))),
    "epikv-fit, shared": ("epikv-fit", dict(slot_map="shared", calibration=tiny.calibration(4, 2))),
}
CALIBRATED = {
    f"{policy}, calibrated": (policy, dict(calibration=tiny.calibration(4))) for policy in SCORING
}
VARIANTS |= CALIBRATED
EVICTING_VARIANTS = [name for name in VARIANTS if name != "full"]


def as_twin(text, row, reads):
    """A row in the twin's form: of each token the residuals by block, keys and values by head."""
    residuals = [dict(zip(reads, token, strict=True)) for token in text.residuals[row].tolist()]
    k, v = (x[row].permute(2, 0, 1, 3).tolist() for x in (text.k, text.v))
    return list(zip(residuals, k, v, strict=True))


def assert_same_row(cache, row, reference):
    """The same tokens with the same scores in every map.

    Where the twin says "beyond the quota" the cache has a score below any other.
    """
    assert len(reference.maps) == cache.position[row, ..., 0].numel()
    for at, tokens in reference.maps.items():
        actual = score_of(cache, row, *(() if at == "shared" else at))
        assert sorted(actual) == sorted(token["position"] for token in tokens)
        for token in tokens:
            score = actual[token["position"]]
            if token["beyond"] == twin.WITHIN:
                assert math.isclose(score, token["score"], rel_tol=1e-9, abs_tol=1e-9)
            else:
                assert score < -1e6


@pytest.mark.parametrize("prompts", [(0,), (17, 55, 230)], ids=["one row", "ragged"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_victims_are_the_twins(variant, prompts):
    """2,000 steps with the defaults: no prompt; one below half the budget, one above, one over."""
    policy, options = VARIANTS[variant]
    n_steps = 2000
    budget = 80 if policy != "full" else n_steps + max(prompts)
    config = EvictionConfig(budget=budget, policy=policy, seed=3, **options)
    reads_contents = policy in READING or "value_reserve" in options
    sizes = dict(n_layers=2, n_kv_heads=2)
    if policy in SCORING:
        sizes = dict(n_layers=32, n_kv_heads=1, head_dim=1)
    if policy in SCORING and reads_contents or "calibration" in options:
        sizes = dict(n_layers=4)
    cache = make_cache(config, len(prompts), **sizes)
    text = random_text(cache, max(prompts) + n_steps, seed=1)
    twins, streams = [], []
    for row, n_prompt in enumerate(prompts):
        source = make_cache(config, **sizes)
        tokens = as_twin(text, row, cache.reads)
        reference = twin.TwinRow(
            policy,
            budget=budget,
            seed=3,
            n_prompt=n_prompt,
            n_layers=sizes["n_layers"],
            n_heads=2,
            **options,
        )
        prefill(source, text[row, :n_prompt], chunk=80)
        for start in range(0, n_prompt, 80):
            reference.admit(start, *zip(*tokens[start : min(start + 80, n_prompt)], strict=True))
        assert_same_row(source, 0, reference)
        cache.load_row(row, source)
        twins.append(reference)
        streams.append(tokens[n_prompt:])

    steps = joined([text[row, n : n + n_steps] for row, n in enumerate(prompts)])
    for step in range(n_steps):
        expected = [
            reference.append(n_prompt + step, *stream[step])
            for reference, n_prompt, stream in zip(twins, prompts, streams, strict=True)
        ]
        assert decode(cache, steps[:, step], write=reads_contents) == expected, f"step {step}"
    for row, reference in enumerate(twins):
        assert_same_row(cache, row, reference)


@st.composite
def cases(draw, policy):
    """Options of a configuration that can work, a prompt and how to take it."""
    kind = epikv.POLICIES[policy]
    options = dict(window=draw(st.integers(2, 6)))
    if kind.has_lag:
        options["lag"] = draw(st.integers(1, 5))
    if kind.has_quotas:
        quotas = draw(st.lists(st.integers(0, options["lag"]), min_size=3, max_size=3))
        options["quotas"] = tuple(sorted(quotas, reverse=True))
    if policy == "lag-kv":
        options["lag_reference"] = draw(st.sampled_from(["next", "previous"]))
    options["slot_map"] = draw(st.sampled_from(kind.slot_maps))
    least = kind.blocks * options.get("lag", 0)  # tokens that must be recent
    budget = draw(st.integers(1, 14)) + least
    sinks = draw(st.integers(0, min(4, budget - least - 1)))
    recent = draw(st.integers(least, budget - sinks - 1))
    options |= dict(budget=budget, sinks=sinks, recent=recent)
    if draw(st.booleans()):
        options["value_reserve"] = draw(st.integers(0, budget - sinks - recent - 1))
        options["value_statistic"] = draw(st.sampled_from(["range", "var", "norm"]))
    n_prompt = draw(st.integers(0, 3 * budget))
    chunk = draw(st.integers(1, 2 * budget))
    return options, n_prompt, chunk, draw(st.integers(0, 2**32 - 1))


def assert_same_victims(cache, reference, text, n_prompt, chunk):
    """Take a prompt in chunks, then decode, in a cache of one row and in its twin."""
    tokens = as_twin(text, 0, cache.reads)
    cache.protect_prompt(n_prompt)
    for start in range(0, n_prompt, chunk):
        end = min(start + chunk, n_prompt)
        admit(cache, text[:, start:end])
        reference.admit(start, *zip(*tokens[start:end], strict=True))
        assert_same_row(cache, 0, reference)
    for position in range(n_prompt, text.n_tokens):
        expected = reference.append(position, *tokens[position])
        assert decode(cache, text[:, position]) == [expected], f"position {position}"
    assert_same_row(cache, 0, reference)


@pytest.mark.parametrize("variant", ["epikv-seg", "lag-kv", "lag-kv previous", "lag-kv per head"])
def test_the_end_of_a_block_is_the_same_at_any_other_time(variant):
    """Of no row is anything changed where no block ends, nor where its end was called before."""
    policy, options = VARIANTS[variant]
    cache = make_cache(settings_for(policy, budget=24, **options | dict(lag=4)), batch_size=2)
    text = random_text(cache, 60)
    prefill(cache, text[:, :30], chunk=11)
    ended = 0
    for t in range(30, 60):
        decode(cache, text[:, t])
        before = {name: buffer.clone() for name, buffer in cache.named_buffers()}
        cache.end_block()
        ended += t % 4 == 3
        for name, buffer in cache.named_buffers():
            assert torch.equal(buffer, before[name]), (t, name)
    assert ended == 8


@pytest.mark.parametrize("variant", [*EVICTING, *CALIBRATED])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_victims_are_the_twins_for_any_settings(variant, data):
    """Small budgets, windows, blocks and chunks, where the protections meet each other."""
    policy, fixed = VARIANTS[variant]
    options, n_prompt, chunk, seed = data.draw(cases(policy))
    options |= fixed
    cache = make_cache(settings_for(policy, seed=seed, **options))
    bands = ([0, 1], [2, 3]) if policy in SCORING and not fixed else ()
    reference = twin.TwinRow(
        policy, seed=seed, bands=bands, n_prompt=n_prompt, n_layers=4, n_heads=2, **options
    )
    text = random_text(cache, n_prompt + 2 * options["budget"], seed)
    assert_same_victims(cache, reference, text, n_prompt, chunk)


@pytest.mark.parametrize("history", [1, 7])
def test_epikv_seg_ranks_the_last_blocks_only(history, monkeypatch):
    """The last 1024; here fewer, of which 90 come, so that the oldest are replaced many times."""
    assert epikv.EpiKVSeg.HISTORY == twin.HISTORY == 1024
    monkeypatch.setattr(epikv.EpiKVSeg, "HISTORY", history)
    monkeypatch.setattr(twin, "HISTORY", history)
    options = dict(budget=24, lag=3, quotas=(3, 1, 0), window=8)
    cache = make_cache(settings_for("epikv-seg", **options))
    options |= dict(bands=([0, 1], [2, 3]), n_prompt=60, n_layers=4, n_heads=2)
    reference = twin.TwinRow("epikv-seg", **options)
    assert_same_victims(cache, reference, random_text(cache, 270), n_prompt=60, chunk=26)


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

# Calibrations with a window of 2. The bands are block 1 for and block 0 against, which weighs
# nothing: the scores of CHANGES are z_b.
AGAINST = replace(
    tiny.calibration(4), window=2, band_a=(1,), band_b=(0,), weight_a=1.0, weight_b=0.0
)
# Block 0 for a token and three times block 1 against it.
#   token          0   1   2   3   4   5   6
#   of RAW         0   1  -1  -5  -2   0   1
THREEFOLD = replace(AGAINST, band_a=(0,), band_b=(1,), weight_b=3.0)

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
    #   4   1: 0, 2: 0, 3: 1      1, the older of equals
    #   5   2: 0, 3: 1, 4: -1     4
    #   6   2: 0, 3: 1, 5: 0      2, the older of equals
    #   7   3: 1, 5: 0, 6: 1      5
    "calibrated": (
        "epikv",
        dict(budget=4, sinks=1, recent=1, calibration=AGAINST),
        CHANGES,
        0,
        [1, 4, 2, 5],
    ),
    # The weights stay, so the scores are z_a:
    #   4   1: 0, 2: 1, 3: -1     3
    #   5   1: 0, 2: 1, 4: 1      1
    #   6   2: 1, 4: 1, 5: -1     5
    #   7   2: 1, 4: 1, 6: 0      6
    "calibrated, but other bands": (
        "epikv",
        dict(budget=4, sinks=1, recent=1, calibration=AGAINST, band_a=(0,), band_b=(1,)),
        CHANGES,
        0,
        [3, 1, 5, 6],
    ),
    #   4   0: 0, 1: 1, 2: -1, 3: -5   3
    #   5   0: 0, 1: 1, 2: -1, 4: -2   4
    #   6   0: 0, 1: 1, 2: -1, 5: 0    2
    #   7   0: 0, 1: 1, 5: 0, 6: 1     0, the older of equals
    "raw, calibrated": (
        "epikv-raw",
        dict(budget=4, sinks=0, recent=1, calibration=THREEFOLD),
        RAW,
        0,
        [3, 4, 2, 0],
    ),
    # Nothing counts but age. If it speaks against a token this is `streaming`:
    "old ones go": (
        "epikv-fit",
        dict(budget=5, sinks=1, recent=2, slot_map="shared", calibration=only(4, log_age=-1.0)),
        12,
        0,
        [1, 2, 3, 4, 5, 6, 7],
    ),
    # If it speaks for a token the newest goes that is not among the last two: 3 when 5 comes in.
    "new ones go": (
        "epikv-fit",
        dict(budget=5, sinks=1, recent=2, slot_map="shared", calibration=only(4, log_age=1.0)),
        12,
        0,
        [3, 4, 5, 6, 7, 8, 9],
    ),
}


@pytest.mark.parametrize("example", BY_HAND)
def test_victims_worked_out_by_hand(example):
    """Residuals of one number that grows by g; the first token has some residual, but no change."""
    policy, options, changes, n_prompt, victims = BY_HAND[example]
    if policy in SCORING:
        half = len(changes) // 2
        if "calibration" not in options:
            bands = dict(band_a=tuple(range(half)), band_b=tuple(range(half, len(changes))))
            options = options | bands
        growth = torch.tensor(changes, dtype=torch.float64)  # [blocks, N-1]
        growth = torch.cat([torch.full((len(changes), 1), 7.0), growth], dim=1)
        residuals = growth.cumsum(dim=1).T[None, :, :, None]  # [1, N, blocks, 1]
    cache = make_cache(EvictionConfig(policy=policy, **options), hidden_size=1)
    if policy not in SCORING:
        residuals = torch.zeros(1, changes, len(cache.reads), 1)
    text = with_contents(cache, residuals)

    prefill(cache, text[:, :n_prompt], chunk=options["budget"])
    decoded = [decode(cache, text[:, t])[0] for t in range(n_prompt, text.n_tokens)]
    assert [victim for victim in decoded if victim is not None] == victims


# Keys and values of one layer and one head, unless a token has a list for each head of each layer.


def of_variance(*numbers):
    """Vectors (0, x): of two channels, x apart, the sample variance is x² / 2."""
    return [[0, math.sqrt(2 * number)] for number in numbers]


# Norms of keys, in head 0 and in head 1, and their mean:
#   token    0  1  2   3   4   5   6
#   head 0   1  5  2   3   1   4   2
#   head 1   1  1  6   2   4   1   1
#   mean     1  3  4  2.5 2.5 2.5 1.5
NORMS = [[1, 5, 2, 3, 1, 4, 2], [1, 1, 6, 2, 4, 1, 1]]
TWO_HEADS = [[[[a, 0], [0, -b]]] for a, b in zip(*NORMS, strict=True)]
TWO_LAYERS = [[[[a, 0]], [[0, -b]]] for a, b in zip(*NORMS, strict=True)]

# Directions of keys, their sum when the token is there, and the cosine of the two; their lengths,
# which differ, must not count.
#   token       0      1      2      3      4      5      6      7
#   direction   →      ↑      →      →      ↑      ←      ↑      →
#   sum       (1,0)  (1,1)  (2,1)  (3,1)  (3,2)  (2,2)  (2,3)  (3,3)
#   cosine      1     .71    .89    .95    .55   -.71    .83    .71
DIRECTIONS = [[1, 0], [0, 10], [1, 0], [2, 0], [0, 1], [-5, 0], [0, 3], [1, 0]]

# Variances, and their means of two; the first token counts, unlike its residual.
#   token      0   1   2   3   4   5   6   7   8
#   variance   2   8   2   0   2   8   0  32   0
#   mean       2   5   5   1   1   5   4  16  16
VARIANCES = of_variance(2, 8, 2, 0, 2, 8, 0, 32, 0)

# Blocks of two. Of two channels a and b the sample deviation is |a - b| / √2; without the root:
#   block        0             1             2             3             4
#   token        0      1      2      3      4      5      6      7      8      9
#   key        (1,1)  (2,0)  (0,0)  (2,4)  (0,0)  (1,1)  (1,0)  (3,4)  (0,0)  (1,2)
#   lowest     (1,0)         (0,0)         (0,0)         (1,0)         (0,0)
#   range      (1,1)         (2,4)         (1,1)         (2,4)         (1,2)
#   by next   (.5,.25)(1,0)  (0,0)  (2,4) (-.5,0) (0,.25)(1,0)  (3,2)
#   score       .25     1      0      2     .5     .25     1      1
#   by prev.  (0,1)  (1,0)  (-1,0)  (1,4)  (0,0) (.5,.25) (1,0)  (3,4)
#   score        1      1      1      3      0     .25      1      1
# The 1e-9 beside each range makes up for none of these differences, and is the same in each tie.
# Values are 0 but for token 6, (3, 0), and token 9, (1, 1). In the range (1, 1) of block 4 the
# former adds 3 to its score; in the range 0 of block 2, by the 1e-9, 3,000,000,000.
LAG_KEYS = [[1, 1], [2, 0], [0, 0], [2, 4], [0, 0], [1, 1], [1, 0], [3, 4], [0, 0], [1, 2], [0, 0]]
LAG_KEYS.append([0, 0])
LAG_VALUES = [[0, 0]] * 6 + [[3, 0], [0, 0], [0, 0], [1, 1], [0, 0], [0, 0]]

# CHANGES, and three tokens more that change as much as the one before: their z-scores are 0.
#   token        0   1   2   3   4   5   6   7   8   9  10  11
#   score        0   0   1  -2   2  -1  -1   2   0   0   0   0
# Blocks of two, quotas 2, 1 and 0. A block is at or above the number in place 2m//3 of m sorted
# ones, or else at or above that in place m//3, or below both:
#   block   variance   all so far, sorted   places   quota   beyond it
#     0        5       5                     0, 0      2
#     1        2       2 5                   1, 0      1     3
#     2        1       1 2 5                 2, 1      0     5, then 4
#     3        8       1 2 5 8               2, 1      2
#     4        3       1 2 3 5 8             3, 1      1     8, the older of equals
SEG_CHANGES = [[*CHANGES[0], 3, 3, 3, 3], [*CHANGES[1], 1, 1, 1, 1]]
SEG_KEYS = of_variance(6, 4, 2, 2, 2, 0, 4, 12, 3, 3, 0, 0)

# Ranges of values for `streaming`:
#   token   0   1   2   3   4   5   6   7   8
#   range   9   5   1   5   2   2   7   1   0
RANGES = [[1, 1 + size] for size in (9, 5, 1, 5, 2, 2, 7, 1, 0)]

# Three values and what is large in them; after the sink 0, tokens
#   1   (3, 3, 7)         range 4     variance 5.33   norm 8.2
#   2   (1, 3, 5.5)       range 4.5   variance 5.08   norm 6.3
#   3   (-2.5, 0, 2.5)    range 5     variance 6.25   norm 3.5
THREE_VALUES = [[0, 0, 0], [3, 3, 7], [1, 3, 5.5], [-2.5, 0, 2.5], [0, 0, 0]]

# Norms of keys. Less log(1 + age) their logarithms are in the order of norm / (1 + age), of which
# token 1 has more than token 3 from the moment on when 12 / t > 8 / (t - 2), which is t > 6.
AGEING = [[size, 0] for size in (1, 12, 4, 8, 4, 2, 20, 2, 1)]

# The same with keys and values. name: policy, options, keys, values (None: all zero), changes (None
# where they do not count), victims.
OF_KEYS_BY_HAND = {
    # The largest norm goes. Tokens that may go, as token: norm, when each token comes in:
    #   4   1: 3, 2: 4, 3: 2.5       2
    #   5   1: 3, 3: 2.5, 4: 2.5     1
    #   6   3: 2.5, 4: 2.5, 5: 2.5   3, the oldest of equals
    "k-norm": ("k-norm", dict(budget=4, sinks=1, recent=1), TWO_HEADS, None, None, [2, 1, 3]),
    # Each head for itself:
    #   4   1: 5, 2: 2, 3: 3    1      1: 1, 2: 6, 3: 2    2
    #   5   2: 2, 3: 3, 4: 1    3      1: 1, 3: 2, 4: 4    4
    #   6   2: 2, 4: 1, 5: 4    5      1: 1, 3: 2, 5: 1    3
    "k-norm per head": (
        "k-norm",
        dict(budget=4, sinks=1, recent=1, slot_map="head"),
        TWO_HEADS,
        None,
        None,
        [[[1, 2]], [[3, 4]], [[5, 3]]],
    ),
    # The same numbers in two layers of one head.
    "k-norm per layer's head": (
        "k-norm",
        dict(budget=4, sinks=1, recent=1, slot_map="head"),
        TWO_LAYERS,
        None,
        None,
        [[[1], [2]], [[3], [4]], [[5], [3]]],
    ),
    # The largest cosine goes:
    #   4   1: .71, 2: .89, 3: .95    3
    #   5   1: .71, 2: .89, 4: .55    2
    #   6   1: .71, 4: .55, 5: -.71   1
    #   7   4: .55, 5: -.71, 6: .83   6
    "key-diff": (
        "key-diff",
        dict(budget=4, sinks=1, recent=1),
        DIRECTIONS,
        None,
        None,
        [3, 2, 1, 6],
    ),
    #   4   0: 2, 1: 5, 2: 5, 3: 1   3
    #   5   0: 2, 1: 5, 2: 5, 4: 1   4
    #   6   0: 2, 1: 5, 2: 5, 5: 5   0
    #   7   1: 5, 2: 5, 5: 5, 6: 4   6
    #   8   1: 5, 2: 5, 5: 5, 7: 16  1
    "key-var": (
        "key-var",
        dict(budget=4, sinks=0, recent=1, window=2),
        VARIANCES,
        None,
        None,
        [3, 4, 0, 6, 1],
    ),
    "value-var": (
        "value-var",
        dict(budget=4, sinks=0, recent=1, window=2),
        [[3, -3]] * 9,
        VARIANCES,
        None,
        [3, 4, 0, 6, 1],
    ),
    # Four tokens are recent; blocks 0 and 1 are scored when token 6 comes in, block 2 with token 7
    # and block 3 with token 9.
    #    6   0: .25, 1: 1, 2: 0    2
    #    7   0: .25, 1: 1, 3: 2    0
    #    8   1: 1, 3: 2, 4: .5     4
    #    9   1: 1, 3: 2, 5: .25    5
    #   10   1: 1, 3: 2, 6: 1 + 3  1
    #   11   3: 2, 6: 4, 7: 1      7
    "lag-kv": (
        "lag-kv",
        dict(budget=6, sinks=0, recent=4, lag=2),
        LAG_KEYS,
        LAG_VALUES,
        None,
        [2, 0, 4, 5, 1, 7],
    ),
    #    6   0: 1, 1: 1, 2: 1      0, the oldest of equals
    #    7   1: 1, 2: 1, 3: 3      1
    #    8   2: 1, 3: 3, 4: 0      4
    #    9   2: 1, 3: 3, 5: .25    5
    #   10   2: 1, 3: 3, 6: much   2
    #   11   3: 3, 6: much, 7: 1   7
    "lag-kv previous": (
        "lag-kv",
        dict(budget=6, sinks=0, recent=4, lag=2, lag_reference="previous"),
        LAG_KEYS,
        LAG_VALUES,
        None,
        [0, 1, 4, 5, 2, 7],
    ),
    # Beyond their quota, as token!:
    #    6   0: 0, 1: 0, 2: 1, 3!, 4!      3, the older block's
    #    7   0: 0, 1: 0, 2: 1, 4!, 5!      5, the lower score
    #    8   0: 0, 1: 0, 2: 1, 4!, 6: -1   4, though no score is higher
    #    9   0: 0, 1: 0, 2: 1, 6: -1, 7: 2      6
    #   10   0: 0, 1: 0, 2: 1, 7: 2, 8!         8
    #   11   0: 0, 1: 0, 2: 1, 7: 2, 9: 0       0, the oldest of equals
    "epikv-seg": (
        "epikv-seg",
        dict(budget=6, sinks=0, recent=2, lag=2, quotas=(2, 1, 0), window=2),
        SEG_KEYS,
        None,
        SEG_CHANGES,
        [3, 5, 4, 6, 8, 0],
    ),
    # Without a quota for the middle tier block 1 is wholly beyond, and so is block 4:
    #    6   0: 0, 1: 0, 2!, 3!, 4!              3, the lower score of block 1
    #    7   0: 0, 1: 0, 2!, 4!, 5!              2, as block 1 goes before block 2
    #    8   0: 0, 1: 0, 4!, 5!, 6: -1           5
    #    9   0: 0, 1: 0, 4!, 6: -1, 7: 2         4
    #   10   0: 0, 1: 0, 6: -1, 7: 2, 8!         8
    #   11   0: 0, 1: 0, 6: -1, 7: 2, 9!         9
    "epikv-seg, oldest block": (
        "epikv-seg",
        dict(budget=6, sinks=0, recent=2, lag=2, quotas=(2, 0, 0), window=2),
        SEG_KEYS,
        None,
        SEG_CHANGES,
        [3, 2, 5, 4, 8, 9],
    ),
    # The oldest goes, but not the largest value; that is chosen each time:
    #   4   1: 5, 2: 1, 3: 5   3 is spared, the newer of equals: 1
    #   5   2: 1, 3: 5, 4: 2   3 is spared: 2
    #   6   3: 5, 4: 2, 5: 2   3 is spared: 4
    #   7   3: 5, 5: 2, 6: 7   6 is spared: 3
    #   8   5: 2, 6: 7, 7: 1   6 is spared: 5
    "reserve": (
        "streaming",
        dict(budget=4, sinks=1, recent=1, value_reserve=1),
        [[0, 0]] * 9,
        RANGES,
        None,
        [1, 2, 4, 3, 5],
    ),
    # Norm / (1 + age):
    #   4   1: 12/4, 2: 4/3, 3: 8/2    2
    #   5   1: 12/5, 3: 8/3, 4: 4/2    4
    #   6   1: 12/6, 3: 8/4, 5: 2/2    5
    #   7   1: 12/7, 3: 8/5, 6: 20/2   3, which was worth more than 1 when 5 came in
    #   8   1: 12/8, 6: 20/3, 7: 2/2   7
    "ages": (
        "epikv-fit",
        dict(
            budget=4,
            sinks=1,
            recent=1,
            slot_map="shared",
            calibration=only(1, 1, -1.0, key_norm=(1.0,)),
        ),
        AGEING,
        None,
        None,
        [2, 4, 5, 3, 7],
    ),
}
OF_KEYS_BY_HAND |= {
    # The two larger ones are spared.
    f"reserve by {statistic}": (
        "streaming",
        dict(budget=4, sinks=1, recent=0, value_reserve=2, value_statistic=statistic),
        [[0, 0, 0]] * 5,
        THREE_VALUES,
        None,
        [victim],
    )
    for statistic, victim in [("range", 1), ("var", 2), ("norm", 3)]
}


@pytest.mark.parametrize("example", OF_KEYS_BY_HAND)
def test_victims_of_keys_and_values_worked_out_by_hand(example):
    """Decoded token by token; and of a long prompt in chunks of one the same tokens stay."""
    policy, options, keys, values, changes, victims = OF_KEYS_BY_HAND[example]
    k = torch.tensor(keys, dtype=torch.float64)
    k = k.view(len(keys), *([1, 1] if k.dim() == 2 else k.shape[1:3]), -1)  # [N, L, H, D]
    v = torch.zeros_like(k) if values is None else torch.tensor(values).double().view_as(k)
    n_layers = 2 if changes else k.shape[1]
    if changes:
        options = options | dict(band_a=(0,), band_b=(1,))
        k, v = k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)
        growth = torch.tensor([[7.0, *series] for series in changes], dtype=torch.float64)
        residuals = growth.cumsum(dim=1).T[None, :, :, None]
    sizes = dict(n_layers=n_layers, n_kv_heads=k.shape[2], head_dim=k.shape[3], hidden_size=1)
    config = EvictionConfig(policy=policy, **options)

    cache = make_cache(config, **sizes)
    if not changes:
        residuals = torch.zeros(1, len(keys), len(cache.reads), 1)
    text = Text(residuals, *(x.permute(1, 2, 0, 3)[None] for x in (k, v)))
    decoded = [decode(cache, text[:, t])[0] for t in range(text.n_tokens)]
    assert [victim for victim in decoded if victim is not None] == victims

    prompted = make_cache(config, **sizes)
    prefill(prompted, text, chunk=1)
    for mine, theirs in zip(scores_of_maps(prompted), scores_of_maps(cache), strict=True):
        assert mine.keys() == theirs.keys()


def test_the_fit_by_hand():
    """Each feature with a weight of its own, in a block of two heads; three tokens."""
    weights = dict(change=2, key_norm=3, key_variance=5, value_norm=7, value_variance=11)
    weights = {name: (float(weight),) for name, weight in weights.items()}
    calibration = replace(only(1, **weights, key_similarity=(13.0,)), window=2)
    config = EvictionConfig(budget=8, policy="epikv-fit", calibration=calibration)
    cache = make_cache(config, n_layers=1, head_dim=2, hidden_size=1)
    # [token][head]: norms 5 and 10, sample variances 1/2 and 2; 5 and 10, 49/2 and 98; and of token
    # 2 the first once more.
    keys = [[[3, 4], [6, 8]], [[4, -3], [8, -6]], [[3, 4], [6, 8]]]
    # Norms 2 and 3, variances 2 and 9/2; nothing, which counts as 1e-6 and 1e-12; norms 1 and 1,
    # variances 1/2.
    values = [[[0, 2], [3, 0]], [[0, 0], [0, 0]], [[1, 0], [0, 1]]]
    k, v = (torch.tensor(x).double().permute(1, 0, 2)[None, None] for x in (keys, values))
    residuals = torch.tensor([7.0, 8.0, 11.0], dtype=torch.float64)[None, :, None, None]
    admit(cache, Text(residuals, k, v))
    norm, log = (math.log(5) + math.log(10)) / 2, math.log
    # The changes are 1 and 3, a standard deviation of 1 above their mean. The keys of token 1 are
    # at right angles to those before, so each makes 45 degrees with the sum; then the direction
    # (3, 4) is there twice, and the cosine of it to the sum of one and two sides is 2 / sqrt(5).
    expected = {
        0: 3 * norm + 5 * log(0.5 * 2) / 2 + 7 * log(2 * 3) / 2 + 11 * log(2 * 4.5) / 2 + 13,
        1: 3 * norm + 5 * log(24.5 * 98) / 2 + (7 + 22) * log(1e-6) + 13 * math.sqrt(0.5),
        2: 2 / (1 + 1e-6) + 3 * norm + 5 * log(0.5 * 2) / 2 + 11 * log(0.5) + 26 / math.sqrt(5),
    }
    assert score_of(cache) == pytest.approx(expected)


@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
@pytest.mark.parametrize(
    "policy, recent, log_age, kept",
    [
        # Protected: 0 and 7. Of 1: 0, 2: 1, 3: -2, 4: 2, 5: -1, 6: -1 the best two stay.
        ("epikv", 1, 0, [0, 2, 4, 7]),
        # Protected: 0, 6 and 7. The best one of the others stays.
        ("epikv", 2, 0, [0, 4, 6, 7]),
        # Of equal scores the oldest go.
        ("streaming", 1, 0, [0, 5, 6, 7]),
        # So they do where age speaks against a token; else the newest that are not recent.
        ("epikv-fit", 1, -1.0, [0, 5, 6, 7]),
        ("epikv-fit", 1, 1.0, [0, 1, 2, 7]),
        ("epikv-fit", 2, 1.0, [0, 1, 6, 7]),
    ],
)
def test_a_long_prompt_by_hand(policy, recent, log_age, kept, chunk):
    """The best of a prompt of 8 stay; here it does not matter in how many chunks it comes."""
    options = dict(band_a=(0,), band_b=(1,)) if policy == "epikv" else {}
    if policy == "epikv-fit":
        options = dict(calibration=only(2, log_age=log_age))
    config = EvictionConfig(budget=4, policy=policy, sinks=1, recent=recent, window=2, **options)
    cache = make_cache(config, n_layers=2, hidden_size=1)
    growth = torch.tensor([[7.0, *series] for series in CHANGES], dtype=torch.float64)
    residuals = growth.cumsum(dim=1).T[None, :, : len(cache.reads), None]
    prefill(cache, with_contents(cache, residuals), chunk)
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
    prefill(cache, with_contents(cache, residuals), chunk=2)
    assert held(cache) == sorted({0, n_prompt - 1})


# Rolling statistics ----------------------------------------------------------------------------


def statistics_of(signal, size, chunk):
    """Rolling mean and z-score of a signal [N], the first value being no change, in chunks."""
    window = epikv.RollingWindow(size, 1, CacheShape(1, 1, 1, 1, dtype=signal.dtype))
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
    config = EvictionConfig(budget=64, window=size, policy=policy)
    scorer = epikv.POLICIES[policy](config, CacheShape(1, 1, 1, 1, dtype=torch.float64))
    scores = scorer.score(Tokens(torch.arange(40)[None], signal, None, None))[0].tolist()

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
        "epikv-seg": flat,
        "epikv-smooth": [0.0, *(statistics.fmean(past(flat, t)) for t in range(1, 40))],
        "epikv-raw": [0.0]
        + [statistics.fmean(past(a, t)) - statistics.fmean(past(b, t)) for t in range(1, 40)],
    }
    assert scores == pytest.approx(expected[policy], abs=1e-9)


def test_changes_that_a_policy_gets(monkeypatch):
    """The distance to the token before, across chunks and steps; the mean over a band; first 0."""
    seen = []

    class Recorder(epikv.EpiKV):
        def score(self, tokens):
            seen.append((tokens.position, tokens.change))
            return super().score(tokens)

    monkeypatch.setitem(epikv.POLICIES, "recorder", Recorder)
    config = EvictionConfig(budget=8, policy="recorder", band_a=(3, 0), band_b=(0, 2))
    cache = make_cache(config, batch_size=2)
    assert cache.reads == (0, 2, 3)
    text = random_text(cache, 20)
    prefill(cache, text[:, :11], chunk=4)
    for t in range(11, 20):
        decode(cache, text[:, t])

    assert torch.cat([p for p, _ in seen], dim=1).tolist() == [list(range(20))] * 2
    change = torch.cat([change for _, change in seen], dim=1)
    residuals = text.residuals
    assert change[:, 0].eq(0).all()
    for row, t in ((row, t) for row in range(2) for t in range(1, 20)):
        g = [math.dist(*residuals[row, t - 1 : t + 1, i].tolist()) for i in range(3)]
        expected = [(g[2] + g[0]) / 2, (g[0] + g[1]) / 2]
        assert change[row, t].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", sorted({*SCORING, *READING}))
def test_scores_of_any_cache_are_computed_in_float32(policy, dtype):
    """The same numbers give the same scores whatever precision the cache has."""
    config = settings_for(policy, budget=32, window=8, value_reserve=2)
    caches = [make_cache(config, dtype=kind) for kind in (dtype, torch.float32)]
    text = random_text(caches[0], 40).to(dtype)
    for cache in caches:
        assert cache.score.dtype == cache.value_size.dtype == torch.float32
        prefill(cache, text.to(cache.layers[0].k.dtype), chunk=7)
        for t in range(20):
            decode(cache, text.to(cache.layers[0].k.dtype)[:, t])
    assert caches[0].score.unique().numel() > 16
    assert torch.equal(caches[0].score, caches[1].score)
    assert torch.equal(caches[0].value_size, caches[1].value_size)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
@pytest.mark.parametrize("budget", [60, 20], ids=["all stay", "some go"])
@pytest.mark.parametrize("variant", EVICTING_VARIANTS)
def test_scores_do_not_depend_on_chunks(variant, budget, chunk):
    """The rolling state crosses every bound, also that from prefill to decode."""
    policy, options = VARIANTS[variant]
    if epikv.POLICIES[policy].has_lag:
        options = dict(lag=2) | options
    whole = make_cache(settings_for(policy, budget=60, window=8, **options))
    text = random_text(whole, 60)
    prefill(whole, text, chunk=60)
    cache = make_cache(settings_for(policy, budget=budget, window=8, **options))
    prefill(cache, text[:, :45], chunk)
    for t in range(45, 60):
        decode(cache, text[:, t])
    for expected, actual in zip(scores_of_maps(whole), scores_of_maps(cache), strict=True):
        assert len(actual) == budget
        for position, score in actual.items():
            assert score == pytest.approx(expected[position], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("slot_map", ["shared", "head"])
@pytest.mark.parametrize("lag_reference", ["next", "previous"])
def test_online_scores_of_lag_kv_are_the_offline_ones(lag_reference, slot_map, dtype):
    """To the last bit: scored once in a cache of 24 or at the end, with the whole text at hand."""
    options = dict(lag=5, slot_map=slot_map, lag_reference=lag_reference)
    cache = make_cache(EvictionConfig(budget=24, policy="lag-kv", **options), dtype=dtype)
    text = random_text(cache, 75)

    def offline(x):  # [L, H, N, D] -> [L, H, N]
        blocks = x.to(dtype).unflatten(2, (15, 5))
        neighbours = [*range(1, 15), 14] if lag_reference == "next" else [0, *range(14)]
        reference = blocks[:, :, neighbours]
        low, high = (f(reference, 3, keepdim=True) for f in (torch.amin, torch.amax))
        return ((blocks - low) / (high - low + 1e-9)).std(-1).flatten(2)

    expected = offline(text.k[0]) + offline(text.v[0])
    if lag_reference == "next":
        expected[:, :, 70:] = 0  # no block has come after this one
    if slot_map == "shared":
        expected = expected.mean(0, keepdim=True).mean(1, keepdim=True)
    expected = expected.flatten(0, 1).tolist()
    prefill(cache, text[:, :33], chunk=13)
    for t in range(33, 75):
        decode(cache, text[:, t])
        if cache.length % 5 == 0:
            unscored = t - 4 if lag_reference == "next" else t + 1
            for scores, actual in zip(expected, scores_of_maps(cache), strict=True):
                ready = {p: score for p, score in actual.items() if p < unscored}
                assert len(ready) >= 19
                assert ready == {p: scores[p] for p in ready}


def assert_same_scores_but_for(broken, clean, spoiled):
    """Two caches that hold all tokens of a row agree on those not `spoiled`, and not on all."""
    differ = ~torch.isclose(broken.score, clean.score, **ROUNDING)[0, 0, 0, : clean.length[0]]
    assert {*differ.nonzero().flatten().tolist()} <= {*spoiled}
    assert differ.any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", [*SCORING, "epikv-fit"])
def test_a_broken_residual_is_forgotten(policy, poison):
    """NaN and infinity spoil no score for longer than the windows last, and none is not finite."""
    config = settings_for(policy, budget=64, window=4)
    clean, broken = make_cache(config), make_cache(config)
    text = random_text(clean, 40)
    prefill(clean, text, chunk=40)
    text.residuals[0, 10, :, 1] = poison
    prefill(broken, text, chunk=6)
    assert broken.score.isfinite().all()
    # Changes 10 and 11 are broken, z-scores up to 14, their means up to 17; with blocks of 8 those
    # are in two blocks, which rank their tokens otherwise.
    first, end = (8, 24) if policy == "epikv-seg" else (10, 18)
    assert_same_scores_but_for(broken, clean, range(first, end))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "policy, options, spoiled",
    [
        ("key-var", {}, range(10, 14)),
        ("value-var", {}, range(10, 14)),
        ("k-norm", {}, [10]),
        ("key-diff", {}, [10]),
        ("epikv-fit", {}, [10]),
        # The token is in block 1, by which block 0 is normalised, and block 1 itself by block 2.
        ("lag-kv", dict(lag=8), [*range(8), 10]),
        ("lag-kv", dict(lag=8, lag_reference="previous"), [10, *range(16, 24)]),
    ],
)
def test_a_broken_key_spoils_no_more_than_it_must(policy, options, spoiled, poison):
    """One channel of one head: scores made of it are spoiled, and none is not finite.

    In the mean direction of `key-diff`, and so of `epikv-fit`, a broken key counts for nothing, as
    one of zeros does.
    """
    config = settings_for(policy, budget=64, window=4, **options)
    clean, broken = make_cache(config), make_cache(config)
    text = random_text(clean, 40)
    if policy in ("key-diff", "epikv-fit"):
        text.k[0, 1, 0, 10] = 0
    prefill(clean, text, chunk=40)
    text.k[0, 1, 0, 10, 1] = text.v[0, 1, 0, 10, 1] = poison
    prefill(broken, text[:, :25], chunk=6)
    for t in range(25, 40):
        decode(broken, text[:, t])
    assert broken.score.isfinite().all()
    assert_same_scores_but_for(broken, clean, spoiled)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["key-diff", "k-norm", "key-var", "value-var", "lag-kv"])
def test_a_broken_key_does_not_stay_for_ever(policy, poison):
    """While it does, all attention is broken. 200 tokens in 24 slots are long enough to go."""
    cache = make_cache(settings_for(policy, budget=24))
    text = random_text(cache, 200)
    text.k[:, :, :, 30] = text.v[:, :, :, 30] = poison
    prefill(cache, text[:, :20], chunk=20)
    for t in range(20, 200):
        decode(cache, text[:, t])
    assert 30 not in held(cache)


# What always holds -----------------------------------------------------------------------------


def same(a, b):
    """Equal numbers, and NaN where the other has it."""
    return ((a == b) | (a.isnan() & b.isnan())).all()


def assert_consistent(cache, text, n_prompt):
    """Everything that a cache of rows of equal length promises at any time.

    text: what it takes its tokens from, the first `n_prompt` as a prompt.
    """
    config, n_seen = cache.config, cache.length[0].item()
    assert cache.length.eq(n_seen).all()
    n_held = min(config.budget, n_seen)
    must_stay = {*range(min(config.sinks, n_seen)), *range(max(0, n_seen - config.recent), n_seen)}
    free = config.budget - config.recent - config.value_reserve - 1
    if n_prompt <= min(config.budget // 2, free):
        must_stay |= set(range(min(n_prompt, n_seen)))
    if n_seen:
        must_stay.add(n_seen - 1)

    position = cache.position  # [B, l, h, S]
    assert (position[..., n_held:] == epikv.NO_POSITION).all()
    in_order = position[..., :n_held].sort(dim=-1).values
    assert (in_order >= 0).all() and (in_order < n_seen).all()
    assert (in_order.diff(dim=-1) > 0).all()  # none twice
    for p in must_stay:
        assert (position == p).any(dim=-1).all(), p
    mask = cache.attention_mask(config.budget)
    assert torch.equal(mask[..., 0, :], position != epikv.NO_POSITION)
    assert cache.score.isfinite().all() and cache.value_size.isfinite().all()

    for i, (layer, at) in enumerate(zip(cache.layers, cache.per_layer(position), strict=True)):
        at = at[..., :n_held, None].expand(*layer.k[:, :, :n_held].shape)
        for mine, theirs in ((layer.k, text.k), (layer.v, text.v)):
            assert same(mine[:, :, :n_held], theirs[:, i].to(mine.dtype).gather(2, at))


def spared(cache, text):
    """By row, layer and head of the map, the evictable tokens with the largest values."""
    v = text.v.to(cache.layers[0].v.dtype).double()
    size = {
        "range": lambda: v.amax(-1) - v.amin(-1),
        "var": lambda: v.var(-1),
        "norm": lambda: (v**2).sum(-1).sqrt(),
    }[cache.config.value_statistic]()  # [B, L, H_kv, N]
    for axis in (1, 2):
        if cache.position.shape[axis] == 1:
            size = size.mean(axis, keepdim=True)
    spared = {}
    for row, layer, head in itertools.product(*map(range, cache.position.shape[:3])):
        last = cache.length[row] - max(cache.config.recent, 1)
        there = [
            p
            for p in cache.position[row, layer, head].tolist()
            if cache.protected[row] <= p <= last
        ]
        there.sort(key=lambda p: (size[row, layer, head, p].item(), p), reverse=True)
        spared[row, layer, head] = there[: cache.config.value_reserve]
    return spared


def check_invariants(config, sizes, n_prompt, chunk, seed, poison, ties=False):
    """Take in a prompt and decode as many tokens as twice the budget, looking at every step."""
    cache = make_cache(config, **sizes)
    text = random_text(cache, n_prompt + 2 * config.budget, seed)
    if ties:
        for x in (text.residuals, text.k, text.v):
            x.round_()
    generator = torch.Generator().manual_seed(seed)
    for x in (text.residuals, text.k, text.v):
        x[torch.rand(x.shape, generator=generator) < 0.03] += poison
    # Of equal values the newer is spared; only of these does equal mean the same to the last bit.
    exact = config.value_statistic == "range" or not ties
    sound = exact and math.isfinite(poison)

    cache.protect_prompt(n_prompt)
    for start in range(0, n_prompt, chunk):
        admit(cache, text[:, start : min(start + chunk, n_prompt)])
        assert_consistent(cache, text, n_prompt)
    for t in range(n_prompt, text.n_tokens):
        reserve = spared(cache, text) if config.value_reserve and sound else {}
        victims = decode(cache, text[:, t])
        assert all((victim is None) == (t < config.budget) for victim in victims)
        assert_consistent(cache, text, n_prompt)
        for at, positions in reserve.items():
            assert {*positions} <= {*cache.position[at].tolist()}


POISON = st.sampled_from([0.0, 0.0, 1e30, math.nan, math.inf, -math.inf])


@st.composite
def shapes(draw, n_layers=None):
    """Sizes of a small cache."""
    return dict(
        n_layers=n_layers or draw(st.integers(1, 3)),
        n_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(2, 5)),
        batch_size=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )


@pytest.mark.parametrize("policy", EVICTING)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), poison=POISON, ties=st.booleans())
def test_invariants(policy, data, poison, ties):
    """Protected, spared and newest tokens stay, each slot has its position's keys and values.

    Whatever the settings, residuals, keys and values, some of which are equal or not finite.
    """
    options, n_prompt, chunk, seed = data.draw(cases(policy))
    sizes = data.draw(shapes(4 if policy in SCORING or policy == "epikv-fit" else None))
    if policy == "epikv-fit":
        options["calibration"] = tiny.calibration(4, n_kv_heads=sizes["n_kv_heads"])
    check_invariants(settings_for(policy, **options), sizes, n_prompt, chunk, seed, poison, ties)


@pytest.mark.parametrize("n_blocks", [0, 1, 2])
@pytest.mark.parametrize(
    "palette",
    [[0.0], [0.0, 1.0], [1e30, -1e30, 0.0], [-1e30, math.nan, math.inf, -math.inf, 2.0]],
    ids=str,
)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), by_head=st.booleans())
def test_invariants_for_any_score(palette, n_blocks, data, by_head):
    """Equal, huge or no numbers, by token or by head, revised or not, on every kind of map."""

    def paint(position, heads):
        """[B, N], or [B, L, H_kv, N] with `heads`, the sizes L and H_kv."""
        if by_head:
            place = torch.arange(math.prod(heads)).view(*heads, 1)
            position = position[:, None, None] * 7 + place * 5
        return torch.tensor(palette)[position * 11 // 3 % len(palette)]

    class Stub(epikv.Policy):
        slot_maps = ("shared", "layer", "head")
        reads_kv = True
        has_lag = n_blocks > 0
        blocks = n_blocks
        revised_block = data.draw(st.integers(0, max(0, n_blocks - 1)))

        def score(self, tokens):
            return paint(tokens.position, tokens.k.shape[1:3])

        def revise(self, last):
            lag = last.position.shape[1] // n_blocks
            mine = last.position[:, self.revised_block * lag :][:, :lag]
            return paint(mine + 1, last.k.shape[1:3])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(epikv.POLICIES, "stub", Stub)
        options, n_prompt, chunk, seed = data.draw(cases("stub"))
        config = EvictionConfig(policy="stub", **options)
        check_invariants(config, data.draw(shapes()), n_prompt, chunk, seed, poison=0.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_budget_for_everything_keeps_everything_in_order(variant):
    """Then slot and position are the same, as in a cache that never evicts."""
    policy, options = VARIANTS[variant]
    cache = make_cache(settings_for(policy, budget=40, **options), batch_size=2)
    text = random_text(cache, 40)
    prefill(cache, text[:, :25], chunk=10)
    for t in range(25, 40):
        assert decode(cache, text[:, t]) == [None, None]
    assert cache.position.eq(torch.arange(40)).all()
    assert_consistent(cache, text, n_prompt=25)


def run(cache, seed):
    """Prefill, decode; returns every step's victims."""
    text = random_text(cache, 90, seed)
    prefill(cache, text[:, :40], chunk=9)
    return [decode(cache, text[:, t]) for t in range(40, 90)]


@pytest.mark.parametrize("variant", EVICTING_VARIANTS)
def test_reset_forgets_everything_and_moves_nothing(variant):
    """Every buffer stays where it is; a second run equals the first, even after one with NaN."""
    policy, options = VARIANTS[variant]
    config = settings_for(policy, budget=16, window=8, **options)
    cache, fresh = make_cache(config, batch_size=2), make_cache(config, batch_size=2)
    addresses = {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}
    assert len(set(addresses.values()) - {0}) >= 4 + 2 * len(cache.layers)

    def same_addresses():
        return addresses == {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}

    expected = run(fresh, seed=1)
    assert len({str(victim) for victims in expected for victim in victims}) > 40
    assert run(cache, seed=1) == expected and same_addresses()
    short = random_text(cache, 5, seed=2)
    for text in (short, short * math.nan):
        cache.reset()
        prefill(cache, text, chunk=3)  # protected, unlike the prompt of `run`
    cache.load_row(1, make_cache(config))
    assert same_addresses()

    cache.reset()
    assert same_addresses()
    untouched = dict(make_cache(config, batch_size=2).named_buffers())
    for name, buffer in cache.named_buffers():
        assert torch.equal(buffer, untouched[name]), name
    assert run(cache, seed=1) == expected and same_addresses()


def first_row(config, dtype, others):
    """Victims and scores of a row at 60 steps, with `others`, texts of one row.

    The length of another row's prompt is what it has more than these 60.
    """
    n_steps = 60
    cache = make_cache(config, 1 + len(others), dtype=dtype)
    texts = [random_text(cache, 10 + n_steps, seed=5, batch_size=1), *others]
    texts = [text.to(dtype) for text in texts]
    for row, text in enumerate(texts):
        source = make_cache(config, dtype=dtype)
        prefill(source, text[:, :-n_steps], chunk=16)
        cache.load_row(row, source)
    steps = joined([text[:, -n_steps:] for text in texts])
    trace = []
    for t in range(n_steps):
        victims = decode(cache, steps[:, t])
        trace.append((victims[0], scores_of_maps(cache, 0)))
    return trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", EVICTING_VARIANTS)
def test_rows_are_independent(variant, dtype):
    """To the last bit: alone, beside ordinary rows, and beside rows that are new, long or NaN."""
    policy, options = VARIANTS[variant]
    config = settings_for(policy, budget=20, window=8, **options)
    shape = make_cache(config)
    plain = [random_text(shape, 70 + n, seed=n) for n in (0, 3)]
    strange = [random_text(shape, 60, seed=8), random_text(shape, 110, seed=9) * math.nan]
    alone = first_row(config, dtype, [])
    assert sum(victim is not None for victim, _ in alone) == 50  # 10 + 60 tokens, 20 slots
    assert first_row(config, dtype, plain) == alone
    assert first_row(config, dtype, strange) == alone


@pytest.mark.parametrize(
    "variant",
    ["epikv-smooth", "epikv-seg, reserve", "epikv-fit", "key-diff per head", "lag-kv per head"],
)
def test_load_row_touches_one_row(variant):
    """It takes over everything of the one-row cache, and the others keep what they had."""
    policy, options = VARIANTS[variant]
    config = settings_for(policy, budget=16, window=4, **options)
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
        (dict(budget=64, policy="full", band_a=(1,), band_b=(3,)), ["'full'", "no bands"]),
        (dict(budget=64, policy="k-norm", band_a=(1,)), ["'k-norm'", "band_a"]),
        (
            dict(budget=64, policy="epikv-fit", calibration=tiny.calibration(4), band_b=(1,)),
            ["'epikv-fit'", "no bands"],
        ),
        (
            dict(budget=64, policy="epikv-fit"),
            ["policy 'epikv-fit' needs a calibration; see scripts/calibrate.py"],
        ),
        (
            dict(budget=64, calibration=replace(tiny.calibration(4), window=1)),
            ["window must be from 2 to 4096, got 1"],
        ),
        (dict(budget=64, lag=8), ["'epikv'", "no blocks", "lag"]),
        (dict(budget=64, policy="lag-kv", lag=0), ["lag", "from 1 to 29", "0"]),
        (dict(budget=64, policy="epikv-seg", lag=-3), ["lag", "from 1 to 59", "-3"]),
        (dict(budget=64, policy="epikv-seg", lag=17, recent=16), ["1 x lag 17", "recent is 16"]),
        (dict(budget=64, policy="lag-kv", lag=9, recent=17), ["2 x lag 9", "recent is 17"]),
        (dict(budget=64, policy="lag-kv", lag=30), ["lag", "from 1 to 29", "30"]),
        (dict(budget=64, policy="epikv-seg", lag=60), ["lag", "from 1 to 59", "60"]),
        (dict(budget=2, policy="lag-kv", sinks=0), ["budget 2", "sinks 0", "recent 2"]),
        (dict(budget=64, policy="lag-kv", lag_reference="later"), ["lag_reference", "'later'"]),
        (dict(budget=64, quotas=(8, 4, 2)), ["'epikv'", "no quotas"]),
        (dict(budget=64, policy="lag-kv", quotas=(8, 4, 2)), ["'lag-kv'", "no quotas"]),
        (dict(budget=64, policy="epikv-seg", quotas=(2, 4, 8)), ["do not ascend", "(2, 4, 8)"]),
        (dict(budget=64, policy="epikv-seg", quotas=(8, 2, 4)), ["do not ascend", "(8, 2, 4)"]),
        (dict(budget=64, policy="epikv-seg", quotas=(9, 4, 2)), ["lag 8", "(9, 4, 2)"]),
        (dict(budget=64, policy="epikv-seg", quotas=(8, 4, -1)), ["from 0 to lag 8", "(8, 4, -1)"]),
        (dict(budget=64, policy="epikv-seg", quotas=(8, 4)), ["three", "(8, 4)"]),
        (dict(budget=64, policy="epikv-seg", quotas=(8, 4, 2, 1)), ["three", "(8, 4, 2, 1)"]),
        (dict(budget=64, value_reserve=-1), ["value_reserve", "from 0 to 43", "-1"]),
        (dict(budget=64, value_reserve=44), ["value_reserve", "from 0 to 43", "44 slots"]),
        (dict(budget=64, policy="full", value_reserve=1), ["'full'", "value_reserve"]),
        (dict(budget=64, value_statistic="max"), ["'max'", *epikv.VALUE_STATISTICS]),
        (dict(budget=64, slot_map="head"), ["'epikv'", "'head'", "shared"]),
        (dict(budget=64, policy="key-var", slot_map="head"), ["'key-var'", "'head'", "shared"]),
        (dict(budget=64, policy="k-norm", slot_map="row"), ["'k-norm'", "'row'", "shared, head"]),
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


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (1, 4, 2, 1, 1)])
def test_scores_of_a_wrong_shape_are_refused(monkeypatch, shape):
    """With the name of the policy, what it gave, and what is wanted."""

    class Odd(epikv.Policy):
        def score(self, tokens):
            return torch.zeros(shape)

    monkeypatch.setitem(epikv.POLICIES, "odd", Odd)
    cache = make_cache(EvictionConfig(budget=64, policy="odd"))
    slot, position = cache.begin_step()
    with pytest.raises(ValueError) as error:
        cache.end_step(slot, position, [])
    message = str(error.value)
    assert "'odd'" in message and str(list(shape)) in message and "[B, T]" in message


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


@pytest.mark.parametrize(
    "policy, budget, options, lag, recent",
    [
        ("lag-kv", 4096, {}, 128, 256),
        ("lag-kv", 1024, {}, 128, 256),
        ("lag-kv", 1000, {}, 125, 250),
        ("lag-kv", 64, {}, 8, 16),
        ("lag-kv", 67, {}, 8, 16),
        ("lag-kv", 64, dict(lag=10), 10, 20),
        ("lag-kv", 64, dict(lag=29), 29, 58),
        ("lag-kv", 64, dict(lag=3), 3, 16),
        ("lag-kv", 64, dict(lag=3, recent=6), 3, 6),
        ("lag-kv", 7, dict(sinks=0), 1, 2),
        ("epikv-seg", 4096, {}, 128, 128),
        ("epikv-seg", 64, {}, 8, 16),
        ("epikv-seg", 64, dict(lag=20), 20, 20),
        ("epikv-seg", 64, dict(lag=59), 59, 59),
        ("epikv-seg", 64, dict(recent=9), 8, 9),
        ("k-norm", 64, {}, None, 16),
    ],
)
def test_default_lag_and_the_recency_it_needs(policy, budget, options, lag, recent):
    """min(128, budget // 8), and one such block is recent for `epikv-seg`, two for `lag-kv`."""
    config = EvictionConfig(budget=budget, policy=policy, **options)
    assert (config.lag, config.recent) == (lag, recent)
    assert make_cache(config).block == (lag or 0)


@pytest.mark.parametrize(
    "options, quotas",
    [
        (dict(budget=4096), (64, 32, 8)),
        (dict(budget=512), (32, 16, 4)),
        (dict(budget=64), (4, 2, 0)),
        (dict(budget=64, lag=5), (2, 1, 0)),
        (dict(budget=64, lag=5, quotas=(5, 5, 0)), (5, 5, 0)),
    ],
)
def test_default_quotas_are_a_half_a_quarter_and_a_sixteenth(options, quotas):
    """Of the lag: the paper's 64, 32 and 8 of 128. Named ones are taken as they are."""
    assert EvictionConfig(policy="epikv-seg", **options).quotas == quotas


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_the_smallest_budget_that_works(sinks):
    """One slot beside the sinks: every new token drives out the one before it."""
    cache = make_cache(settings_for("epikv", budget=sinks + 1, sinks=sinks, recent=0))
    text = random_text(cache, 20)
    victims = [decode(cache, text[:, t])[0] for t in range(20)]
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
        ("epikv-seg", 28, ((9,), (18,))),
        ("lag-kv", 32, ()),
        ("key-var", 32, ()),
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


# Calibration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SCORING)
def test_a_calibration_says_what_is_not_named(policy):
    """The window and each band; what is named stays; `epikv-fit` reads every block."""
    calibration = replace(tiny.calibration(6), band_a=(5, 1), band_b=(3,), window=9)
    given = dict(budget=64, policy=policy, calibration=calibration)
    assert EvictionConfig(**given).window == 9
    assert EvictionConfig(**given).bands(6) == ((5, 1), (3,))
    assert EvictionConfig(**given, window=30).window == 30
    assert EvictionConfig(**given, band_a=(2,)).bands(6) == ((2,), (3,))
    assert EvictionConfig(**given, band_b=(2, 0)).bands(6) == ((5, 1), (2, 0))
    fit = EvictionConfig(**given | dict(policy="epikv-fit"))
    assert fit.window == 9 and make_cache(fit, n_layers=6).reads == tuple(range(6))


def test_without_a_calibration_the_window_is_the_papers():
    assert EvictionConfig(budget=64).window == 64


@pytest.mark.parametrize("policy", [*SCORING, "epikv-fit"])
@pytest.mark.parametrize("n_layers", [3, 5, 32])
def test_a_calibration_of_another_model_is_refused(policy, n_layers):
    """When the number of blocks is known; with bands that are named too, as the weights count."""
    given = [dict(band_a=(0,), band_b=(1,))] if policy in SCORING else []
    for bands in ({}, *given):
        config = EvictionConfig(64, policy, calibration=tiny.calibration(4), **bands)
        words = f"^calibrated was a model of 4 blocks; this has {n_layers}$"
        with pytest.raises(ValueError, match=words):
            make_cache(config, n_layers=n_layers)


UNCALIBRATED = [name for name in EVICTING if name not in (*SCORING, "epikv-fit")]


@pytest.mark.parametrize("policy", UNCALIBRATED)
def test_others_do_without_a_calibration(policy):
    """They take one, even of another model, and forget the same tokens; their window stays."""
    plain, given = (
        EvictionConfig(24, policy, calibration=calibration)
        for calibration in (None, tiny.calibration(7))
    )
    assert given.window == 64
    assert run(make_cache(given), seed=0) == run(make_cache(plain), seed=0)


def test_a_band_outside_the_calibrated_model_is_refused():
    config = EvictionConfig(64, calibration=replace(tiny.calibration(4), band_b=(2, 4)))
    with pytest.raises(ValueError, match="^band names block 4; the model has 0 to 3$"):
        make_cache(config)


@pytest.mark.parametrize("budget, share, recent", [(128, 0.375, 48), (100, 0.25, 25), (8, 0.75, 3)])
def test_a_calibration_sets_the_recency_window(budget, share, recent):
    """A share of the budget, rounded down, as far as a slot is left besides it and the sinks."""
    calibration = replace(tiny.calibration(4), recent=share)
    config = EvictionConfig(budget, "epikv-fit", calibration=calibration)
    assert config.recent == recent
    assert EvictionConfig(budget, calibration=calibration).recent == budget // 4  # of no other
    assert replace(config, recent=2).recent == 2


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    """To the last digit; what else the file tells is left alone, and whole numbers are numbers."""
    path = tmp_path / "calibration.json"
    for calibration in (tiny.calibration(4), tiny.calibration(32, seed=1)):
        tiny.write_calibration(path, calibration)
        assert Calibration.read(path) == Calibration.read(str(path)) == calibration
    tiny.edit_json(path, verdict="no reliable signal", weight_a=1)
    assert Calibration.read(path) == replace(calibration, weight_a=1.0)


def spoiled(**changes):
    """A calibration for 4 blocks in JSON, with other weights of the fit for names that it has."""
    content = asdict(tiny.calibration(4))
    fit = {name: changes.pop(name) for name in [*changes] if name in content["fit"]}
    return json.dumps(content | changes | dict(fit=content["fit"] | fit)).encode()


def without(*path):
    """A calibration in JSON that lacks a field."""
    content = asdict(tiny.calibration(4))
    *outer, name = path
    del (content["fit"] if outer else content)[name]
    return json.dumps(content).encode()


# name: contents of the file (None: there is none), words of the error.
BAD_CALIBRATIONS = {
    "no file": (None, "No such file"),
    "empty": (b"", "JSONDecodeError"),
    "no JSON": (b"{'n_layers': 4}", "JSONDecodeError"),
    "not UTF-8": (spoiled().replace(b"window", b"wind\xffow"), "UnicodeDecodeError"),
    "a list": (b"[1, 2, 3]", "TypeError"),
    "a number": (b"4", "TypeError"),
    "deep nesting": (b'{"fit":' + b"[" * 100_000, "RecursionError"),
    "no fit": (without("fit"), "'fit'"),
    "no number of blocks": (without("n_layers"), "'n_layers'"),
    "no window": (without("window"), "'window'"),
    "no band": (without("band_b"), "'band_b'"),
    "no weight of a band": (without("weight_a"), "'weight_a'"),
    "no feature": (without("fit", "value_norm"), "'value_norm'"),
    "no age": (without("fit", "log_age"), "'log_age'"),
    "an unknown feature": (
        spoiled(fit=asdict(tiny.calibration(4).fit)).replace(b'"change"', b'"charge"'),
        "'change'",
    ),
    "a fit that is a list": (without("fit")[:-1] + b', "fit": [1]}', "TypeError"),
    "too few weights": (spoiled(key_norm=[[1, 2, 3]] * 3), "expected sequence of length"),
    "too few sums": (spoiled(change=[[1] * 4] * 2), "expected sequence of length"),
    "another number of blocks": (
        spoiled(n_layers=5),
        "the fit's weights are [3, 6, 4] and [3, 4, 2] for 5 blocks",
    ),
    "too few sums of the heads": (
        spoiled(heads=[[[1, 2]] * 4]),
        "the fit's weights are [3, 6, 4] and [1, 4, 2] for 4 blocks",
    ),
    "no sums": (
        spoiled(**{name: [] for name in asdict(tiny.calibration(4).fit) if name != "log_age"}),
        "weights are",
    ),
    "a weight too large for float32": (spoiled(heads=[[[1, 1e39]] * 4] * 3), "not finite"),
    "heads of fewer blocks": (spoiled(heads=[[[1, 2]] * 3] * 3), "[3, 3, 2] for 4 blocks"),
    "heads of different numbers": (
        spoiled(heads=[[[1, 2]] * 3 + [[1]]] * 3),
        "expected sequence of length",
    ),
    "no heads": (without("fit", "heads"), "'heads'"),
    "one weight for all": (spoiled(change=1.0), "TypeError"),
    "ages by block": (spoiled(log_age=[1.0] * 4), "TypeError"),
    "a feature that is NaN": (spoiled(value_norm=[[0.1, math.nan, 0, 0]] * 3), "not finite"),
    "a head that is infinite": (spoiled(heads=[[[1, math.inf]] * 4] * 3), "not finite"),
    "an age that is infinite": (spoiled(log_age=math.inf), "not finite"),
    "a band's weight that is infinite": (spoiled(weight_b=-math.inf), "not finite"),
    "a weight that is no number": (spoiled(change=[[1, 2, "three", 4]] * 3), "'three'"),
    "a weight that is null": (spoiled(weight_a=None), "TypeError"),
    "a weight too large for a float": (spoiled(weight_a=10**400), "OverflowError"),
    "an infinite window": (spoiled(window=math.inf), "OverflowError"),
    "a window in words": (spoiled(window="wide"), "'wide'"),
    "a band that is a number": (spoiled(band_a=3), "TypeError"),
    "an empty band": (spoiled(band_a=[]), "a band names no block"),
    "no recency window": (without("recent"), "'recent'"),
    "a recency window of all slots": (spoiled(recent=1.0), "recent is a share of the budget"),
    "a recency window that is NaN": (spoiled(recent=math.nan), "recent is a share of the budget"),
}


@pytest.mark.parametrize("fault", BAD_CALIBRATIONS)
def test_a_bad_calibration_is_told_in_one_line(tmp_path, fault):
    """With the name of the file and what is wrong with it."""
    content, words = BAD_CALIBRATIONS[fault]
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((OSError, ValueError)) as error:
        Calibration.read(path)
    message = str(error.value)
    assert str(path) in message and words in message and "\n" not in message
    assert len(message) < 300 + len(str(path))
    if content is not None:
        assert type(error.value) is ValueError and message.endswith("; see calibrate.py")


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

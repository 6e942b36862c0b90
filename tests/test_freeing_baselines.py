"""The baselines that leave slots empty for a while: R-KV and ThinKV, and their reference forms."""

import itertools
import math
from dataclasses import dataclass

import freeing_twin as twin
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compile import random_model

import baselines
from baselines import BASELINES, FreeingCache, ThinKV, mean_occupancy, nearest_to_centroids
from epikv import NO_POSITION, POLICIES, CacheShape, EvictionConfig
from generate import Engine, Sampling, generate, sample
from model import attention_weights

FREEING = ["r-kv", "r-kv-reference", "thinkv", "thinkv-reference"]
MAPS = [(name, slot_map) for name in FREEING for slot_map in BASELINES[name].slot_maps]
MAP_IDS = [f"{name} {slot_map}" for name, slot_map in MAPS]
N_LAYERS, N_HEADS, N_GROUPED, HEAD_DIM = 2, 2, 2, 3


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The baselines are policies while a test runs, and ThinKV is not calibrated for a model."""
    monkeypatch.setattr(ThinKV, "thresholds", (0.6, 0.8))
    monkeypatch.setattr(ThinKV, "layers", (0, 16))  # of 32: both of two
    for name, policy in BASELINES.items():
        monkeypatch.setitem(POLICIES, name, policy)


# Driving a cache without a model ---------------------------------------------------------------


def make_cache(config, batch_size=1, dtype=torch.float64, **sizes):
    sizes = dict(n_layers=N_LAYERS, n_kv_heads=N_HEADS, head_dim=HEAD_DIM, hidden_size=1) | sizes
    shape = CacheShape(batch_size=batch_size, dtype=dtype, **sizes)
    return POLICIES[config.policy].cache_type()(config, shape)


@dataclass
class Text:
    """Of N tokens: q [B, L, H_kv, G, N, D], and k, v [B, L, H_kv, N, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __getitem__(self, rows_and_tokens):
        """Some rows and some tokens, numbers or slices."""
        rows, tokens = (
            slice(at, at + 1 or None) if isinstance(at, int) else at for at in rows_and_tokens
        )
        return Text(
            self.q[rows, :, :, :, tokens], self.k[rows, :, :, tokens], self.v[rows, :, :, tokens]
        )

    @property
    def n_tokens(self):
        return self.k.shape[3]


def joined(texts):
    """The rows of all `texts` in one batch."""
    return Text(*(torch.cat([getattr(text, x) for text in texts]) for x in ("q", "k", "v")))


def random_text(n_tokens, batch_size=1, seed=0, on_grid=False):
    """Keys of heavy-tailed size, four in ten nearly those of an earlier token; queries in phases.

    on_grid: key channels are multiples of 1/256, so that the two tokens of a cluster are as far
    from their centroid to the last bit, and the older stays.
    In each phase of 5 to 40 tokens attention is nearly even, mixed, or nearly on one token.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = (batch_size, N_LAYERS, N_HEADS)
    k = (randn(*heads, n_tokens, 1) / 2).exp() * randn(*heads, n_tokens, HEAD_DIM)
    for token in range(1, n_tokens):
        lag, copied = torch.rand(2, batch_size, generator=generator)
        for row in range(batch_size):
            if copied[row] < 0.4:
                earlier = k[row, :, :, max(0, token - 1 - int(30 * lag[row]))]
                k[row, :, :, token] = earlier * (1 + 0.05 * randn(*earlier.shape))
    if on_grid:
        k = (k * 256).round() / 256
    scale = torch.empty(batch_size, n_tokens, dtype=torch.float64)
    for row in range(batch_size):
        start = 0
        while start < n_tokens:
            length, kind = torch.rand(2, generator=generator).tolist()
            end = start + 5 + int(35 * length)
            scale[row, start:end] = (0.3, 6.0, 40.0)[int(3 * kind)]
            start = end
    q = scale[:, None, None, None, :, None] * randn(*heads, N_GROUPED, n_tokens, HEAD_DIM)
    return Text(q, k, randn(*heads, n_tokens, HEAD_DIM))


def admit(cache, text):
    """Take the tokens of `text` at once, as part of a prompt. One row."""
    n_cached = min(cache.length.item(), cache.config.budget)
    for i, layer in enumerate(cache.layers):
        k = torch.cat([layer.k[:, :, :n_cached], text.k[:, i]], dim=2)
        layer.observe_prompt(text.q[:, i].flatten(1, 2), k)
    cache.admit([*text.k.unbind(1)], [*text.v.unbind(1)], [])


def prefill(cache, text, chunk):
    cache.protect_prompt(text.n_tokens)
    for start in range(0, text.n_tokens, chunk):
        admit(cache, text[:, start : start + chunk])


def decode(cache, text, weigh=None):
    """Take one token per row; `weigh` (layer, mask, text) replaces attention. Returns the slots."""
    slot, position = cache.begin_step()
    prefix = min(cache.config.budget, cache.length.max().item())
    masks = cache.per_layer(cache.attention_mask(prefix))
    parts = enumerate(zip(cache.layers, cache.per_layer(slot), masks, strict=True))
    for i, (layer, at, mask) in parts:
        layer.write(at, text.k[:, i], text.v[:, i])
        if weigh is None:
            q, k = text.q[:, i, :, :, 0], layer.k[:, :, :prefix]
            weights = attention_weights(q, k, mask)
        else:
            weights = weigh(layer, mask)
        layer.observe(weights)
    cache.end_step(slot, position, [])
    if (cache.length % cache.block == 0).any():
        cache.end_block()
    return slot


def held_maps(cache, row=0):
    """The positions that each map of a row holds, oldest first, map by map."""
    maps = cache.position[row].flatten(0, 1).tolist()
    return [sorted(p for p in positions if p != NO_POSITION) for positions in maps]


def of_row(text, row, tokens):
    """A row in the twin's form: of each token the queries and the keys by layer and head."""
    q = text.q[row, :, :, :, tokens].permute(3, 0, 1, 2, 4).tolist()
    k = text.k[row, :, :, tokens].permute(2, 0, 1, 3).tolist()
    return q, k


# Against the twin ------------------------------------------------------------------------------


def started(name, text, row, n_prompt, budget, options):
    """A one-row cache and its twin after the first `n_prompt` tokens of a row."""
    cache = make_cache(EvictionConfig(budget, name, **options))
    sizes = dict(n_layers=N_LAYERS, n_heads=N_HEADS, n_prompt=n_prompt)
    reference = twin.TwinRow(name, budget=budget, **options, **sizes)
    prefill(cache, text[row, :n_prompt], chunk=budget)
    for start in range(0, n_prompt, budget):
        reference.admit(start, *of_row(text, row, slice(start, min(start + budget, n_prompt))))
    assert held_maps(cache) == [sorted(held) for held in reference.maps.values()]
    return cache, reference


def follow(name, prompts, budget, n_steps, seed=1, **options):
    """Rows with `prompts` tokens each take `n_steps` tokens and hold after each what twins hold."""
    text = random_text(max(prompts) + n_steps, len(prompts), seed, on_grid=name == "thinkv")
    cache = make_cache(EvictionConfig(budget, name, **options), len(prompts))
    twins = []
    for row, n_prompt in enumerate(prompts):
        source, reference = started(name, text, row, n_prompt, budget, options)
        cache.load_row(row, source)
        twins.append(reference)
    streams = [of_row(text, row, slice(n, n + n_steps)) for row, n in enumerate(prompts)]
    steps = joined([text[row, n : n + n_steps] for row, n in enumerate(prompts)])
    for step in range(n_steps):
        decode(cache, steps[:, step])
        for row, (reference, (q, k)) in enumerate(zip(twins, streams, strict=True)):
            reference.append(prompts[row] + step, q[step], k[step])
            expected = [sorted(held) for held in reference.maps.values()]
            assert held_maps(cache, row) == expected, f"row {row}, step {step}"
    return twins


@pytest.mark.parametrize("prompts", [(0,), (21, 43, 130)], ids=["one row", "ragged"])
@pytest.mark.parametrize(("name", "slot_map"), MAPS, ids=MAP_IDS)
def test_held_tokens_are_the_twins(name, slot_map, prompts):
    """2,000 steps: no prompt; one that is protected, one that is not, one far over the budget."""
    twins = follow(name, prompts, budget=48, n_steps=2000, lag=8, slot_map=slot_map)
    if name == "thinkv":
        for reference in twins:
            assert set(reference.thoughts.values()) == set(twin.LEAST_IMPORTANT_FIRST)
            assert reference.n_shrunk > 0 and reference.n_dropped > 0


@pytest.mark.parametrize("name", FREEING)
def test_held_tokens_are_the_twins_with_longer_blocks(name):
    """Blocks of 16 of 64 slots, longer than R-KV's window, with more steps in ThinKV's schedule."""
    slot_map = BASELINES[name].slot_maps[0]
    options = dict(lag=16, sinks=2, slot_map=slot_map)
    follow(name, (10, 33, 150), budget=64, n_steps=400, seed=2, **options)


@pytest.mark.parametrize(("name", "slot_map"), MAPS, ids=MAP_IDS)
def test_held_tokens_are_the_twins_in_a_crowded_cache(name, slot_map):
    """24 protected tokens of 48 leave no room for a block of 20: evictions one by one as well."""
    follow(name, (24, 70), budget=48, n_steps=400, seed=9, lag=20, slot_map=slot_map)


def test_thinkv_schedule_is_stepped_down_by_degrees():
    """With segments of 32 a segment passes 16, 8 and 4 tokens; the twin has seen it do so."""
    (reference,) = follow(
        "thinkv", (0,), budget=128, n_steps=1200, seed=3, lag=32, slot_map="layer"
    )
    assert max(reference.levels.values()) >= 3


# By hand ---------------------------------------------------------------------------------------


def hand_cache(name, **options):
    """One layer, one key-value head and one query head."""
    return make_cache(EvictionConfig(policy=name, **options), n_layers=1, n_kv_heads=1, head_dim=5)


def feed(cache, key, weights):
    """Decode a token with this key; `weights`: those of its query, by position."""
    key = torch.tensor(key, dtype=torch.float64).expand(5).view(1, 1, 1, 1, 5)

    def weigh(layer, mask):
        by_slot = [weights.get(p, 0.0) for p in cache.position[0, 0, 0].tolist()]
        return torch.tensor(by_slot[: mask.shape[-1]], dtype=torch.float64).view(1, 1, 1, -1)

    decode(cache, Text(None, key, torch.zeros_like(key)), weigh)


def held(cache):
    return held_maps(cache)[0]


def score_of(cache, position):
    return cache.score[cache.position == position].item()


# Tokens 3 to 6 are the same, all others at right angles to each other. Every query looks at its own
# token, but the last one at token 0: of the eight weights token 0 has 2, token 7 none, others 1.
# Pooled over three neighbours on either side: 2/8 for tokens 0 to 3, 1/8 for 4 to 7.
AXES = [0, 1, 2, 3, 3, 3, 3, 4]


def feed_axes(cache):
    for position, axis in enumerate(AXES):
        key = [float(axis == channel) for channel in range(5)]
        feed(cache, key, {position if position < 7 else 0: 1.0})
        if position < 7:  # a block ended after token 3, with room for another
            assert held(cache) == list(range(position + 1))


def test_r_kv_by_hand():
    """Of each duplicate's others the latest is spared: 6, and 5 for token 6 itself.

    So the others count 3 times for tokens 3 and 4, twice (for 3 and 4) for token 5, never for 6.
    """
    cache = hand_cache("r-kv", budget=8, lag=4, sinks=0, recent=1)
    feed_axes(cache)
    # Of 8 tokens the best four: 7 is recent, 6 has as little redundancy as 0, 1, 2 but less weight.
    assert held(cache) == [0, 1, 2, 7]
    total = 2 * math.exp(3 / 8) + math.exp(2 / 8) + 5
    for position in (0, 1, 2):
        assert score_of(cache, position) == pytest.approx(0.1 * 2 / 8 - 0.9 / total, rel=1e-12)
    assert score_of(cache, 7) == pytest.approx(0.1 * 1 / 8 - 0.9 / total, rel=1e-12)
    for position in (8, 9, 10):
        feed(cache, [1.0] * 5, {position: 1.0})
    assert cache.position[0, 0, 0].tolist() == [0, 1, 2, 8, 9, 10, NO_POSITION, 7]


def test_r_kv_reference_by_hand():
    """Four tokens have three twins, four none; four have the pooled weight 2/8, four 1/8.

    Standardised, either is +-d with d = sqrt(7 / 8), as a sample deviation of eight divides by 7.
    """
    cache = hand_cache("r-kv-reference", budget=8, lag=4, sinks=0, recent=1)
    feed_axes(cache)
    assert held(cache) == [0, 1, 2, 7]
    d = math.sqrt(7 / 8)
    for position in (0, 1, 2):
        assert score_of(cache, position) == pytest.approx(0.1 * d + 0.9 * d, rel=1e-5)
    assert score_of(cache, 7) == pytest.approx(-0.1 * d + 0.9 * d, rel=1e-5)


def test_r_kv_keeps_the_latest_duplicate_over_older_ones():
    """With all weights alike redundancy alone decides, and among equals age."""
    cache = hand_cache("r-kv", budget=8, lag=4, sinks=0, recent=1)
    for position, axis in enumerate([0, 0, 0, 1, 2, 3, 0, 4]):
        key = [float(axis == channel) for channel in range(5)]
        feed(cache, key, {position: 1.0})
    # Axis 0 in tokens 0, 1, 2, 6: counted 3, 3, 2 and 0 times. Then the oldest of the rest goes: 3.
    assert held(cache) == [4, 5, 6, 7]


def kind_of_weights(kind, positions):
    """Weights that make a step executing (none is small), reasoning, or a transition."""
    n = len(positions)
    n_seen = {"E": n, "R": max(1, int(0.3 * n)), "T": 1}[kind]
    return dict.fromkeys(positions[-n_seen:], 1 / n_seen)


def feed_segments(cache, kinds, keys):
    """Segments of these kinds. Yields, after each, the number of tokens held of each segment."""
    for segment, kind in enumerate(kinds):
        for i, key in enumerate(keys):
            position = segment * len(keys) + i
            feed(cache, key, kind_of_weights(kind, [*held(cache), position]))
        sizes = {}
        for p in held(cache):
            sizes[p // len(keys)] = sizes.get(p // len(keys), 0) + 1
        yield sizes


# Channels of a segment's keys: four clusters, and the first, third, fifth and seventh of the tokens
# lie in different ones. Means: 4/3 (of 0, 1, 3), 100, 604/3 (of 200, 201, 203), 300.
CLUSTERED = [0.0, 1.0, 100.0, 3.0, 200.0, 201.0, 300.0, 203.0]
NEAREST = [1, 2, 5, 6]  # the tokens with 1, 100, 201 and 300


def test_thinkv_plan_by_hand():
    """Segments of 8 in 32 slots: they shrink to 4 tokens, then go whole."""
    cache = hand_cache("thinkv", budget=32, lag=8, sinks=0)
    plans = feed_segments(cache, "RETERET", CLUSTERED)
    assert next(plans) == {0: 8}
    assert next(plans) == {0: 8, 1: 8}
    assert next(plans) == {0: 4, 1: 4, 2: 8}  # a transition: all earlier ones step down
    assert next(plans) == {0: 4, 1: 4, 2: 8, 3: 8}  # 24 held, so 8 are free
    # 32 held: first the transition 2 shrinks, then the execution 3; 4 x 4 + 8 leave 8 free.
    assert next(plans) == {0: 4, 1: 4, 2: 4, 3: 4, 4: 8}
    # 32 held, of which only 4 can shrink; then the transition goes whole.
    assert next(plans) == {0: 4, 1: 4, 3: 4, 4: 4, 5: 8}
    # A transition: 5 steps down. 28 held: the oldest execution, 1, goes whole.
    assert next(plans) == {0: 4, 3: 4, 4: 4, 5: 4, 6: 8}
    nearest = [8 * segment + i for segment in (0, 3, 4, 5) for i in NEAREST]
    assert held(cache) == [*nearest, *range(48, 56)]
    assert mean_occupancy(cache).tolist() == [24 / 32]


def test_thinkv_plan_by_hand_with_segments_of_two():
    """Segments of 2 in 8 slots never shrink; token 0 is a sink, so segment 0 is token 1 alone."""
    cache = hand_cache("thinkv", budget=8, lag=2, sinks=1)
    plans = feed_segments(cache, "EETEEE", [0.0, 1.0])
    for n_tokens in (2, 4, 6):
        next(plans)
        assert held(cache) == list(range(n_tokens))  # of 8 slots 2 are free
    next(plans)
    assert held(cache) == [0, 1, 2, 3, 6, 7]  # the transition, 4 and 5, goes first
    next(plans)
    assert held(cache) == [0, 6, 7, 8, 9]  # then the oldest: 1 leaves too little room, so 2 and 3
    next(plans)
    assert held(cache) == [0, 8, 9, 10, 11]


def test_thinkv_steps_down_one_level_at_each_transition():
    """Of a segment of 16, 8 and then 4 tokens stay, however often a transition follows."""
    cache = hand_cache("thinkv", budget=80, lag=16, sinks=0)
    plans = feed_segments(cache, "RTTT", [float(2**i) for i in range(16)])
    assert list(plans) == [
        {0: 16},
        {0: 8, 1: 16},
        {0: 4, 1: 8, 2: 16},
        {0: 4, 1: 4, 2: 8, 3: 16},
    ]


def test_thinkv_leaves_the_sinks_out_of_a_segment():
    """Of segment 0 tokens 2 to 7 may go: four of them stay besides the two sinks."""
    cache = hand_cache("thinkv", budget=32, lag=8, sinks=2)
    assert list(feed_segments(cache, "ET", CLUSTERED)) == [{0: 8}, {0: 6, 1: 8}]
    assert held(cache)[:2] == [0, 1]


def test_thinkv_prompt_is_reasoning():
    """An unprotected prompt's segment outlasts a later execution."""
    cache = hand_cache("thinkv", budget=16, lag=4, sinks=0)
    text = Text(*(torch.ones(1, 1, 1, *shape, 5).double() for shape in ((1, 12), (12,), (12,))))
    prefill(cache, text, chunk=12)
    assert cache.protected.tolist() == [0]
    for position in range(12, 24):
        feed(cache, 1.0, kind_of_weights("E", [*held(cache), position]))
    # After token 15 only the prompt's segments can go, the oldest first. After 19 the execution 12
    # to 15 goes before older ones of the prompt, after 23 the execution 16 to 19.
    assert held(cache) == [*range(4, 12), *range(20, 24)]


def test_sparsity_by_hand():
    """A query head has none of four weights below a hundredth of its largest, the other has two."""
    cache = make_cache(EvictionConfig(16, "thinkv", lag=4), n_layers=1, n_kv_heads=2)
    text = random_text(4)
    text = Text(text.q[:, :1], text.k[:, :1], text.v[:, :1])
    rows = [[0.5, 0.4501, 0.005, 0.0449], [0.0, 0.0049, 0.5, 0.4951]]  # one is at it
    weights = torch.tensor([[rows, rows]], dtype=torch.float64)  # two query heads for each of two
    for token in range(3):
        decode(cache, text[:, token])
    before = cache.sparsity.clone()
    slot, position = cache.begin_step()
    cache.layers[0].observe(weights)
    cache.end_step(slot, position, [])
    assert (cache.sparsity - before).tolist() == [pytest.approx((0 / 4 + 2 / 4) / 2)]
    assert cache.n_steps.tolist() == [4]


@pytest.mark.parametrize(
    ("n_layers", "observed"),
    [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (16, [1, 4, 10, 15]), (32, [2, 8, 20, 31])],
)
def test_thinkv_observes_scaled_layers(n_layers, observed, monkeypatch):
    """Blocks of 32 scaled to the model's depth, each once."""
    monkeypatch.setattr(ThinKV, "layers", (2, 8, 20, 31))
    cache = make_cache(EvictionConfig(16, "thinkv"), n_layers=n_layers)
    assert list(cache.observed_layers) == observed


def test_sparsity_counts_the_named_layers_only(monkeypatch):
    """Layer 1 sees one token of four, layer 0 all of them."""
    monkeypatch.setattr(ThinKV, "layers", (16,))
    cache = make_cache(EvictionConfig(20, "thinkv", lag=8))
    text = random_text(4)
    for token in range(4):
        before = cache.sparsity.item()

        def weigh(layer, mask, token=token):
            even = torch.ones(1, N_HEADS, N_GROUPED, token + 1).double() / (token + 1)
            return even if layer is cache.layers[0] else even.cumsum(-1).eq(1).to(even.dtype)

        decode(cache, text[:, token], weigh)
    assert cache.sparsity.item() - before == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("lag", "expected"),
    [
        (128, [64, 32, 16, 8, 4]),
        (64, [32, 16, 8, 4, 4]),
        (16, [8, 4, 4, 4, 4]),
        (8, [4, 4, 4, 4, 4]),
        (4, [4, 4, 4, 4, 4]),
        (1, [1, 1, 1, 1, 1]),
    ],
)
def test_schedule(lag, expected):
    """Halves, never below 4 tokens or the segment."""
    assert ThinKV.schedule(lag) == expected


def test_thought_at_its_thresholds():
    """A sparsity at either threshold is reasoning."""
    low, high = ThinKV.thresholds
    assert ThinKV.thought(low) == ThinKV.thought(high) == ThinKV.REASONING
    assert ThinKV.thought((low + high) / 2) == ThinKV.REASONING
    assert ThinKV.thought(math.nextafter(low, 0)) == ThinKV.thought(0.0) == ThinKV.EXECUTION
    assert ThinKV.thought(math.nextafter(high, 1)) == ThinKV.thought(1.0) == ThinKV.TRANSITION


def nearest(points, k):
    return nearest_to_centroids(torch.tensor([points], dtype=torch.float64), k).tolist()[0]


def test_nearest_to_centroids_by_hand():
    """Clusters whose means are known, in the order of their first points."""
    assert nearest([[x] for x in CLUSTERED], 4) == NEAREST
    # Both centroids start at 0, the first takes all three points and moves to 5/3; the second, left
    # without any, stays. Then the first has the 5 alone.
    assert nearest([[0.0], [0.0], [5.0]], 2) == [2, 0]
    # (0, 0) and (0, 6) start; (0, 2), (1, 1) join the first, whose mean is (1/3, 1).
    assert nearest([[0.0, 0.0], [0.0, 2.0], [0.0, 6.0], [1.0, 1.0]], 2) == [3, 2]


def test_nearest_to_centroids_takes_each_point_once():
    """Equal points, and as many clusters as points."""
    assert sorted(nearest([[7.0]] * 6, 6)) == list(range(6))
    assert len(set(nearest([[7.0]] * 6, 4))) == 4
    assert sorted(nearest([[1.0], [1.0], [1.0], [9.0]], 3))[-1] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [8, 40])
def test_nearest_to_centroids_of_any_size_of_key(n, dtype):
    """Keys whose squares overflow or vanish: still `k` different points."""
    signs = torch.randn(3, n, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for size in (0.0, 1e-30, 1.0, 1e30):
        for indices in nearest_to_centroids(size * signs, n // 2).tolist():
            assert len(set(indices)) == n // 2, size


def test_nearest_to_centroids_of_huge_duplicates():
    """As above with float32 keys of which three are equal at a time: no distance is finite."""
    signs = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
    for indices in nearest_to_centroids(1e30 * signs.repeat(1, 3, 1), 6).tolist():
        assert len(set(indices)) == 6


def test_thinkv_reference_by_hand():
    """Of 8 tokens that may go, the block of low entropy keeps lag / 2, the other lag / 4."""
    cache = hand_cache("thinkv-reference", budget=12, lag=4, sinks=0, recent=4)
    for position in range(11):
        feed(cache, 1.0, {position: 1.0})
        assert held(cache) == list(range(position + 1))  # a block's room is left after token 7
    last = [0.1, 0.3, 0, 0, 0.05, 0.04, 0.06, 0.05, 0.1, 0.1, 0.1, 0.1]
    feed(cache, 1.0, dict(enumerate(last)))
    assert held(cache) == [0, 1, 6, 8, 9, 10, 11]


def test_thinkv_reference_gives_a_part_of_a_block_its_own_quota():
    """Tokens 0 to 5 may go: 4 and 5, all of the second block, are within its quota of 2."""
    cache = hand_cache("thinkv-reference", budget=12, lag=4, sinks=0, recent=6)
    for position in range(11):
        feed(cache, 1.0, {position: 1.0})
    last = [0.06, 0.05, 0.05, 0.05, 0.1, 0.01, *[0.68 / 6] * 6]
    feed(cache, 1.0, dict(enumerate(last)))
    assert held(cache) == [0, *range(4, 12)]


def test_mean_occupancy_by_hand():
    """Row 0 has 3 of 4 slots in one layer and 1 of 4 in the other, row 1 none and all."""
    cache = make_cache(EvictionConfig(4, "thinkv", sinks=0, lag=1), batch_size=2)
    assert mean_occupancy(cache).tolist() == [0, 0]
    taken = torch.tensor([[[5, -1, 2, 3], [-1, 0, -1, -1]], [[-1, -1, -1, -1], [4, 1, 2, 3]]])
    cache.position.copy_(taken[:, :, None])
    assert mean_occupancy(cache).tolist() == [4 / 8, 4 / 8]
    cache.position[1, 1, 0, :3] = NO_POSITION
    assert mean_occupancy(cache).tolist() == [4 / 8, 1 / 8]


# What must hold for any input ------------------------------------------------------------------


@st.composite
def cases(draw, name):
    """Options of a configuration that can work, sizes, a prompt and how to take it."""
    kind = BASELINES[name]
    lag = draw(st.integers(1, 6))
    least = kind.blocks * lag
    sinks = draw(st.integers(0, 4))
    # ThinKV's window is its segment: a longer one has a test of its own.
    recent = least if name == "thinkv" else max(1, least) + draw(st.integers(0, 6))
    budget = sinks + recent + lag + draw(st.integers(0, 6))
    slot_map = draw(st.sampled_from(kind.slot_maps))
    options = dict(budget=budget, lag=lag, sinks=sinks, recent=recent, slot_map=slot_map)
    sizes = dict(n_layers=draw(st.integers(1, 3)), n_kv_heads=draw(st.integers(1, 2)))
    sizes |= dict(head_dim=draw(st.integers(1, 3)), batch_size=draw(st.integers(1, 2)))
    sizes["dtype"] = draw(st.sampled_from([torch.float32, torch.float64]))
    prompts = [draw(st.integers(0, 3 * budget)) for _ in range(sizes["batch_size"])]
    return options, sizes, prompts, draw(st.integers(1, budget)), draw(st.integers(0, 2**32 - 1))


def keys_of_kind(kind, shape, generator, dtype):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    factor = {"random": 1.0, "constant": 0.0, "huge": 1e30, "zero": 0.0}[kind]
    return (factor * x + (kind == "constant")).to(dtype)


def weights_of_kind(kind, mask, n_grouped, generator, dtype):
    """Weights [B, H_kv or 1, G, P] over the slots of a mask [B, H_kv or 1, 1, P]."""
    logits = torch.rand(*mask.shape[:2], n_grouped, mask.shape[-1], generator=generator)
    logits = logits * {"even": 0.0, "mixed": 10.0, "one-hot": 1e4}[kind]
    return logits.masked_fill(~mask, -torch.inf).softmax(-1).to(dtype)


def check_invariants(cache, text, prompts):
    """What each map of every row holds, and the keys and values that stand in its slots."""
    config, position = cache.config, cache.position
    taken = position != NO_POSITION
    assert cache.score.isfinite().all()
    assert torch.equal(cache.attention_mask(config.budget)[:, :, :, 0], taken)
    shape = (*cache.length.shape, len(cache.layers), *cache.layers[0].k.shape[1:3])
    spread, there = position.expand(shape), taken.expand(shape)[..., None]
    at = spread.clamp(min=0)[..., None].expand(*shape, text.k.shape[-1])
    for name in ("k", "v"):
        contents = torch.stack([getattr(layer, name) for layer in cache.layers], dim=1)
        expected = getattr(text, name).gather(3, at)
        assert torch.equal(contents.where(there, 0), expected.where(there, 0))
    for row, n_prompt in enumerate(prompts):
        length = cache.length[row].item()
        free = config.budget - config.recent - 1
        n_protected = n_prompt if n_prompt <= min(config.budget // 2, free) else 0
        stay = {*range(min(length, max(config.sinks, n_protected)))}
        stay |= {*range(max(0, length - max(config.recent, 1)), length)}
        for positions in held_maps(cache, row):
            assert len(set(positions)) == len(positions) <= config.budget
            assert stay <= set(positions) <= set(range(length))
            if config.policy.startswith("r-kv"):
                assert len(positions) >= min(length, config.budget - config.lag)


@pytest.mark.parametrize("keys", ["random", "constant", "huge", "zero"])
@pytest.mark.parametrize("name", FREEING)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_invariants(name, keys, data):
    """Any shape, budget, block and prompt; keys and weights that are degenerate."""
    options, sizes, prompts, chunk, seed = data.draw(cases(name))
    kind = data.draw(st.sampled_from(["even", "mixed", "one-hot"]))
    n_grouped = data.draw(st.integers(1, 2))
    config, dtype = EvictionConfig(policy=name, **options), sizes["dtype"]
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(config, **sizes)
    n_steps = 2 * config.budget + 2 * config.lag
    n_tokens = max(prompts) + n_steps
    shape = (len(prompts), sizes["n_layers"], sizes["n_kv_heads"], n_tokens, sizes["head_dim"])
    k = keys_of_kind(keys, shape, generator, dtype)
    v = torch.randn(shape, generator=generator, dtype=dtype)
    q = torch.randn(*shape[:3], n_grouped, *shape[3:], generator=generator, dtype=dtype)
    text = Text(q, k, v)
    single = sizes | dict(batch_size=1)
    for row, n_prompt in enumerate(prompts):
        source = make_cache(config, **single)
        source.protect_prompt(n_prompt)
        for start in range(0, n_prompt, chunk):
            admit(source, text[row, start : min(start + chunk, n_prompt)])
            check_invariants(source, text[row, :], [n_prompt])
        cache.load_row(row, source)
    for step in range(n_steps):
        now = joined([text[row, n + step] for row, n in enumerate(prompts)])
        before = cache.position.clone()
        length = cache.length.clone()

        def weigh(layer, mask):
            mask = mask.expand(-1, sizes["n_kv_heads"], -1, -1)
            return weights_of_kind(kind, mask, n_grouped, generator, dtype)

        slot = decode(cache, now, weigh)
        had_room = (before == NO_POSITION).any(-1)
        was_taken = before.gather(-1, slot[..., None])[..., 0] != NO_POSITION
        assert not (had_room & was_taken).any()
        at = slot[..., None]
        expected = before.scatter(-1, at, length[:, None, None, None].expand_as(at))
        freed = expected != cache.position
        assert (cache.position[freed] == NO_POSITION).all()
        in_block = cache.length % config.lag != 0
        assert not freed[in_block].any()  # another row's block end is not this row's
        check_invariants(cache, text, prompts)


@pytest.mark.parametrize("name", FREEING)
def test_recency_window_stays(name):
    """A window of three blocks is never shortened, not even by ThinKV's transitions."""
    config = EvictionConfig(48, name, lag=8, recent=24)
    cache = make_cache(config)
    text = random_text(400, seed=4)
    for token in range(400):
        decode(cache, text[:, token])
        window = set(range(max(0, token - 23), token + 1))
        for positions in held_maps(cache):
            assert window <= set(positions), f"token {token}"


@pytest.mark.parametrize("name", FREEING)
def test_a_block_must_fit_beside_what_stays(name):
    """4 sinks, 20 recent tokens and a lag of 20 need 44 slots."""
    make_cache(EvictionConfig(44, name, lag=20, recent=20))
    with pytest.raises(ValueError, match="budget 43 is smaller than sinks 4 .* 20 .* lag 20"):
        EvictionConfig(43, name, lag=20, recent=20)


def test_thinkv_has_no_value_reserve():
    """It frees segments by the clusters of their keys, so there is nothing to spare."""
    with pytest.raises(ValueError, match="'thinkv' .* drop value_reserve"):
        EvictionConfig(48, "thinkv", lag=8, value_reserve=1)


@pytest.mark.parametrize("name", [name for name in FREEING if name != "thinkv"])
def test_reserve_of_large_values_stays(name):
    """The token with by far the largest values is spared at every eviction."""
    config = EvictionConfig(48, name, lag=8, value_reserve=1)
    cache = make_cache(config)
    text = random_text(400, seed=5)
    text.v[:, :, :, 30] *= 1e6
    for token in range(400):
        decode(cache, text[:, token])
        assert token < 30 or all(30 in positions for positions in held_maps(cache)), token
    assert mean_occupancy(cache).item() < 1


@pytest.mark.parametrize("name", FREEING)
def test_rows_are_independent(name):
    """Prompts below, at and over the budget: each row holds what it holds alone."""
    prompts, n_steps = (9, 43, 130), 200
    text = random_text(max(prompts) + n_steps, len(prompts), seed=6, on_grid=True)
    config = EvictionConfig(48, name, lag=8)
    batch, alone = make_cache(config, len(prompts)), []
    for row, n_prompt in enumerate(prompts):
        alone.append(make_cache(config))
        prefill(alone[row], text[row, :n_prompt], chunk=48)
        batch.load_row(row, alone[row])
    for step in range(n_steps):
        steps = [text[row, n + step] for row, n in enumerate(prompts)]
        decode(batch, joined(steps))
        for row, (cache, tokens) in enumerate(zip(alone, steps, strict=True)):
            decode(cache, tokens)
            assert held_maps(batch, row) == held_maps(cache), f"row {row}, step {step}"


@pytest.mark.parametrize("name", FREEING)
def test_reset_brings_back_a_fresh_cache(name):
    """Every buffer is as in a new cache, and a second run holds what the first one did."""
    config = EvictionConfig(32, name, lag=8)
    cache, text = make_cache(config), random_text(150, seed=7)
    runs = []
    for _ in range(2):
        prefill(cache, text[:, :50], chunk=32)
        seen = []
        for token in range(50, 150):
            decode(cache, text[:, token])
            seen.append(held_maps(cache))
        runs.append(seen)
        cache.reset()
        for mine, fresh in zip(cache.buffers(), make_cache(config).buffers(), strict=True):
            assert torch.equal(mine, fresh)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", FREEING)
def test_load_row_takes_up_a_row_in_the_middle_of_a_segment(name):
    """A copy made after 101 tokens, beside another row, goes on as its source does."""
    config = EvictionConfig(32, name, lag=8)
    source, text = make_cache(config), random_text(200, seed=8, on_grid=True)
    for token in range(101):
        decode(source, text[:, token])
    batch = make_cache(config, 2)
    batch.load_row(0, make_cache(config))
    batch.load_row(1, source)
    for token in range(101, 200):
        decode(source, text[:, token])
        decode(batch, joined([text[:, token - 101], text[:, token]]))
        assert held_maps(batch, 1) == held_maps(source), f"token {token}"


# With a model ----------------------------------------------------------------------------------

PROMPT = [(7 * i) % 50 for i in range(20)]
DRAWN = Sampling(temperature=1.0)
RUN = dict(temperature=1.0, seed=DRAWN.seed, compile_mode="none")


@pytest.mark.parametrize("name", FREEING)
def test_engine_always_masks(name):
    """However many tokens there are, the step attends to a masked prefix that reaches them all."""
    config = EvictionConfig(700, name, lag=8)
    engine = Engine(random_model(n_layers=1), config, Sampling(), 2, compile_mode="none")
    for shortest, longest in itertools.combinations_with_replacement((1, 512, 513, 700, 5000), 2):
        prefix = engine.prefix(shortest, longest)
        assert prefix is not None and min(longest, 700) <= prefix <= 700
    other = Engine(random_model(n_layers=1), EvictionConfig(700), Sampling(), 2, "none")
    assert other.prefix(700, 700) is None


def slow_tokens(model, config, n_tokens):
    """Tokens drawn from keys and values that are all kept, in attention to the held ones only.

    Which are held is asked of a cache that runs alongside; its own logits are compared.
    """
    cache = model.new_cache(config)
    everything = model.new_cache(EvictionConfig(len(PROMPT) + n_tokens, "full"))
    prompt = torch.tensor([PROMPT])
    logits = model.prefill(prompt, everything)
    torch.testing.assert_close(model.prefill(prompt, cache), logits, rtol=1e-9, atol=1e-9)
    n_freed, tokens = 0, []
    for _ in range(n_tokens):
        newest = cache.length - 1
        drawn = sample(logits, DRAWN, torch.ones(1), torch.tensor([DRAWN.seed]), newest)
        tokens.append(drawn.item())
        slot, position = cache.begin_step()
        mask = cache.attention_mask(config.budget)
        token, place = torch.tensor([tokens[-1:]]), position[:, None]
        x, residuals, _, _ = model(token, place, cache, slot, mask)
        cache.end_step(slot, position, residuals)

        own_slot, _ = everything.begin_step()  # equal to the position: nothing is ever evicted
        seen = torch.zeros(*cache.position.shape[:3], 1, everything.config.budget, dtype=torch.bool)
        for at in itertools.product(*map(range, cache.position.shape[:3])):
            for p in cache.position[at].tolist():
                if p != NO_POSITION:
                    seen[at][0, p] = True
        own, _, _, _ = model(token, place, everything, own_slot, seen)
        logits = model.logits(own[:, -1])
        torch.testing.assert_close(model.logits(x[:, -1]), logits, rtol=1e-9, atol=1e-9)

        if cache.length.item() % cache.block == 0:
            n_freed += (cache.position != NO_POSITION).sum().item()
            cache.end_block()
            n_freed -= (cache.position != NO_POSITION).sum().item()
    assert n_freed > 0
    return tokens


@pytest.mark.parametrize(("name", "slot_map"), MAPS, ids=MAP_IDS)
def test_generation_attends_to_the_held_tokens(name, slot_map):
    """Logits as of a slow driver that never overwrites, and the tokens of generate()."""
    model = random_model()
    config = EvictionConfig(48, name, lag=8, slot_map=slot_map)
    expected = slow_tokens(model, config, 120)
    options = dict(budget=48, policy=name, lag=8, slot_map=slot_map, **RUN)
    result = generate(model, [PROMPT], max_new_tokens=120, **options)
    assert result.outputs[0].tokens == expected
    assert len(set(expected)) > 20


@pytest.mark.parametrize("name", FREEING)
def test_freed_slots_do_not_matter(name, monkeypatch):
    """Whatever stands in empty slots, a batch of two rows generates the same tokens."""
    model = random_model()
    prompts = [PROMPT, [3, 1, 4] * 20]
    options = dict(budget=48, policy=name, lag=8, max_new_tokens=120, **RUN)
    expected = generate(model, prompts, **options)
    n_poisoned = 0

    def poisoned(end_block):
        def end(cache):
            nonlocal n_poisoned
            end_block(cache)
            empty = (cache.position == NO_POSITION)[..., None]
            n_poisoned += empty.sum().item()
            for layer, at in zip(cache.layers, cache.per_layer(empty), strict=True):
                layer.k.masked_fill_(at, 1e3)
                layer.v.masked_fill_(at, 1e6)

        return end

    for kind in (FreeingCache, baselines.ThoughtCache):
        monkeypatch.setattr(kind, "end_block", poisoned(kind.end_block))
    result = generate(model, prompts, **options)
    assert n_poisoned > 0
    for mine, other in zip(result.outputs, expected.outputs, strict=True):
        assert mine.tokens == other.tokens and mine.kept == other.kept


@pytest.mark.parametrize("name", FREEING)
def test_a_large_budget_generates_the_tokens_of_full(name, monkeypatch):
    """As long as nothing is freed; without transitions ThinKV frees nothing either."""
    monkeypatch.setattr(ThinKV, "thresholds", (0.0, 1.0))
    model = random_model()
    full = generate(model, [PROMPT], policy="full", max_new_tokens=100, **RUN)
    options = dict(budget=200, policy=name, max_new_tokens=100, **RUN)
    result = generate(model, [PROMPT], **options)
    assert result.outputs[0].tokens == full.outputs[0].tokens
    assert result.outputs[0].kept == list(range(len(PROMPT) + 99))


def test_statistics_count_the_tokens_held():
    """With one slot map a row's `kept` are all it holds, and the rest has been evicted."""
    model = random_model()
    options = dict(budget=48, policy="r-kv", slot_map="shared", lag=8, **RUN)
    result = generate(model, [PROMPT], max_new_tokens=117, **options)  # 136 tokens: a block's end
    n_kept = len(result.outputs[0].kept)
    assert n_kept == 40
    assert result.statistics.tokens_kept == n_kept
    assert result.statistics.tokens_evicted == 136 - n_kept


# Calibrating ThinKV ----------------------------------------------------------------------------


def test_thresholds_lie_between_the_modes():
    """Three narrow heaps at 0.2, 0.5 and 0.9 of unequal size; one heap is cut into thirds."""
    generator = torch.Generator().manual_seed(0)
    heaps = [(0.2, 300), (0.5, 200), (0.9, 100)]
    parts = [m + 0.02 * torch.randn(n, generator=generator) for m, n in heaps]
    low, high = baselines.thresholds_between_modes(torch.cat(parts))
    assert 0.27 < low < 0.43 and 0.57 < high < 0.83
    assert baselines.valleys(torch.full((50,), 0.3)) == []
    line = torch.arange(101) / 100
    assert baselines.thresholds_between_modes(line) == pytest.approx((1 / 3, 2 / 3))


def test_the_deepest_valley_comes_first():
    """Heaps at 0, 1 and 1.5: between the first two nothing lies, between the others some does."""
    generator = torch.Generator().manual_seed(1)
    parts = [m + 0.15 * torch.randn(400, generator=generator) for m in (0.0, 1.0, 1.5)]
    (first, deep), (second, shallow) = baselines.valleys(torch.cat(parts))[:2]
    assert 0.3 < first < 0.7 and 1.1 < second < 1.4
    assert deep < shallow < 1


def test_calibration_reads_the_sparsity_of_the_full_cache(monkeypatch):
    """Against shares counted from the weights of every step, and their means over four steps."""
    model, steps = random_model(), []
    for block in model.blocks:
        block.q_norm.weight.mul_(6)  # sparse attention, which small random numbers would not give

    def noted(q, k, mask):
        weights = attention_weights(q, k, mask)
        steps.append(weights.flatten(1, 2))  # [B, H, N]
        return weights

    monkeypatch.setattr("model.attention_weights", noted)
    texts = [[1, 2, 3, 4] * 6, list(range(24))]
    found = baselines.calibrate_thinkv(model, texts, segment=4)
    assert len(steps) == 24 * 4  # the model has four layers
    sparsity = [
        [
            [
                mean([sum(w < 0.01 * max(head) for w in head[: t + 1]) / (t + 1) for head in row])
                for row in steps[4 * t + layer].tolist()
            ]
            for t in range(24)
        ]
        for layer in range(4)
    ]  # [layer][step][row]
    over_layers = [[mean([sparsity[i][t][b] for i in range(4)]) for b in (0, 1)] for t in range(24)]
    means = [mean([over_layers[t + i][b] for i in range(4)]) for t in range(21) for b in (0, 1)]
    assert found["layers"] == [0, 1, 2, 3] and found["n_layers"] == 4
    expected = baselines.thresholds_between_modes(torch.tensor(means, dtype=torch.float64))
    assert found["thresholds"] == pytest.approx(expected)
    assert min(means) < found["thresholds"][0] < found["thresholds"][1] < max(means)


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("n_layers", [16, 28, 30, 32, 36])
def test_a_calibration_names_the_layers_of_its_model(n_layers):
    """They come out as they went in, whatever the depth."""
    layers = [1, n_layers // 3, n_layers // 2 + 1, n_layers - 1]
    calibration = dict(n_layers=n_layers, layers=layers, thresholds=[0.4, 0.7])
    thinkv = baselines.calibrated_thinkv(calibration)
    assert thinkv.thresholds == (0.4, 0.7) and issubclass(thinkv, ThinKV)
    POLICIES["thinkv"] = thinkv  # the fixture takes it out again
    assert make_cache(EvictionConfig(64, "thinkv"), n_layers=n_layers).observed_layers == layers

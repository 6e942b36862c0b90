"""The attention policies: against the twin, by hand, by what must hold, and inside the model."""

import itertools
import math

import pytest
import torch
from attention_twin import (
    AttentionTwin,
    Text,
    admit,
    decode,
    default_recent,
    lists_of,
    new_cache,
    prefill,
    random_text,
    random_weights,
    weights_by_position,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compile import (
    Allocations,
    WithoutCudaBuild,
    cuda_attention,
    fake_model,
    random_model,
    run,
    with_two_axes,
)
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import model as model_file
from baselines import BASELINES
from epikv import NO_POSITION, POLICIES, EvictionConfig
from generate import DecodeState, Engine, Sampling, decode_step

FREEING = ("r-kv", "r-kv-reference", "thinkv", "thinkv-reference")  # test_freeing_baselines.py
POLICY_NAMES = [name for name in BASELINES if name not in FREEING]
VARIANTS = [(name, slot_map) for name in POLICY_NAMES for slot_map in BASELINES[name].slot_maps]
BEFORE = dict(POLICIES)


@pytest.fixture(autouse=True, scope="module")
def nothing_leaks():
    """The registry of policies is after this file what it was before."""
    yield
    assert POLICIES == BEFORE and list(POLICIES) == list(BEFORE)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Make the baselines policies like any other, for one test."""
    for name, policy in BASELINES.items():
        monkeypatch.setitem(POLICIES, name, policy)


def settings_for(policy, **options):
    """A configuration; the band of `attn-hs` is block 1 of the small models here."""
    if policy == "attn-hs":
        options = dict(band_a=(1,)) | options
    return EvictionConfig(policy=policy, **options)


def test_the_policies_and_their_maps():
    """What is offered, so that a policy that is taken away is missed below."""
    assert {name: BASELINES[name].slot_maps for name in POLICY_NAMES} == {
        "h2o": ("head", "layer", "shared"),
        "h2o-reference": ("shared",),
        "tova": ("layer", "shared"),
        "raas": ("layer", "shared"),
        "raas-token": ("layer", "shared"),
        "raas-reference": ("shared",),
        "longflow": ("layer", "shared"),
        "longflow-reference": ("shared",),
        "snapkv": ("head", "layer", "shared"),
        "attn-hs": ("shared",),
    }


# Against the twin ------------------------------------------------------------------------------


class Pair:
    """A cache and the twins of its rows, which get the same tokens and the same weights."""

    def __init__(self, policy, slot_map, prompts, *, chunk, n_steps, seed=0, **options):
        config = settings_for(policy, slot_map=slot_map, **options)
        self.cache = new_cache(config, len(prompts))
        self.steps = random_text(self.cache, n_steps, seed)
        self.twins = []
        for row, n_prompt in enumerate(prompts):
            prompt = random_text(self.cache, n_prompt, seed + 1 + row, batch_size=1)
            one = new_cache(config)
            prefill(one, prompt, chunk)
            self.cache.load_row(row, one)
            limits = {key: options[key] for key in ("budget", "sinks", "recent") if key in options}
            window = options.get("window", 64)
            twin = AttentionTwin(
                policy, slot_map=slot_map, n_prompt=n_prompt, window=window, **limits
            )
            for start in range(0, n_prompt, chunk):
                twin.admit(start, *(x[start : start + chunk] for x in lists_of(prompt)))
            self.twins.append(twin)

    def assert_same(self):
        """Every map of every row holds the same tokens, with the same scores."""
        for row, twin in enumerate(self.twins):
            maps = itertools.product(*map(range, self.cache.position.shape[1:3]))
            for (layer, head), tokens in zip(maps, twin.maps.values(), strict=True):
                at = row, layer, head
                pairs = zip(self.cache.position[at], self.cache.score[at], strict=True)
                score = {position.item(): score.item() for position, score in pairs}
                score.pop(NO_POSITION, None)
                expected = {token["position"]: token["score"] for token in tokens}
                assert score == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def step(self, t, weigh):
        """Decode a token in every row and compare the victims. Returns those of the twins."""
        position = self.cache.length.tolist()
        text = self.steps[t]
        victims, weights = decode(self.cache, text, weigh)
        expected = []
        for row, twin in enumerate(self.twins):
            _, _, (value,), (residual,) = lists_of(text, row)
            expected.append(twin.enter(position[row], value, residual))
            got = [None if p == NO_POSITION else p for p in victims[row].flatten().tolist()]
            assert got == expected[-1], f"step {t}, row {row}"
        for twin, given_to in zip(
            self.twins, weights_by_position(self.cache, weights), strict=True
        ):
            twin.observe(given_to)
        return expected


@pytest.mark.parametrize("prompts", [(0,), (17, 30, 101)], ids=["one row", "ragged"])
@pytest.mark.parametrize(("policy", "slot_map"), VARIANTS)
def test_victims_are_the_twins(policy, slot_map, prompts):
    """Victim for victim over 2,000 tokens, after prompts of which some are over budget."""
    sizes = dict(budget=41, sinks=2, window=16)  # odd, so that half of 39 tokens is rounded
    pair = Pair(policy, slot_map, prompts, chunk=23, n_steps=2000, **sizes)
    pair.assert_same()
    weigh, seen = random_weights(seed=9), set()
    for t in range(2000):
        seen |= {(row, str(v)) for row, v in enumerate(pair.step(t, weigh))}
        if t % 100 == 0:
            pair.assert_same()
    assert len(seen) > 1900 * len(prompts)


@st.composite
def cases(draw, policy):
    """(options of a configuration, prompt length, chunk, seed) that may meet."""
    budget = draw(st.integers(3, 40))
    sinks = draw(st.integers(0, min(5, budget - 1)))
    options = dict(budget=budget, sinks=sinks)
    if default_recent(policy, budget, sinks) >= budget - sinks or draw(st.booleans()):
        options["recent"] = draw(st.integers(0, budget - sinks - 1))
    if policy == "attn-hs":
        options["window"] = draw(st.integers(2, 30))
    n_prompt = draw(st.one_of(st.just(0), st.integers(1, 2 * budget + 5)))
    return options, n_prompt, draw(st.integers(1, budget)), draw(st.integers(0, 999))


PALETTES = st.sampled_from([None, [0.125, 0.25, 0.5], [0.5], [0.0, 1.0]])


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), palette=PALETTES)
def test_victims_are_the_twins_for_any_settings(policy, data, palette):
    """Any budget, sinks, recency, prompt and chunk; where weights tie, sums of them are exact."""
    options, n_prompt, chunk, seed = data.draw(cases(policy))
    slot_map = data.draw(st.sampled_from(BASELINES[policy].slot_maps))
    n_steps = 2 * options["budget"]
    pair = Pair(policy, slot_map, (n_prompt,), chunk=chunk, n_steps=n_steps, seed=seed, **options)
    if palette is not None:
        pair.steps.v.mul_(4).round_().div_(4)  # so that products are exact as well
    pair.assert_same()
    weigh = random_weights(seed, palette=palette)
    for t in range(n_steps):
        pair.step(t, weigh)
    pair.assert_same()


# By hand ---------------------------------------------------------------------------------------

# Weights are in eighths, {position: weight} of each step, or a list of these of the heads. There is
# one sink, and of recent tokens the newest unless said. `victims` starts at the first eviction.
FIRST = [{0: 8}, {0: 4, 1: 4}, {0: 1, 1: 1, 2: 6}, {0: 1, 1: 3, 2: 1, 3: 3}]
EXAMPLES = {
    # Sums of what was received since the token entered; two recent tokens stay.
    # After step 4: 1 has 4+1+3 = 8, 2 has 6+1+1 = 8, 3 has 3+2 = 5: 3 goes.
    # 5: 1 has 8, 2 has 8, 4 has 5+4 = 9: the older of the equals goes, 1.
    # 6: 2 has 8, 4 has 9, 5 has 4+2 = 6, as what its slot's old token had is forgotten: 5 goes.
    # 7: 2 has 10, 4 has 10, 6 has 5+1 = 6: 6 goes.
    "h2o": dict(
        options=dict(budget=5, recent=2),
        steps=[
            *FIRST,
            {0: 0, 1: 0, 2: 1, 3: 2, 4: 5},
            {0: 0, 1: 0, 2: 0, 4: 4, 5: 4},
            {0: 1, 2: 0, 4: 0, 5: 2, 6: 5},
            {0: 2, 2: 2, 4: 1, 6: 1, 7: 2},
            {0: 8, 2: 0, 4: 0, 7: 0, 8: 0},
        ],
        victims=[3, 1, 5, 6],
    ),
    # The last query alone, mean over two heads.
    # After step 3: 1 has (0+4)/2, 2 has (3+1)/2, 3 has (3+2)/2: the older of the equals, 1.
    # 4: 2 has 3.5, 3 has 2.5, 4 has 1: 4, though it entered last.
    # 5: 2 has 0.5, 3 has 1, 5 has 1.5: 2, whatever it had before.
    # 6: 3 has 3.5, 5 has 2.5, 6 has 2: 6.
    "tova": dict(
        options=dict(budget=4),
        steps=[
            [{0: 8}, {0: 8}],
            [{0: 4, 1: 4}, {0: 6, 1: 2}],
            [{0: 2, 1: 5, 2: 1}, {0: 2, 1: 1, 2: 5}],
            [{0: 2, 1: 0, 2: 3, 3: 3}, {0: 1, 1: 4, 2: 1, 3: 2}],
            [{0: 1, 2: 1, 3: 5, 4: 1}, {0: 1, 2: 6, 3: 0, 4: 1}],
            [{0: 5, 2: 1, 3: 1, 5: 1}, {0: 5, 2: 0, 3: 1, 5: 2}],
            [{0: 0, 3: 4, 5: 2, 6: 2}, {0: 0, 3: 3, 5: 3, 6: 2}],
            [{0: 8, 3: 0, 5: 0, 7: 0}, {0: 8, 3: 0, 5: 0, 7: 0}],
        ],
        victims=[1, 4, 2, 6],
    ),
    # Stamps of 1, 2, ...: step 1 renews 1; step 2 the one more attended of two, 2.
    # 3: two of three, 1 and 3: stamps 3, 2, 3, so 2 goes.
    # 4: 3 and 4: 1 still has 3 and goes.
    # 5: all are equal, so all are renewed: the oldest, 3, goes.
    # 6: 5 and 6: 4 still has 5 and goes.
    # 7: 6, and 5 and 7 are equal: all have 7, so 5 goes.
    "raas-token": dict(
        options=dict(budget=4),
        steps=[
            *FIRST,
            {0: 0, 1: 1, 3: 4, 4: 3},
            {0: 2, 3: 2, 4: 2, 5: 2},
            {0: 0, 4: 1, 5: 3, 6: 4},
            {0: 1, 5: 1, 6: 5, 7: 1},
            {0: 8, 6: 0, 7: 0, 8: 0},
        ],
        victims=[2, 1, 3, 4, 5],
    ),
    # Pages of two tokens, so 0 and 1, 2 and 3, ... share the larger weight of theirs.
    # 1: renews 1. 2: the better one, 2. 3: page 0 has 3, page 1 has 3: all three, stamp 3.
    # 4: page 0 has 3 by its sink, page 1 has 1, page 2 has 4: 4 and 1 of the four are renewed; 2
    #    and 3 have stamp 3: 2 goes. (Token by token 1 has nothing, and would have gone.)
    # 5: 1 has 0, page 1 has 5, page 2 has 2, both its tokens: 3, 4, 5 are renewed, 1 goes.
    # 6: 3 has 2, page 2 has 3, 6 has 2: 4 and 5 are renewed, 6 entered with 6; 3 has 5 and goes.
    "raas": dict(
        options=dict(budget=5),
        patch=dict(page=2),
        steps=[
            *FIRST,
            {0: 3, 1: 0, 2: 0, 3: 1, 4: 4},
            {0: 0, 1: 0, 3: 5, 4: 1, 5: 2},
            {0: 0, 3: 2, 4: 3, 5: 1, 6: 2},
            {0: 8, 4: 0, 5: 0, 6: 0, 7: 0},
        ],
        victims=[2, 1, 3],
    ),
    # Renewed at the lower median or above, which of four tokens are three.
    # 2: both, stamp 2. 3: weights 3, 1, 3 with median 3: 1 and 3, stamp 3.
    # 4: weights 1, 2, 0, 5 with lower median 1: all but 3, which goes.
    # 5: weights 0, 1, 2, 5 of 1, 2, 4, 5: all but 1, which goes.
    # 6: all are equal: the oldest goes, 2.
    "raas-reference": dict(
        options=dict(budget=5),
        steps=[
            *FIRST,
            {0: 0, 1: 1, 2: 2, 3: 0, 4: 5},
            {0: 0, 1: 0, 2: 1, 4: 2, 5: 5},
            {0: 4, 2: 1, 4: 1, 5: 1, 6: 1},
            {0: 8, 4: 0, 5: 0, 6: 0, 7: 0},
        ],
        victims=[3, 1, 2],
    ),
    # The mean over two heads of weight times |value|.
    # After step 3: 1 has (1*4 + 4*1)/2 = 4, 2 has (4*1 + 1*4)/2 = 4, 3 has 2*2 = 4: 1.
    # 4: 2 has (4*1 + 0*4)/2 = 2, 3 has 1*2 = 2, 4 has (1*1 + 5*1)/2 = 3: 2.
    # 5: 3 has 1*2 = 2, 4 has 2*1 = 2, 5 has 1*3 = 3: 3.
    # 6: 4 has 4*1, 5 has 1*3, 6 has (3*0 + 3*1)/2 = 1.5: 6.
    "longflow": dict(
        options=dict(budget=4),
        values=[(1, 1), (4, -1), (-1, 4), (2, 2), (-1, 1), (3, -3), (0, 1), (1, 1)],
        steps=[
            [{0: 8}, {0: 8}],
            [{0: 4, 1: 4}, {0: 4, 1: 4}],
            [{0: 2, 1: 3, 2: 3}, {0: 2, 1: 3, 2: 3}],
            [{0: 1, 1: 1, 2: 4, 3: 2}, {0: 1, 1: 4, 2: 1, 3: 2}],
            [{0: 2, 2: 4, 3: 1, 4: 1}, {0: 2, 2: 0, 3: 1, 4: 5}],
            [{0: 4, 3: 1, 4: 2, 5: 1}, {0: 4, 3: 1, 4: 2, 5: 1}],
            [{0: 0, 4: 4, 5: 1, 6: 3}, {0: 0, 4: 4, 5: 1, 6: 3}],
            [{0: 8, 4: 0, 5: 0, 7: 0}, {0: 8, 4: 0, 5: 0, 7: 0}],
        ],
        victims=[1, 2, 3, 6],
    ),
    # The mean weight times the mean |value|; the same values, and weights as far as the same stay.
    # After step 3: 1 has 2.5 * 2.5, 2 has 2.5 * 2.5, 3 has 2 * 2: 3.
    # 4: 1 has 2 * 2.5 = 5, 2 has 1 * 2.5, 4 has 3 * 1: 2.
    # 5: 1 has 1 * 2.5, 4 has 2 * 1, 5 has 1 * 3: 4.
    # 6: 1 has 4 * 2.5, 5 has 1 * 3, 6 has 3 * 0.5: 6.
    "longflow-reference": dict(
        options=dict(budget=4),
        values=[(1, 1), (4, -1), (-1, 4), (2, 2), (-1, 1), (3, -3), (0, 1), (1, 1)],
        steps=[
            [{0: 8}, {0: 8}],
            [{0: 4, 1: 4}, {0: 4, 1: 4}],
            [{0: 2, 1: 3, 2: 3}, {0: 2, 1: 3, 2: 3}],
            [{0: 1, 1: 1, 2: 4, 3: 2}, {0: 1, 1: 4, 2: 1, 3: 2}],
            [{0: 2, 1: 4, 2: 1, 4: 1}, {0: 2, 1: 0, 2: 1, 4: 5}],
            [{0: 4, 1: 1, 4: 2, 5: 1}, {0: 4, 1: 1, 4: 2, 5: 1}],
            [{0: 0, 1: 4, 5: 1, 6: 3}, {0: 0, 1: 4, 5: 1, 6: 3}],
            [{0: 8, 1: 0, 5: 0, 7: 0}, {0: 8, 1: 0, 5: 0, 7: 0}],
        ],
        victims=[3, 2, 4, 6],
    ),
    # The last two queries, and one neighbour on either side.
    # Sums after step 5: 1, 2, 0, 1, 6, 6; largest around: 1 has 2, 2 has 2, 3 to 5 have 6: 1.
    # 6: of 0, 2, 3, 4, 5, 6 sums 3, 0, 0, 1, 7, 4; 2 has 3 from the sink beside it, 3 has 1: 3.
    # 7: of 0, 2, 4, 5, 6, 7 sums 3, 0, 0, 1, 4, 8; 2 has 3, 4 has 1: 4.
    # 8: of 0, 2, 5, 6, 7, 8 sums 0, 5, 0, 0, 8, 3; 2 and 5 have 5, the others 8: 2.
    "snapkv": dict(
        options=dict(budget=6, recent=1),
        patch=dict(n_rows=2, kernel=3),
        steps=[
            *FIRST,
            {0: 1, 1: 1, 2: 0, 3: 1, 4: 5},
            {0: 0, 1: 1, 2: 0, 3: 0, 4: 1, 5: 6},
            {0: 3, 2: 0, 3: 0, 4: 0, 5: 1, 6: 4},
            {0: 0, 2: 0, 4: 0, 5: 0, 6: 0, 7: 8},
            {0: 0, 2: 5, 5: 0, 6: 0, 7: 0, 8: 3},
            {0: 8, 5: 0, 6: 0, 7: 0, 8: 0, 9: 0},
        ],
        victims=[1, 3, 4, 2],
    ),
    # With a window of two, z is 1 where the residual moves further than before, -1 where less far:
    # 0, 1, -1, 0, 1, -1 from position 1 on. What stands in brackets is scaled to 0..1.
    # After step 3: attention 8, 6, 2 [1, 2/3, 0] and z 0, 1, -1 [1/2, 1, 0]: 3.
    # 4: of 1, 2, 4 attention 8, 6, 6 [1, 0, 0] and z 0, 1, 0 [0, 1, 0]: 4.
    # 5: of 1, 2, 5 attention 8, 10, 4 [2/3, 1, 0] and z 0, 1, 1 [0, 1, 1]: 1.
    # 6: of 2, 5, 6 attention 10, 4, 6 [1, 0, 1/3] and z 1, 1, -1 [1, 1, 0]: 6.
    "attn-hs": dict(
        options=dict(budget=4, window=2, band_a=(0,)),
        residuals=[0, 1, 3, 4, 5, 7, 8, 9],
        steps=[
            {0: 8},
            {0: 4, 1: 4},
            {0: 2, 1: 2, 2: 4},
            {0: 2, 1: 2, 2: 2, 3: 2},
            {0: 2, 1: 0, 2: 0, 4: 6},
            {0: 0, 1: 0, 2: 4, 5: 4},
            {0: 2, 2: 0, 5: 0, 6: 6},
            {0: 8, 2: 0, 5: 0, 7: 0},
        ],
        victims=[3, 4, 1, 6],
    ),
}


def line(values, residuals=None, keys=None, n_heads=1):
    """A text of one row and layer in one dimension; all queries are 1."""
    n = len(values)
    values = torch.tensor(values, dtype=torch.float64).view(1, 1, n, -1, 1).transpose(2, 3)
    values = values.expand(1, 1, n_heads, n, 1)
    keys = torch.tensor(keys or [1.0] * n, dtype=torch.float64).log().view(1, 1, 1, n, 1)
    n_blocks = 0 if residuals is None else 1
    residuals = torch.tensor(residuals or [], dtype=torch.float64).view(1, n, n_blocks, 1)
    ones = torch.ones(1, 1, n_heads, 1, n, 1, dtype=torch.float64)
    return Text(ones, keys.expand(1, 1, n_heads, n, 1), values, residuals)


def small_cache(policy, n_heads, **options):
    options = dict(sinks=1, recent=1) | options
    config = EvictionConfig(policy=policy, **options)
    return new_cache(config, n_layers=1, n_kv_heads=n_heads, head_dim=1, hidden_size=1)


def decode_by_hand(cache, text, steps):
    """Decode the tokens of `text` with the weights of `steps`. Returns the victims."""
    victims = []
    for t, step in enumerate(steps):
        heads = step if isinstance(step, list) else [step]
        position = cache.length.item()

        def weigh(taken, heads=heads, position=position):
            held = cache.position[0, 0, 0].tolist()
            assert {p for p in held if p != NO_POSITION} == set(heads[0]), f"at {position}"
            rows = [[head.get(p, 0) / 8 for p in held] for head in heads]
            return torch.tensor(rows, dtype=torch.float64)[None, None, :, None]

        assert all(sum(head.values()) == 8 for head in heads), "weights sum to 1"
        victims += decode(cache, text[t], weigh)[0].flatten().tolist()
    return [p for p in victims if p != NO_POSITION]


@pytest.mark.parametrize("policy", EXAMPLES)
def test_victims_worked_out_by_hand(monkeypatch, policy):
    """At most ten tokens, whose victims are derived beside the examples."""
    example = EXAMPLES[policy]
    for name, value in example.get("patch", {}).items():
        monkeypatch.setattr(BASELINES[policy], name, value)
    steps = example["steps"]
    n_heads = len(steps[0]) if isinstance(steps[0], list) else 1
    cache = small_cache(policy, n_heads, **example["options"])
    text = line(example.get("values", [1] * len(steps)), example.get("residuals"), None, n_heads)
    assert decode_by_hand(cache, text, steps) == example["victims"]


@pytest.mark.parametrize(
    ("policy", "steps", "victims"),
    [
        # The prompt's queries gave 1 2/3 + 1/2 + 1/4 = 17/12, 2 1/4 + 1/8, 3 1/2; with steps 4 and
        # 5 2 has 7/8, 3 has 3/4, 4 has 1/2, 5 has 3/4: 4 goes. Step 6: 1 has 17/12, 2 and 3 have
        # 7/8, 5 has 1, 6 has 5/8: 6 goes. Step 7: 7 has nothing and goes.
        (
            "h2o",
            [{0: 0, 1: 0, 2: 0, 3: 1, 5: 2, 6: 5}, {0: 8, 1: 0, 2: 0, 3: 0, 5: 0, 7: 0}],
            [4, 6, 7],
        ),
        # Those do not count: 1 has 0, 2 has 4/8, 3 has 2/8, 4 has 4/8, 5 has 6/8: 1 goes. Step 6: 3
        # has 3/8, 2 and 4 have 4/8, 5 has 8/8, 6 has 5/8: 3. Step 7: 7 has nothing and goes.
        # Step 8: 2 and 4 still have 4/8, the others more: 2.
        (
            "h2o-reference",
            [
                {0: 0, 2: 0, 3: 1, 4: 0, 5: 2, 6: 5},
                {0: 8, 2: 0, 4: 0, 5: 0, 6: 0, 7: 0},
                {0: 0, 2: 0, 4: 0, 5: 0, 6: 0, 8: 8},
            ],
            [1, 3, 7, 2],
        ),
    ],
)
def test_whether_queries_of_the_prompt_count(policy, steps, victims):
    """Four prompt tokens with keys ln 1, ln 2, ln 1, ln 4, whose queries of 1 weigh them so."""
    cache = small_cache(policy, 1, budget=6)
    text = line([1] * 10, keys=[1, 2, 1, 4, 1, 1, 1, 1, 1, 1])
    prefill(cache, text[:4], chunk=4)
    both = [{0: 0, 1: 0, 2: 4, 3: 0, 4: 4}, {0: 0, 1: 0, 2: 0, 3: 2, 4: 0, 5: 6}]
    assert decode_by_hand(cache, text[4:], [*both, *steps]) == victims[:-1]
    before = cache.position.clone()
    slot, _ = cache.begin_step()
    assert before.flatten()[slot.item()] == victims[-1]


@pytest.mark.parametrize("chunk", [3, 6])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        # Keys ln 1, 2, 3, 1, 4, 1: the last query gives 1 to 4 2, 3, 1 and 4 twelfths: 3 and 1 go.
        ("tova", [0, 2, 4, 5]),
        # Sums 2/3+2/6+2/7+2/11+2/12 = 1.6, 3/6+3/7+3/11+3/12 = 1.5, 1/7+1/11+1/12 = 0.3, 4/11+4/12
        # = 0.7: 3 and 4 go.
        ("h2o", [0, 1, 2, 5]),
        # All have nothing: the oldest go.
        ("h2o-reference", [0, 3, 4, 5]),
        # The last query renews three of the five, 1, 2 and 4; 3 has stamp 3 and goes, then the
        # oldest of stamp 5, 1.
        ("raas-token", [0, 2, 4, 5]),
        # One page, so all are renewed: the oldest go.
        ("raas", [0, 3, 4, 5]),
        # Weights 2, 3, 1, 4, 1 of 1 to 5 with median 2: as by token.
        ("raas-reference", [0, 2, 4, 5]),
        # |v| is 6 for 3, else 1: 2, 3, 6, 4: 1 and 2 go.
        ("longflow", [0, 3, 4, 5]),
        ("longflow-reference", [0, 3, 4, 5]),
        # Sums as for h2o, and 1+1/3+1/6+1/7+1/11+1/12 = 1.8 for the sink, which all but 4 have
        # among their three neighbours to the left: 4 goes, then the oldest, 1.
        ("snapkv", [0, 2, 3, 5]),
        # No attention counts; z is 0, 1, -1, 1 from 1 to 4: 3 and 1 go.
        ("attn-hs", [0, 2, 4, 5]),
    ],
)
def test_a_long_prompt_by_hand(policy, kept, chunk):
    """Six tokens for four slots, whose queries are all 1, in one chunk or two."""
    options = dict(window=2, band_a=(0,)) if policy == "attn-hs" else {}
    cache = small_cache(policy, 1, budget=4, **options)
    residuals = [0, 1, 3, 4, 6, 7] if cache.reads else None
    text = line([1, -1, 1, -6, 1, 1], residuals, [1, 2, 3, 1, 4, 1])
    prefill(cache, text, chunk)
    assert cache.position[0, 0, 0].tolist() == kept


@pytest.mark.parametrize(
    ("policy", "n_prompt", "protected"),
    [
        ("raas", 8, 8),
        ("raas-token", 8, 8),
        ("raas-reference", 8, 8),
        ("raas", 9, 2),
        ("raas", 1, 2),
        ("h2o", 5, 5),
        ("h2o", 6, 2),
        ("tova", 6, 2),
    ],
)
def test_how_much_of_a_prompt_is_protected(policy, n_prompt, protected):
    """Ten slots, of which one is recent: RaaS leaves one to evict, the others half of them."""
    cache = new_cache(EvictionConfig(10, policy, sinks=2, recent=1))
    text = random_text(cache, n_prompt + 30)
    prefill(cache, text[:n_prompt], chunk=4)
    assert cache.protected.item() == protected
    weigh = random_weights(0)
    for t in range(n_prompt, text.n_tokens):
        decode(cache, text[t], weigh)
        for p in range(min(protected, t)):
            assert (cache.position == p).any(dim=-1).all()


@pytest.mark.parametrize(
    ("policy", "budget", "sinks", "recent"),
    [
        ("h2o", 41, 4, 20),
        ("h2o-reference", 41, 4, 36),
        ("h2o-reference", 1000, 4, 128),
        ("h2o-reference", 5, 3, 1),
        ("tova", 41, 4, 1),
        ("raas", 41, 4, 1),
        ("raas-token", 41, 4, 1),
        ("raas-reference", 41, 4, 1),
        ("longflow", 41, 4, 1),
        ("longflow-reference", 41, 4, 1),
        ("snapkv", 41, 4, 20),
        ("snapkv", 1000, 4, 32),
        ("attn-hs", 41, 4, 10),
        ("attn-hs", 1000, 4, 128),
    ],
)
def test_default_recency(policy, budget, sinks, recent):
    """What the papers keep, or the code of EpiKV's authors."""
    assert EvictionConfig(budget, policy, sinks=sinks).recent == recent


# What must hold for any input ------------------------------------------------------------------


def assert_consistent(cache, text, n_prompt):
    """Everything that a cache of rows of equal length promises at any time.

    `text` is what it has taken from and will, of which `n_prompt` tokens are prompt.
    """
    config, n_seen = cache.config, cache.length[0].item()
    assert cache.length.eq(n_seen).all()
    n_held = min(config.budget, n_seen)
    free = config.budget - config.recent - config.value_reserve - 1
    limit = free if cache.policy.keeps_prompt else min(config.budget // 2, free)
    must_stay = {*range(min(config.sinks, n_seen)), *range(max(0, n_seen - config.recent), n_seen)}
    must_stay |= {*range(min(n_prompt, n_seen))} if n_prompt <= limit else set()
    must_stay |= {n_seen - 1} if n_seen else set()

    assert (cache.position[..., n_held:] == NO_POSITION).all()
    position = cache.position[..., :n_held]
    for row, layer, head in itertools.product(*map(range, position.shape[:3])):
        held = position[row, layer, head].tolist()
        assert len(held) == len(set(held)) == n_held
        assert must_stay <= set(held) <= set(range(n_seen))
    assert cache.score.isfinite().all() and cache.rows.isfinite().all()
    for i, (layer, at) in enumerate(zip(cache.layers, cache.per_layer(position), strict=True)):
        at = at[..., None].expand(*layer.k[:, :, :n_held].shape)
        for mine, theirs in ((layer.k, text.k), (layer.v, text.v)):
            assert torch.equal(mine[:, :, :n_held], theirs[:, i].to(mine.dtype).gather(2, at))


def one_hot(seed):
    """Like `random_weights`, but every query gives all to one token."""
    soft = random_weights(seed)

    def weigh(taken):
        weights = soft(taken)
        return torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)

    return weigh


WEIGHTS = {
    "random": random_weights,
    "equal": lambda seed: random_weights(seed, sharpness=0),
    "one-hot": one_hot,
    "ties": lambda seed: random_weights(seed, palette=[0.0, 0.25]),
    "none": lambda seed: random_weights(seed, palette=[0.0]),
}


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_invariants(policy, data):
    """Sinks, recent and protected tokens stay, and each slot has its position's key and value.

    Whatever the shapes, settings and weights, and with values of 1e30.
    """
    options, n_prompt, chunk, seed = data.draw(cases(policy))
    options["slot_map"] = data.draw(st.sampled_from(BASELINES[policy].slot_maps))
    config = settings_for(policy, **options)
    evictable = config.budget - config.sinks - config.recent
    if not BASELINES[policy].keeps_prompt:  # whose reserve is a test of its own
        reserve = data.draw(st.integers(0, evictable - 1))
        config = settings_for(policy, value_reserve=reserve, **options)
    sizes = dict(
        n_layers=data.draw(st.integers(2, 3)),
        n_kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.integers(2, 5)),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64])),
    )
    cache = new_cache(config, data.draw(st.integers(1, 3)), **sizes)
    text = random_text(cache, n_prompt + config.budget + 20, seed)
    huge = data.draw(st.sampled_from([0.0, 1e30, -1e30]))
    spoiled = torch.rand(text.v.shape, generator=torch.Generator().manual_seed(seed)) < 0.1
    text.v.masked_fill_(spoiled & (huge != 0), huge)
    if data.draw(st.booleans()):
        text.q.zero_()  # the prompt's weights are equal

    cache.protect_prompt(n_prompt)
    for start in range(0, n_prompt, chunk):
        admit(cache, text[start : min(start + chunk, n_prompt)])
        assert_consistent(cache, text, n_prompt)
    weigh = WEIGHTS[data.draw(st.sampled_from(sorted(WEIGHTS)))](seed)
    for t in range(n_prompt, text.n_tokens):
        victims, _ = decode(cache, text[t], weigh)
        assert (victims == NO_POSITION).eq(t < config.budget).all()
        assert_consistent(cache, text, n_prompt)


@pytest.mark.parametrize("policy", ["raas", "raas-token", "raas-reference", "h2o", "tova"])
@pytest.mark.parametrize("n_prompt", [5, 9, 10, 12, 14])
def test_a_value_reserve_leaves_a_token_to_evict(policy, n_prompt):
    """16 slots, 2 sinks, 1 recent, 5 of the largest values: sinks stay beside any prompt."""
    config = EvictionConfig(16, policy, sinks=2, recent=1, value_reserve=5)
    cache = new_cache(config)
    text = random_text(cache, n_prompt + 20)
    prefill(cache, text[:n_prompt], chunk=16)
    weigh = random_weights(0)
    for t in range(n_prompt, text.n_tokens):
        decode(cache, text[t], weigh)
        assert_consistent(cache, text, n_prompt)


def by_row(weighers):
    """One `weigh` for a batch of one for each row."""
    return lambda taken: torch.cat([w(taken[i : i + 1]) for i, w in enumerate(weighers)])


def stacked(texts):
    parts = zip(*((text.q, text.k, text.v, text.residuals) for text in texts), strict=True)
    return Text(*(torch.cat(part) for part in parts))


def run_rows(config, dtype, seeds, prompts, n_steps=70):
    """Prefill and decode rows that are seeded each by itself. Returns the cache and all victims."""
    cache = new_cache(config, len(seeds), dtype)
    texts = []
    for row, (seed, n_prompt) in enumerate(zip(seeds, prompts, strict=True)):
        one = new_cache(config, dtype=dtype)
        text = random_text(one, n_prompt + n_steps, seed)
        prefill(one, text[:n_prompt], chunk=13)
        cache.load_row(row, one)
        texts.append(text[n_prompt:])
    batch, weigh = stacked(texts), by_row([random_weights(seed) for seed in seeds])
    victims = [decode(cache, batch[t], weigh)[0] for t in range(n_steps)]
    return cache, torch.stack(victims, dim=1)  # [B, n_steps, l, h]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("policy", "slot_map"), VARIANTS)
def test_rows_are_independent(policy, slot_map, dtype):
    """A row alone and beside others of other lengths: all it holds is the same, bit by bit."""
    config = settings_for(policy, budget=24, sinks=2, slot_map=slot_map, window=8)
    alone, victims = run_rows(config, dtype, [5], [30])
    batch, of_batch = run_rows(config, dtype, [3, 5, 4], [0, 30, 9])
    assert victims.unique().numel() > 30
    assert torch.equal(of_batch[1], victims[0])
    for (name, one), (_, many) in zip(alone.named_buffers(), batch.named_buffers(), strict=True):
        assert torch.equal(one[0], many[1]), name


def start_and_go_on(cache, seed):
    """A prompt over budget, then 40 tokens. Returns all victims."""
    text = random_text(cache, 70, seed)
    prefill(cache, text[:30], chunk=11)
    weigh = random_weights(seed)
    return torch.stack([decode(cache, text[t], weigh)[0] for t in range(30, 70)])


@pytest.mark.parametrize(("policy", "slot_map"), VARIANTS)
def test_reset_forgets_everything_and_moves_nothing(policy, slot_map):
    """Every buffer is as in a new cache and where it was; a second run equals the first."""
    config = settings_for(policy, budget=20, sinks=1, slot_map=slot_map, window=8)
    cache, fresh = new_cache(config, 2), new_cache(config, 2)
    addresses = {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}
    untouched = {name: buffer.clone() for name, buffer in fresh.named_buffers()}
    assert {"rows", "entry", "layers.0.row", "layers.0.near"} <= untouched.keys()
    expected = start_and_go_on(fresh, seed=1)
    start_and_go_on(cache, seed=2)
    assert any(not torch.equal(b, untouched[name]) for name, b in cache.named_buffers())
    cache.reset()
    for name, buffer in cache.named_buffers():
        assert torch.equal(buffer, untouched[name]), name
    assert torch.equal(start_and_go_on(cache, seed=1), expected)
    for (name, one), (_, other) in zip(cache.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert {name: buffer.data_ptr() for name, buffer in cache.named_buffers()} == addresses
    assert cache.candidates is None and all(layer.prompt_rows is None for layer in cache.layers)


@pytest.mark.parametrize(("policy", "slot_map"), VARIANTS)
def test_load_row_copies_everything_and_touches_one_row(policy, slot_map):
    """What a used row was is gone, and what comes next is as in the source."""
    config = settings_for(policy, budget=20, sinks=1, slot_map=slot_map, window=8)
    source, cache = new_cache(config), new_cache(config, 3)
    start_and_go_on(cache, seed=3)
    start_and_go_on(source, seed=4)
    before = {name: buffer.clone() for name, buffer in cache.named_buffers()}
    cache.load_row(1, source)
    for (name, mine), theirs in zip(cache.named_buffers(), source.buffers(), strict=True):
        assert torch.equal(mine[1], theirs[0]), name
        assert torch.equal(mine[::2], before[name][::2]), name
    text = random_text(source, 30, seed=5)
    weigh = by_row([random_weights(0), random_weights(6), random_weights(1)])
    alone = random_weights(6)
    for t in range(30):
        expected, _ = decode(source, text[t], alone)
        victims, _ = decode(cache, stacked([text[t]] * 3), weigh)
        assert torch.equal(victims[1], expected[0])


# Inside the model ------------------------------------------------------------------------------


def softmax_by_hand(q, keys):
    """Weights [n] of a query [D] over keys [n, D]."""
    powers = (keys @ q / math.sqrt(len(q))).exp()
    return powers / powers.sum()


@pytest.mark.parametrize("policy", ["h2o", "tova", "longflow-reference"])
def test_the_weights_observed_in_a_decode_step(monkeypatch, policy):
    """A softmax over the slots that are taken, mean over two query heads; it also mixes the values.

    With one map for each head, each layer, and all, from the first token on until long after the
    cache is full.
    """
    engine = Engine(random_model(), EvictionConfig(24, policy, recent=2), Sampling(), 2, "none")
    cache, seen = engine.cache, []
    original = model_file.attend_to_slots

    def checked(q, layer, mask):
        y = original(q, layer, mask)
        i = [*cache.layers].index(layer)
        for row, head in itertools.product(range(2), range(2)):
            position = cache.position[row, i % cache.position.shape[1]]
            taken = position[head % len(position)] != NO_POSITION
            k, v = layer.k[row, head, taken], layer.v[row, head, taken]
            weights = [softmax_by_hand(q[row, of, 0], k) for of in (2 * head, 2 * head + 1)]
            given = layer.row[row, head]
            assert given[~taken].eq(0).all()
            torch.testing.assert_close(given[taken], (weights[0] + weights[1]) / 2)
            mixed = torch.cat([w @ v for w in weights])
            torch.testing.assert_close(y[row, 0].view(2, -1)[head], mixed)
            seen.append(int(taken.sum()))
        near = [
            (w >= 0.01 * w.max()).sum().item()
            for row in range(2)
            for w in all_weights(q, layer, cache, i, row)
        ]
        if layer.policy.reads_sparsity:
            near = torch.tensor(near).view(2, 4).double().mean(1)
            torch.testing.assert_close(layer.near, near)
        return y

    monkeypatch.setattr(model_file, "attend_to_slots", checked)
    run(engine, [[1, 2, 3], list(range(10))], 60)
    assert set(seen) == set(range(4, 25))
    assert seen.count(24) > 500


def all_weights(q, layer, cache, i, row):
    """The weights of every query head of a row."""
    for head in range(q.shape[1]):
        position = cache.position[row, i % cache.position.shape[1]]
        taken = position[(head // 2) % len(position)] != NO_POSITION
        yield softmax_by_hand(q[row, head, 0], layer.k[row, head // 2, taken])


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova"])
@pytest.mark.parametrize("budget", [90, 300], ids=["three chunks", "one chunk"])
def test_the_weights_observed_in_a_prompt(monkeypatch, policy, budget):
    """Sums over all queries, the last 32 or the last one, each over what was held and seen then."""
    model, config = random_model(n_layers=2), EvictionConfig(budget, policy, recent=8)
    cache = model.new_cache(config)
    given = {}  # (layer, head, position of the query): {position: weight}
    original = model_file.attend_to_prompt

    def recorded(q, k, v, layer, n_cached, mask):
        i, first = [*cache.layers].index(layer), cache.length.item()
        all_k = torch.cat([layer.k[:, :, :n_cached], k], dim=2)
        for head in range(2):
            position = cache.position[0, i, head % cache.position.shape[2]]
            held = position[:n_cached].tolist() + [*range(first, first + q.shape[2])]
            for t in range(q.shape[2]):
                keys = all_k[0, head, : n_cached + t + 1]
                weights = [softmax_by_hand(q[0, of, t], keys) for of in (2 * head, 2 * head + 1)]
                mean = ((weights[0] + weights[1]) / 2).tolist()
                given[i, head, first + t] = dict(zip(held, mean, strict=False))
        return original(q, k, v, layer, n_cached, mask)

    monkeypatch.setattr(model_file, "attend_to_prompt", recorded)
    model.prefill(torch.arange(220)[None] * 7 % 50, cache)
    n_rows = cache.policy.n_rows
    assert n_rows == {"h2o": 1, "snapkv": 32, "tova": 1}[policy]
    n_held = min(220, budget)
    for i, head in itertools.product(range(2), range(2)):
        position = cache.position[0, i, head % cache.position.shape[2]].tolist()[:n_held]
        for place in range(n_rows):
            queries = [q for q in range(220 - n_rows, 220) if q % n_rows == place]
            if policy == "h2o":
                queries = range(220)
            sums = [sum(given[i, head, q].get(p, 0.0) for q in queries) for p in position]
            found = cache.rows[0, i, head, place]
            torch.testing.assert_close(found[:n_held], torch.tensor(sums).double())
            assert found[n_held:].eq(0).all()


UNTHINNED = [name for name in BASELINES if name != "thinkv"]  # a transition frees slots anyway


@pytest.mark.parametrize("policy", UNTHINNED)
def test_a_budget_for_everything_gives_the_tokens_of_full(policy):
    """Greedy and sampled, prompts of 3 and 45 tokens, on every map."""
    model = random_model()
    sampling = Sampling(temperature=(0.0, 1.0), seed=4)
    prompts = [[1, 2, 3], list(range(45))]
    expected = run(Engine(model, EvictionConfig(200, "full"), sampling, 2, "none"), prompts, 80)
    assert len({*expected[0]}) > 2 and len({*expected[1]}) > 20
    for slot_map in BASELINES[policy].slot_maps:
        config = EvictionConfig(200, policy, slot_map=slot_map)
        engine = Engine(model, config, sampling, 2, "none")
        assert run(engine, prompts, 80) == expected, slot_map
        assert (engine.cache.position[1, 0, 0] != NO_POSITION).sum() == 45 + 79


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_run_depends_on_no_other(policy):
    """The same engine twice, with another prompt in between, evicting in every step."""
    engine = Engine(random_model(), EvictionConfig(16, policy, recent=2), Sampling(), 2, "none")
    prompts = [[1, 2, 3], list(range(40))]
    first = run(engine, prompts, 40)
    position = engine.cache.position.clone()
    run(engine, [list(range(30)), [7]], 25)
    assert run(engine, prompts, 40) == first
    assert torch.equal(engine.cache.position, position)


# The other variants differ in numbers, or in what runs eagerly at the end of a block.
STEPS = [
    "h2o",
    "tova",
    "raas",
    "thinkv",
    "thinkv-reference",
    "r-kv",
    "longflow",
    "snapkv",
    "attn-hs",
]


@pytest.mark.parametrize("policy", STEPS)
def test_compiled_step_equals_eager(policy):
    """Same tokens, slots and scores over filling and evicting, one prompt over budget."""
    model = random_model(n_layers=2)
    prompts = [[1, 2, 3], list(range(45)), list(range(40)) * 2]
    sampling = Sampling(temperature=(0.0, 1.0, 0.8), top_k=20, seed=3)
    config = EvictionConfig(48, policy, recent=8)
    engines = [Engine(model, config, sampling, 3, mode) for mode in ("blocks", "none")]
    tokens = [run(engine, prompts, 100) for engine in engines]
    compiled, eager = (engine.cache for engine in engines)
    assert tokens[0] == tokens[1]
    assert torch.equal(compiled.position, eager.position)
    # RoPE's cosines are float32 in any model, and the compiler has its own.
    for name, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name), rtol=1e-5, atol=1e-5)


# As on a CUDA device ---------------------------------------------------------------------------

BATCH, SLOTS, HEADS = 3, 1031, 4
EVERY_MAP = [(name, slot_map) for name in BASELINES for slot_map in BASELINES[name].slot_maps]


class Spelled(WithoutCudaBuild):
    """And one operator more, whose Python binding wants a CUDA build of torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not(*args)
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def fake_cuda(monkeypatch):
    """As in test_compile.py: tensors that have shapes but no values."""
    attention = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, attention, cuda_attention)
    monkeypatch.setattr(model_file, "causal_lower_right", lambda q, k: ("lower right", q, k))
    with FakeTensorMode(), torch.device("cuda"), Spelled():
        yield


@pytest.mark.parametrize("prefix", [512, None])
@pytest.mark.parametrize(("policy", "slot_map"), EVERY_MAP)
def test_decode_on_cuda(fake_cuda, policy, slot_map, prefix):
    """No value is asked for, and nothing is larger than [B, H, S] but the policy's own state.

    That is [B, L, H_kv, W, S], what the last W queries gave. Nothing copies a layer's K or V.
    """
    model = fake_model()
    cache = model.new_cache(EvictionConfig(SLOTS, policy, slot_map=slot_map), BATCH)
    state = DecodeState(Sampling(temperature=0.7, top_k=20), BATCH)
    with Allocations(model, cache, state) as allocations:
        decode_step(model, cache, state, prefix)
    assert len(allocations.shapes) > 100
    limit = max(BATCH * HEADS * SLOTS, cache.rows.numel())
    assert [s for s in allocations.shapes if torch.Size(s).numel() > limit] == []
    kv = {SLOTS, 64}  # the axes of keys and values
    assert not [s for s in allocations.shapes if kv <= {*s}]


@pytest.mark.parametrize(("policy", "slot_map"), VARIANTS)
def test_prefill_on_cuda(fake_cuda, policy, slot_map):
    """No value is asked for, and no tensor has two sequence axes, in a prompt of four chunks.

    The weights of a few queries at a time are [.., G * 64, N].
    """
    model = fake_model()
    cache = model.new_cache(EvictionConfig(331, policy, slot_map=slot_map))
    with Allocations(model, cache) as allocations:
        logits = model.prefill(torch.zeros(1, 1193, dtype=torch.int64), cache)
    assert logits.shape == (1, 300)
    sequence = {331, 200, 331 + 331, 331 + 200}
    assert any(331 in shape for shape in allocations.shapes)
    assert not with_two_axes(allocations, sequence)
    n_queries = min(331, 64 if cache.policy.accumulates else cache.policy.n_rows)
    shape = (1, 2, 2 * n_queries, 662)
    assert shape in allocations.shapes
    of_weights = {s[-2] for s in allocations.shapes if len(s) > 1 and s[-1] == 662}
    assert max(of_weights) == 2 * n_queries


@pytest.mark.parametrize("policy", ["r-kv", "r-kv-reference", "thinkv-reference"])
def test_the_end_of_a_block_on_cuda(fake_cuda, policy):
    """No value is asked for, so that it can be captured; every buffer keeps its storage."""
    cache = fake_model().new_cache(EvictionConfig(SLOTS, policy), BATCH)
    assert cache.captures_blocks
    before = [buffer.untyped_storage()._cdata for buffer in cache.buffers()]
    cache.end_block()
    assert [buffer.untyped_storage()._cdata for buffer in cache.buffers()] == before


def test_thinkv_plans_on_the_host(fake_cuda):
    """So its blocks are kept out of CUDA graphs: it does ask for values."""
    cache = fake_model().new_cache(EvictionConfig(SLOTS, "thinkv"), BATCH)
    assert not cache.captures_blocks
    with pytest.raises(DataDependentOutputException):
        cache.end_block()


# Registered names ------------------------------------------------------------------------------


def test_baselines_are_listed_once_registered():
    """An unknown policy is told all the names, and they have a cache of their own."""
    with pytest.raises(ValueError, match="unknown policy 'lru'") as error:
        EvictionConfig(64, "lru")
    for name in [*BEFORE, *BASELINES]:
        assert name in str(error.value).partition("known: ")[2].split(", ")
    for name in POLICY_NAMES:
        cache = new_cache(EvictionConfig(200, name))
        assert type(cache).__name__ == "AttentionCache"
        assert isinstance(cache.policy, BASELINES[name])


def test_baselines_are_unknown_until_registered(monkeypatch):
    """Importing the file changes nothing."""
    assert not BEFORE.keys() & BASELINES.keys()
    for name in BASELINES:
        monkeypatch.delitem(POLICIES, name)
    for name in ["lru", *BASELINES]:
        with pytest.raises(ValueError, match=f"unknown policy '{name}'") as error:
            EvictionConfig(64, name)
        known = str(error.value).partition("known: ")[2].split(", ")
        assert known == list(BEFORE)


def test_a_slot_map_that_a_policy_has_not_is_refused():
    """In one line that names those it has."""
    for name in POLICY_NAMES:
        maps = BASELINES[name].slot_maps
        for slot_map in {"shared", "layer", "head"} - {*maps}:
            with pytest.raises(ValueError, match="known: " + ", ".join(maps)):
                EvictionConfig(200, name, slot_map=slot_map)

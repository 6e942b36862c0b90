"""Feeding given texts: chunks against single steps, which are those of generation."""

from argparse import Namespace
from dataclasses import replace

import pytest
import tiny
import torch

from epikv import POLICIES, EvictionConfig
from generate import Engine, Sampling, full_budget
from model import Transformer
from replay import CHUNK, Replay, Setting, by_setting, parse_settings, takes_chunks

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = dict(num_hidden_layers=4, max_position_embeddings=1024)
    return Transformer.from_pretrained(tiny.make_checkpoint(folder, **config), dtype=torch.float64)


def random_tokens(*shape, seed=0):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def prompts_of(*lengths):
    return [random_tokens(length, seed=length).tolist() for length in lengths]


CHUNKED = [
    "epikv",
    "epikv-smooth",
    "epikv-raw",
    "epikv-band",
    "epikv-fit",
    "key-diff",
    "k-norm",
    "key-var",
    "value-var",
    "streaming",
    "random",
]


@pytest.mark.parametrize("reserve", [0, 5])
@pytest.mark.parametrize(
    "policy, slot_map",
    [*((policy, None) for policy in CHUNKED), ("k-norm", "head"), ("epikv-fit", "shared")],
)
def test_a_chunk_is_as_many_steps(model, policy, slot_map, reserve):
    """The same predictions, and the same tokens left in the same slots.

    Of rows whose prompt is protected, fits, and is longer than the budget; chunks that are cut
    short among them.
    """
    options = dict(seed=3, value_reserve=reserve, slot_map=slot_map)
    config = EvictionConfig(128, policy, **options, **tiny.needed(policy, 4))
    prompts, tokens = prompts_of(3, 100, 170), random_tokens(3, 3 * CHUNK + 10)
    single = Replay(model, config, prompts, tokens.shape[1], "none", chunked=False)
    chunked = Replay(model, config, prompts, tokens.shape[1], "none")
    assert chunked.chunked
    torch.testing.assert_close(chunked.feed(tokens), single.feed(tokens), rtol=0, atol=1e-10)
    torch.testing.assert_close(chunked.logits, single.logits, rtol=0, atol=1e-10)
    assert torch.equal(chunked.cache.position, single.cache.position)
    assert torch.equal(chunked.cache.length, single.cache.length)
    torch.testing.assert_close(chunked.cache.score, single.cache.score, rtol=0, atol=1e-9)


@pytest.mark.parametrize("log_age", [-3.0, 2.0])
def test_a_chunk_is_as_many_steps_where_age_counts_much(model, log_age):
    """A token that enters with a chunk is weighed by its age at each later step of others."""
    calibration = tiny.calibration(4, seed=1)
    fit = replace(calibration.fit, log_age=log_age)
    config = EvictionConfig(128, "epikv-fit", calibration=replace(calibration, fit=fit))
    tokens = random_tokens(2, 6 * CHUNK + 3)
    single, chunked = (
        Replay(model, config, prompts_of(3, 170), tokens.shape[1], "none", chunked=chunked)
        for chunked in (False, True)
    )
    torch.testing.assert_close(chunked.feed(tokens), single.feed(tokens), rtol=0, atol=1e-10)
    assert torch.equal(chunked.cache.position, single.cache.position)


def test_every_policy_takes_chunks_or_is_known_not_to():
    for name in POLICIES:
        config = EvictionConfig(128, name, **tiny.needed(name, 4))
        assert takes_chunks(config) == (name in [*CHUNKED, "full"]), name


def test_what_cannot_take_chunks():
    """A recency window shorter than a chunk."""
    assert takes_chunks(EvictionConfig(128, "epikv", recent=CHUNK))
    assert not takes_chunks(EvictionConfig(128, "epikv", recent=CHUNK - 1))


@pytest.mark.parametrize("policy", ["epikv", "epikv-fit", "lag-kv", "h2o"])
def test_single_steps_are_those_of_generation(model, policy):
    """Fed what a greedy run draws, the likeliest token is always the next one it draws."""
    config, prompts = EvictionConfig(32, policy, **tiny.needed(policy, 4)), prompts_of(5, 12)
    engine = Engine(model, config, Sampling(), 2, "none")
    engine.prefill(prompts)
    drawn = [engine.state.token.clone()]
    for step in range(1, 61):
        engine.step(engine.prefix(5 + step, 12 + step))
        if engine.cache.block and any((n + step) % engine.cache.block == 0 for n in (5, 12)):
            engine.end_block()
        drawn.append(engine.state.token.clone())
    drawn = torch.stack(drawn, dim=1)  # [B, 61]
    replay = Replay(model, config, prompts, 60, "none")
    assert not replay.chunked
    assert torch.equal(replay.feed(drawn[:, :60]).argmax(-1), drawn[:, :60])
    assert torch.equal(replay.logits.argmax(-1), drawn[:, 60])


@pytest.mark.parametrize("chunked", [False, True])
def test_logits_stand_before_their_tokens(model, chunked):
    """With a cache for everything they are those of one prefill of all the text."""
    (prompt,) = prompts_of(7)
    tokens = random_tokens(1, CHUNK + 9)
    config = EvictionConfig(full_budget(100), "full")
    replay = Replay(model, config, [prompt], tokens.shape[1], "none", chunked=chunked)
    logits = replay.feed(tokens)
    for n in (0, 1, CHUNK, CHUNK + 8):
        text = torch.tensor([prompt + tokens[0, :n].tolist()])
        wanted = model.prefill(text, model.new_cache(config))
        torch.testing.assert_close(logits[:, n], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "policy", ["epikv", "random", "epikv-seg", "epikv-fit", "h2o", "raas", "thinkv"]
)
def test_going_back(model, policy):
    """After `restore` the same tokens give the same predictions, bit for bit."""
    config, prompts = EvictionConfig(128, policy, **tiny.needed(policy, 4)), prompts_of(3, 90)
    replay = Replay(model, config, prompts, 400, "none")
    replay.feed(random_tokens(2, 150))
    saved = replay.save()
    tokens, others = random_tokens(2, 40, seed=1), random_tokens(2, 77, seed=2)
    first, last = replay.feed(tokens), replay.logits
    replay.restore(saved)
    assert not torch.equal(replay.feed(others)[:, :40], first)
    replay.restore(saved)
    assert torch.equal(replay.feed(tokens), first) and torch.equal(replay.logits, last)


@pytest.mark.parametrize("policy", ["epikv", "epikv-seg"])
def test_the_split_does_not_matter(model, policy):
    """Tokens fed at once, or in pieces that end anywhere."""
    config, tokens = EvictionConfig(128, policy), random_tokens(1, 200)
    replay, pieces = (Replay(model, config, prompts_of(9), 200, "none") for _ in range(2))
    parts = [pieces.feed(part) for part in tokens.split([1, 50, 32, 7, 110], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), replay.feed(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("policy", ["epikv", "streaming"])
def test_a_chunk_is_as_many_steps_where_positions_stop(model, policy):
    """The prompt's own stay true, longer than the budget or not."""
    config, prompts, tokens = EvictionConfig(128, policy), prompts_of(3, 170), random_tokens(2, 150)
    single, chunked = (
        Replay(model, config, prompts, 150, "none", positions="cache-length", chunked=chunked)
        for chunked in (False, True)
    )
    true = Replay(model, config, prompts, 150, "none")
    assert torch.equal(chunked.logits, true.logits)
    found, stopped = chunked.feed(tokens), single.feed(tokens)
    torch.testing.assert_close(found, stopped, rtol=0, atol=1e-10)
    assert not torch.allclose(found[0, 140], true.feed(tokens)[0, 140], rtol=0, atol=1e-3)


@pytest.mark.parametrize("policy", ["epikv", "lag-kv", "h2o", "thinkv"])
def test_the_share_of_slots_held(model, policy):
    """All that can be; but ThinKV empties slots, here after the first blocks: see its own tests."""
    replay = Replay(model, EvictionConfig(128, policy), prompts_of(10, 20), 200, "none")
    shares = []
    for token in random_tokens(2, 200).split(1, dim=1):
        replay.feed(token)
        position = replay.cache.position.flatten(1, 2)  # [B, l * h, S]
        possible = torch.tensor([10, 20]) + len(shares) + 1
        shares.append((position >= 0).double().mean((1, 2)) * 128 / possible.clamp(max=128))
        torch.testing.assert_close(replay.held[:, 0], shares[-1])
    assert (min(share.min() for share in shares) == 1) == (policy != "thinkv")


def test_nothing_compiles_while_tokens_are_fed(model):
    replay = Replay(model, EvictionConfig(32, "epikv"), prompts_of(3, 8), 60)
    with torch.compiler.set_stance("fail_on_recompile"):
        replay.feed(random_tokens(2, 60))


def test_more_than_the_context(model):
    with pytest.raises(ValueError, match="1025 tokens do not fit in the model's context of 1024"):
        Replay(model, EvictionConfig(32, "epikv"), prompts_of(3, 25), 1000)


def arguments(policies, budgets, recent, seed=0, calibration=None):
    """As the command line of a script gives them."""
    return Namespace(
        policies=policies, budgets=budgets, recent=recent, seed=seed, calibration=calibration
    )


def test_settings():
    """All combinations, but `full` only once; by budget in tables."""
    settings = parse_settings(arguments("epikv,full,k-norm", "64,32", "8,16"))
    assert [str(setting) for setting in settings] == [
        "epikv, recent 8, 64",
        "epikv, recent 16, 64",
        "full",
        "k-norm, recent 8, 64",
        "k-norm, recent 16, 64",
        "epikv, recent 8, 32",
        "epikv, recent 16, 32",
        "k-norm, recent 8, 32",
        "k-norm, recent 16, 32",
    ]
    keys = [dict(policy=s.policy, budget=s.budget, recent=s.recent, n=1) for s in settings[:6]]
    budgets = [setting.budget for setting in by_setting(keys + keys)]
    assert budgets == [None, 32, 64, 64, 64, 64]
    assert all(len(records) == 2 for records in by_setting(keys + keys).values())


def test_a_budget_for_everything_is_the_full_cache_s():
    """And its recency window is the one that such a budget has."""
    for setting in (Setting("full"), Setting("epikv", 500), Setting("epikv", 1000)):
        assert setting.config(500).budget == full_budget(500) == 1024
    assert Setting("epikv", 499).config(500).budget == 499
    assert Setting("random", 32, 7).config(500, seed=5) == EvictionConfig(
        32, "random", recent=7, seed=5
    )


def test_a_calibration_goes_with_every_setting():
    """Of which `epikv-fit` needs one, to be told before there is a model."""
    calibration = tiny.calibration(4)
    config = Setting("epikv-fit", 32).config(500, calibration=calibration)
    assert config == EvictionConfig(32, "epikv-fit", calibration=calibration)
    assert config.window == calibration.window
    policies = "epikv-fit,streaming,full"
    settings = parse_settings(arguments(policies, "64", None, calibration=calibration))
    assert [str(setting) for setting in settings] == ["epikv-fit, 64", "streaming, 64", "full"]
    assert [setting.slot_map for setting in settings] == ["head", "shared", "shared"]


@pytest.mark.parametrize(
    "given, words",
    [
        (("lru", "64", None), "unknown policy 'lru'"),
        (("epikv", "64,many", None), "budgets must be numbers with commas, got '64,many'"),
        (("epikv", "64", "8,"), "recent must be numbers with commas, got '8,'"),
        (("epikv", "64", "64"), "budget 64 is smaller than"),
        (("epikv", "0", None), "budget"),
        (("epikv", "64", None, -1), "seed must be from 0"),
        (("epikv-fit", "64", None), "policy 'epikv-fit' needs a calibration"),
    ],
)
def test_bad_settings(given, words):
    with pytest.raises(ValueError, match=words):
        parse_settings(arguments(*given))

"""generate(), stream() and the engine: against a slow decoder, by hand, and row by row."""

import contextlib
import math
import types
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
import twin
from safetensors.torch import load_file

import generate as generate_module
from epikv import POLICIES, EvictionConfig, Policy, SlotCache
from generate import Engine, Generation, Sampling, generate, memory_bandwidth, sample, stream
from model import Transformer

DEMO = Path(generate_module.__file__).parent / "models" / "SmolLM2-135M-Instruct"
N_BLOCKS = 8
CASES = {
    name: tiny.needed(name, N_BLOCKS)
    for name, policy in POLICIES.items()
    if policy.cache_type() is SlotCache
}
CASES |= {
    "lag-kv previous": dict(policy="lag-kv", lag_reference="previous"),
    "lag-kv by head": dict(policy="lag-kv", slot_map="head"),
    "key-diff by head": dict(policy="key-diff", slot_map="head"),
    "k-norm by head": dict(policy="k-norm", slot_map="head"),
    "epikv reserve": dict(policy="epikv", value_reserve=5),
    "lag-kv reserve": dict(policy="lag-kv", value_reserve=5, value_statistic="norm"),
    "epikv calibrated": dict(policy="epikv", calibration=tiny.calibration(N_BLOCKS)),
}
EVICTING = [name for name in CASES if name != "full"]
SMALL = dict(budget=24, recent=4, window=8)  # a cache that fills soon
BLOCKS = {"lag-kv": dict(recent=8, lag=4), "epikv-seg": dict(recent=4, lag=4, quotas=(3, 2, 1))}
CONTEXT = 1024


def case(name):
    """The settings of CASES called `name`, of a cache of any size."""
    return dict(policy=name) | CASES[name]


def small(name):
    """The same in a small cache, but for `full`, which has its own size."""
    settings = case(name)
    size = {} if name == "full" else SMALL | BLOCKS.get(settings["policy"], {})
    return size | settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama of 8 blocks, deep enough for the bands to differ; no test may change it."""
    folder = tmp_path_factory.mktemp("generate")
    tiny.make_model(folder, num_hidden_layers=N_BLOCKS, max_position_embeddings=CONTEXT)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    return tiny.make_tokenizer(folder, chat_template=template)


@pytest.fixture(scope="module")
def model(folder):
    """The same in float64."""
    return Transformer.from_pretrained(folder, device="cpu", dtype=torch.float64)


@pytest.fixture(scope="module")
def small_model(folder):
    """The same in float32."""
    return Transformer.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def demo():
    return Transformer.from_pretrained(DEMO, device="cpu")


def prompts_of(*lengths, seed=0):
    """Random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def run(model, prompts, **settings):
    """generate() without compilation, on past every end-of-sequence token."""
    return generate(model, prompts, **dict(compile_mode="none", ignore_eos=True) | settings)


def started(model, prompts, **settings):
    """The same, not yet run."""
    return stream(model, prompts, **dict(compile_mode="none", ignore_eos=True) | settings)


def tokens_of(result):
    return [output.tokens for output in result.outputs]


def cut(tokens, stop_ids):
    """Tokens up to the first that ends a text."""
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0]] if ends else tokens


# 1. A cache for everything -----------------------------------------------------------------------


DRAWN = dict(max_new_tokens=300, temperature=1.0, seed=5)  # greedy tokens soon run in a circle


@pytest.fixture(scope="module", params=[(40,), (3, 41, 90)], ids=["one row", "ragged"])
def full_run(request, small_model):
    """Prompts, and what `full` makes of them."""
    prompts = prompts_of(*request.param)
    return prompts, run(small_model, prompts, policy="full", **DRAWN)


@pytest.mark.parametrize(
    "name", [name for name in EVICTING if name in POLICIES] + ["lag-kv by head", "epikv reserve"]
)
def test_a_cache_for_everything_equals_full(small_model, full_run, name):
    """It has just enough slots; the last token is drawn and not fed, so it needs none."""
    prompts, expected = full_run
    budget = max(map(len, prompts)) + 300 - 1
    result = run(small_model, prompts, budget=budget, sinks=2, **case(name), **DRAWN)
    assert [len(tokens) for tokens in tokens_of(result)] == [300] * len(prompts)
    assert result.outputs == expected.outputs
    assert result.statistics.tokens_evicted == 0


N_DEMO, N_RAGGED = 80, 30  # new tokens of one row, and of two: the demo model takes its time


@pytest.fixture(scope="module")
def demo_prompts(demo):
    texts = ["Explain in plain words how rain forms.", "Tell me about the sea.\n" * 6]
    return [demo.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def demo_full(demo, demo_prompts):
    """The tokens of `full`: of the first prompt alone, and of both."""
    alone = run(demo, demo_prompts[:1], policy="full", max_new_tokens=N_DEMO)
    both = run(demo, demo_prompts, policy="full", max_new_tokens=N_RAGGED)
    return tokens_of(alone) + tokens_of(both)


@pytest.mark.parametrize(
    "name",
    ["epikv", "epikv-smooth", "epikv-raw", "epikv-band", "streaming", "random"]
    + ["epikv-seg", "lag-kv by head"],
)
def test_the_demo_in_a_cache_for_everything_equals_full(demo, demo_prompts, demo_full, name):
    budget = len(demo_prompts[0]) + N_DEMO - 1
    result = run(demo, demo_prompts[:1], budget=budget, max_new_tokens=N_DEMO, **case(name))
    assert tokens_of(result) == demo_full[:1]


@pytest.mark.parametrize("policy", ["epikv-smooth"])
def test_the_demo_with_ragged_rows_equals_full(demo, demo_prompts, demo_full, policy):
    """The first of the two rows also has the tokens it has alone."""
    budget = max(map(len, demo_prompts)) + N_RAGGED - 1
    result = run(demo, demo_prompts, policy=policy, budget=budget, max_new_tokens=N_RAGGED)
    assert tokens_of(result) == demo_full[1:]
    assert demo_full[1] == demo_full[0][:N_RAGGED]


# 2. A slow decoder -------------------------------------------------------------------------------


class SlowDecoder:
    """A Llama in float64 that keeps every token's keys and values, and is told what to look at."""

    def __init__(self, folder):
        self.config = tiny.read_json(folder / "config.json")
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.keys = [[] for _ in range(self.config["num_hidden_layers"])]
        self.values = [[] for _ in self.keys]

    def norm(self, x, name):
        scale = math.sqrt(x.square().mean() + self.config["rms_norm_eps"])
        return x / scale * self.weights[f"{name}.weight"]

    def rotate(self, x, position):
        """Turn x [heads, D]: dimensions i and i + D/2 as a complex number; angles in float32."""
        size = x.shape[1]
        exponent = torch.arange(0, size, 2).float() / size
        angle = position / self.config["rope_parameters"]["rope_theta"] ** exponent
        turn = torch.complex(angle.cos().double(), angle.sin().double())
        turned = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    def step(self, token, visible):
        """Take the next token, which sees the positions `visible`, its own included.

        visible: by (layer, head), or "shared" for all.

        Returns its logits, and in plain lists the residual after each block, the keys and the
        values of each layer's heads.
        """
        position = len(self.keys[0])
        size = self.config["head_dim"]
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        x, residuals = self.weights["model.embed_tokens.weight"][token], []
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            name = f"model.layers.{layer}"

            def linear(y, part, name=name):
                return self.weights[f"{name}.{part}.weight"] @ y

            y = self.norm(x, f"{name}.input_layernorm")
            q = self.rotate(linear(y, "self_attn.q_proj").view(-1, size), position)
            keys.append(self.rotate(linear(y, "self_attn.k_proj").view(-1, size), position))
            values.append(linear(y, "self_attn.v_proj").view(-1, size))
            k, v = [], []
            for head in range(len(keys[0])):
                mine = visible["shared"] if "shared" in visible else visible[layer, head]
                k.append(torch.stack([keys[i][head] for i in mine]))
                v.append(torch.stack([values[i][head] for i in mine]))
            k = torch.stack(k, dim=1).repeat_interleave(group, dim=1)
            v = torch.stack(v, dim=1).repeat_interleave(group, dim=1)
            weight = (torch.einsum("hd,nhd->hn", q, k) / math.sqrt(size)).softmax(dim=1)
            attended = torch.einsum("hn,nhd->hd", weight, v).flatten()
            x = x + linear(attended, "self_attn.o_proj")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate = linear(y, "mlp.gate_proj")
            x = x + linear(gate * gate.sigmoid() * linear(y, "mlp.up_proj"), "mlp.down_proj")
            residuals.append(x.tolist())
        logits = self.weights["lm_head.weight"] @ self.norm(x, "model.norm")
        k, v = ([of_layer[-1].tolist() for of_layer in kept] for kept in (self.keys, self.values))
        return logits, (residuals, k, v)


def positions(reference):
    """Those that each map of the twin holds."""
    return {
        head: [token["position"] for token in tokens] for head, tokens in reference.maps.items()
    }


def slow_generate(folder, prompt, n_new, reference, chunk, choose):
    """Decode with a SlowDecoder, the row `reference` of the twin saying what is kept.

    choose: the next token from logits and the position of the last token.
    """
    decoder = SlowDecoder(folder)
    for start in range(0, len(prompt), chunk):
        before, contents = positions(reference), []
        for i in range(start, min(start + chunk, len(prompt))):
            visible = {head: [*kept, *range(start, i + 1)] for head, kept in before.items()}
            logits, content = decoder.step(prompt[i], visible)
            contents.append(content)
        reference.admit(start, *zip(*contents, strict=True))
    tokens = [choose(logits, len(prompt) - 1)]
    while len(tokens) < n_new:
        position = len(prompt) + len(tokens) - 1
        visible = {head: [*kept, position] for head, kept in positions(reference).items()}
        for head, held in reference.maps.items():
            if reference.policy != "full" and len(visible[head]) > reference.budget:
                visible[head].remove(reference.worst(held, newest=position)["position"])
        logits, content = decoder.step(tokens[-1], visible)
        reference.append(position, *content)
        for head, kept in positions(reference).items():
            assert sorted(kept) == sorted(visible[head])
        tokens.append(choose(logits, position))
    return tokens


def slow_draw(logits, temperature, seed, row, position):
    """The largest probability / exponential noise, in plain floats."""
    if temperature == 0:
        return logits.argmax().item()
    probability = (logits / temperature).softmax(dim=0).tolist()
    race = [
        p / -math.log(twin.hash_uniform(seed, row, position, token))
        for token, p in enumerate(probability)
    ]
    return race.index(max(race))


GREEDY = ["epikv", "epikv-smooth", "epikv-raw", "epikv-band", "streaming", "random", "full"]


@pytest.mark.parametrize(
    "name, temperature", [*((name, 1.0) for name in CASES), *((name, 0.0) for name in GREEDY)]
)
def test_tokens_equal_those_of_a_slow_decoder(folder, model, name, temperature):
    """Prompts in half the budget, at it, over it and far over; 40 tokens after each."""
    prompts, n_new, seed = prompts_of(7, 24, 25, 60, 150), 40, 3
    settings = small(name)
    result = run(
        model, prompts, max_new_tokens=n_new, temperature=temperature, seed=seed, **settings
    )
    for row, (prompt, output) in enumerate(zip(prompts, result.outputs, strict=True)):
        sizes = dict(n_layers=8, n_heads=2, n_prompt=len(prompt))
        reference = twin.TwinRow(**SMALL | settings, seed=seed, **sizes)
        chunk = 2048 if name == "full" else 24

        def choose(logits, position, row=row):
            return slow_draw(logits, temperature, seed, row, position)

        expected = slow_generate(folder, prompt, n_new, reference, chunk, choose)
        assert output.tokens == expected, f"row {row}"
        assert output.kept == sorted(set().union(*positions(reference).values())), f"row {row}"


def test_eviction_matters_to_these_tokens(model):
    """Otherwise the comparisons with the slow decoder would say little."""
    prompts = prompts_of(7, 24, 25, 60, 150)
    runs = {
        tuple(map(tuple, tokens_of(run(model, prompts, max_new_tokens=40, **small(name)))))
        for name in CASES
    }
    assert len(runs) == len(CASES)


# A policy of one's own ---------------------------------------------------------------------------


class Startling(Policy):
    """Forget the token that changed block 10 of 32 the least."""

    bands = ((10,),)

    def score(self, tokens):
        return tokens.change[..., 0]


def test_a_policy_of_ones_own_runs(folder, model, monkeypatch):
    """A class with one method and one band: its tokens are those of a slow decoder that forgets
    by the same rule. In 8 blocks the band is block 2, or 2.5 rounded to even."""
    monkeypatch.setitem(POLICIES, "startling", Startling)

    class Row(twin.TwinRow):
        def score(self, position, residuals, keys, values):
            before, self.residuals = self.residuals, residuals
            return math.dist(residuals[2], before[2]) if position > 0 else 0.0

    prompts = prompts_of(7, 60)
    result = run(model, prompts, policy="startling", max_new_tokens=40, **SMALL)
    for prompt, output in zip(prompts, result.outputs, strict=True):
        reference = Row("startling", n_layers=8, n_heads=2, n_prompt=len(prompt), **SMALL)
        likeliest = slow_generate(
            folder, prompt, 40, reference, 24, lambda logits, position: logits.argmax().item()
        )
        assert output.tokens == likeliest
        assert output.kept == sorted(positions(reference)["shared"])
    assert tokens_of(result) != tokens_of(run(model, prompts, max_new_tokens=40, **SMALL))
    named = run(model, prompts, policy="startling", max_new_tokens=40, band_a=(2,), **SMALL)
    assert tokens_of(named) == tokens_of(result)


def test_an_unknown_policy_is_told_the_known_ones(idle, monkeypatch):
    """With one that was entered a moment ago."""
    monkeypatch.setitem(POLICIES, "startling", Startling)
    with pytest.raises(ValueError, match="unknown policy 'lru'; known: ") as error:
        started(idle, [[1]], policy="lru", max_new_tokens=1)
    known = str(error.value).partition("known: ")[2].split(", ")
    assert known == list(POLICIES) and "startling" in known and "lag-kv" in known


# The ends of blocks ------------------------------------------------------------------------------


def watched_ends(generation, monkeypatch):
    """Run it. Returns the lengths of all rows at each step, and those at each call of end_block."""
    engine, steps, ends = generation.engine, [], []
    step, end_block = engine.step, engine.end_block

    def watched_step(prefix):
        step(prefix)
        steps.append(engine.cache.length.tolist())

    def watched_end():
        ends.append(engine.cache.length.tolist())
        end_block()

    monkeypatch.setattr(engine, "step", watched_step)
    monkeypatch.setattr(engine, "end_block", watched_end)
    list(generation)
    return steps, ends


@pytest.mark.parametrize("policy", BLOCKS)
@pytest.mark.parametrize("lengths", [(7,), (8,), (3, 8, 30), (5, 9, 61), (5, 6, 7, 8)], ids=str)
def test_a_block_ends_after_a_step_that_completes_one_in_a_row(model, monkeypatch, policy, lengths):
    """Blocks of 4: exactly once after such a step, and after no other."""
    settings = dict(max_new_tokens=40, **small(policy))
    generation = started(model, prompts_of(*lengths), **settings)
    steps, ends = watched_ends(generation, monkeypatch)
    assert steps == [[n + i for n in lengths] for i in range(1, 40)]
    assert ends == [step for step in steps if any(n % 4 == 0 for n in step)]
    assert len(ends) >= 9


@pytest.mark.parametrize("name", ["epikv", "key-diff by head", "epikv reserve", "streaming"])
def test_no_block_ends_where_there_is_none(model, monkeypatch, name):
    generation = started(model, prompts_of(8, 12), max_new_tokens=40, **small(name))
    steps, ends = watched_ends(generation, monkeypatch)
    assert len(steps) == 39 and ends == []


# 3. Rows -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_logits(model):
    """Collect the logits [rows, vocab] of every call."""
    seen, compute = [], model.logits

    def watched(x):
        seen.append(compute(x))
        return seen[-1]

    model.logits = watched
    yield seen
    del model.logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "name",
    ["epikv", "epikv-smooth", "epikv-band", "random", "epikv-seg", "lag-kv", "key-diff by head"]
    + ["value-var", "lag-kv reserve"],
)
def test_a_row_has_the_same_bits_beside_any_mates(model, name, temperature):
    """Three rows, the middle one the same twice: its logits agree bit for bit."""
    mine, *mates = prompts_of(30, 9, 50, 9, 50)
    logits, tokens = [], []
    for first, last in (mates[:2], mates[2:]):
        settings = dict(max_new_tokens=50, temperature=temperature, **small(name))
        with watch_logits(model) as seen:
            result = run(model, [first, mine, last], **settings)
        tokens.append(tokens_of(result))
        logits.append(torch.stack([seen[1][0], *(step[1] for step in seen[3:])]))
    assert len(logits[0]) == 50
    assert torch.equal(logits[0], logits[1])
    assert tokens[0][1] == tokens[1][1]
    assert tokens[0][0] != tokens[1][0] and tokens[0][2] != tokens[1][2]


@pytest.mark.parametrize("name", EVICTING)
def test_a_row_has_the_tokens_it_has_alone(model, name):
    """Also when its mates are longer or shorter, and fill their slots at other times."""
    prompts = prompts_of(3, 12, 20, 20, 24, 80)  # two of a length, but not the same
    settings = dict(max_new_tokens=50, **small(name))
    together = run(model, prompts, **settings)
    for prompt, output in zip(prompts, together.outputs, strict=True):
        alone = run(model, [prompt], **settings).outputs[0]
        assert output == alone


@pytest.fixture
def ends_early(model, monkeypatch):
    """Three prompts of which only the middle one soon draws the token that is made to end texts.

    Returns the prompts, settings, the end token and the tokens of a run that does not stop.
    """
    prompts = prompts_of(5, 20, 60)
    settings = dict(policy="epikv", max_new_tokens=60, temperature=1.0, seed=2, **SMALL)
    endless = tokens_of(run(model, prompts, **settings))
    elsewhere = {*endless[0], *endless[2], *endless[1][:5]}
    stop = next(token for token in endless[1][5:20] if token not in elsewhere)
    monkeypatch.setitem(model.defaults, "eos_token_id", stop)
    monkeypatch.setattr(model.tokenizer, "eos_id", None)
    return prompts, settings, stop, endless


def test_a_row_that_ends_early_changes_nothing_for_others(model, ends_early):
    prompts, settings, stop, endless = ends_early
    result = run(model, prompts, ignore_eos=False, **settings)
    assert tokens_of(result) == [cut(tokens, {stop}) for tokens in endless]
    assert [output.stop_reason for output in result.outputs] == ["length", "eos", "length"]
    assert [len(tokens) for tokens in tokens_of(result)][::2] == [60, 60]
    assert 5 <= len(result.outputs[1].tokens) < 20
    assert result.outputs[1].text == model.tokenizer.decode(result.outputs[1].tokens)


def test_what_a_row_that_ended_kept_does_not_depend_on_its_mates(model, ends_early):
    """It is what was in the cache at its end, as in a batch that goes no further."""
    prompts, settings, stop, endless = ends_early
    output = run(model, prompts, ignore_eos=False, **settings).outputs[1]
    n_new = len(output.tokens) + 1  # the end token is drawn, and not fed
    ended = run(model, prompts, **settings | dict(max_new_tokens=n_new)).outputs[1]
    assert ended.tokens[:-1] == output.tokens
    assert output.kept == ended.kept


def test_samples_of_a_prompt_follow_the_seed(model):
    prompts = prompts_of(9, 30)
    settings = dict(temperature=1.0, num_samples=3, max_new_tokens=25, **SMALL)
    first, again, other = (
        tokens_of(run(model, prompts, seed=seed, **settings)) for seed in (1, 1, 2)
    )
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 6
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


def test_samples_of_a_prompt_stand_together(model):
    a, b = prompts_of(9, 30)
    samples = started(model, [a, b], num_samples=2, max_new_tokens=1)
    assert samples.prompts == [a, a, b, b]
    settings = dict(temperature=1.0, seed=4, max_new_tokens=25, **SMALL)
    assert tokens_of(run(model, [a, b], num_samples=2, **settings)) == tokens_of(
        run(model, [a, a, b, b], **settings)
    )


# 4. Nothing stays --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("name", EVICTING)
def test_nothing_stays_between_the_prompts_of_an_engine(model, name, n_rows):
    """Tokens, kept positions and every buffer of the cache that a token could be read from."""
    engine = Engine(
        model,
        EvictionConfig(**small(name)),
        Sampling(temperature=1.0, seed=1),
        n_rows,
        compile_mode="none",
    )
    outcomes = []
    for lengths, seed in [((9, 40), 0), ((60, 7), 1), ((9, 40), 0)]:
        generation = Generation(engine, prompts_of(*lengths[:n_rows], seed=seed), 45, set())
        list(generation)
        buffers = {name: b.clone() for name, b in engine.cache.named_buffers()}
        outcomes.append((generation.result().outputs, buffers))
    (first, cache), (other, _), (again, cache_again) = outcomes
    assert first == again != other
    for name, buffer in cache.items():
        assert torch.equal(buffer, cache_again[name]), name


def test_nothing_stays_when_a_generation_was_left(model):
    config = EvictionConfig(policy="epikv-smooth", **SMALL)
    engine = Engine(model, config, Sampling(), 1, compile_mode="none")
    (prompt,) = prompts_of(30)
    expected = tokens_of(run(model, [prompt], policy="epikv-smooth", max_new_tokens=20, **SMALL))
    for _ in zip(range(7), Generation(engine, prompts_of(11, seed=1), 20, set()), strict=False):
        pass
    generation = Generation(engine, [prompt], 20, set())
    list(generation)
    assert tokens_of(generation.result()) == expected


def test_two_streams_at_once_do_not_meet(model):
    a, b = prompts_of(9, 30)
    settings = dict(max_new_tokens=40, **SMALL)
    expected = [tokens_of(run(model, [prompt], **settings)) for prompt in (a, b)]
    generations = [started(model, [prompt], **settings) for prompt in (a, b)]
    for _ in zip(*generations, strict=True):
        pass
    assert [tokens_of(generation.result()) for generation in generations] == expected


# 5. Sampling -------------------------------------------------------------------------------------

LOGITS = [1.5, -0.5, 0.3, 0.0, 2.0, -1.0, 1.1, -2.2]  # no two alike, and none very unlikely


def draw(logits, sampling, seed=0, position=0):
    """sample() for the rows of `logits` [B, vocab]; seed and position may be one for each call."""
    logits = torch.as_tensor(logits)
    n_rows = len(logits)
    return sample(
        logits,
        sampling,
        torch.tensor(sampling.temperatures(n_rows)),
        torch.tensor([seed]),
        torch.as_tensor(position).expand(n_rows),
    ).tolist()


def random_logits(n_rows, n_tokens=50, seed=0):
    return 2 * torch.randn(n_rows, n_tokens, generator=torch.Generator().manual_seed(seed))


def softmax(logits, temperature=1.0):
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def allowed(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Probability of each token that may be drawn, worked out one limit after the other."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    probability = dict(
        zip(ranked, softmax([logits[token] for token in ranked], temperature), strict=True)
    )
    if top_p is not None:
        for n_tokens in range(len(ranked), 0, -1):  # the fewest that make up the share
            if n_tokens == 1 or sum(probability[token] for token in ranked[: n_tokens - 1]) < top_p:
                ranked = ranked[:n_tokens]
                break
    if min_p is not None:
        most = probability[ranked[0]]
        ranked = [token for token in ranked if probability[token] >= min_p * most]
    total = sum(probability[token] for token in ranked)
    return {token: probability[token] / total for token in ranked}


def chi_square(counts, probability):
    """Pearson's statistic of observed counts."""
    n = sum(counts.values())
    return sum((counts[token] - n * p) ** 2 / (n * p) for token, p in probability.items())


@pytest.mark.parametrize("top_k, top_p, min_p", [(None, None, None), (3, 0.5, 0.1)])
def test_temperature_0_is_argmax_row_by_row(top_k, top_p, min_p):
    """In a batch of mixed temperatures; the other rows draw what they draw anyway."""
    logits = random_logits(200)
    limits = dict(top_k=top_k, top_p=top_p, min_p=min_p)
    temperatures = [0.0 if row % 3 == 0 else 1.5 for row in range(200)]
    mixed = draw(logits, Sampling(temperature=temperatures, **limits))
    drawn = draw(logits, Sampling(temperature=1.5, **limits))
    likeliest = logits.argmax(dim=1).tolist()
    assert mixed == [likeliest[row] if row % 3 == 0 else drawn[row] for row in range(200)]
    assert sum(mine != theirs for mine, theirs in zip(mixed, likeliest, strict=True)) > 20


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 100.0])
def test_top_k_1_is_argmax(temperature):
    logits = random_logits(200)
    drawn = draw(logits, Sampling(temperature=temperature, top_k=1))
    assert drawn == logits.argmax(dim=1).tolist()


def test_a_tiny_temperature_is_argmax():
    """1e-9 times any difference of logits is far beyond what noise makes up for."""
    logits = random_logits(200)
    assert draw(logits, Sampling(temperature=1e-9)) == logits.argmax(dim=1).tolist()


def test_one_likeliest_token_is_one_even_if_another_ties():
    """Logits that were computed in bfloat16 tie often."""
    logits = [[1.0, 3.0, 3.0, 0.0]] * 200
    assert len(set(draw(logits, Sampling(temperature=1.0, top_k=1)))) == 1


# Draws that differ in what the noise hangs on: the row, the position or the seed.
VARIED = {
    "row": lambda sampling, n: draw([LOGITS] * n, sampling),
    "position": lambda sampling, n: [
        draw([LOGITS], sampling, position=position)[0] for position in range(n)
    ],
    "seed": lambda sampling, n: [draw([LOGITS], sampling, seed=seed)[0] for seed in range(n)],
}


@pytest.mark.parametrize(
    "limits",
    [dict(temperature=1.0), dict(temperature=0.7), dict(temperature=1.6, top_k=6, top_p=0.9)],
    ids=["plain", "cold", "limited"],
)
@pytest.mark.parametrize("varied", VARIED)
def test_tokens_come_as_often_as_their_probability_says(varied, limits):
    """Chi-square with at most 7 degrees of freedom passes 40 once in 800,000."""
    counts = Counter(VARIED[varied](Sampling(**limits), 5000))
    probability = allowed(LOGITS, **limits)
    assert counts.keys() <= probability.keys()
    assert chi_square(counts, probability) < 40


@pytest.mark.parametrize("neighbour", ["row", "position", "seed"])
def test_neighbouring_draws_are_independent(neighbour):
    """Pairs of draws come as often as the product; 15 degrees of freedom pass 57 as rarely."""
    logits, sampling = [LOGITS[:4]] * 20000, Sampling(temperature=1.0)
    first = draw(logits, sampling)
    second = {
        "row": lambda: first[1:] + first[:1],
        "position": lambda: draw(logits, sampling, position=1),
        "seed": lambda: draw(logits, sampling, seed=1),
    }[neighbour]()
    p = softmax(LOGITS[:4])
    pairs = {(i, j): p[i] * p[j] for i in range(4) for j in range(4)}
    counts = Counter(zip(first, second, strict=True))
    if neighbour == "row":  # every draw counts in two pairs: take each once
        counts = Counter(zip(first[::2], first[1::2], strict=True))
    assert chi_square(counts, pairs) < 57


LIMITS = [
    dict(top_k=1),
    dict(top_k=3),
    dict(top_k=8),
    dict(top_k=1000),
    dict(top_p=1e-6),
    dict(top_p=0.3),
    dict(top_p=0.5),
    dict(top_p=0.9),
    dict(top_p=1.0),
    dict(min_p=0.0),
    dict(min_p=0.2),
    dict(min_p=0.7),
    dict(min_p=1.0),
    dict(top_k=5, top_p=0.8),
    dict(top_k=5, min_p=0.2),
    dict(top_p=0.9, min_p=0.3),
    dict(top_k=6, top_p=0.95, min_p=0.15),
]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_limits_leave_exactly_the_tokens_they_should(limits, temperature):
    """The least likely one of any set here comes in 0.05 % of draws, so in 40,000 it does."""
    expected = allowed(LOGITS, temperature, **limits)
    drawn = draw([LOGITS] * 40000, Sampling(temperature=temperature, **limits))
    assert min(expected.values()) > 0.0005
    assert set(drawn) == expected.keys()


@pytest.mark.parametrize("limits", [dict(top_p=1.0), dict(min_p=0.0), dict(top_k=49152)], ids=str)
def test_a_limit_that_limits_nothing_changes_no_draw(limits):
    """Over a vocabulary of the real size."""
    logits = random_logits(50, n_tokens=49152)
    unlimited = draw(logits, Sampling(temperature=1.0))
    assert draw(logits, Sampling(temperature=1.0, **limits)) == unlimited


def test_a_row_draws_the_same_in_any_batch():
    """Beside other rows, and in a longer batch."""
    mine = random_logits(3)
    sampling = Sampling(temperature=1.0, top_p=0.95)
    expected = draw(mine, sampling, seed=4, position=9)
    for n_mates in (2, 5, 40):
        batch = torch.cat([mine, random_logits(n_mates, seed=n_mates)])
        assert draw(batch, sampling, seed=4, position=9)[:3] == expected


def test_the_noise_of_a_row_follows_its_own_position():
    logits = random_logits(1).expand(300, -1)
    sampling = Sampling(temperature=1.0)
    position = torch.arange(300) % 3
    apart = [draw(logits, sampling, position=p) for p in range(3)]
    assert draw(logits, sampling, position=position) == [apart[r % 3][r] for r in range(300)]
    assert apart[0] != apart[1] != apart[2]


@pytest.mark.parametrize(
    "setting, words",
    [
        (dict(temperature=-0.1), "temperature must be 0 or more"),
        (dict(temperature=[0.5, -1.0]), "temperature must be 0 or more"),
        (dict(temperature=math.nan), "temperature must be 0 or more"),
        (dict(top_k=0), "top-k must be a whole number of at least 1, got 0"),
        (dict(top_k=-5), "top-k must be a whole number of at least 1, got -5"),
        (dict(top_p=0.0), "top-p must be above 0 and at most 1, got 0.0"),
        (dict(top_p=1.5), "top-p must be above 0 and at most 1, got 1.5"),
        (dict(top_p=math.nan), "top-p must be above 0"),
        (dict(min_p=-0.1), "min-p must be from 0 to 1, got -0.1"),
        (dict(min_p=2.0), "min-p must be from 0 to 1, got 2.0"),
        (dict(min_p=math.nan), "min-p must be from 0 to 1"),
        (dict(seed=-1), "seed must be from 0 to 2.32 - 1, got -1"),
        (dict(seed=2**32), "seed must be from 0 to 2.32 - 1, got 4294967296"),
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**setting)


R1 = dict(do_sample=True, temperature=0.6, top_p=0.95)


@pytest.mark.parametrize(
    "defaults, given, expected",
    [
        ({}, {}, Sampling()),
        (R1 | dict(do_sample=False), {}, Sampling()),
        (dict(temperature=0.6, top_k=20), {}, Sampling()),
        (R1, {}, Sampling(temperature=0.6, top_p=0.95)),
        (dict(do_sample=True), {}, Sampling(temperature=1.0)),
        (dict(do_sample=True, top_k=20, min_p=0.1), {}, Sampling(1.0, top_k=20, min_p=0.1)),
        (dict(do_sample=True, temperature=None, top_k=None), {}, Sampling(temperature=1.0)),
        (dict(do_sample=True, top_k=0), {}, Sampling(temperature=1.0)),
        (R1, dict(temperature=0.0), Sampling()),
        (R1, dict(temperature=1.2), Sampling(temperature=1.2, top_p=0.95)),
        (R1, dict(top_p=0.5, top_k=7), Sampling(temperature=0.6, top_p=0.5, top_k=7)),
        (R1, dict(top_p=None, min_p=0.1), Sampling(temperature=0.6, top_p=0.95, min_p=0.1)),
        (R1, dict(min_p=0.0), Sampling(temperature=0.6, top_p=0.95, min_p=0.0)),
        (R1, dict(temperature=[0.0, 0.5]), Sampling(temperature=[0.0, 0.5], top_p=0.95)),
        (R1, dict(temperature=[0.0, 0.0]), Sampling(temperature=[0.0, 0.0])),
        (dict(temperature=0.6, top_p=0.9), dict(temperature=0.8), Sampling(temperature=0.8)),
        ({}, dict(temperature=0.8, top_k=5), Sampling(temperature=0.8, top_k=5)),
        (R1, dict(seed=9), Sampling(temperature=0.6, top_p=0.95, seed=9)),
    ],
    ids=str,
)
def test_the_checkpoints_defaults_hold_where_nothing_is_given(defaults, given, expected):
    assert Sampling.for_model(types.SimpleNamespace(defaults=defaults), **given) == expected


@pytest.mark.parametrize("defaults", [{}, R1 | dict(do_sample=False)], ids=["none", "greedy"])
@pytest.mark.parametrize("temperature", [None, 0.0, [0.0, 0.0]], ids=str)
@pytest.mark.parametrize("name, value", [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_limits_at_temperature_0_are_refused(defaults, temperature, name, value):
    model = types.SimpleNamespace(defaults=defaults)
    words = f"{name.replace('_', '-')} has no effect at temperature 0; set a temperature"
    with pytest.raises(ValueError, match=words):
        Sampling.for_model(model, temperature=temperature, **{name: value})
    with pytest.raises(ValueError, match=words):
        Sampling.for_model(types.SimpleNamespace(defaults=R1), temperature=0.0, **{name: value})


def test_a_checkpoints_defaults_reach_the_tokens(model, monkeypatch):
    prompts = prompts_of(9, 30)
    settings = dict(max_new_tokens=20, seed=3, **SMALL)
    expected = tokens_of(run(model, prompts, temperature=0.9, top_k=40, **settings))
    greedy = tokens_of(run(model, prompts, **settings))
    monkeypatch.setattr(model, "defaults", dict(do_sample=True, temperature=0.9, top_k=40))
    assert tokens_of(run(model, prompts, **settings)) == expected
    assert tokens_of(run(model, prompts, temperature=0.0, **settings)) == greedy != expected


@pytest.mark.parametrize("temperature", [[0, 1.0, 0.0, 1.0], [0, 1, 0, 1], (0, 1, 0, 1)], ids=str)
def test_rows_of_mixed_temperatures(model, temperature):
    prompts = prompts_of(9, 30, 12, 50)
    settings = dict(max_new_tokens=30, seed=3, **SMALL)
    mixed = tokens_of(run(model, prompts, temperature=temperature, **settings))
    greedy, drawn = (tokens_of(run(model, prompts, temperature=t, **settings)) for t in (0, 1.0))
    assert mixed == [greedy[0], drawn[1], greedy[2], drawn[3]]
    assert all(a != b for a, b in zip(greedy, drawn, strict=True))


# 6. Where a text ends ----------------------------------------------------------------------------


@pytest.fixture
def endless(model):
    """A prompt and 60 tokens after it."""
    prompts = prompts_of(9)
    return prompts, tokens_of(run(model, prompts, max_new_tokens=60, temperature=1.0, **SMALL))[0]


@pytest.mark.parametrize("form", [lambda ids: ids[0], list], ids=["number", "list"])
def test_a_text_ends_before_the_first_end_token(model, endless, monkeypatch, form):
    """The ends of the list come at tokens 30, 20 and 40; the number is the first of them."""
    prompts, tokens = endless
    ids = [tokens[30], tokens[20], tokens[40]]
    stops = form(ids)
    monkeypatch.setattr(model, "defaults", dict(eos_token_id=stops))
    monkeypatch.setattr(model.tokenizer, "eos_id", None)
    settings = dict(max_new_tokens=60, temperature=1.0, **SMALL)
    (output,) = run(model, prompts, ignore_eos=False, **settings).outputs
    assert output.tokens == cut(tokens, ids if stops == ids else ids[:1])
    assert len(output.tokens) <= (20 if stops == ids else 30)
    assert output.stop_reason == "eos"
    assert output.text == model.tokenizer.decode(output.tokens)
    (silenced,) = run(model, prompts, ignore_eos=True, **settings).outputs
    assert silenced.tokens == tokens and silenced.stop_reason == "length"


def test_the_tokenizers_end_counts_as_well(model, endless, monkeypatch):
    prompts, tokens = endless
    monkeypatch.setattr(model, "defaults", dict(eos_token_id=tokens[30]))
    monkeypatch.setattr(model.tokenizer, "eos_id", tokens[10])
    settings = dict(max_new_tokens=60, temperature=1.0, **SMALL)
    (output,) = run(model, prompts, ignore_eos=False, **settings).outputs
    assert output.tokens == cut(tokens, {tokens[10], tokens[30]})
    assert run(model, prompts, ignore_eos=True, **settings).outputs[0].tokens == tokens


@pytest.mark.parametrize("n_new", [1, 5])
def test_the_first_token_may_end_the_text(model, endless, monkeypatch, n_new):
    prompts, tokens = endless
    monkeypatch.setattr(model, "defaults", dict(eos_token_id=tokens[0]))
    settings = dict(max_new_tokens=n_new, temperature=1.0, **SMALL)
    result = run(model, prompts, ignore_eos=False, **settings)
    (output,) = result.outputs
    assert (output.tokens, output.text, output.stop_reason) == ([], "", "eos")
    assert output.kept == list(range(9))
    assert (result.statistics.new_tokens, result.statistics.decode_steps) == (0, 0)


def test_an_end_token_in_the_last_place_is_an_end(model, endless, monkeypatch):
    """Both reasons hold; the text is complete, so it is "eos"."""
    prompts, tokens = endless
    place = next(i for i in range(5, 60) if tokens[i] not in tokens[:i])
    monkeypatch.setattr(model, "defaults", dict(eos_token_id=tokens[place]))
    for n_new, reason in [(place, "length"), (place + 1, "eos"), (place + 2, "eos")]:
        settings = dict(max_new_tokens=n_new, temperature=1.0, **SMALL)
        (output,) = run(model, prompts, ignore_eos=False, **settings).outputs
        assert (output.tokens, output.stop_reason) == (tokens[:place], reason)


def test_one_new_token_takes_no_step(model, endless):
    prompts, tokens = endless
    result = run(model, prompts, max_new_tokens=1, temperature=1.0, **SMALL)
    assert tokens_of(result) == [tokens[:1]]
    assert result.outputs[0].stop_reason == "length"
    assert result.statistics.decode_steps == 0
    assert result.statistics.decode_tokens_per_second == 0


@pytest.mark.parametrize("n_prompt, n_new", [(CONTEXT - 5, 5), (CONTEXT - 1, 1)])
def test_a_text_may_fill_the_context_exactly(model, n_prompt, n_new):
    prompts = prompts_of(n_prompt, 12)
    for wanted in (n_new, None):
        result = run(model, prompts, max_new_tokens=wanted, **SMALL)
        assert [len(tokens) for tokens in tokens_of(result)] == [n_new] * 2
        assert {output.stop_reason for output in result.outputs} == {"length"}


@pytest.fixture
def idle(model, monkeypatch):
    """A model that must not run, nor be given a cache."""

    def fail(*args, **kwargs):
        raise AssertionError("this should have been refused before")

    monkeypatch.setattr(model, "forward", fail)
    monkeypatch.setattr(model, "new_cache", fail)
    return model


@pytest.mark.parametrize(
    "n_prompt, n_new, room",
    [(CONTEXT - 5, 6, 5), (12, CONTEXT, CONTEXT - 12), (CONTEXT, 1, 0), (CONTEXT, None, 0)]
    + [(CONTEXT + 70, None, -70), (CONTEXT + 70, 5, -70)],
)
def test_a_text_past_the_context_is_refused_before_it_starts(idle, n_prompt, n_new, room):
    words = f"a prompt of {n_prompt} tokens leaves {room} of the model's context of {CONTEXT}"
    with pytest.raises(ValueError, match=words):
        started(idle, prompts_of(3, n_prompt), max_new_tokens=n_new, **SMALL)


@pytest.mark.parametrize("policy", ["full", "epikv"])
def test_without_a_limit_a_text_runs_to_the_end_of_the_context(model, policy):
    size = {} if policy == "full" else SMALL
    result = run(model, prompts_of(CONTEXT - 100), policy=policy, **size)
    assert len(result.outputs[0].tokens) == 100
    assert result.outputs[0].stop_reason == "length"


# 7. Prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, settings, texts",
    [
        ("hi", {}, ["u:hi;a:"]),
        (["hi", "you"], {}, ["u:hi;a:", "u:you;a:"]),
        ("hi", dict(system="be"), ["s:be;u:hi;a:"]),
        ("hi", dict(num_samples=2), ["u:hi;a:", "u:hi;a:"]),
        (["hi", "you"], dict(raw=True), ["hi", "you"]),
    ],
    ids=str,
)
def test_texts_pass_through_the_template_unless_raw(model, prompts, settings, texts):
    generation = started(model, prompts, max_new_tokens=1, **settings)
    ids = model.tokenizer.tokenizer.token_to_id  # one token for each of these characters
    expected = [[ids(character) for character in text] for text in texts]
    if settings.get("raw"):  # a template writes BOS itself, or means to have none
        expected = [[tiny.BOS, *row] for row in expected]
    assert generation.prompts == expected


@pytest.mark.parametrize(
    "prompts, words",
    [
        ("", "the prompt is empty"),
        (" \n\t", "the prompt is empty"),
        (["hi", ""], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[1], []], "the prompt is empty"),
        ([], "nothing to continue"),
        ([1, 2, 3], "list inside the list"),
        ([[1, tiny.VOCAB_SIZE]], f"token id 261 is outside the vocabulary, 0 to {260}"),
        ([[1], [2, -1]], "token id -1 is outside the vocabulary, 0 to 260"),
    ],
    ids=str,
)
def test_prompts_that_cannot_be_continued_are_refused(idle, prompts, words):
    with pytest.raises(ValueError, match=words):
        started(idle, prompts, max_new_tokens=1)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(num_samples=0), "num-samples"),
        (dict(max_new_tokens=0), "max-new-tokens must be at least 1, got 0"),
        (dict(max_new_tokens=-3), "max-new-tokens must be at least 1, got -3"),
        (dict(policy="full", budget=64), "policy 'full' keeps every token"),
        (dict(budget=0), "budget must be at least 1"),
        (dict(budget=8, sinks=4, recent=4), "smaller than sinks 4 . recent 4 . 1"),
        (dict(policy="lru"), "unknown policy 'lru'; known: epikv, "),
        (dict(top_k=5), "top-k has no effect"),
        (dict(raw=True, system="be brief"), "system message needs the chat template"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(idle, settings, words):
    with pytest.raises(ValueError, match=words):
        started(idle, [[1, 2]], **dict(max_new_tokens=1) | settings)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(compile_mode="fast"), "unknown compile mode 'fast'; known: blocks, step, none"),
        (dict(temperature=[0.5]), "got 1 temperatures for 2 rows"),
        (dict(temperature=[0.5] * 3), "got 3 temperatures for 2 rows"),
        (dict(temperature=[]), "got 0 temperatures for 2 rows"),
        (dict(band_a=(8,)), "band names block 8; the model has 0 to 7"),
        (dict(policy="streaming", band_a=(1,)), "has no bands"),
        (
            dict(policy="epikv-fit", calibration=tiny.calibration(7)),
            "calibrated was a model of 7 blocks; this has 8",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_rows_or_the_model_are_refused(model, settings, words):
    with pytest.raises(ValueError, match=words):
        started(model, [[1], [2]], **dict(max_new_tokens=1) | settings)


def test_a_model_without_a_tokenizer_takes_only_ids(model, monkeypatch):
    prompts = prompts_of(5, 9)
    expected = tokens_of(run(model, prompts, max_new_tokens=8))
    monkeypatch.setattr(model, "tokenizer", None)
    with pytest.raises(ValueError, match="no tokenizer: give prompts as lists of token ids"):
        started(model, "hi", max_new_tokens=1)
    result = run(model, prompts, max_new_tokens=8)
    assert tokens_of(result) == expected
    assert [output.text for output in result.outputs] == ["", ""]


def test_a_seed_may_be_large(model):
    """All 32 bits of it count."""
    texts = {
        tuple(tokens_of(run(model, [[1]], temperature=1.0, seed=seed, max_new_tokens=20))[0])
        for seed in (0, 1, 2**16, 2**31, 2**32 - 1)
    }
    assert len(texts) == 5


# 8. Statistics -----------------------------------------------------------------------------------


def test_statistics_by_hand(small_model):
    """Rows of 7, 15 and 60 prompt tokens in 24 slots; 10 new tokens each, 9 of them fed.

    Bytes of a token's keys and values: 8 blocks x 2 x 2 heads x 12 dimensions x 4 bytes = 1536.
    Besides the rows' three caches there is a fourth, for prompts.
    Tokens seen: 16, 24 and 69; kept: 16, 24 and 24. Slots read in 9 steps: 8 + ... + 16 = 108,
    16 + ... + 24 = 180 and 9 x 24 = 216, together 504.
    """
    result = run(small_model, prompts_of(7, 15, 60), max_new_tokens=10, **SMALL)
    s = result.statistics
    assert (s.prompt_tokens, s.new_tokens, s.decode_steps) == (82, 30, 9)
    assert (s.tokens_kept, s.tokens_evicted) == (64, 45)
    assert s.kv_bytes == (3 + 1) * 24 * 1536
    assert s.kv_bytes_full_cache == (16 + 24 + 69) * 1536
    attention = 48 * 48 + 2 * 24 * 48 + 48 * 48
    block = attention + 3 * 48 * 80 + 2 * 48
    weights = 8 * block + 48 + 261 * 48  # and the embedding is only looked up
    read = 9 * weights * 4 + 504 * 1536
    assert s.decode_bytes_per_second * s.decode_seconds == pytest.approx(read)
    assert s.decode_tokens_per_second * s.decode_seconds == pytest.approx(27)
    assert s.prefill_seconds > 0 and s.decode_seconds > 0 and s.compile_seconds == 0
    assert s.peak_memory > 2 * weights * 4


def test_statistics_of_a_float64_cache_and_of_full(model):
    """Twice the bytes; `full` has slots for 1024, and 9 + 12 - 1 = 20 tokens to store."""
    s = run(model, prompts_of(9), policy="full", max_new_tokens=12).statistics
    assert s.kv_bytes == 1024 * 3072
    assert s.kv_bytes_full_cache == 20 * 3072
    assert (s.tokens_kept, s.tokens_evicted) == (20, 0)


def test_tied_embeddings_are_read_in_every_step(tmp_path):
    folder = tiny.make_model(tmp_path, tie_word_embeddings=True)
    tiny.make_tokenizer(folder)
    model = Transformer.from_pretrained(folder, device="cpu")
    block = 2 * 48 * 48 + 2 * 24 * 48 + 3 * 48 * 80 + 2 * 48
    assert generate_module.weight_bytes(model) == 4 * (3 * block + 48 + 261 * 48)


@pytest.mark.parametrize(
    "n_tokens, slots", [(1, 1024), (1024, 1024), (1025, 2048), (5000, 5120), (131072, 131072)]
)
def test_full_has_slots_in_steps_of_1024(n_tokens, slots):
    assert generate_module.full_budget(n_tokens) == slots


@pytest.mark.parametrize("name", CASES)
def test_kept_positions_are_those_in_the_cache(model, name):
    """In any head: where each chooses for itself they are more than one of them holds."""
    settings = small(name)
    generation = started(model, prompts_of(3, 20, 60), max_new_tokens=15, **settings)
    list(generation)
    cache = generation.engine.cache
    for row, n_seen in enumerate([17, 34, 74]):
        output = generation.result().outputs[row]
        maps = cache.position[row].flatten(0, 1).tolist()
        assert output.kept == sorted({p for one_map in maps for p in one_map if p != -1})
        for one_map in maps:
            kept = {p for p in one_map if p != -1}
            assert len(kept) == min(n_seen, settings.get("budget", n_seen))
            recent = range(n_seen - settings.get("recent", 4), n_seen)
            assert {0, 1, 2, 3, *recent} <= kept <= set(range(n_seen))


# 9. Streaming ------------------------------------------------------------------------------------


def test_deltas_add_up_to_the_result(model, ends_early):
    """Three rows of which one ends early; random bytes, so that characters come in pieces."""
    prompts, settings, *_ = ends_early
    generation = started(model, prompts, ignore_eos=False, **settings)
    deltas = list(generation)
    result = generation.result()
    for row, output in enumerate(result.outputs):
        mine = [delta for delta in deltas if delta.row == row]
        assert [token for delta in mine for token in delta.tokens] == output.tokens
        assert "".join(delta.text for delta in mine) == output.text
        assert output.text == model.tokenizer.decode(output.tokens)
    assert [delta.row for delta in deltas[:3]] == [0, 1, 2]


def reading_late(model, prompts, steps_per_read, ahead, **settings):
    generation = started(model, prompts, **settings)
    generation.engine.steps_per_read, generation.engine.reads_ahead = steps_per_read, ahead
    return generation


@pytest.mark.parametrize("steps_per_read, ahead", [(1, True), (7, False), (7, True), (32, True)])
def test_tokens_read_late_are_the_same(model, ends_early, steps_per_read, ahead):
    """A few at a time, while the next few steps run, as on CUDA; 59 steps are no multiple of 7."""
    prompts, settings, *_ = ends_early
    wanted = run(model, prompts, ignore_eos=False, **settings)
    generation = reading_late(model, prompts, steps_per_read, ahead, ignore_eos=False, **settings)
    deltas = list(generation)
    result = generation.result()
    assert tokens_of(result) == tokens_of(wanted)
    assert [output.text for output in result.outputs] == [output.text for output in wanted.outputs]
    assert "".join(delta.text for delta in deltas if delta.row == 0) == result.outputs[0].text
    assert result.statistics.decode_steps == 59


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_steps_begin_before_the_tokens_of_the_last_are_waited_for(model, ahead):
    """In chunks of 3, 3 and 1 steps."""
    generation = reading_late(model, prompts_of(9), 3, ahead, max_new_tokens=8, **SMALL)
    engine, calls = generation.engine, []
    step, read_tokens = engine.step, engine.read_tokens

    def noted_read(count):
        wait = read_tokens(count)
        return lambda: calls.append("wait") or wait()

    engine.step = lambda prefix: calls.append("step") or step(prefix)
    engine.read_tokens = noted_read
    list(generation)
    first, *others = "".join(call[0] for call in calls).split("w")  # of the prefill
    assert first == ""
    assert others == (["ssssss", "s", "", ""] if ahead else ["sss", "sss", "s", ""])


def test_a_text_that_ends_is_left_after_the_steps_begun(model, monkeypatch):
    """Reading ahead, 4 steps past those in which the end was drawn, which are not counted."""
    settings = dict(max_new_tokens=60, temperature=1.0, **SMALL)
    (endless,) = tokens_of(run(model, prompts_of(20), **settings))
    place = next(i for i in range(9, 60) if endless[i] not in endless[:i])  # token i is step i's
    monkeypatch.setitem(model.defaults, "eos_token_id", endless[place])
    monkeypatch.setattr(model.tokenizer, "eos_id", None)
    generation = reading_late(model, prompts_of(20), 4, True, ignore_eos=False, **settings)
    list(generation)
    result = generation.result()
    assert tokens_of(result) == [endless[:place]]
    assert result.outputs[0].stop_reason == "eos"
    n_read = -(-place // 4) * 4
    assert result.statistics.decode_steps == n_read
    assert generation.engine.cache.length.item() == 20 + n_read + 4


def test_the_demos_text_streams_whole(demo, demo_prompts):
    """Every delta as it comes; the text is that of the tokens."""
    generation = started(demo, demo_prompts[:1], max_new_tokens=15)
    texts = [delta.text for delta in generation]
    (output,) = generation.result().outputs
    assert "".join(texts) == output.text == demo.tokenizer.decode(output.tokens)
    assert sum(map(bool, texts)) > 10


@pytest.mark.parametrize("n_deltas", [1, 2, 3, 14, 15])
def test_leaving_early_gives_what_there_is(model, n_deltas):
    """Of two rows, of which after an odd number of deltas the first is a token ahead."""
    prompts = prompts_of(9, 40)
    settings = dict(max_new_tokens=30, temperature=1.0, **SMALL)
    expected = tokens_of(run(model, prompts, **settings))
    generation = started(model, prompts, **settings)
    deltas = [delta for _, delta in zip(range(n_deltas), generation, strict=False)]
    result = generation.result()
    lengths = [(n_deltas + 1) // 2, n_deltas // 2]
    assert tokens_of(result) == [e[:n] for e, n in zip(expected, lengths, strict=True)]
    for row, output in enumerate(result.outputs):
        assert output.stop_reason == "interrupted"
        assert output.text == "".join(delta.text for delta in deltas if delta.row == row)
        held = generation.engine.cache.position[row]
        assert output.kept == sorted(held[held >= 0].tolist())
    assert result.statistics.new_tokens == n_deltas


def test_the_result_of_nothing_is_empty(model):
    result = started(model, prompts_of(9), max_new_tokens=5, **SMALL).result()
    (output,) = result.outputs
    assert (output.tokens, output.text, output.stop_reason, output.kept) == (
        [],
        "",
        "interrupted",
        [],
    )
    assert (result.statistics.new_tokens, result.statistics.tokens_kept) == (0, 0)


@pytest.mark.parametrize("n_steps", [0, 1, 6])
def test_ctrl_c_in_a_step_leaves_the_text_so_far(model, monkeypatch, n_steps):
    prompts = prompts_of(9)
    expected = tokens_of(run(model, prompts, max_new_tokens=n_steps + 1, **SMALL))
    generation = started(model, prompts, max_new_tokens=30, **SMALL)
    step, calls = generation.engine.step, []

    def interrupted(prefix):
        calls.append(prefix)
        if len(calls) > n_steps:
            raise KeyboardInterrupt
        step(prefix)

    monkeypatch.setattr(generation.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    result = generation.result()
    assert tokens_of(result) == expected
    assert result.outputs[0].stop_reason == "interrupted"
    assert result.statistics.decode_steps == n_steps


# 10. Prefixes and the machine --------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget, shortest, longest, expected",
    [
        (64, 1, 1, 64),  # the first bucket is larger than the cache
        (64, 63, 900, 64),
        (64, 64, 64, None),  # all slots of all rows are taken
        (64, 65, 900, None),
        (512, 511, 511, 512),
        (512, 512, 512, None),
        (5000, 1, 512, 512),
        (5000, 1, 513, 2048),
        (5000, 2048, 2048, 2048),
        (5000, 2048, 2049, 5000),  # not 8192
        (5000, 4999, 9000, 5000),
        (5000, 5000, 9000, None),
        (9000, 100, 8192, 8192),
        (9000, 100, 8193, 9000),
    ],
)
def test_prefixes_by_hand(model, budget, shortest, longest, expected):
    engine = Engine(model, EvictionConfig(budget), Sampling(), compile_mode="none")
    assert engine.prefix(shortest, longest) == expected


def test_steps_ask_for_the_prefix_of_their_rows(model, monkeypatch):
    """Rows of 9 and 20 in 24 slots: every slot of both is taken once the first holds 24 tokens."""
    generation = started(model, prompts_of(9, 20), max_new_tokens=20, **SMALL)
    step, prefixes = generation.engine.step, []
    monkeypatch.setattr(
        generation.engine, "step", lambda prefix: (prefixes.append(prefix), step(prefix))
    )
    list(generation)
    assert prefixes == [24] * 14 + [None] * 5


def test_memory_bandwidth_is_measured():
    """Between a floppy disk and a stack of accelerators."""
    assert 1e6 < memory_bandwidth(torch.device("cpu")) < 1e14


def test_peak_memory_is_in_bytes():
    """More than torch itself needs, less than a terabyte."""
    assert 2**25 < generate_module.peak_memory(torch.device("cpu")) < 2**40


def test_a_run_that_was_left_goes_on_where_it_stopped(model):
    """An iteration taken up again neither repeats nor loses a token."""
    whole = tokens_of(run(model, prompts_of(7), max_new_tokens=20))
    generation = started(model, prompts_of(7), max_new_tokens=20, ignore_eos=True)
    first = [next(generation) for _ in range(5)]
    rest = list(generation)
    assert [token for delta in first + rest for token in delta.tokens] == whole[0]
    assert tokens_of(generation.result()) == whole


@pytest.mark.parametrize("value", ["0.7", [[1]], {}], ids=str)
def test_a_default_that_is_no_number_is_refused(model, monkeypatch, value):
    monkeypatch.setattr(model, "defaults", {"do_sample": True, "temperature": value})
    with pytest.raises(ValueError, match="no number"):
        Sampling.for_model(model)

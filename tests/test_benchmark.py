"""The benchmark's contenders: all read the same text; and what is reckoned from their times."""

import argparse
import importlib.util
import json
import sys
import types

import pytest
import tiny
import torch
import transformers

import benchmark
import generate
import peers
from epikv import EvictionConfig
from model import Transformer
from peers import INTERVAL, Context, TokenClock

LENGTH, FED = 40, 5  # tokens of the text before the contenders go on, and what they are then fed
NAMES = (
    "transformers generate()",
    "transformers forward loop",
    "transformers static cache, compiled",
)
needs_kvpress = pytest.mark.skipif(not importlib.util.find_spec("kvpress"), reason="no kvpress")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(scope="module")
def model(folder):
    return Transformer.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def peer(folder):
    return peers.load_peer(folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def context(model):
    """Random tokens, so that no two places look alike."""
    tokens = torch.randint(256, (100,), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(EvictionConfig(LENGTH + 1, "full", sinks=0, recent=1))
    model.prefill(tokens[None, :LENGTH], cache)
    return Context(tokens, [(kv.k[:, :, :LENGTH], kv.v[:, :, :LENGTH]) for kv in cache.layers])


@pytest.fixture
def eager(monkeypatch):
    """Compile nothing: neither our step nor that of transformers, which asks for it by a method."""
    asked = []

    def compiled_call(self, config):
        asked.append(config)
        return self.__call__

    base = transformers.PreTrainedModel
    monkeypatch.setattr(base, "get_compiled_call", compiled_call)
    monkeypatch.setattr(generate, "compiled_step", lambda mode, device: generate.decode_step)
    return asked


@pytest.fixture(scope="module")
def truth(peer, context):
    """Keys [1, H_kv, LENGTH + FED, D] of each layer when transformers reads the text at once."""
    with torch.no_grad():
        output = peer(context.tokens[None, : LENGTH + FED], use_cache=True)
    return [layer.keys for layer in (output.get("cache") or output.past_key_values).layers]


# 1. The text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_peers_read_the_text(eager, peer, context, truth, name, n_rows):
    """Whatever they predict: their caches are those of a single pass over it, in every row."""
    contender = peers.peer_contenders(peer, n_rows, 16, 64)[name]()
    contender.prepare(context, LENGTH)
    assert contender.run(context.tokens[LENGTH : LENGTH + FED]) > 0
    for layer, keys in zip(contender.cache.layers, truth, strict=True):
        expected = keys.expand(n_rows, -1, -1, -1)
        torch.testing.assert_close(layer.keys[:, :, : LENGTH + FED], expected, atol=1e-4, rtol=1e-4)
    assert bool(eager) == (name == NAMES[2])


@pytest.mark.parametrize("n_rows", [1, 2])
def test_our_full_cache_reads_the_text(eager, model, context, truth, n_rows):
    decoder = benchmark.Decoder(model, EvictionConfig(64, "full"), n_rows)
    decoder.prepare(context, LENGTH)
    decoder.run(context.tokens[LENGTH : LENGTH + FED])
    for layer, keys in zip(decoder.engine.cache.layers, truth, strict=True):
        expected = keys.expand(n_rows, -1, -1, -1)
        torch.testing.assert_close(layer.k[:, :, : LENGTH + FED], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n_rows", [1, 2])
def test_we_read_the_text_within_a_budget(eager, model, context, n_rows):
    """Streaming holds the first four tokens and the last twelve that it was fed, in every row."""
    decoder = benchmark.Decoder(model, EvictionConfig(16, "streaming"), n_rows)
    decoder.prepare(context, LENGTH)
    decoder.run(context.tokens[LENGTH : LENGTH + FED])
    cache = decoder.engine.cache
    last = {*range(4), *range(LENGTH + FED - 12, LENGTH + FED)}
    for row in cache.position[:, 0, 0].tolist():
        assert {*row} == last
    assert decoder.kv_bytes == n_rows * 3 * 2 * 2 * 16 * 12 * 4  # layers, k and v, heads, slots, D


def test_the_context_is_what_the_full_cache_holds(eager, model, peer):
    found = benchmark.read_context(model, 30, 50)
    with torch.no_grad():
        output = peer(found.tokens[None, :30], use_cache=True)
    cache = output.get("cache") or output.past_key_values
    assert len(found.tokens) == 50 and len(found.kv) == 3
    for (k, v), layer in zip(found.kv, cache.layers, strict=True):
        torch.testing.assert_close(k, layer.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(v, layer.values, atol=1e-4, rtol=1e-4)


def test_every_contender_gets_the_same_parts(monkeypatch, context):
    """One is prepared at the position, and each round goes on where the one before it ended."""
    fed = []

    class Contender:
        def prepare(self, found, length):
            assert found is context and length == LENGTH

        def run(self, tokens):
            fed.append((self, tokens.tolist()))
            return 1.0

    one, other = Contender(), Contender()
    steps = len(context.tokens[LENGTH:]) // 3
    monkeypatch.setattr(benchmark, "STEPS", steps)
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    benchmark.race({"one": one, "other": other}, context, LENGTH)
    text = context.tokens[LENGTH:].tolist()
    parts = [text[i * steps : (i + 1) * steps] for i in range(3)]
    assert fed == [(contender, part) for part in parts for contender in (one, other)]


# 2. The clock ------------------------------------------------------------------------------------


def test_the_clock_leaves_out_prompt_and_prefill(monkeypatch):
    """Three decode steps from 5 to 9."""
    ticks = iter([0.0, 5.0, 6.0, 8.0, 9.0])
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(ticks))
    clock = TokenClock()
    for _ in range(5):
        clock.put(None)
    clock.end()
    assert clock.seconds_per_token() == pytest.approx(4 / 3)


def test_transformers_calls_the_clock_for_the_prompt_and_each_token(peer):
    clock = TokenClock()
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    peer.generate(torch.tensor([[1, 2, 3]]), streamer=clock, **options)
    assert len(clock.times) == 1 + 6
    assert clock.seconds_per_token() == (clock.times[6] - clock.times[1]) / 5


# 3. kvpress --------------------------------------------------------------------------------------

BUDGET = 24


@needs_kvpress
@pytest.mark.parametrize("press", ["LagKV", "KeyDiff", "Knorm"])
def test_kvpress_holds_the_budget(peer, context, press):
    """It is full at the start, grows token by token, and shrinks at the end of an interval."""
    contender = peers.peer_contenders(peer, 2, BUDGET, 128)[f"kvpress {press}"]()
    contender.prepare(context, LENGTH)
    held = [contender.cache.get_seq_length()]
    for n in (1, INTERVAL - 2, 1, 3):
        contender.run(context.tokens[LENGTH : LENGTH + n])
        held.append(contender.cache.get_seq_length())
    assert held == [BUDGET, BUDGET + 1, BUDGET + INTERVAL - 1, BUDGET, BUDGET + 3]
    assert contender.kv_bytes == 2 * 3 * 2 * 2 * (BUDGET + 3) * 12 * 4
    contender.prepare(context, LENGTH)  # from the start again
    contender.run(context.tokens[LENGTH : LENGTH + INTERVAL])
    assert contender.cache.get_seq_length() == BUDGET


@needs_kvpress
def test_kvpress_forgets_the_longest_keys_and_keeps_true_positions(peer, context, truth):
    """Knorm's choice in each head, and a new key of the first layer, which is the token's alone."""
    contender = peers.peer_contenders(peer, 1, BUDGET, 128)["kvpress Knorm"]()
    contender.prepare(context, LENGTH)
    for layer, (k, _) in zip(contender.cache.layers, context.kv, strict=True):
        for kept, keys in zip(layer.keys[0], k[0], strict=True):
            shortest = keys.norm(dim=-1).sort().values[:BUDGET]
            torch.testing.assert_close(kept.norm(dim=-1).sort().values, shortest)
    contender.run(context.tokens[LENGTH : LENGTH + FED])
    new = contender.cache.layers[0].keys[:, :, -FED:]
    torch.testing.assert_close(new, truth[0][:, :, -FED:], atol=1e-4, rtol=1e-4)


@needs_kvpress
def test_kvpress_leaves_attention_and_the_model_as_they_were(peer, context):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = dict(functions)
    contender = peers.peer_contenders(peer, 1, BUDGET, 128)["kvpress Knorm"]()
    contender.prepare(context, LENGTH)
    contender.run(context.tokens[:2])
    assert dict(functions) == before
    assert not any(layer.self_attn._forward_hooks for layer in peer.model.layers)


# 4. Peers that are missing -----------------------------------------------------------------------


def test_a_missing_kvpress_is_skipped(monkeypatch, capsys, peer):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert tuple(peers.peer_contenders(peer, 1, 16, 64)) == NAMES
    assert "skipped kvpress: " in capsys.readouterr().err


def test_without_transformers_ours_run_alone(monkeypatch, capsys, folder, model):
    monkeypatch.setitem(sys.modules, "transformers", None)
    peer = peers.load_peer(folder, torch.float32, torch.device("cpu"))
    assert "skipped transformers and kvpress: " in capsys.readouterr().err
    policies = {"epikv": dict(policy="epikv")}
    makers = benchmark.contender_makers({"": model, "int8": model}, peer, policies, 1, 16, 64)
    assert list(makers) == ["epikv", "full", "epikv int8"]


# 5. What is reckoned -----------------------------------------------------------------------------


class Timed:
    """A contender that takes so many `seconds` a step, and then reads so many bytes."""

    compile_seconds, kv_bytes = 0.0, 123

    def __init__(self, n_bytes, *seconds):
        self.n_bytes, self.seconds = n_bytes, [*seconds]

    def prepare(self, context, length):
        assert length == 40

    def run(self, tokens):
        return self.seconds.pop(0)

    def step_bytes(self, length):
        return self.n_bytes * length


def test_the_share_of_the_bandwidth_is_that_of_each_round(monkeypatch):
    """Of a machine that becomes slower: 4,000 bytes in 10 ms, at 800, 400 and 200 kB/s."""
    rates = iter([1e9, 8e5, 4e5, 2e5])
    probe = types.SimpleNamespace(__wrapped__=lambda device: next(rates))
    monkeypatch.setattr(benchmark, "memory_bandwidth", probe)
    monkeypatch.setattr(benchmark, "ROUNDS", 3)
    context = Context(torch.zeros(400, dtype=torch.int64), [])
    theirs = Timed(100, 9, 0.02, 0.04, 0.04)
    contenders = {"ours": Timed(100, 9, 0.01, 0.01, 0.01), "theirs": theirs}
    ours, theirs = benchmark.measure_at(40, contenders, context, 3)
    assert ours["bandwidth_share"] == pytest.approx(1.0)  # of 0.5, 1.0 and 2.0
    assert theirs["bandwidth_share"] == pytest.approx(0.25)  # of 0.25, 0.25 and 0.5
    assert (ours["tokens_per_second"], theirs["tokens_per_second"]) == (300, 75)
    assert (ours["speed_of_ours"], theirs["speed_of_ours"]) == (1, 4)
    assert (theirs["contender"], theirs["position"], theirs["kv_bytes"]) == ("theirs", 40, 123)
    assert theirs["seconds"] == [0.02, 0.04, 0.04]


@pytest.mark.parametrize("policy", ["full", "epikv"])
def test_the_bytes_of_our_step(eager, model, context, policy):
    """Weights, and 3 layers' keys and values of 2 heads and 12 numbers for each token held."""
    decoder = benchmark.Decoder(model, EvictionConfig(64, policy), 2)
    tokens = 3 * 2 * 2 * 12 * 4
    weights = sum(w.nbytes for w in model.parameters()) - model.embedding.nbytes
    assert model.head is not None
    held = {"full": (40, 100), "epikv": (40, 64)}[policy]
    found = [decoder.step_bytes(length) for length in (40, 100)]
    assert found == [weights + 2 * n * tokens for n in held]


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_a_peers_step(tmp_path, context, tied):
    """As ours; an embedding that is also the head is read."""
    folder = tiny.make_checkpoint(tmp_path, tie_word_embeddings=tied)
    peer = peers.load_peer(folder, torch.float32, torch.device("cpu"))
    contender = peers.Loop(peer, 2)
    contender.prepare(context, LENGTH)
    ours = Transformer.from_pretrained(folder, device="cpu")
    decoder = benchmark.Decoder(ours, EvictionConfig(64, "full"), 2)
    assert contender.step_bytes(LENGTH) == decoder.step_bytes(LENGTH)


def record(contender, position, ms=1.0, seconds=None):
    return {
        "contender": contender,
        "position": position,
        "speed_of_ours": 4.0,
        "ms_per_step": ms,
        "ms_quartiles": [ms - 0.5, ms + 0.5],
        "tokens_per_second": 1000 / ms,
        "kv_bytes": 2_500_000,
        "bandwidth_share": 0.5,
        "seconds": seconds or [ms, ms],
    }


def test_goals_are_against_the_fastest():
    """A ratio is the median over rounds; of formats the better counts, and int4 is none of them."""
    short = [record("epikv", 512, 2.0), record("full", 512), record("epikv int4", 512, 0.1)]
    short += [record("epikv bfloat16", 512, 1.0), record("epikv int8", 512, 0.5)]
    short += [record("transformers generate()", 512, 7.0), record("kvpress LagKV", 512, 6.0)]
    short += [record("transformers forward loop", 512, 5.0), record("kvpress Knorm", 512, 5.5)]
    long = [record("epikv", 1000), record("full", 1000, 9.0)]
    long += [record("epikv", 8000, seconds=[1.0, 2.0, 4.0]), record("kvpress Knorm", 8000, 0.1)]
    long += [record("full", 8000, seconds=[3.0, 4.0, 16.0])]
    rows = benchmark.goals_table({"short": short, "long": long})
    found = [(row["at token"], row["goal"], row["reached"]) for row in rows.values()]
    assert found == [
        (512, 2.0, 2.5),
        (512, 2.2, 2.75),
        (8000, 1.5, 3.0),
        (512, 3.5, 10.0),
        (512, 1.5, 4.0),
    ]
    assert not any("static" in name for name in rows)  # which was not there


def test_every_event_of_a_step_has_a_part():
    names = {
        "graph_1_cpp_fused_add_as_strided_mean_mul_silu_split_sum_1": "output projection, MLP",
        "graph_1_cpp_fused_index_put_mean_mul_rsqrt_sum_0": "QKV projection, RoPE, write",
        "graph_2_cpp_fused_add_arange_argmax_cat_linalg_vector_norm": "head, sampling, scores",
        "graph_0_cpp_fused_amin_argmin_bitwise_and_eq": "slot to overwrite",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "TorchDynamo Cache Lookup": "guards of compiled code",
        "Torch-Compiled Region: 1/0": "calls of compiled code",
        "## Call CompiledFxGraph abc ##": "calls of compiled code",
        "aten::cos": "other operators",
    }
    assert {name: benchmark.part_of_a_step(name) for name in names} == names


def test_a_step_in_parts(model):
    """Compiled, as it is for users: all parts but the rest are found, and their bytes."""
    rows = benchmark.profile_step(model, 48)
    parts = {name: row for name, row in rows.items() if name in benchmark.PARTS_OF_A_STEP}
    assert all(row["ms"] > 0 for row in parts.values())
    total = rows["all, under the profiler"]["ms"]
    assert sum(row["ms"] for row in parts.values()) == pytest.approx(total)
    assert parts["attention"]["events"] == 3  # one in each layer
    kv = 3 * 2 * 2 * 12 * 4 * 48
    assert parts["attention"]["GB/s"] == pytest.approx(kv / parts["attention"]["ms"] / 1e6)
    weights = sum(b.qkv.weight.nbytes for b in model.blocks)
    qkv = parts["QKV projection, RoPE, write"]
    assert qkv["GB/s"] == pytest.approx(weights / qkv["ms"] / 1e6, rel=0.05)  # and biases


def test_the_table_has_the_steps_of_all_positions_and_the_rest_of_the_last():
    rows = benchmark.peers_table([record("full", 1000, 2.0), record("full", 8000, 5.0)])
    assert rows == {
        "full": {
            "ms at 1,000": "2.0 (1.5 to 2.5)",
            "ms at 8,000": "5.0 (4.5 to 5.5)",
            "tokens/s": "200.0",
            "ours is faster by": "4.00",
            "KV MB": "2.5",
            "share of bandwidth": "50%",
        }
    }


def test_what_compiles_runs_twice_in_a_process_of_its_own(monkeypatch):
    """In one folder, which is its own; the peak is that of the second, or an error in its place."""
    calls = []

    def in_own_process(checkpoint, policies, name, n_rows, *rest):
        calls.append((name, rest))
        if name == "broken":
            raise RuntimeError("no\nmemory")
        seconds = {"loop": [0.0], "ours": [8.0, 2.0]}[name]
        n = sum(called == name for called, _ in calls)
        return {"peak_memory": n * 5_000_000, "compile_seconds": seconds[n - 1]}

    monkeypatch.setattr(benchmark, "in_own_process", in_own_process)
    what = ("here", {}, 1, 16, 99, "blocks")
    rows = benchmark.measure_processes(["ours", "loop", "broken"], *what)
    assert rows == {
        "ours": {"peak MB": 10, "compile cold, s": 8, "compile warm, s": 2},
        "loop": {"peak MB": 5},
        "broken": {"peak MB": "no memory"},
    }
    folders = [rest[-1] for _, rest in calls]
    assert folders[0] == folders[1] and len({*folders}) == 3


@pytest.mark.parametrize("name", ["epikv", "full", "epikv int8", NAMES[1]])
def test_a_contender_alone(eager, monkeypatch, folder, name, registered, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored")
    policies = {"epikv": dict(policy="epikv")}
    found = benchmark.measure_alone(folder, policies, name, 2, 32, 70, "blocks", str(tmp_path))
    assert found["compile_seconds"] == 0 and found["peak_memory"] > 50e6


# 6. The command ----------------------------------------------------------------------------------


def test_the_whole_comparison(eager, monkeypatch, folder, tmp_path, capsys, registered):
    """On one peer: records of every contender and place, tables, goals and a plot."""
    makers = peers.peer_contenders
    loop = NAMES[1]
    monkeypatch.setattr(benchmark, "peer_contenders", lambda *what: {loop: makers(*what)[loop]})
    output = tmp_path / "result.json"
    command = ["benchmark.py", "--checkpoint", folder, "--parts", "peers", "--batches", "1,2"]
    command += ["--budgets", "32", "--positions", "40,60", "--output", output]
    command += ["--formats", "bfloat16,int8"]
    monkeypatch.setattr(sys, "argv", [*map(str, command)])
    benchmark.main()
    result = json.loads(output.read_text(encoding="utf-8"))
    for batch in (1, 2):
        where = f"batch {batch}, budget 32"
        for text, positions in (("short", [32]), ("long", [40, 60])):
            records = result[f"a {text} text, {where}"]
            found = [(record["position"], record["contender"]) for record in records]
            names = ("epikv", "full", "epikv bfloat16", "epikv int8", loop)
            assert found == [(p, name) for p in positions for name in names]
        assert len(result[f"goals, {where}"]) == 4
        assert (tmp_path / f"result-batch{batch}-budget32.png").stat().st_size > 0
    assert capsys.readouterr().out.count("| transformers forward loop |") == 4
    told = output.with_suffix(".md").read_text(encoding="utf-8").splitlines()[0]
    assert told == (
        "`benchmark.py --parts peers --batches 1,2 --budgets 32 --positions 40,60"
        " --policies epikv --formats bfloat16,int8 --compile-mode blocks`"
    )


def test_a_contender_without_memory_is_left_out(monkeypatch, context, capsys):
    def fail():
        raise ValueError("no memory for a\ncache")

    monkeypatch.setattr(benchmark, "measure_at", lambda position, found, *rest: [*found])
    makers = {"ours": lambda: "one", "full": fail}
    assert benchmark.compare_peers(makers, context, [7], 16) == ["ours"]
    assert "skipped full: no memory for a cache\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (("--parts", "peers", "--positions", "9999"), "go to 144, not 9,999"),
        (("--parts", "policies", "--budgets", "100000000000"), "not 100,000,000,000"),
    ],
)
def test_a_text_beyond_the_context_is_refused(
    monkeypatch, tmp_path, folder, registered, options, words
):
    """Of 256 tokens, of which 112 follow a position; positions count for peers alone."""
    command = ["benchmark.py", "--checkpoint", str(folder), *options]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "a.json")])
    with pytest.raises(SystemExit) as exit:
        benchmark.main()
    assert words in exit.value.code and exit.value.code.startswith("error: positions and budgets")


@pytest.mark.parametrize("text", ["", "0", "1,x", "-1", "2,,3"])
def test_numbers_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no list of numbers; try 1,4,16"):
        benchmark.numbers(text)


def test_numbers_ascend():
    assert benchmark.numbers("16,1,4,4") == [1, 4, 16]


@pytest.mark.parametrize(
    "options, words",
    [
        (("--output", "benchmark.txt"), "output must be a .json file, got benchmark.txt"),
        (("--output", "/nowhere/benchmark.json"), "no such folder: /nowhere"),
        (("--budgets", "3"), "budget 3 is smaller than"),
        (("--parts", "peers,speed"), "unknown part 'speed'; known: peers, processes"),
        (("--formats", "int8,int3"), "unknown format 'int3'; known: bfloat16, int8, int4"),
    ],
)
def test_bad_arguments_are_told_before_the_model_is_loaded(
    monkeypatch, capsys, registered, options, words
):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--checkpoint", "/nowhere", *options])
    with pytest.raises(SystemExit) as exit:
        benchmark.main()
    assert exit.value.code == 2 and words in capsys.readouterr().err

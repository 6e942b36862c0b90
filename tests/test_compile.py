"""The decode step as compilers and CUDA graphs see it: no host sync, no copy, no recompilation."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import generate as generate_file
import model as model_file
from epikv import POLICIES, EvictionConfig, LagKV, Random, SlotCache
from generate import DecodeState, Engine, Generation, Sampling, compiled_step, decode_step
from model import ModelConfig, Transformer

ATTENTION_FREE = [name for name, policy in POLICIES.items() if policy.cache_type() is SlotCache]
SETTINGS = {
    name: dict(policy=name) | tiny.needed(name, 4) for name in ATTENTION_FREE if name != "full"
}
SETTINGS |= {
    "lag-kv previous": dict(policy="lag-kv", lag_reference="previous"),
    "lag-kv by head": dict(policy="lag-kv", slot_map="head"),
    "key-diff by head": dict(policy="key-diff", slot_map="head"),
    "k-norm by head": dict(policy="k-norm", slot_map="head"),
    "epikv reserve": dict(policy="epikv", value_reserve=9),
    "lag-kv reserve": dict(policy="lag-kv", value_reserve=9),
    "epikv calibrated": dict(policy="epikv", calibration=tiny.calibration(4)),
}
BLOCKWISE = [name for name, setting in SETTINGS.items() if POLICIES[setting["policy"]].blocks]


def settings(name, lag) -> dict:
    """Those of EvictionConfig called `name`, with `lag` tokens in a block if there are blocks."""
    return SETTINGS[name] | (dict(lag=lag) if name in BLOCKWISE else {})


def small_config(**changes) -> ModelConfig:
    """A model of four blocks with biases and head norms, changed as said."""
    shape = dict(vocab_size=50, hidden_size=32, intermediate_size=48, n_layers=4, n_heads=4)
    shape |= dict(n_kv_heads=2, head_dim=8, norm_eps=1e-5, rope_theta=1e4, rope_scaling={})
    shape |= dict(max_positions=100_000, tied_embeddings=False, qk_norm=True)
    return ModelConfig(**shape | changes, qkv_bias=True, out_bias=False, mlp_bias=False)


def random_model(dtype=torch.float64, **changes) -> Transformer:
    """The small model with random weights and no tokenizer."""
    model = Transformer(small_config(**changes), dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1))
    return model


def run(engine: Engine, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    """Generate exactly `n_tokens` in every row."""
    generation = Generation(engine, prompts, n_tokens, set())
    for _ in generation:
        pass
    return [output.tokens for output in generation.outputs]


# Compiled against eager ------------------------------------------------------------------------


PROMPTS = [[1, 2, 3], list(range(45)), list(range(40)) * 2]  # one over the budget


def assert_same_cache(compiled, eager):
    """Same slots and, but for rounding, same scores, keys and values."""
    assert torch.equal(compiled.position, eager.position)
    # RoPE's cosines are float32 in any model, and the compiler has its own.
    torch.testing.assert_close(compiled.score, eager.score, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled.value_size, eager.value_size, rtol=1e-5, atol=1e-5)
    for one, other in zip(compiled.layers, eager.layers, strict=True):
        torch.testing.assert_close(one.k, other.k, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.v, other.v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode, n_layers", [("blocks", 4), ("step", 3)])
def test_compiled_step_equals_eager(mode, n_layers):
    """Same tokens, slots and scores over filling and evicting, with every kind of sampling."""
    model = random_model(n_layers=n_layers)
    sampling = Sampling(temperature=(0.0, 1.0, 0.8), top_k=20, top_p=0.9, min_p=0.01, seed=3)
    config = EvictionConfig(48, recent=8, window=16)
    engines = [Engine(model, config, sampling, 3, compile_mode) for compile_mode in (mode, "none")]
    tokens = [run(engine, PROMPTS, 150) for engine in engines]
    assert tokens[0] == tokens[1]
    assert_same_cache(*(engine.cache for engine in engines))


@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_policies_equal_eager(name):
    """Likewise; the rows are fed random tokens, as those that are likeliest soon go in a circle."""
    config = EvictionConfig(48, recent=8, window=16, **settings(name, lag=4))
    model, n_tokens = random_model(), 150
    fed = torch.randint(50, (n_tokens, 3), generator=torch.Generator().manual_seed(7))
    engines = [Engine(model, config, Sampling(), 3, mode) for mode in ("blocks", "none")]
    tokens = []
    for engine in engines:
        generation = Generation(engine, PROMPTS, n_tokens, set())
        for i, _ in enumerate(generation):  # a row at a time, and a step before every three
            engine.state.token.copy_(fed[i // 3])
        tokens.append([output.tokens for output in generation.outputs])
        assert engine.cache.length.tolist() == [len(p) + n_tokens - 1 for p in PROMPTS]
    assert tokens[0] == tokens[1]
    assert_same_cache(*(engine.cache for engine in engines))
    assert engines[0].compile_seconds > 0 == engines[1].compile_seconds


@pytest.mark.parametrize(
    "eviction",
    [
        {},
        dict(policy="lag-kv", lag=4, slot_map="head", value_reserve=20),
        dict(policy="epikv-fit", calibration=tiny.calibration(2)),
    ],
    ids=["epikv", "lag-kv by head with reserve", "epikv-fit"],
)
def test_nothing_recompiles(eviction):
    """From the second token to the 10,000th, for five prompt lengths, two runs and two engines."""
    model = random_model(torch.float32, n_layers=2)
    config = EvictionConfig(600, recent=8, **eviction)
    engine = Engine(model, config, Sampling())
    run(engine, [[1, 2, 3]], 2)  # 2,000 more tokens need every prefix: these are compiled now
    engine.warm_up([512, 600, None])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert len(run(engine, [[1, 2, 3]], 10_000)[0]) == 10_000
        for n_tokens in (1, 17, 300, 600, 1500):
            run(engine, [[4] * n_tokens], 50)
        run(Engine(model, config, Sampling(seed=5)), [[7, 8]], 700)


def test_a_recompilation_would_be_noticed():
    """The stance used above does raise for a shape that was not warmed up."""
    model = random_model(torch.float32, n_layers=2)
    run(Engine(model, EvictionConfig(64), Sampling()), [[1, 2]], 3)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        run(Engine(model, EvictionConfig(65), Sampling()), [[1, 2]], 3)


@pytest.mark.parametrize("name", SETTINGS)
def test_buffers_stay_in_place(name):
    """A captured graph needs every buffer at its address: prefill, decode and a second run."""
    config = EvictionConfig(32, recent=4, **settings(name, lag=2))
    engine = Engine(random_model(), config, Sampling(), 2, "none")
    buffers = {**dict(engine.cache.named_buffers()), **dict(engine.state.named_buffers())}
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    run(engine, [[1, 2, 3], [4] * 50], 60)
    run(engine, [[5], [6, 7]], 40)
    after = {**dict(engine.cache.named_buffers()), **dict(engine.state.named_buffers())}
    assert {name: buffer.data_ptr() for name, buffer in after.items()} == addresses


# As on a CUDA device ---------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Record the shape of every tensor that is not a view of one that was there before."""

    def __init__(self, *modules):
        super().__init__()
        tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
        self.storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()._cdata
                if storage not in self.storages:
                    self.shapes.append(tuple(tensor.shape))
                self.storages[storage] = tensor  # held, so that no address is used twice
        return result


def cuda_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    """What scaled_dot_product_attention runs on CUDA; a CPU build only knows its slow fallback."""
    lower_right = isinstance(attn_mask, tuple)
    assert not lower_right or attn_mask == ("lower right", q.shape[2], k.shape[2])
    if attn_mask is None or lower_right:
        assert not (is_causal and q.shape[2] != k.shape[2]), "is_causal is aligned top left"
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, is_causal or lower_right)[0]
    assert q.shape[1] == k.shape[1], "the masked kernel would repeat keys and values"
    mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device)
    mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, False)[0]


class WithoutCudaBuild(TorchFunctionMode):
    """Spell as operators some methods whose Python bindings want a CUDA build of torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return self.get(*args)
        if function is torch.Tensor.__setitem__:
            tensor, index, value = args
            index = [None if item == slice(None) else item for item in index]
            return torch.ops.aten.index_put_(tensor, index, value)
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if function is torch.Tensor.contiguous:
            return torch.ops.aten.contiguous(*args)
        return function(*args, **(kwargs or {}))

    def get(self, tensor, index):
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            missing = tensor.dim() - sum(item is not None for item in index) + 1
            index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
        dim = 0
        for item in index:
            if item is None:
                tensor = tensor.unsqueeze(dim)
            elif isinstance(item, int):
                tensor = tensor.select(dim, item)
                dim -= 1
            else:
                tensor = torch.ops.aten.slice(tensor, dim, item.start, item.stop)
            dim += 1
        return tensor


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors on a CUDA device that have shapes but no values: asking for one raises."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", cuda_attention)
    monkeypatch.setattr(model_file, "causal_lower_right", lambda q, k: ("lower right", q, k))
    with FakeTensorMode(), torch.device("cuda"), WithoutCudaBuild():
        yield


BATCH, SLOTS, HEADS = 3, 1031, 4  # primes, to tell axes by their size


def fake_decoder(budget=SLOTS, **eviction):
    model = fake_model()
    config = EvictionConfig(budget, **eviction)
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1)
    return model, model.new_cache(config, BATCH), DecodeState(sampling, BATCH)


def fake_model(quantize=None):
    """A model with heads as wide as flash attention has them."""
    wide = dict(head_dim=64, hidden_size=128, intermediate_size=256, vocab_size=300)
    return Transformer(small_config(**wide, tied_embeddings=True), torch.bfloat16, quantize)


def largest(allocations):
    return max(torch.Size(shape).numel() for shape in allocations.shapes)


def with_two_axes(allocations, sequence):
    """Shapes in which more than one axis has the length of a sequence."""
    return [s for s in allocations.shapes if sum(size in sequence for size in s) > 1]


@pytest.mark.parametrize("prefix", [512, None])
@pytest.mark.parametrize("name", SETTINGS)
def test_decode_on_cuda(fake_cuda, name, prefix):
    """No value is asked for, and nothing larger than [B, H, S] is made: no copy of K or V.

    A map of slots by layer and head is [B, L, H_kv, S] itself.
    """
    model, cache, state = fake_decoder(**settings(name, lag=37))
    with Allocations(model, cache, state) as allocations:
        decode_step(model, cache, state, prefix)
    assert len(allocations.shapes) > 100
    assert largest(allocations) <= max(BATCH * HEADS * SLOTS, cache.position.numel())
    assert largest(allocations) < cache.layers[0].k.numel() / 10


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_decode_on_cuda(fake_cuda, quantize):
    """No value is asked for; but of one layer at a time K and V are copied."""
    model = fake_model(quantize)
    cache = model.new_cache(EvictionConfig(SLOTS, kv_dtype="int8"), BATCH)
    state = DecodeState(Sampling(temperature=0.7, top_k=20), BATCH)
    with Allocations(model, cache, state) as allocations:
        decode_step(model, cache, state, None)
    assert largest(allocations) == cache.layers[0].held_k.numel()


LAG = 37


@pytest.mark.parametrize("name", BLOCKWISE)
def test_the_end_of_a_block_on_cuda(fake_cuda, name):
    """No value is asked for, no tensor has two sequence axes, and no layer's K or V is copied."""
    model, cache, state = fake_decoder(**settings(name, LAG))
    with Allocations(model, cache, state) as allocations:
        cache.end_block()
    n_last = cache.policy.blocks * LAG
    shape = (BATCH, 4, 2, n_last, 64)  # the keys of the last blocks
    assert shape in allocations.shapes
    assert largest(allocations) == torch.Size(shape).numel() < cache.layers[0].k.numel()
    assert not with_two_axes(allocations, {SLOTS, LAG, n_last})


@pytest.mark.parametrize("name", SETTINGS)
def test_prefill_on_cuda(fake_cuda, name):
    """No value is asked for, and no tensor has two sequence axes, in a prompt of four chunks."""
    budget, n_tokens = 331, 1193  # chunks of 331, 331, 331 and 200
    model = fake_model()
    cache = model.new_cache(EvictionConfig(budget, **settings(name, LAG)))
    with Allocations(model, cache) as allocations:
        logits = model.prefill(torch.zeros(1, n_tokens, dtype=torch.int64), cache)
    assert logits.shape == (1, 300)
    sequence = {331, 200, 331 + 331, 331 + 200, LAG, 2 * LAG}
    assert any(331 in shape for shape in allocations.shapes)
    assert not with_two_axes(allocations, sequence)


def test_a_host_sync_would_be_noticed(fake_cuda, monkeypatch):
    """A policy that looks at a value raises, so the tests above can fail."""

    class Peeking(Random):
        def score(self, tokens):
            score = super().score(tokens)
            return score if score.sum().item() > 0 else -score

    monkeypatch.setitem(POLICIES, "peeking", Peeking)
    with pytest.raises(DataDependentOutputException):
        decode_step(*fake_decoder(policy="peeking"), 512)


def test_a_host_sync_at_the_end_of_a_block_would_be_noticed(fake_cuda, monkeypatch):
    """So would one, say, that asks whether any row has completed its block."""

    class Peeking(LagKV):
        def revise(self, last):
            return super().revise(last) if last.complete.any() else last.score

    monkeypatch.setitem(POLICIES, "peeking", Peeking)
    _, cache, _ = fake_decoder(policy="peeking")
    with pytest.raises(DataDependentOutputException):
        cache.end_block()


def storages(*modules):
    return [b.untyped_storage()._cdata for module in modules for b in module.buffers()]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_buffer_keeps_its_storage(fake_cuda, name):
    """A captured graph knows buffers by address: nothing may put others in their place."""
    model, cache, state = fake_decoder(**settings(name, LAG))
    prompt_cache = model.new_cache(cache.config)
    before = storages(cache, state, prompt_cache)
    decode_step(model, cache, state, None)
    cache.load_row(0, prompt_cache)
    if cache.block:
        cache.end_block()
    model.prefill(torch.zeros(1, 1100, dtype=torch.int64), prompt_cache)
    cache.reset()
    assert storages(cache, state, prompt_cache) == before


def test_mps_runs_eagerly():
    assert compiled_step("blocks", "mps") is decode_step


def test_a_missing_compiler_is_told_in_one_line():
    """With what to do about it, instead of the compiler's traceback."""
    # Inductor's own patch: pytest's would delete the second setting, an alias, when it undoes.
    missing = {"cpp.cxx": (None, "/no/such/compiler"), "force_disable_caches": True}
    engine = Engine(random_model(vocab_size=53), EvictionConfig(64), Sampling())
    told = pytest.raises(ValueError, match="cannot compile .*no-compile")
    with torch._inductor.config.patch(missing), told as caught:
        engine.warm_up([None])
    assert "\n" not in str(caught.value)


def test_a_copy_of_the_cache_would_be_noticed(fake_cuda, monkeypatch):
    """Attention that repeats keys for the query heads makes a tensor that is too large."""
    model, cache, state = fake_decoder()
    with Allocations(model, cache, state) as allocations:
        cache.layers[0].k.repeat_interleave(2, dim=1)
    assert largest(allocations) > BATCH * HEADS * SLOTS


def test_cuda_graph_route(monkeypatch):
    """On CUDA in mode "blocks", a prefix is captured once and replayed for each step."""
    engine = Engine(random_model(), EvictionConfig(32, recent=4), Sampling(), 1, "none")
    captured, replayed = [], []

    class Graph:
        def __init__(self, prefix):
            self.prefix = prefix

        def replay(self):
            replayed.append(self.prefix)

    def capture(prefix):
        captured.append(prefix)
        engine.graphs[prefix] = Graph(prefix)

    monkeypatch.setattr(engine, "captures", True)
    monkeypatch.setattr(engine, "capture", capture)
    monkeypatch.setattr(engine, "run_step", lambda *args: pytest.fail("ran outside the graph"))
    engine.warm_up([32, 32, None])
    engine.warm_up([None])
    for prefix in (32, 32, None):
        engine.step(prefix)
    assert captured == [32, None]
    assert replayed == [32, 32, None]


class StandIn:
    """In place of a CUDA graph: calls what it was recorded from, and counts."""

    def __init__(self, function):
        self.function, self.n_replays = function, 0

    def replay(self):
        self.function()
        self.n_replays += 1


@pytest.fixture
def recorded(monkeypatch):
    """The stand-ins, in place of all graphs that are recorded."""
    graphs = []

    def record(function):
        graphs.append(StandIn(function))
        return graphs[-1]

    monkeypatch.setattr(generate_file, "record", record)
    return graphs


def capturing_engine(monkeypatch, **eviction):
    """An engine that takes the way of CUDA, and whose step and block end are no graphs."""
    engine = Engine(random_model(), EvictionConfig(32, recent=8, **eviction), Sampling(), 2, "none")
    monkeypatch.setattr(engine, "captures", True)
    monkeypatch.setattr(engine, "run_step", lambda *args: decode_step(*args))
    return engine


@pytest.mark.parametrize("policy", ["lag-kv", "epikv-seg"])
def test_the_end_of_a_block_is_captured_once(monkeypatch, recorded, policy):
    """Beside the two graphs of the step; a replay is all that `end_block` does."""
    engine = capturing_engine(monkeypatch, policy=policy, lag=4)
    engine.warm_up([32, None])
    engine.warm_up([None, 32])
    assert len(recorded) == 3
    assert recorded[2] is engine.block_graph
    assert recorded[2].function == engine.cache.end_block
    recorded[2].function = lambda: None
    monkeypatch.setattr(engine.cache, "end_block", lambda: pytest.fail("ran outside the graph"))
    for _ in range(3):
        engine.end_block()
    assert [graph.n_replays for graph in recorded] == [0, 0, 3]


def test_no_block_is_captured_where_there_is_none(monkeypatch, recorded):
    engine = capturing_engine(monkeypatch)
    engine.warm_up([32, None])
    assert len(recorded) == 2 and engine.block_graph is None


@pytest.mark.parametrize("policy", ["lag-kv", "epikv-seg"])
def test_the_graphs_do_what_the_eager_run_does(monkeypatch, recorded, policy):
    """Rows of 3 and 21 with blocks of 4: one ends in every second step or so, as counted here."""
    prompts, n_tokens = [[1, 2, 3], [*range(21)]], 60
    engine = capturing_engine(monkeypatch, policy=policy, lag=4)
    eager = Engine(engine.model, engine.cache.config, Sampling(), 2, "none")
    assert run(engine, prompts, n_tokens) == run(eager, prompts, n_tokens)
    assert torch.equal(engine.cache.position, eager.cache.position)
    *steps, block = recorded
    fed = range(1, n_tokens)
    assert sum(graph.n_replays for graph in steps) == len(fed)
    assert block.n_replays == sum((3 + n) % 4 == 0 or (21 + n) % 4 == 0 for n in fed)

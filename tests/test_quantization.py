"""Quantised weights and caches against slow twins: rounding, products, loading, whole runs."""

import json
import math
import statistics
import sys

import pytest
import tiny
import torch
import transformers
from test_epikv import (
    EVICTING,
    READING,
    Text,
    decode,
    make_cache,
    prefill,
    random_text,
    settings_for,
)

import model as model_file
import quantization
from epikv import EvictionConfig
from generate import Engine, Generation, Sampling, generate, weight_bytes
from model import FUSED_ROWS, CheckpointError, Int4, Int8, Transformer
from replay import Replay

# The inputs of every weight are a multiple of a group of int4.
SHAPE = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
FORMATS = {"int8": Int8, "int4": Int4}


def random_weight(n_out, n_in, seed=0):
    """Rows and groups of different sizes; one all zero, one with a single sign."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_out, n_in, generator=generator)
    weight *= torch.logspace(-3, 3, n_out)[:, None]
    weight[1] = 0
    weight[2] = weight[2].abs()
    weight[3, 5] = 40 * weight[3].abs().max()
    return weight


def quantised(name, weight):
    held = FORMATS[name].empty(*weight.shape)
    held.copy_(weight)
    return held


def int8_twin(weight):
    """Values and scales [n_out, n_in], an entry at a time, in Python's own numbers."""
    values, scales = [], []
    for row in weight.double().tolist():
        scale = max(map(abs, row)) / 127
        values.append([round(x / scale) * scale if scale else 0.0 for x in row])
        scales.append([scale] * len(row))
    return torch.tensor([values, scales], dtype=torch.float64)


def int4_twin(weight):
    """Likewise: -8 is where a group reaches farther, and 7.5 is what the other end may need."""
    values, scales = [], []
    for row in weight.double().tolist():
        out, sizes = [], []
        for start in range(0, len(row), 64):
            group = row[start : start + 64]
            sign = 1 if max(group) < -min(group) else -1
            far, near = -min(x * sign for x in group), max(x * sign for x in group)
            scale = sign * max(far / 8, near / 7.5)
            for x in group:
                level = round(x / scale) if scale else 0
                out.append(max(-8, min(7, level)) * scale)
                sizes.append(abs(scale))
        values.append(out)
        scales.append(sizes)
    return torch.tensor([values, scales], dtype=torch.float64)


TWINS = {"int8": int8_twin, "int4": int4_twin}


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_equals_the_slow_twin(name):
    """And no weight is off by more than half its scale."""
    weight = random_weight(9, 192)
    values, scales = TWINS[name](weight)
    found = quantised(name, weight).dequantised(torch.float64)
    # An entry half-way between two levels may go either way: the twin divides in float64.
    error = (found - values).abs() / scales.clamp(min=1e-30)
    assert (error > 1e-4).double().mean() < 0.005 and error.max() < 1.001
    assert torch.all((found - weight).abs() <= 0.5001 * scales)
    assert torch.equal(found[1], torch.zeros(192, dtype=torch.float64))


@pytest.mark.parametrize("name, bytes_per_weight", [("int8", 1), ("int4", 0.5)])
def test_a_weight_takes_its_bits_and_its_scales(name, bytes_per_weight):
    held = FORMATS[name].empty(10, 256)
    assert held.shape == (10, 256) and len(held) == 10
    n_scales = 10 if name == "int8" else 10 * 256 // 64
    assert held.levels.nbytes == 10 * 256 * bytes_per_weight
    assert held.scale.nbytes == 4 * n_scales


@pytest.mark.parametrize("name, n_levels", [("int8", 255), ("int4", 16)])
def test_every_level_is_used(name, n_levels):
    evenly = torch.linspace(-1, 1, 640).view(64, 10).T.flatten()  # in each group too
    held = quantised(name, evenly.expand(2, -1))
    scale = held.scale.double().repeat_interleave(640 // held.scale.shape[1], 1)
    levels = (held.dequantised(torch.float64) / scale).round()
    assert len(levels[0].unique()) == n_levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_those_of_the_dequantised_weight(name, dtype):
    """Of one row and of several, compiled and eager, with a bias."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(2, 40, 128, generator=generator)
    held, bias = quantised(name, weight), bias[:, 0].to(dtype)
    rows = torch.randn(FUSED_ROWS + 1, 1, 128, generator=generator).to(dtype)
    compiled = torch.compile(model_file.linear, fullgraph=True, dynamic=False)
    exact = held.dequantised(torch.float64)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    for x in (rows[:1], rows[:3], rows[:-1].transpose(0, 1), rows):
        expected = x.double() @ exact.T + bias.double()
        for linear in (model_file.linear, compiled):
            with torch._dynamo.config.patch(recompile_limit=64):
                y = linear(x, held, bias)
            assert y.dtype == dtype and y.shape == expected.shape
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("n_rows", [1, 2, FUSED_ROWS, FUSED_ROWS + 1])
def test_products_with_a_weight_as_it_is(n_rows):
    """Compiled, and the rows of a batch have the bits that each has alone."""
    generator = torch.Generator().manual_seed(1)
    weight, rows = torch.randn(40, 128, generator=generator), torch.randn(n_rows, 1, 128)
    compiled = torch.compile(model_file.linear, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=64):
        y = compiled(rows, weight)
        alone = torch.cat([compiled(row[None], weight) for row in rows])
    torch.testing.assert_close(y.double(), rows.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    if n_rows <= FUSED_ROWS:
        assert torch.equal(y, alone)


# Whole models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised")
    return tiny.make_checkpoint(path, "Qwen2", tie_word_embeddings=request.param, **SHAPE)


def dequantise(model, plain):
    """Put the rounded weights of `model` into `plain`, which holds none."""
    for name, module in plain.named_modules():
        if isinstance(module, model_file.Linear):
            module.weight.copy_(model.get_submodule(name).weight.dequantised(plain.dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_quantised_part_by_part(folder, name):
    """Every weight is what its own rows give; a head is int8; all else is as stored."""
    stored = Transformer.from_pretrained(folder, dtype=torch.float64)
    model = Transformer.from_pretrained(folder, dtype=torch.float64, quantize=name)
    for path, module in stored.named_modules():
        if isinstance(module, model_file.Linear):
            kind = "int8" if path == "head" else name
            expected = quantised(kind, module.weight).dequantised(torch.float64)
            found = model.get_submodule(path).weight.dequantised(torch.float64)
            assert torch.equal(found, expected)
    head = stored.embedding if stored.head is None else stored.head.weight
    expected = quantised("int8", head).dequantised(torch.float64)
    assert torch.equal(model.head.weight.dequantised(torch.float64), expected)
    assert torch.equal(model.embedding, stored.embedding)
    assert torch.equal(model.blocks[0].qkv.bias, stored.blocks[0].qkv.bias)


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_a_step_reads(folder, name):
    """Counted by hand from the shapes: three blocks, biases of q, k, v, norms, and the head."""
    model = Transformer.from_pretrained(folder, quantize=name)
    weights = [(128, 64), (64, 64), (256, 64), (64, 128)]  # qkv, out, gate_up, down
    if name == "int8":
        n_bytes = sum(n_out * n_in + 4 * n_out for n_out, n_in in weights)
    else:
        n_bytes = sum(n_out * n_in // 2 + 4 * n_out * n_in // 64 for n_out, n_in in weights)
    floats = 3 * (2 * 64 + 128) + 64
    head = tiny.VOCAB_SIZE * (64 + 4)
    assert weight_bytes(model) == 3 * n_bytes + 4 * floats + head


@pytest.mark.parametrize("name", FORMATS)
def test_generation_equals_that_of_the_rounded_weights(folder, name):
    """Three rows that fill and evict, eager; float64, so that no likeliest token is in doubt."""
    model = Transformer.from_pretrained(folder, dtype=torch.float64, quantize=name)
    plain = Transformer(model.config, torch.float64)
    plain.load_state_dict(Transformer.from_pretrained(folder, dtype=torch.float64).state_dict())
    dequantise(model, plain)
    if plain.head is None:
        plain.head = model_file.Linear(64, tiny.VOCAB_SIZE, False, torch.float64)
        plain.head.weight.requires_grad_(False)
        plain.head.weight.copy_(model.head.weight.dequantised(torch.float64))
    prompts = [[1, 2, 3], list(range(40)), [7] * 20]
    settings = dict(budget=32, max_new_tokens=40, ignore_eos=True, compile_mode="none")
    found, expected = (generate(one, prompts, **settings).outputs for one in (model, plain))
    assert [output.tokens for output in found] == [output.tokens for output in expected]


@pytest.mark.parametrize("name, prompts", [("int8", 1), ("int4", 1), ("int4", 2)])
def test_compiled_equals_eager_and_nothing_recompiles(tmp_path, name, prompts):
    """One row, which takes the fused product, and two; the second run compiles nothing."""
    folder = tiny.make_checkpoint(tmp_path, **SHAPE)
    model = Transformer.from_pretrained(folder, dtype=torch.float64, quantize=name)
    prompts = [[1, 2, 3], [9] * 40][:prompts]
    tokens = []
    for mode in ("blocks", "none"):
        engine = Engine(model, EvictionConfig(32, recent=8), Sampling(), len(prompts), mode)
        tokens.append(run(engine, prompts, 60))
        with torch.compiler.set_stance("fail_on_recompile"):
            assert run(engine, prompts, 60) == tokens[-1]
    assert tokens[0] == tokens[1]


def run(engine, prompts, n_tokens):
    generation = Generation(engine, prompts, n_tokens, set())
    for _ in generation:
        pass
    return [output.tokens for output in generation.outputs]


def test_a_weight_that_int4_cannot_hold_is_told_in_one_line(tmp_path):
    checkpoint = tiny.make_checkpoint(tmp_path)  # of 48 inputs
    with pytest.raises(ValueError) as error:
        Transformer.from_pretrained(checkpoint, quantize="int4")
    message = str(error.value)
    assert "48" in message and "64" in message and "int8" in message and "\n" not in message
    Transformer.from_pretrained(checkpoint, quantize="int8")


def test_a_faulty_tensor_is_refused_as_ever(tmp_path):
    """The shape is checked against the whole weight's part, though it is stored otherwise."""
    checkpoint = tiny.make_checkpoint(tmp_path, **SHAPE)
    tiny.edit_json(checkpoint / "config.json", intermediate_size=192)
    with pytest.raises(CheckpointError, match=r"has shape \[(128, 64|64, 128)\]"):
        Transformer.from_pretrained(checkpoint, quantize="int4")


# The cache -------------------------------------------------------------------------------------


def rounded(x):
    """Values and scales [...] of x [..., D] as int8 holds them, an entry at a time."""
    values, scales = int8_twin(x.reshape(-1, x.shape[-1]))
    return values.to(x.dtype).view_as(x), scales.to(x.dtype).view_as(x)


def test_what_is_stored_is_off_by_half_a_scale_at_most():
    """In a slot that is written, in those read back, and in those a prompt keeps."""
    layer = make_cache(EvictionConfig(8, recent=1, kv_dtype="int8"), batch_size=2).layers[0]
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 2, 5, 3, generator=generator, dtype=torch.float64)
    k[0, 0, 2] = 0
    kept = torch.tensor([[8, 9, 10, 11, 12, 0, 1, 2]]).expand(2, 1, -1)  # 8 is the first new one
    layer.keep(kept, k, v)
    layer.write(torch.tensor([[6], [7]]), 5 * k[:, :, :1], 7 * v[:, :, :1])
    for found, x, factor in ((layer.k, k, 5), (layer.v, v, 7)):
        expected, scale = rounded(x)
        torch.testing.assert_close(found[:, :, :5], expected, rtol=1e-12, atol=0)
        assert torch.all((found[:, :, :5] - x).abs() <= 0.5000001 * scale)
        torch.testing.assert_close(found[0, :, 6], factor * expected[0, :, 0])
        torch.testing.assert_close(found[1, :, 7], factor * expected[1, :, 0])
        assert not found[0, :, [5, 7]].any() and not found[1, :, [5, 6]].any()
    some = torch.tensor([[[4, 0]], [[1, 7]]])
    for found, whole in zip(layer.read(some), (layer.k, layer.v), strict=True):
        for row in range(2):
            assert torch.equal(found[row], whole[row][:, some[row, 0]])


@pytest.mark.parametrize("name", [*EVICTING, "lag-kv by head", "reserve"])
def test_an_int8_cache_is_a_cache_of_rounded_keys_and_values(name):
    """Same victims and scores as a float64 cache that is given them, in prompt and decode."""
    options = dict(policy=name)
    if name == "lag-kv by head":
        options = dict(policy="lag-kv", slot_map="head")
    if name == "reserve":
        options = dict(policy="epikv", value_reserve=4)
    options |= dict(budget=24, recent=8) | (dict(lag=4) if name.startswith("lag") else {})
    int8, exact = (
        make_cache(settings_for(**options, kv_dtype=kv), batch_size=2) for kv in ("int8", None)
    )
    text = random_text(int8, 60)
    text = Text(text.residuals, rounded(text.k)[0], rounded(text.v)[0])
    for cache in (int8, exact):
        prefill(cache, text[:, :30], chunk=12)
    for i in range(30, 60):
        assert decode(int8, text[:, i : i + 1]) == decode(exact, text[:, i : i + 1])
    assert torch.equal(int8.position, exact.position)
    torch.testing.assert_close(int8.score, exact.score)
    for one, other in zip(int8.layers, exact.layers, strict=True):
        torch.testing.assert_close(one.k, other.k)
        torch.testing.assert_close(one.v, other.v)


@pytest.mark.parametrize("policy", ["epikv", *READING, "h2o", "r-kv", "thinkv"])
def test_every_kind_of_cache_generates_with_int8(folder, registered, policy):
    """Rows of a batch are as alone; there are as many bytes as the shapes say."""
    model = Transformer.from_pretrained(folder, dtype=torch.float64)
    prompts = [[1, 2, 3], list(range(60)), [7] * 20]
    settings = dict(policy=policy, budget=48, max_new_tokens=40, ignore_eos=True)
    settings |= tiny.needed(policy, 3) | dict(compile_mode="none", kv_dtype="int8")
    result = generate(model, prompts, **settings)
    for prompt, output in zip(prompts, result.outputs, strict=True):
        assert generate(model, [prompt], **settings).outputs[0].tokens == output.tokens
    if policy == "epikv":  # 3 layers, 2 heads of 16, scales of 8 bytes; 3 rows and the prompt's
        assert result.statistics.kv_bytes == 4 * 3 * 2 * 48 * 2 * (16 + 8)


def test_a_compiled_step_with_int8_equals_the_eager_one(tmp_path):
    """Rows that fill and evict, and nothing compiled in a second run."""
    model = Transformer.from_pretrained(tiny.make_checkpoint(tmp_path), dtype=torch.float64)
    config = EvictionConfig(32, recent=8, kv_dtype="int8")
    prompts = [[1, 2, 3], [9] * 40]
    tokens = []
    for mode in ("blocks", "none"):
        engine = Engine(model, config, Sampling(), 2, mode)
        tokens.append(run(engine, prompts, 60))
        with torch.compiler.set_stance("fail_on_recompile"):
            assert run(engine, prompts, 60) == tokens[-1]
    assert tokens[0] == tokens[1]


def test_a_replay_in_chunks_stores_what_one_by_token_does(folder):
    """Where nothing is forgotten; a chunk's own tokens see each other before they are rounded."""
    model = Transformer.from_pretrained(folder, dtype=torch.float64)
    config = EvictionConfig(128, recent=40, kv_dtype="int8")
    tokens = torch.randint(tiny.VOCAB_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))
    caches = []
    for chunked in (True, False):
        replay = Replay(model, config, [[1, 2, 3]], 64, "none", chunked=chunked)
        replay.feed(tokens)
        caches.append(replay.cache)
    assert torch.equal(caches[0].position, caches[1].position)
    first, second = (cache.layers[0] for cache in caches)  # no attention comes before these
    torch.testing.assert_close(first.k, second.k)
    torch.testing.assert_close(first.v, second.v)


def test_another_kv_dtype_is_refused():
    with pytest.raises(ValueError, match="unknown kv_dtype 'int4'; known: int8"):
        EvictionConfig(64, kv_dtype="int4")


# The script ------------------------------------------------------------------------------------


def losses(folder, traces, rounding=None):
    """Mean loss over each trace by transformers, with `rounding` of every linear weight."""
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Transformer.from_pretrained(folder).tokenizer
    head = torch.nn.Linear(64, tiny.VOCAB_SIZE, bias=False)
    head.weight.data = peer.lm_head.weight.data.clone()  # no longer the embedding, where tied
    peer.lm_head = head
    if rounding is not None:
        for module in peer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = rounding(module.weight.data)[0].float()
    found = []
    for trace in traces:
        prompt = tokenizer.encode(trace["prompt"])
        tokens = torch.tensor([prompt + tokenizer.ids(trace["trace"], add_special_tokens=False)])
        logits = peer(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :])
        found.append(loss.item())
    return found


def test_the_script_tells_the_loss_of_every_variant(folder, tmp_path, monkeypatch, capsys):
    """Against transformers, as stored and with weights rounded to int8 by the twin."""
    traces = [
        dict(id=str(i), prompt="q" * (3 + i), trace=text * 40) for i, text in enumerate("a bc")
    ]
    file = tmp_path / "traces.jsonl"
    file.write_text("\n".join(map(json.dumps, traces)), encoding="utf-8")
    options = ["--checkpoint", folder, "--traces", file, "--tokens", 40, "--device", "cpu"]
    options += ["--batch-size", 3, "--output", tmp_path / "table.md"]
    monkeypatch.setattr(sys, "argv", ["quantization.py", *map(str, options)])
    quantization.main()
    table = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == table
    assert table.startswith(f"{folder.name}, 4 traces x 40 tokens\n")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    cells = {name: rest for name, *rest in rows[2:]}
    assert list(cells) == list(quantization.VARIANTS)
    assert cells["float32"][2:4] == ["0.0000 ± 0.0000", "1.0000 ± 0.0000"]
    for name, rounding in (("float32", None), ("int8 weights", int8_twin)):
        expected = losses(folder, traces, rounding)
        mean, error = statistics.mean(expected), statistics.stdev(expected) / 2
        found = [float(number) for number in cells[name][0].split(" ± ")]
        assert found == pytest.approx([mean, error], abs=2e-3)
        assert float(cells[name][1]) == pytest.approx(math.exp(mean), rel=2e-3)
    kl = {name: float(rest[2].split()[0]) for name, rest in cells.items()}
    assert 0 < kl["int8 weights"] < kl["int4 weights"] and kl["int8 cache"] < 0.01
    n_bytes = [rest[-1] for rest in cells.values()]  # 3 layers, 2 heads of 16, keys and values
    assert n_bytes == ["768", "384", "768", "768", "240", "240"]

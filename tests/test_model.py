"""The decoder against transformers and a slow twin, and the loader on good and bad checkpoints."""

import dataclasses
import errno
import json
import math
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from fake_hub import REVISION, HubServer, client_environment
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import model as model_module
from epikv import EvictionConfig
from model import CheckpointError, ModelConfig, TextTokenizer, Transformer, rope_frequencies

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "SmolLM2-135M-Instruct"


# Running the model -------------------------------------------------------------------------------


def random_tokens(n_rows, n_tokens, seed=0, vocab_size=tiny.VOCAB_SIZE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (n_rows, n_tokens), generator=generator)


def prefill_all(model, tokens):
    """Logits [N, vocab] of every token of a prompt [1, N] that passes at once."""
    cache = model.new_cache(EvictionConfig(tokens.shape[1] + 8))
    x, *_ = model(tokens, torch.arange(tokens.shape[1])[None], cache)
    return model.logits(x[0])


def decode_step(model, tokens, cache, prefix=None):
    """Logits [B, vocab] after one more token [B] a row; `prefix` as the mask's, None for no mask"""
    slot, position = cache.begin_step()
    mask = None if prefix is None else cache.attention_mask(prefix)
    x, residuals, _, _ = model(tokens[:, None], position[:, None], cache, slot, mask)
    cache.end_step(slot, position, residuals)
    if cache.block and (cache.length % cache.block == 0).any():
        cache.end_block()
    return model.logits(x[:, -1])


def decode_all(model, tokens, n_prompt):
    """Logits [N - n_prompt + 1, vocab] from the end of the prompt on, one token at a time."""
    n_tokens = tokens.shape[1]
    cache = model.new_cache(EvictionConfig(n_tokens + 8))
    steps = [model.prefill(tokens[:, :n_prompt], cache)]
    for i in range(n_prompt, n_tokens):
        steps.append(decode_step(model, tokens[:, i], cache, prefix=min(i + 5, n_tokens + 8)))
    return torch.cat(steps)


def reference_model(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def reference_logits(folder, tokens):
    with torch.no_grad():
        return reference_model(folder)(tokens).logits[0]


def relative_difference(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# 1. The same logits as transformers --------------------------------------------------------------

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
THETA_ROPE = {"rope_type": "default", "rope_theta": 300.0}

FAMILIES = {
    "llama": ("Llama", {}),
    "llama-llama3-rope": ("Llama", dict(rope_parameters=LLAMA3_ROPE, head_dim=16)),
    "llama-linear-rope": ("Llama", dict(rope_parameters=LINEAR_ROPE)),
    "llama-theta": ("Llama", dict(rope_parameters=THETA_ROPE)),
    "llama-head-dim": ("Llama", dict(head_dim=20)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-norm-eps": ("Llama", dict(rms_norm_eps=0.3)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-attention-bias": ("Llama", dict(attention_bias=True)),
    "llama-mlp-bias": ("Llama", dict(mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral-head-dim": ("Mistral", dict(sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=20)),
    "qwen3-biases": ("Qwen3", dict(head_dim=12, attention_bias=True)),
    "mha": ("Llama", dict(num_key_value_heads=4)),
    "mha-by-default": ("Llama", dict(num_key_value_heads=None)),
    "gqa-group-3": ("Llama", dict(num_attention_heads=6, num_key_value_heads=2)),
    "mqa": ("Llama", dict(num_key_value_heads=1)),
    "one-head": ("Llama", dict(num_attention_heads=1, num_key_value_heads=1)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Folder, tokens and transformers' logits of a tiny model of one family."""
    name, config = FAMILIES[request.param]
    folder = tiny.make_checkpoint(tmp_path_factory.mktemp(request.param), name, **config)
    tokens = random_tokens(1, 60)
    return folder, tokens, reference_logits(folder, tokens)


def test_logits_equal_those_of_transformers(family):
    """Over the prompt at once, and token by token after a part of it."""
    folder, tokens, expected = family
    model = Transformer.from_pretrained(folder)
    assert relative_difference(prefill_all(model, tokens), expected) < 1e-4
    n_prompt = 7
    decoded = decode_all(model, tokens, n_prompt)
    assert relative_difference(decoded, expected[n_prompt - 1 :]) < 1e-4


def test_every_parameter_shows_in_the_logits(family):
    """Zeroing any kind of tensor, or dropping a quirk, is far outside the tolerance above."""
    folder, tokens, expected = family
    model = Transformer.from_pretrained(folder)
    kinds = {}
    for name, parameter in model.named_parameters():
        kinds.setdefault(name.split(".", 2)[-1], []).append(parameter)
    spoiled = {}
    for kind, parameters in kinds.items():
        saved = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.fill_(1.0 if "norm" in kind else 0.0)
        spoiled[kind] = relative_difference(prefill_all(model, tokens), expected)
        for parameter, old in zip(parameters, saved, strict=True):
            parameter.copy_(old)
    plain = dataclasses.replace(model.config, rope_scaling={}, rope_theta=10000.0)
    if plain != model.config:
        model.rope.copy_(rope_frequencies(plain))
        spoiled["rope"] = relative_difference(prefill_all(model, tokens), expected)
    assert min(spoiled.values()) > 1e-3, spoiled


def old_rope_keys(kind_key):
    def rewrite(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {kind_key: kind, **rope}

    return rewrite


ROPE_SPELLINGS = {
    "rope_parameters": lambda config: None,
    "rope_scaling with rope_type": old_rope_keys("rope_type"),
    "rope_scaling with type": old_rope_keys("type"),
    "rope_parameters with theta outside": lambda config: config.update(
        rope_theta=config["rope_parameters"].pop("rope_theta")
    ),
}


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, LINEAR_ROPE, THETA_ROPE])
@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_rope_is_read_from_either_spelling(tmp_path, rope, spelling):
    """transformers reads the file that it wrote; the rewritten one must mean the same."""
    folder = tiny.make_checkpoint(tmp_path, rope_parameters=rope, head_dim=16)
    tokens = random_tokens(1, 60)
    expected = reference_logits(folder, tokens)
    config = tiny.read_json(folder / "config.json")
    ROPE_SPELLINGS[spelling](config)
    tiny.write_json(folder / "config.json", config)
    model = Transformer.from_pretrained(folder)
    assert relative_difference(prefill_all(model, tokens), expected) < 1e-4


def test_rope_without_any_key_has_base_10000(tmp_path):
    """As every family's class has it in transformers."""
    folder = tiny.make_checkpoint(tmp_path)
    tiny.edit_json(folder / "config.json", drop=["rope_parameters"])
    tokens = random_tokens(1, 60)
    model = Transformer.from_pretrained(folder)
    assert relative_difference(prefill_all(model, tokens), reference_logits(folder, tokens)) < 1e-4


@pytest.fixture(scope="module")
def demo():
    return Transformer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def demo_reference():
    return reference_model(DEMO)


def test_demo_logits_equal_those_of_transformers(demo, demo_reference):
    text = "Rain forms when warm, moist air rises and cools. " * 5
    tokens = torch.tensor([demo.tokenizer.encode(text)])
    with torch.no_grad():
        expected = demo_reference(tokens).logits[0]
    assert relative_difference(prefill_all(demo, tokens), expected) < 1e-4
    n_prompt = tokens.shape[1] - 20
    decoded = decode_all(demo, tokens, n_prompt)
    assert relative_difference(decoded, expected[n_prompt - 1 :]) < 1e-4


# 2. The same greedy text as transformers ---------------------------------------------------------


def test_demo_greedy_text_equals_that_of_transformers(demo, demo_reference):
    """200 tokens in a cache that holds them all; a difference needs two logits within 1e-3."""
    n_new = 200
    prompt = demo.tokenizer.encode_chat([{"role": "user", "content": "How does rain form?"}])
    prompt = torch.tensor([prompt])
    n_prompt = prompt.shape[1]
    expected = demo_reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        eos_token_id=-1,  # a token that never comes: the text runs on past its end
        pad_token_id=0,
    )[0, n_prompt:].tolist()
    assert len(expected) == n_new
    cache = demo.new_cache(EvictionConfig(n_prompt + n_new + 8))
    logits = demo.prefill(prompt, cache)
    for i, theirs in enumerate(expected):
        ours = logits[0].argmax().item()
        if ours != theirs:
            assert logits[0, ours] - logits[0, theirs] <= 1e-3, f"token {i}"
            break
        prefix = min((n_prompt + i) // 64 * 64 + 64, cache.config.budget)
        logits = decode_step(demo, torch.tensor([ours]), cache, prefix)


# 3. Rows of a batch ------------------------------------------------------------------------------

CACHE = EvictionConfig(budget=24, recent=4, window=8)
CACHES = {  # with every kind of score, block and slot map
    "epikv": {},
    "epikv-smooth": {},
    "epikv-band": {},
    "epikv with reserve": dict(policy="epikv", value_reserve=5),
    "epikv-seg": dict(lag=4, quotas=(3, 2, 1)),
    "lag-kv": dict(lag=2),
    "lag-kv of the previous": dict(policy="lag-kv", lag=2, lag_reference="previous"),
    "lag-kv by head": dict(policy="lag-kv", lag=2, slot_map="head"),
    "lag-kv by head with reserve": dict(policy="lag-kv", lag=2, slot_map="head", value_reserve=5),
    "key-diff": {},
    "key-diff by head": dict(policy="key-diff", slot_map="head"),
    "k-norm by head": dict(policy="k-norm", slot_map="head"),
    "value-var": {},
    "streaming": {},
    "random": {},
}


def small_cache(name):
    """A cache of CACHES, small enough to evict soon."""
    size = dict(budget=CACHE.budget, recent=CACHE.recent, window=CACHE.window)
    return EvictionConfig(**size | dict(policy=name) | CACHES[name])


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A tiny Llama that no test may change."""
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_model(tiny_folder):
    """The same in float64."""
    return Transformer.from_pretrained(tiny_folder, dtype=torch.float64)


def three_rows(model, config, lengths):
    """One-row caches after prompts of `lengths`, and a batch into which they are loaded."""
    batch = model.new_cache(config, batch_size=len(lengths))
    rows = []
    for i, length in enumerate(lengths):
        rows.append(model.new_cache(config))
        model.prefill(random_tokens(1, length, seed=i), rows[i])
        batch.load_row(i, rows[i])
    return batch, rows


@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_a_batch_are_independent(tiny_model, cache):
    """Each row gives the logits and keeps the tokens that it does alone, before and after full.

    Blocks of the rows end at different steps.
    """
    config = small_cache(cache)
    lengths = [3, 11, 40]
    batch, rows = three_rows(tiny_model, config, lengths)
    tokens = random_tokens(3, 50, seed=9)
    for step in range(tokens.shape[1]):
        together = decode_step(tiny_model, tokens[:, step], batch, prefix=config.budget)
        for i, row in enumerate(rows):
            seen = lengths[i] + step + 1
            prefix = seen if seen < config.budget else None
            alone = decode_step(tiny_model, tokens[i : i + 1, step], row, prefix)
            torch.testing.assert_close(together[i], alone[0], rtol=0, atol=1e-10)
            assert torch.equal(batch.position[i], row.position[0])
    assert (batch.length > config.budget).all()


def test_a_longer_prefix_changes_nothing(tiny_model):
    """Masked slots count for nothing, whatever is in them."""
    tokens = random_tokens(3, 8, seed=9)
    outcomes = []
    for prefix in (20, 22, CACHE.budget):
        batch, _ = three_rows(tiny_model, CACHE, [3, 5, 11])
        for layer in batch.layers:
            empty = (batch.position < 0)[:, 0, :, :, None]  # [B, 1, S, 1]
            layer.k.masked_fill_(empty, 100.0)
            layer.v.masked_fill_(empty, 100.0)
        steps = [decode_step(tiny_model, tokens[:, i], batch, prefix) for i in range(8)]
        outcomes.append(torch.stack(steps))
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0], rtol=0, atol=1e-10)


def test_no_mask_equals_the_full_mask_once_every_slot_is_taken(tiny_model):
    tokens = random_tokens(3, 8, seed=9)
    outcomes = []
    for prefix in (None, CACHE.budget):
        batch, _ = three_rows(tiny_model, CACHE, [24, 25, 60])
        steps = [decode_step(tiny_model, tokens[:, i], batch, prefix) for i in range(8)]
        outcomes.append(torch.stack(steps))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=1e-10)


# 4. Chunked prefill against a slow twin ----------------------------------------------------------


class Twin:
    """A Llama in float64 written out head by head, with dense attention and an explicit mask."""

    def __init__(self, folder):
        self.config = tiny.read_json(folder / "config.json")
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.double() for name, weight in weights.items()}

    def norm(self, x, name):
        scale = torch.sqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[f"{name}.weight"]

    def rotate(self, x):
        """Turn x [N, D] by position, with angles in float32 as the design has them."""
        n_tokens, size = x.shape
        exponent = torch.arange(0, size, 2).float() / size
        frequency = 1.0 / self.config["rope_parameters"]["rope_theta"] ** exponent
        angle = torch.arange(n_tokens).float()[:, None] * frequency
        turn = torch.complex(angle.cos().double(), angle.sin().double())
        turned = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def logits(self, tokens, visible):
        """Logits [N, vocab] of tokens [N]; visible [L, H_kv, N, N]: token i sees token j."""
        w, config = self.weights, self.config
        size = config["head_dim"]
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            y = self.norm(x, f"{name}.input_layernorm")
            q = (y @ w[f"{name}.self_attn.q_proj.weight"].T).split(size, dim=-1)
            k = (y @ w[f"{name}.self_attn.k_proj.weight"].T).split(size, dim=-1)
            v = (y @ w[f"{name}.self_attn.v_proj.weight"].T).split(size, dim=-1)
            heads = []
            for i, query in enumerate(q):
                affinity = self.rotate(query) @ self.rotate(k[i // group]).T / math.sqrt(size)
                affinity = affinity.masked_fill(~visible[layer, i // group], -math.inf)
                heads.append(affinity.softmax(-1) @ v[i // group])
            x = x + torch.cat(heads, dim=-1) @ w[f"{name}.self_attn.o_proj.weight"].T
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate = y @ w[f"{name}.mlp.gate_proj.weight"].T
            y = gate * gate.sigmoid() * (y @ w[f"{name}.mlp.up_proj.weight"].T)
            x = x + y @ w[f"{name}.mlp.down_proj.weight"].T
        return self.norm(x, "model.norm") @ w["lm_head.weight"].T


def watched_prefill(model, tokens, cache):
    """Prefill; also the length of every chunk, and the positions [l, h, S] kept after it."""
    lengths, kept = [], []
    admit = cache.admit

    def watched(k, v, residuals):
        lengths.append(k[0].shape[2])
        admit(k, v, residuals)
        kept.append(cache.position[0].clone())

    cache.admit = watched
    logits = model.prefill(tokens, cache)
    del cache.admit
    return logits, lengths, kept


def kept_sets(position, n_layers, n_heads):
    """Sets of the positions [l, h, S] that are kept in every layer and head."""
    expanded = position.expand(n_layers, n_heads, -1)
    return [[set(head.tolist()) - {-1} for head in layer] for layer in expanded]


def visible_tokens(n_tokens, lengths, kept):
    """Boolean [L, H_kv, N, N]: its chunk up to itself, and what was kept when its chunk began."""
    n_layers, n_heads = len(kept[0]), len(kept[0][0])
    visible = torch.zeros(n_layers, n_heads, n_tokens, n_tokens, dtype=torch.bool)
    for layer in range(n_layers):
        for head in range(n_heads):
            start, before = 0, set()
            for length, after in zip(lengths, kept, strict=True):
                for i in range(start, start + length):
                    visible[layer, head, i, sorted(before)] = True
                    visible[layer, head, i, start : i + 1] = True
                start, before = start + length, after[layer][head]
    return visible


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("chunk", [2048, 7])
@pytest.mark.parametrize("n_prompt", [CACHE.budget, CACHE.budget + 1, 3 * CACHE.budget, 100])
def test_chunked_prefill_equals_the_slow_twin(
    tiny_folder, tiny_model, monkeypatch, name, chunk, n_prompt
):
    """Also the tokens decoded afterwards, each of which evicts one more."""
    monkeypatch.setattr(model_module, "PREFILL_CHUNK", chunk)
    config = small_cache(name)
    n_tokens = n_prompt + 6
    tokens = random_tokens(1, n_tokens, seed=3)
    cache = tiny_model.new_cache(config)
    sizes = tiny_model.config.n_layers, tiny_model.config.n_kv_heads
    logits, lengths, kept = watched_prefill(tiny_model, tokens[:, :n_prompt], cache)
    kept = [kept_sets(position, *sizes) for position in kept]
    assert sum(lengths) == n_prompt and max(lengths) == min(chunk, config.budget)
    seen = 0
    for length, layers in zip(lengths, kept, strict=True):
        seen += length
        protected = {*range(min(seen, config.sinks)), *range(max(seen - config.recent, 0), seen)}
        for positions in (positions for heads in layers for positions in heads):
            assert len(positions) == min(seen, config.budget)
            assert protected <= positions <= set(range(seen))
    actual = [logits]
    for i in range(n_prompt, n_tokens):
        actual.append(decode_step(tiny_model, tokens[:, i], cache))
        kept.append(kept_sets(cache.position[0], *sizes))
        lengths.append(1)
    # A decoded token takes its victim's slot before it attends, so it sees what stays after it.
    visible = visible_tokens(n_tokens, lengths, kept)
    for i in range(n_prompt, n_tokens):
        visible[:, :, i] = False
        for layer, heads in enumerate(kept[i - n_tokens]):
            for head, positions in enumerate(heads):
                visible[layer, head, i, sorted(positions)] = True
    expected = Twin(tiny_folder).logits(tokens[0], visible)[n_prompt - 1 :]
    torch.testing.assert_close(torch.cat(actual), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 5, 23])
@pytest.mark.parametrize("name", CACHES)
def test_chunks_without_eviction_equal_one_pass(tiny_model, monkeypatch, name, chunk):
    """Logits and everything in the cache, the policy's state included.

    No token comes twice: `lag-kv` divides by the range of a block of two.
    """
    config = small_cache(name)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randperm(tiny.VOCAB_SIZE, generator=generator)[None, : CACHE.budget]
    whole = tiny_model.new_cache(config)
    expected = tiny_model.prefill(tokens, whole)
    monkeypatch.setattr(model_module, "PREFILL_CHUNK", chunk)
    parts = tiny_model.new_cache(config)
    actual, lengths, _ = watched_prefill(tiny_model, tokens, parts)
    assert len(lengths) == math.ceil(CACHE.budget / chunk)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    others = dict(whole.named_buffers())
    for name, buffer in parts.named_buffers():
        torch.testing.assert_close(buffer, others[name], rtol=1e-9, atol=1e-9, msg=name)


# 5. The loader -----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny_folder, tmp_path):
    """A tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "checkpoint"))


def refused(checkpoint, *words):
    """Loading fails in one line that holds all `words`. Returns the message."""
    with pytest.raises(CheckpointError) as error:
        Transformer.from_pretrained(checkpoint)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def edit_weights(folder, edit):
    """Rewrite model.safetensors after `edit` changed its dict of tensors."""
    weights = weights_of(folder)
    edit(weights)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_shards_give_the_weights_of_one_file(tiny_folder, tmp_path):
    shards = tiny.make_tokenizer(tiny.make_model(tmp_path, max_shard_size="60KB"))
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    assert not (shards / "model.safetensors").exists()
    whole = Transformer.from_pretrained(tiny_folder).state_dict()
    for name, tensor in Transformer.from_pretrained(shards).state_dict().items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("shard", [0, 1, -1])
def test_a_shard_that_the_index_names_must_be_there(tmp_path, shard):
    shards = tiny.make_tokenizer(tiny.make_model(tmp_path, max_shard_size="60KB"))
    victim = sorted(shards.glob("model-*.safetensors"))[shard]
    victim.unlink()
    refused(shards, victim.name, "not found")


def test_a_tied_checkpoint_may_store_its_head(tmp_path):
    """A stored lm_head is ignored, be it a copy of the embedding or not."""
    folder = tiny.make_checkpoint(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in weights_of(folder)
    tokens = random_tokens(1, 20)
    expected = prefill_all(Transformer.from_pretrained(folder), tokens)
    for factor in (1.0, 3.0):
        edit_weights(
            folder,
            lambda w, factor=factor: w.update(
                {"lm_head.weight": factor * w["model.embed_tokens.weight"]}
            ),
        )
        assert torch.equal(prefill_all(Transformer.from_pretrained(folder), tokens), expected)


def test_old_rotary_buffers_are_ignored(checkpoint):
    tokens = random_tokens(1, 20)
    expected = prefill_all(Transformer.from_pretrained(checkpoint), tokens)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(checkpoint, lambda w: w.update({name: torch.ones(6)}))
    assert torch.equal(prefill_all(Transformer.from_pretrained(checkpoint), tokens), expected)


WEIGHT_FAULTS = {
    "untied without head": (lambda w: w.pop("lm_head.weight"), ["lm_head.weight", "missing"]),
    "missing tensor": (
        lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"),
        ["model.layers.1.self_attn.k_proj.weight", "missing"],
    ),
    "unknown tensor": (
        lambda w: w.update({"model.layers.0.mlp.router.weight": torch.ones(3)}),
        ["model.layers.0.mlp.router.weight", "unknown"],
    ),
    "bias that the config denies": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
        ["model.layers.0.self_attn.q_proj.bias"],
    ),
    "layer too many": (
        lambda w: w.update({"model.layers.3.input_layernorm.weight": torch.ones(48)}),
        ["model.layers.3.input_layernorm.weight"],
    ),
    "transposed": (
        lambda w: w.update({"model.layers.2.mlp.down_proj.weight": torch.ones(80, 48)}),
        ["model.layers.2.mlp.down_proj.weight", "[80, 48]", "[48, 80]"],
    ),
    "one row short": (
        lambda w: w.update({"model.embed_tokens.weight": torch.ones(tiny.VOCAB_SIZE - 1, 48)}),
        ["model.embed_tokens.weight", "[260, 48]", "[261, 48]"],
    ),
    "shape that would broadcast": (
        lambda w: w.update({"model.norm.weight": torch.ones(1)}),
        ["model.norm.weight", "[1]", "[48]"],
    ),
    "scalar": (
        lambda w: w.update({"model.norm.weight": torch.tensor(1.0)}),
        ["model.norm.weight", "[]", "[48]"],
    ),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_in_the_tensors_names_the_tensor(checkpoint, fault):
    edit, words = WEIGHT_FAULTS[fault]
    edit_weights(checkpoint, edit)
    refused(checkpoint, *words)


TRUNCATIONS = {
    "empty": lambda size, header: 0,
    "in the header's length": lambda size, header: 4,
    "before the header": lambda size, header: 8,
    "in the header": lambda size, header: 8 + header // 2,
    "before the data": lambda size, header: 8 + header,
    "in the data": lambda size, header: (8 + header + size) // 2,
    "by one byte": lambda size, header: size - 1,
}


@pytest.mark.parametrize("point", TRUNCATIONS)
def test_truncated_weights_are_refused(checkpoint, point):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    length = TRUNCATIONS[point](len(data), int.from_bytes(data[:8], "little"))
    path.write_bytes(data[:length])
    refused(checkpoint, str(path))


@pytest.mark.parametrize("start", [b"\xff" * 8, b"\x10" + b"\0" * 7 + b"{]" * 8])
def test_garbage_for_weights_is_refused(checkpoint, start):
    path = checkpoint / "model.safetensors"
    path.write_bytes(start + path.read_bytes()[len(start) :])
    refused(checkpoint, str(path))


def rope_of(kind):
    return dict(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


CONFIG_FAULTS = {
    "architecture": (
        dict(architectures=["GPT2LMHeadModel"]),
        ["GPT2LMHeadModel", *(f"{f}ForCausalLM" for f in ("Llama", "Mistral", "Qwen2", "Qwen3"))],
    ),
    "no architecture": (dict(architectures=[]), ["architecture", "LlamaForCausalLM"]),
    "null architecture": (dict(architectures=None), ["architecture", "LlamaForCausalLM"]),
    "dynamic rope": (rope_of("dynamic"), ["dynamic", "llama3"]),
    "yarn rope": (rope_of("yarn"), ["yarn", "llama3"]),
    "longrope": (rope_of("longrope"), ["longrope", "llama3"]),
    "invented rope": (rope_of("corkscrew"), ["corkscrew", "llama3"]),
    "old spelling of an invented rope": (
        dict(rope_parameters=None, rope_scaling={"type": "corkscrew", "factor": 2.0}),
        ["corkscrew", "llama3"],
    ),
    "rope without a factor": (dict(rope_parameters={"rope_type": "linear"}), ["factor"]),
    "llama3 rope without its length": (
        dict(rope_parameters={k: v for k, v in LLAMA3_ROPE.items() if not k.startswith("orig")}),
        ["original_max_position_embeddings"],
    ),
    "partial rope": (dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
    "Mistral's window": (
        dict(architectures=["MistralForCausalLM"], sliding_window=4096),
        ["sliding-window"],
    ),
    "Qwen2's window": (
        dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=4096),
        ["sliding-window"],
    ),
    "a window in some layers": (
        dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        ["sliding-window"],
    ),
    "activation": (dict(hidden_act="gelu"), ["gelu", "silu"]),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_what_the_model_cannot_do_is_refused_by_name(checkpoint, fault):
    changes, words = CONFIG_FAULTS[fault]
    tiny.edit_json(checkpoint / "config.json", **changes)
    refused(checkpoint, *words)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_key_missing_in_the_config_is_named(checkpoint, key):
    tiny.edit_json(checkpoint / "config.json", drop=[key])
    refused(checkpoint, "config.json", key)


@pytest.mark.parametrize(
    "config",
    [
        dict(use_sliding_window=False, sliding_window=None),
        dict(use_sliding_window=False, sliding_window=32768, max_window_layers=2),
    ],
)
def test_a_window_that_qwen2_does_not_use_is_accepted(tmp_path, config):
    """The released Qwen2.5 configurations name a window and switch it off."""
    folder = tiny.make_checkpoint(tmp_path, "Qwen2")
    tiny.edit_json(folder / "config.json", **config)
    tokens = random_tokens(1, 20)
    model = Transformer.from_pretrained(folder)
    assert relative_difference(prefill_all(model, tokens), reference_logits(folder, tokens)) < 1e-4


def test_mistral_has_a_window_unless_the_config_denies_it(tmp_path):
    """The family's class in transformers has one of 4096 where config.json names none."""
    folder = tiny.make_checkpoint(tmp_path, "Mistral", sliding_window=None)
    tiny.edit_json(folder / "config.json", drop=["sliding_window"])
    assert reference_model(folder).config.sliding_window == 4096
    refused(folder, "sliding-window")


FILE_FAULTS = {
    "no config": ("config.json", None, ["config.json", "not found"]),
    "config is not JSON": ("config.json", b'{"hidden_size": ', ["config.json", "JSON"]),
    "config is not text": ("config.json", b"\xff\xfe\x00", ["config.json"]),
    "config is empty": ("config.json", b"", ["config.json", "JSON"]),
    "config is no object": ("config.json", b"[1, 2]", ["config.json"]),
    "no weights": ("model.safetensors", None, ["model.safetensors", "not found"]),
    "index is not JSON": ("model.safetensors.index.json", b"{", ["index.json", "JSON"]),
    "index is no object": ("model.safetensors.index.json", b"[]", ["index.json"]),
    "no tokenizer": ("tokenizer.json", None, ["tokenizer.json", "not found"]),
    "tokenizer is not JSON": ("tokenizer.json", b'{"version": ', ["tokenizer.json"]),
    "tokenizer is another thing": ("tokenizer.json", b'{"version": "1.0"}', ["tokenizer.json"]),
    "tokenizer is empty": ("tokenizer.json", b"", ["tokenizer.json"]),
    "tokenizer config is not JSON": ("tokenizer_config.json", b"{", ["tokenizer_config.json"]),
    "generation config is not JSON": ("generation_config.json", b"x", ["generation_config.json"]),
    "template is not text": ("chat_template.jinja", b"\xff\xfe", ["chat_template.jinja"]),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_missing_or_damaged_file_is_named(checkpoint, fault):
    name, content, words = FILE_FAULTS[fault]
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    refused(checkpoint, *words)


@pytest.mark.parametrize("name", ["no/such/folder/here", "/no/such/folder", "what is this?", ".."])
def test_neither_a_folder_nor_a_repo_id(name, tmp_path, monkeypatch):
    """Told without asking the hub. `..` is a folder, but holds no checkpoint."""
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    refused(name, name)


def test_the_optional_files_are_optional(checkpoint):
    for name in ("generation_config.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    model = Transformer.from_pretrained(checkpoint)
    assert model.tokenizer.chat_template is None
    assert model.eos_ids == {tiny.EOS}


# 6. Types of numbers -----------------------------------------------------------------------------

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", [*FLOATS, torch.float64])
def test_weights_are_converted_and_rope_stays_float32(tmp_path, stored, wanted):
    folder = tiny.make_checkpoint(tmp_path, rope_parameters=LLAMA3_ROPE)
    edit_weights(folder, lambda w: w.update({name: t.to(stored) for name, t in w.items()}))
    model = Transformer.from_pretrained(folder, dtype=wanted)
    weights = weights_of(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert torch.equal(model.embedding, weights["model.embed_tokens.weight"].to(wanted))
    down = weights["model.layers.2.mlp.down_proj.weight"].to(wanted)
    assert torch.equal(model.blocks[2].down.weight, down)
    assert model.rope.dtype == torch.float32
    rotary = reference_model(folder).model.rotary_emb
    torch.testing.assert_close(model.rope, rotary.inv_freq, rtol=1e-6, atol=0)
    logits = prefill_all(model, random_tokens(1, 40))
    assert logits.dtype == torch.promote_types(wanted, torch.float32)
    assert model.new_cache(CACHE).layers[0].k.dtype == wanted
    expected = reference_logits(folder, random_tokens(1, 40))
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(wanted, 1e-4)
    assert relative_difference(logits, expected) < tolerance


def test_the_default_dtype_does_not_change_the_model(tiny_folder):
    tokens = random_tokens(1, 20)
    expected = prefill_all(Transformer.from_pretrained(tiny_folder), tokens)
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer.from_pretrained(tiny_folder)
        actual = prefill_all(model, tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.rope.dtype == torch.float32
    assert torch.equal(actual, expected)


# 7. The hub --------------------------------------------------------------------------------------

# Loads each repo id in turn and prints what came of it. The second field limits the size of any
# file that the process may write, as a disk does that is full.
HUB_CLIENT = """
import json, resource, sys, time
from model import CheckpointError, Transformer
time.sleep = lambda seconds: None
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
for repo, limit in json.loads(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or unlimited[0], unlimited[1]))
    try:
        model = Transformer.from_pretrained(repo)
        outcome = ["loaded", model.embedding.sum().item(), 0]
    except Exception as error:
        outcome = [type(error).__name__, str(error), getattr(error, "errno", 0)]
    print("outcome", json.dumps(outcome))
"""


def load_from_hub(endpoint, home, *repos):
    """Run HUB_CLIENT against `endpoint` with an empty or a filled cache `home`."""
    environment = client_environment(endpoint, home) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HUB_CLIENT, json.dumps(repos)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("outcome ")]
    return [json.loads(line.removeprefix("outcome ")) for line in lines]


FULL_DISK = 30_000  # bytes: less than the weights, more than any other file
UNWANTED = [
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "README.md",
    "tokenizer.model",
]


@pytest.fixture(scope="module")
def hub(tiny_folder, tmp_path_factory):
    """Outcome of each load, files sent by the hub and those wanted, its cache, the weights' sum."""
    home = tmp_path_factory.mktemp("hf_home")
    shards = tiny.make_model(tmp_path_factory.mktemp("shards"), max_shard_size="100KB")
    served, wanted = {}, {}
    for repo, folder in (("org/tiny", tiny_folder), ("org/shards", tiny.make_tokenizer(shards))):
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files["chat_template.jinja"] = TEMPLATE.encode()
        wanted[repo] = sorted(files)
        served[repo] = files | dict.fromkeys(UNWANTED, b"unwanted")
    served |= dict.fromkeys(["org/cut", "org/full", "org/later"], served["org/tiny"])
    server = HubServer(served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = ["tiny", "shards", "cut", "full", "absent", "again"]
    outcomes = load_from_hub(
        f"http://127.0.0.1:{server.server_port}",
        home,
        ("org/tiny", 0),
        ("org/shards", 0),
        ("org/cut", 0),
        ("org/full", FULL_DISK),
        ("org/absent", 0),
        ("org/tiny", 0),
    )
    server.shutdown()
    server.server_close()
    result = dict(zip(names, outcomes, strict=True))
    repos = ("org/tiny", "org/cut", "org/full", "org/later", "org/absent")
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcomes = load_from_hub(endpoint, home, *((repo, 0) for repo in repos))
    result |= dict(zip((f"unreachable {repo}" for repo in repos), outcomes, strict=True))
    total = weights_of(tiny_folder)["model.embed_tokens.weight"].sum().item()
    return result, server.sent, wanted, home, total


def snapshot_files(home, repo):
    folder = home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / REVISION
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.mark.parametrize("case", ["tiny", "shards", "again", "unreachable org/tiny"])
def test_a_repo_id_loads_from_the_hub_and_then_from_the_cache(hub, case):
    result, _, _, _, total = hub
    assert result[case] == ["loaded", pytest.approx(total), 0]


@pytest.mark.parametrize("repo", ["org/tiny", "org/shards"])
def test_only_the_files_needed_are_fetched(hub, repo):
    """Each of them once, though org/tiny was loaded twice."""
    _, sent, wanted, _, _ = hub
    assert sorted(name for sender, name in sent if sender == repo) == wanted[repo]
    assert not {name for _, name in sent} & set(UNWANTED)


@pytest.mark.parametrize(
    "case",
    [
        "absent",
        "cut",
        "unreachable org/later",
        "unreachable org/absent",
        "unreachable org/cut",
        "unreachable org/full",
    ],
)
def test_a_hub_that_does_not_deliver_is_told_in_one_line(hub, case):
    kind, message, _ = hub[0][case]
    assert kind == "CheckpointError", message
    assert "\n" not in message
    assert f"org/{case.rpartition('/')[2]}" in message


def test_a_full_disk_is_told_in_one_line(hub):
    kind, message, *_ = hub[0]["full"]
    assert kind == "CheckpointError" and os.strerror(errno.EFBIG) in message
    assert "org/full" in message and "\n" not in message


@pytest.mark.parametrize("repo", ["org/cut", "org/full"])
def test_a_download_that_broke_off_leaves_nothing_half_done(hub, repo):
    _, sent, _, home, _ = hub
    assert (repo, "model.safetensors") in sent
    whole = snapshot_files(home, "org/tiny")
    found = snapshot_files(home, repo)
    assert "model.safetensors" in whole and "model.safetensors" not in found
    for name, data in found.items():
        assert data == whole[name]
    assert not list(home.rglob("*.incomplete"))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_attention_heads=0), "division"),
        (
            dict(num_attention_heads=3, num_key_value_heads=2),
            "3 query heads cannot share 2 of keys",
        ),
        (dict(hidden_size="wide"), "value that cannot be"),
        (dict(rope_parameters="fast"), "value that cannot be"),
        (dict(num_hidden_layers="x"), "n_layers is 'x'"),
        (dict(num_hidden_layers=1.5), "n_layers is 1.5"),
        (dict(num_hidden_layers=10**30), "n_layers is 1000"),
        (dict(num_attention_heads=4, num_key_value_heads=-1), "n_kv_heads is -1"),
        (dict(head_dim=1.5), "head_dim is 1.5"),
        (dict(vocab_size=True), "vocab_size is True"),
        (dict(rms_norm_eps="x"), "norm_eps is 'x'"),
        (dict(rms_norm_eps=-1), "norm_eps is -1"),
        (dict(max_position_embeddings=None), "max_positions is None"),
        (dict(rope_parameters={"rope_theta": 0}), "rope_theta is 0"),
        (dict(rope_parameters={"rope_type": "linear", "factor": 0}), "factor is 0"),
        (dict(tie_word_embeddings="x"), "tied_embeddings is 'x'"),
        (dict(architectures=1.5), "value that cannot be"),
        (dict(layer_types=-1), "value that cannot be"),
    ],
    ids=str,
)
def test_a_config_value_that_cannot_be_is_told_in_one_line(tiny_folder, changes, words):
    hf = tiny.read_json(tiny_folder / "config.json") | {"head_dim": None} | changes
    with pytest.raises(CheckpointError, match=words) as caught:
        ModelConfig.from_hf(hf)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "weight_map, words",
    [
        ("abc", "index"),
        (None, "index"),
        ({"model.norm.weight": 1}, "index"),
        ({"model.norm.weight": "../elsewhere.safetensors"}, "outside the folder"),
        ({"model.norm.weight": "/elsewhere.safetensors"}, "outside the folder"),
    ],
    ids=str,
)
def test_a_damaged_index_is_told_in_one_line(tmp_path, weight_map, words):
    folder = tiny.make_checkpoint(tmp_path)
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CheckpointError, match=words):
        Transformer.from_pretrained(folder)


def test_a_tensor_stored_twice_or_as_integers_is_refused(tmp_path):
    folder = tiny.make_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is torch.int8"):
        Transformer.from_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    save_file({name: tensors[name]}, folder / "more.safetensors")
    shards = {"a": "model.safetensors", "b": "more.safetensors"}
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": shards})
    with pytest.raises(CheckpointError, match=f"{name}.*stored twice"):
        Transformer.from_pretrained(folder)


def test_only_mistral_has_a_window_by_default(tiny_folder):
    """Qwen's configs carry a window that holds only where use_sliding_window says so."""
    hf = tiny.read_json(tiny_folder / "config.json")
    hf |= {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}
    hf.pop("use_sliding_window", None)
    assert ModelConfig.from_hf(hf).qkv_bias


LOAD = """
import resource, sys, torch
from model import ModelConfig, Transformer, load_weights, read_json
from pathlib import Path
folder = Path(sys.argv[1])
config = ModelConfig.from_hf(read_json(folder / "config.json"))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = Transformer(config)
load_weights(model, folder)
print(peak() - before, sum(weight.nbytes for weight in model.parameters()))
"""


def test_loading_needs_the_model_and_one_shard(tmp_path):
    """Peak host memory: the weights once, and at most the largest file of them again."""
    shape = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    tiny.make_model(tmp_path, max_shard_size="30MB", **shape)
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    grown, weights = map(int, done.stdout.split())
    assert weights > 200e6 and largest < 40e6
    assert grown < weights + largest + 20e6  # and what Python itself takes


# 8. The tokenizer --------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def special(tokenizer, text):
    return tokenizer.tokenizer.token_to_id(text)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([5, 6], 5, "</s>", {5, 6, tiny.EOS}),
        ([5, 6], [6, 5], None, {5, 6}),
        (5, 5, "<bot>", {5, tiny.EOS + 2}),
        (5, 5, {"content": "<bot>", "special": True}, {5, tiny.EOS + 2}),
        ("no file", [7, 8], "</s>", {7, 8, tiny.EOS}),
        ("no key", 7, "</s>", {7, tiny.EOS}),
        ("no file", None, "</s>", {tiny.EOS}),
        ("no key", None, None, set()),
    ],
)
def test_eos_is_joined_from_all_files(checkpoint, generation, config, tokenizer, expected):
    """generation_config's list or number, config.json's, and what tokenizer_config.json names."""
    tiny.edit_json(checkpoint / "config.json", eos_token_id=config)
    tiny.edit_json(checkpoint / "tokenizer_config.json", eos_token=tokenizer)
    path = checkpoint / "generation_config.json"
    if generation == "no file":
        path.unlink()
    elif generation == "no key":
        tiny.edit_json(path, drop=["eos_token_id"])
    else:
        tiny.edit_json(path, eos_token_id=generation)
    assert Transformer.from_pretrained(checkpoint).eos_ids == expected


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False, "special": True}, None])
def test_special_tokens_are_strings_or_objects(tmp_path, bos):
    folder = tiny.make_tokenizer(tmp_path, bos_token=bos, chat_template=TEMPLATE)
    tokenizer = TextTokenizer(folder)
    ids = tokenizer.encode_chat(MESSAGES)
    expected = ["<user>", "h", "i", "<bot>"]
    assert [tokenizer.tokenizer.id_to_token(i) for i in ids] == ["<s>"] * bool(bos) + expected


TEMPLATE_PLACES = {
    "file": lambda t: (t, {}),
    "string": lambda t: (None, {"chat_template": t}),
    "list": lambda t: (
        None,
        {
            "chat_template": [
                {"name": "tool_use", "template": "wrong"},
                {"name": "default", "template": t},
            ]
        },
    ),
    "file before string": lambda t: (t, {"chat_template": "wrong"}),
}


@pytest.mark.parametrize("place", TEMPLATE_PLACES)
def test_the_template_is_found_where_transformers_finds_it(tmp_path, place):
    file, config = TEMPLATE_PLACES[place](TEMPLATE)
    folder = tiny.make_tokenizer(tmp_path, **config)
    if file is not None:
        (folder / "chat_template.jinja").write_text(file, encoding="utf-8")
    tokenizer = TextTokenizer(folder)
    ids = tokenizer.encode_chat(MESSAGES)
    assert ids == [special(tokenizer, "<s>"), *same_as_transformers(folder)[1:]]
    assert ids[-1] == special(tokenizer, "<bot>")


def same_as_transformers(folder, messages=MESSAGES):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE + "{{ '<think>\\n' }}",
        TEMPLATE + "{% if add_generation_prompt %}<think>\n{{ '' }}{% endif %}",
        TEMPLATE.replace("<bot>{% endif %}", "{{ '<bot><think>\\n' }}{% endif %}\n"),
    ],
)
def test_an_open_thought_keeps_its_line_end(tmp_path, template):
    folder = tiny.make_tokenizer(tmp_path, chat_template=template)
    tokenizer = TextTokenizer(folder)
    ids = tokenizer.encode_chat(MESSAGES)
    newline = tokenizer.encode("\n")[-1]
    assert ids[-2:] == [special(tokenizer, "<think>"), newline]
    assert ids == same_as_transformers(folder)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_stands_once(tmp_path, adds_bos):
    """The template writes one; for plain text it is the tokenizer's affair."""
    tokenizer = tiny.byte_level_tokenizer(adds_bos)
    tokenizer = TextTokenizer(tiny.make_tokenizer(tmp_path, tokenizer, chat_template=TEMPLATE))
    bos = special(tokenizer, "<s>")
    chat = tokenizer.encode_chat(MESSAGES)
    assert chat[0] == bos and chat.count(bos) == 1
    assert tokenizer.encode("hi").count(bos) == adds_bos
    assert tokenizer.encode("hi")[:1] == [bos] or not adds_bos


def test_stored_truncation_and_padding_are_switched_off(tmp_path):
    """Some tokenizer.json files carry those of their training."""
    tokenizer = tiny.byte_level_tokenizer(adds_bos=False)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    tokenizer = TextTokenizer(tiny.make_tokenizer(tmp_path, tokenizer))
    assert len(tokenizer.encode("hello")) == 5
    assert len(tokenizer.encode("hello" * 10)) == 50


BAD_TEMPLATES = {
    "raised": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "raised in two lines": ("{{ raise_exception('roles\\nmust alternate') }}", "roles"),
    "syntax": ("{% if %}\n{{ x }}", "template"),
    "unclosed": ("{% for m in messages %}\n{{ m.content }}", "template"),
    "undefined": ("{{ messages[0].tool.name }}", "template"),
    "type": ("{{ 1 + messages[0].content }}", "template"),
    "sandbox": ("{{ ''.__class__.__mro__ ~ messages.append(1) }}", "template"),
}


@pytest.mark.parametrize("fault", BAD_TEMPLATES)
def test_a_template_that_fails_is_told_in_one_line(tmp_path, fault):
    template, word = BAD_TEMPLATES[fault]
    tokenizer = TextTokenizer(tiny.make_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(CheckpointError) as error:
        tokenizer.encode_chat(MESSAGES)
    assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": TEMPLATE}]])
def test_a_missing_template_is_told(tmp_path, template):
    tokenizer = TextTokenizer(tiny.make_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(CheckpointError, match="no chat template"):
        tokenizer.encode_chat(MESSAGES)


TEMPLATE_FEATURES = {
    "tools and documents are none": "{% if tools is none and documents is none %}a{% endif %}",
    "unknown names are undefined": "{% if enable_thinking is undefined %}a{% endif %}",
    "tojson": "{{ messages | tojson }}{{ {'é': '<&>'} | tojson(indent=2) }}",
    "tojson with separators": "{{ messages | tojson(separators=(',', ':')) }}",
    "loop controls": "{% for i in 'abc' %}{% if i == 'b' %}{% break %}{% endif %}a{% endfor %}",
    "namespace": "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}",
    "trimmed blocks": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "generation": "{% generation %}a{% endgeneration %}b",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "special tokens": "{{ eos_token }}{{ unk_token }}{{ pad_token }}",
}


@pytest.mark.parametrize("feature", TEMPLATE_FEATURES)
def test_templates_render_as_in_transformers(tmp_path, feature):
    template = TEMPLATE_FEATURES[feature] + "."
    folder = tiny.make_tokenizer(tmp_path, chat_template=template)
    assert TextTokenizer(folder).encode_chat(MESSAGES) == same_as_transformers(folder)


CONVERSATIONS = {
    "one turn": MESSAGES,
    "system": [{"role": "system", "content": "Be brief."}, *MESSAGES],
    "three turns": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another 🙂, please:\n\n  green or 红?"},
    ],
    "special tokens in a message": [{"role": "user", "content": "<|im_end|>\n<|im_start|>hi"}],
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_demo_conversations_have_the_ids_of_transformers(conversation):
    messages = CONVERSATIONS[conversation]
    assert TextTokenizer(DEMO).encode_chat(messages) == same_as_transformers(DEMO, messages)


@pytest.mark.parametrize("text", ["", " ", "Hello, world!", " a\n\nb\tc", "naïve 🙂 日本語"])
def test_demo_text_has_the_ids_of_transformers(text):
    expected = transformers.AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    assert TextTokenizer(DEMO).encode(text) == expected


TOKENIZERS = {
    "byte level": tiny.byte_level_tokenizer,
    "byte fallback": tiny.byte_fallback_tokenizer,
    "demo": None,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def text_tokenizer(request, tmp_path_factory):
    build = TOKENIZERS[request.param]
    if build is None:
        return TextTokenizer(DEMO)
    return TextTokenizer(tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"), build(False)))


def check_stream(tokenizer, ids, step):
    """Text streamed `step` tokens at a time grows to the decoded text, in whole characters."""
    stream, text = tokenizer.stream(), ""
    expected = tokenizer.decode(ids)
    assert "\ufffd" not in expected
    for start in range(0, len(ids), step):
        text += stream.add(ids[start : start + step])
        assert expected.startswith(text)
    assert text == expected
    assert stream.end() == ""


TEXTS = [
    "plain text",
    "smile 😀😃 and 👩‍👩‍👧‍👦 family",
    "日本語と中文, 한국어",
    "naïve Zoë e\u0301",
    "🇫🇷🇩🇪",
    "  two spaces  \n\n new line\t",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_decoded_text(text_tokenizer, text):
    ids = text_tokenizer.encode(text)
    for step in (1, 2, 5, len(ids)):
        check_stream(text_tokenizer, ids, step)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_any_text_streams(text_tokenizer, text):
    ids = text_tokenizer.encode(text)
    assume("\ufffd" not in text_tokenizer.decode(ids))  # the demo's vocabulary lacks some bytes
    check_stream(text_tokenizer, ids, step=1)


def test_special_tokens_do_not_show_in_the_text(text_tokenizer):
    eos = text_tokenizer.eos_id
    ids = [eos, *text_tokenizer.encode("a b"), eos, *text_tokenizer.encode("😀"), eos]
    check_stream(text_tokenizer, ids, step=1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*"\né😀", 0xFF, 0x80, 0xF0]), max_size=8))
def test_bytes_that_form_no_character_do_not_stop_the_stream(text_tokenizer, pieces):
    """A model may emit any bytes; the text after them must still come."""
    byte_tokens = text_tokenizer.tokenizer.token_to_id
    ids = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += text_tokenizer.encode(piece)
        else:
            alphabet = {0xFF: "ÿ", 0x80: "Ģ", 0xF0: "ð"}  # as the byte-level alphabet writes it
            names = [f"<0x{piece:02X}>", alphabet[piece]]
            ids += [token for name in names if (token := byte_tokens(name)) is not None][:1]
    stream = text_tokenizer.stream()
    for token in ids:
        stream.add([token])
    text = stream.add(text_tokenizer.encode("the end")) + stream.end()
    assert text.endswith("the end")


def test_a_broken_last_character_comes_at_the_end(text_tokenizer):
    """Nothing of it is streamed; the end brings what a full decode shows."""
    ids = text_tokenizer.encode("ok 😀")[:-1]
    stream = text_tokenizer.stream()
    text = "".join(stream.add([token]) for token in ids)
    assert text.rstrip() == "ok"
    assert text + stream.end() == text_tokenizer.decode(ids)
    assert "\ufffd" in text_tokenizer.decode(ids)


def test_a_stream_of_nothing_is_empty(text_tokenizer):
    stream = text_tokenizer.stream()
    assert stream.add([]) + stream.end() == ""


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch):
    """Streams and graphs are made there."""
    current = []
    monkeypatch.setattr(torch, "empty", lambda size, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    found = [model_module.find_device(name) for name in ("cuda:3", "cuda", "cpu")]
    assert [*map(str, found)] == ["cuda:3", "cuda", "cpu"] and current == ["cuda:3"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a file of Linux is read")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_weights_stand_in_one_stretch_of_memory_in_huge_pages(tmp_path, quantize):
    """Aligned, none over another; the kernel notes what was asked of it as the flag hg."""
    folder = tiny.make_checkpoint(tmp_path)
    model = Transformer.from_pretrained(folder, device="cpu", quantize=quantize)
    weights = sorted(model.parameters(), key=lambda weight: weight.data_ptr())
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert all(weight.data_ptr() % 64 == 0 for weight in weights)
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    starts = [weight.data_ptr() for weight in weights[1:]]
    gaps = [start - end for end, start in zip(ends[:-1], starts, strict=True)]
    assert all(0 <= gap < 64 for gap in gaps)
    region = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            low, high = (int(number, 16) for number in line.split()[0].split("-"))
            region = "ours" if low <= weights[0].data_ptr() < high else ""
        elif region and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            break
    else:
        raise AssertionError("the weights are in no region")


def test_memory_of_a_system_without_huge_pages(tmp_path, monkeypatch):
    folder = tiny.make_checkpoint(tmp_path)
    wanted = Transformer.from_pretrained(folder, device="cpu").state_dict()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    found = Transformer.from_pretrained(folder, device="cpu").state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

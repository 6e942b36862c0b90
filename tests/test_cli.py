"""The command line: what it prints where, what it refuses, and how it ends."""

import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path

import pytest
import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import generate as generate_module
from epikv import POLICIES, EvictionConfig, SlotCache
from generate import generate, main, parse_arguments, stream
from model import Transformer

SCRIPT = Path(generate_module.__file__)
DEMO = SCRIPT.parent / "models" / "SmolLM2-135M-Instruct"

USER, BOT, SYSTEM = 258, 259, 260  # in the order of tiny.SPECIAL_TOKENS
TEMPLATE = (
    "{% set name = {'user': '<user>', 'assistant': '<bot>', 'system': '<think>'} %}"
    "{% for m in messages %}{{ name[m.role] }}{{ m.content }}</s>{% endfor %}<bot>"
)
CONTEXT = 256
PROMPT = ("--prompt", "w1 w2")


def word_tokenizer():
    """Token i is the word "wi", so that a text shows its tokens."""
    vocabulary = {f"w{i}": i for i in range(tiny.BOS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tiny.finish_tokenizer(tokenizer, adds_bos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint that speaks in words; no test may change it."""
    folder = tiny.make_model(tmp_path_factory.mktemp("cli"), max_position_embeddings=CONTEXT)
    return tiny.make_tokenizer(folder, word_tokenizer(), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(folder):
    return Transformer.from_pretrained(folder, device="cpu")


def set_stdin(monkeypatch, data, terminal=False):
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape")
    text.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", text)


@pytest.fixture
def cli(folder, capsys, monkeypatch):
    """Run the command line in this process: exit code, stdout and stderr."""

    def run(*options, stdin=b"", terminal=False):
        set_stdin(monkeypatch, stdin, terminal)
        base = ["--checkpoint", str(folder), "--device", "cpu", "--no-compile"]
        try:
            code = main([*base, *map(str, options)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def started(monkeypatch):
    """The generations that the command line starts."""
    generations = []

    def spy(*args, **settings):
        generations.append(stream(*args, **settings))
        return generations[-1]

    monkeypatch.setattr(generate_module, "stream", spy)
    return generations


@pytest.fixture
def unloadable(monkeypatch):
    """No model may be loaded."""

    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the mistake was found")

    monkeypatch.setattr(Transformer, "from_pretrained", fail)


def text_of(model, prompt="w1 w2", **settings):
    settings = dict(compile_mode="none") | settings
    return generate(model, prompt, **settings).outputs[0].text


def is_refused(outcome, *words):
    """One line of error with all the `words`, exit code 2, and nothing on stdout."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


# 11. Bad input -----------------------------------------------------------------------------------

SEG = (*PROMPT, "--policy", "epikv-seg")

MISTAKES = {  # options, and words of the error
    "budget too small": ([*PROMPT, "--budget", 8, "--recent", 4], ["budget 8", "recent 4"]),
    "budget 0": ([*PROMPT, "--budget", 0], ["budget must be at least 1"]),
    "budget negative": ([*PROMPT, "--budget", -5], ["budget must be at least 1", "-5"]),
    "budget not a number": ([*PROMPT, "--budget", "many"], ["--budget", "'many'"]),
    "budget of full": ([*PROMPT, "--policy", "full", "--budget", 64], ["'full'", "64"]),
    "policy": ([*PROMPT, "--policy", "lru"], ["'lru'", *POLICIES]),
    "sinks": ([*PROMPT, "--sinks", -1], ["sinks"]),
    "recent": ([*PROMPT, "--recent", -1], ["recent"]),
    "window": ([*PROMPT, "--window", 1], ["window must be from 2 to 4096"]),
    "band of streaming": ([*PROMPT, "--policy", "streaming", "--band-a", 1], ["'streaming'"]),
    "band a word": ([*PROMPT, "--band-a", "early"], ["--band-a", "'early'"]),
    "band half a range": ([*PROMPT, "--band-b", "7-"], ["--band-b", "'7-'"]),
    "band range and list": ([*PROMPT, "--band-a", "0-1,2"], ["--band-a", "'0-1,2'"]),
    "band backwards": ([*PROMPT, "--band-a", "2-1"], ["2-1"]),
    "band of three ends": ([*PROMPT, "--band-a", "0-1-2"], ["0-1-2"]),
    "recent too large": ([*PROMPT, "--budget", 64, "--recent", 60], ["budget 64", "recent 60"]),
    "recent leaves one slot": (
        [*PROMPT, "--budget", 64, "--recent", 59, "--value-reserve", 1],
        ["value_reserve must be from 0 to 0", "got 1"],
    ),
    "lag longer than recent": (
        [*PROMPT, "--policy", "epikv-seg", "--lag", 65, "--recent", 64],
        ["'epikv-seg'", "lag 65", "recent is 64", "lower lag or raise recent"],
    ),
    "two lags longer than recent": (
        [*PROMPT, "--policy", "lag-kv", "--lag", 33, "--recent", 64],
        ["2 x lag 33", "recent is 64", "lower lag or raise recent"],
    ),
    "lag longer than the budget": (
        [*PROMPT, "--policy", "lag-kv", "--lag", 32, "--budget", 64],
        ["lag must be from 1 to 29", "got 32"],
    ),
    "lag 0": ([*PROMPT, "--policy", "lag-kv", "--lag", 0], ["lag must be from 1 to", "got 0"]),
    "lag a word": ([*PROMPT, "--policy", "lag-kv", "--lag", "long"], ["--lag", "'long'"]),
    "lag without blocks": ([*PROMPT, "--lag", 8], ["'epikv' has no blocks", "drop lag"]),
    "lag of streaming": (
        [*PROMPT, "--policy", "streaming", "--lag", 8],
        ["'streaming' has no blocks"],
    ),
    "lag reference": (
        [*PROMPT, "--policy", "lag-kv", "--lag-reference", "last"],
        ["--lag-reference", "'last'", "previous"],
    ),
    "quotas ascending": (
        [*SEG, "--quotas", "8,32,64"],
        ["three numbers that do not ascend", "(8, 32"],
    ),
    "quotas out of order": ([*SEG, "--quotas", "64,8,32"], ["three numbers that do not ascend"]),
    "two quotas": ([*SEG, "--quotas", "64,32"], ["three numbers", "(64, 32)"]),
    "four quotas": ([*SEG, "--quotas", "64,32,8,4"], ["three numbers"]),
    "quota above the lag": (
        [*SEG, "--quotas", "65,8,0", "--lag", 64],
        ["quotas must be from 0 to lag 64", "65"],
    ),
    "quota below 0": ([*SEG, "--quotas=64,32,-1"], ["quotas must be from 0", "-1"]),
    "quotas a word": ([*SEG, "--quotas", "many"], ["--quotas", "'many'", "64,32,8"]),
    "quotas a range": ([*SEG, "--quotas", "64-8"], ["--quotas", "'64-8'"]),
    "quotas of lag-kv": (
        [*PROMPT, "--policy", "lag-kv", "--quotas", "64,32,8"],
        ["'lag-kv' has no quotas"],
    ),
    "reserve of all": (
        [*PROMPT, "--budget", 64, "--recent", 16, "--value-reserve", 44],
        ["value_reserve must be from 0 to 43", "44 slots", "got 44"],
    ),
    "reserve below 0": ([*PROMPT, "--value-reserve", -1], ["value_reserve", "got -1"]),
    "reserve a word": ([*PROMPT, "--value-reserve", "some"], ["--value-reserve", "'some'"]),
    "reserve of full": ([*PROMPT, "--policy", "full", "--value-reserve", 5], ["'full'", "reserve"]),
    "value statistic": (
        [*PROMPT, "--value-reserve", 8, "--value-statistic", "mean"],
        ["--value-statistic", "'mean'", "range"],
    ),
    "slot map of epikv": ([*PROMPT, "--slot-map", "head"], ["'epikv'", "'head'", "shared"]),
    "slot map of epikv-seg": ([*SEG, "--slot-map", "head"], ["'epikv-seg'", "'head'", "shared"]),
    "slot map unknown": (
        [*PROMPT, "--policy", "lag-kv", "--slot-map", "token"],
        ["--slot-map", "'token'", "head"],
    ),
    "temperature": ([*PROMPT, "--temperature", -0.5], ["temperature must be 0 or more"]),
    "temperature nan": ([*PROMPT, "--temperature", "nan"], ["temperature must be 0 or more"]),
    "top-p 0": ([*PROMPT, "--top-p", 0], ["top-p must be above 0"]),
    "top-p 1.5": ([*PROMPT, "--top-p", 1.5], ["top-p", "1.5"]),
    "top-k 0": (
        [*PROMPT, "--temperature", 1, "--top-k", 0],
        ["top-k must be a whole number of at least 1"],
    ),
    "min-p 2": ([*PROMPT, "--min-p", 2], ["min-p must be from 0 to 1"]),
    "seed": ([*PROMPT, "--seed", -1], ["seed", "-1"]),
    "top-k at temperature 0": (
        [*PROMPT, "--temperature", 0, "--top-k", 5],
        ["top-k has no effect at temperature 0"],
    ),
    "num-samples 0": ([*PROMPT, "--num-samples", 0], ["num-samples"]),
    "max-new-tokens 0": ([*PROMPT, "--max-new-tokens", 0], ["max-new-tokens must be at least 1"]),
    "dtype": ([*PROMPT, "--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
    "quantize": ([*PROMPT, "--quantize", "int2"], ["--quantize", "int2", "int8", "int4"]),
    "compile mode": ([*PROMPT, "--compile-mode", "fast"], ["--compile-mode", "blocks"]),
    "chat and raw": (["--chat", "--raw"], ["--chat", "--raw"]),
    "chat and samples": (["--chat", "--num-samples", 2], ["--chat", "--num-samples"]),
    "chat and marks": (["--chat", "--show-kept"], ["--chat", "--show-kept"]),
    "chat and prompt": (["--chat", *PROMPT], ["--chat", "--prompt"]),
    "two prompts": ([*PROMPT, "--prompt-file", "x"], ["--prompt-file", "--prompt"]),
    "empty prompt": (["--prompt", ""], ["the prompt is empty"]),
    "prompt of blanks": (["--prompt", " \n "], ["the prompt is empty"]),
    "unknown option": ([*PROMPT, "--fast"], ["--fast"]),
    "stray word": ([*PROMPT, "stray"], ["stray"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_a_model_is_loaded(cli, unloadable, mistake):
    """Nor is one looked for: the checkpoint, which is not there either, is no matter yet."""
    options, words = MISTAKES[mistake]
    outcome = cli(*options, "--checkpoint", "/nowhere/at/all")
    is_refused(outcome, *words)
    assert "/nowhere" not in outcome[2]


PIPED = {
    "nothing": (b"", ["the prompt is empty"]),
    "blanks": (b" \n\n", ["the prompt is empty"]),
    "not UTF-8": (b"abc\xff", ["stdin is not UTF-8", "offset 3"]),
}


@pytest.mark.parametrize("fault", PIPED)
def test_a_bad_pipe_is_told_before_a_model_is_loaded(cli, unloadable, fault):
    data, words = PIPED[fault]
    is_refused(cli(stdin=data), *words)


def test_a_terminal_is_no_prompt(cli, unloadable):
    is_refused(cli(stdin=b"", terminal=True), "no prompt", "--prompt", "--prompt-file", "--chat")


def test_closed_stdin_is_no_prompt(unloadable, monkeypatch, capsys):
    """As some daemons have it."""
    monkeypatch.setattr(sys, "stdin", None)
    code = main([])
    is_refused((code, *capsys.readouterr()), "no prompt")


FILES = {
    "missing": (lambda path: None, ["No such file"]),
    "a folder": (lambda path: path.mkdir(), ["directory"]),
    "not UTF-8": (lambda path: path.write_bytes(b"ab\xffc"), ["is not UTF-8", "offset 2"]),
    "empty": (lambda path: path.write_bytes(b""), ["the prompt is empty"]),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_bad_prompt_file_is_told_before_a_model_is_loaded(cli, unloadable, tmp_path, fault):
    make, words = FILES[fault]
    make(tmp_path / "prompt.txt")
    is_refused(cli("--prompt-file", tmp_path / "prompt.txt"), *words)


def test_a_calibration_is_needed(cli, unloadable):
    words = "policy 'epikv-fit' needs a calibration; see scripts/calibrate.py"
    is_refused(cli(*PROMPT, "--policy", "epikv-fit"), words)


CALIBRATIONS = {
    "missing": (lambda path: None, ["No such file"]),
    "a folder": (lambda path: path.mkdir(), ["directory"]),
    "not UTF-8": (lambda path: path.write_bytes(b"ab\xffc"), ["UnicodeDecodeError"]),
    "a list": (lambda path: path.write_text("[1]", "utf-8"), ["is no calibration"]),
    "nested": (lambda path: path.write_text("[" * 100_000, "utf-8"), ["is no calibration"]),
    "without a field": (lambda path: tiny.edit_json(path, drop=["band_a"]), ["'band_a'"]),
    "other blocks": (
        lambda path: tiny.edit_json(path, n_layers=4),
        ["weights are [3, 6, 3] and [3, 3, 2] for 4 blocks"],
    ),
    "NaN": (lambda path: tiny.edit_json(path, weight_b=float("nan")), ["a weight is not finite"]),
    "infinite": (lambda path: tiny.edit_json(path, window=float("inf")), ["OverflowError"]),
    "no band": (lambda path: tiny.edit_json(path, band_b=[]), ["a band names no block"]),
}


@pytest.mark.parametrize("policy", ["epikv-fit", "epikv", "streaming"])
@pytest.mark.parametrize("fault", CALIBRATIONS)
def test_a_bad_calibration_is_told_before_a_model_is_loaded(
    cli, unloadable, tmp_path, fault, policy
):
    """With the name of the file, whether or not the policy would use it."""
    spoil, words = CALIBRATIONS[fault]
    path = tmp_path / "calibration.json"
    if fault not in ("missing", "a folder"):
        tiny.write_calibration(path, tiny.calibration(3))
    spoil(path)
    outcome = cli(*PROMPT, "--policy", policy, "--calibration", path)
    is_refused(outcome, "--calibration", str(path), *words)


def test_a_calibration_of_another_model_is_refused(cli, tmp_path):
    """And taken by a policy that has no use for one."""
    path = tiny.write_calibration(tmp_path / "calibration.json", tiny.calibration(4))
    for policy in ("epikv", "epikv-fit"):
        outcome = cli(*PROMPT, "--policy", policy, "--calibration", path)
        is_refused(outcome, "calibrated was a model of 4 blocks; this has 3")
    options = ("--policy", "streaming", "--max-new-tokens", 3)
    assert cli(*PROMPT, *options, "--calibration", path)[:2] == cli(*PROMPT, *options)[:2]


MISFITS = {  # what only the model can tell
    "past the context": (["--max-new-tokens", 252], ["5 tokens", "251", "context of 256", "252"]),
    "band out of range": (["--band-a", 3], ["block 3", "0 to 2"]),
    "band below 0": (["--band-b", -1], ["block -1"]),
    "band partly out of range": (["--band-a", "1-7"], ["block 3"]),
    "device absent": (["--device", "cuda:99"], ["device 'cuda:99' is not available"]),
    "device unknown": (["--device", "abacus"], ["device 'abacus' is not supported"]),
    "device without memory": (["--device", "meta"], ["device 'meta' is not supported"]),
    "budget beyond memory": (["--budget", 10**13], ["memory"]),
    "missing folder": (["--checkpoint", "/nowhere/at/all"], ["/nowhere/at/all: not a folder"]),
}
if not torch.cuda.is_available():
    MISFITS["no GPU"] = (["--device", "cuda"], ["device 'cuda' is not available here; try cpu"])


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_the_model_or_machine_has_not_is_refused(cli, misfit):
    options, words = MISFITS[misfit]
    is_refused(cli(*PROMPT, *options), *words)


NOT_TEXT = {
    "prompt": (["--prompt", "w1 \udcff"], b""),
    "system": ([*PROMPT, "--system", "w1 \udcff"], b""),
    "raw": (["--prompt", "w1 \udcff", "--raw"], b""),
    "chat": (["--chat"], b"\xff\n"),
}


@pytest.mark.parametrize("source", NOT_TEXT)
def test_bytes_that_are_no_text_are_an_error(cli, source):
    """Python passes them on as lone surrogates, which no tokenizer takes."""
    options, stdin = NOT_TEXT[source]
    code, out, err = cli(*options, "--max-new-tokens", 3, stdin=stdin)
    assert err.startswith("error: ") and err.count("\n") == 1
    assert (code, out) == (0 if source == "chat" else 2, "")


@pytest.mark.parametrize("n_words, room", [(250, 3), (252, 1), (253, 0), (300, -47)])
def test_a_prompt_leaves_what_it_leaves_of_the_context(cli, n_words, room):
    """Three special tokens surround the words; by default the text takes all that is left."""
    outcome = cli("--prompt", "w1 " * n_words, "--ignore-eos")
    if room > 0:
        assert outcome[0] == 0 and f"decode   {room} tokens" in outcome[2]
    else:
        is_refused(outcome, f"{n_words + 3} tokens leaves {room} of", "context of 256")


def truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def drop(name):
    return lambda folder: (folder / name).unlink()


def edit(name="config.json", **changes):
    return lambda folder: tiny.edit_json(folder / name, **changes)


DAMAGE = {
    "weights cut off": (truncate, ["model.safetensors", "damaged or incomplete"]),
    "no weights": (drop("model.safetensors"), ["model.safetensors", "not found"]),
    "shard absent": (
        lambda folder: tiny.write_json(
            folder / "model.safetensors.index.json",
            {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}},
        ),
        ["model-00001-of-00002.safetensors", "not found"],
    ),
    "architecture": (edit(architectures=["MambaForCausalLM"]), ["MambaForCausalLM", "Llama"]),
    "rope type": (edit(rope_parameters={"rope_type": "spiral"}), ["'spiral'", "llama3"]),
    "no config": (drop("config.json"), ["config.json", "not found"]),
    "config not JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        ["config.json", "not valid JSON"],
    ),
    "no tokenizer": (drop("tokenizer.json"), ["tokenizer.json", "not found"]),
    "tokenizer not one": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        ["tokenizer.json", "not a tokenizer"],
    ),
    "no template": (edit("tokenizer_config.json", drop=["chat_template"]), ["--raw"]),
    "broken template": (
        edit("tokenizer_config.json", chat_template="{% if %}"),
        ["chat template"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_told_in_one_line(cli, folder, tmp_path, damage):
    spoil, words = DAMAGE[damage]
    copy = shutil.copytree(folder, tmp_path / "copy")
    spoil(copy)
    is_refused(cli(*PROMPT, "--checkpoint", copy), *words)


# 12. Prompts, options and output -----------------------------------------------------------------

SHORT = ("--max-new-tokens", 12, "--ignore-eos")
SHORT_API = dict(max_new_tokens=12, ignore_eos=True)


def test_the_prompt_may_come_in_three_ways(cli, model, tmp_path):
    """stdout holds the text alone; all of them give that of the same prompt."""
    expected = text_of(model, "w9 w8\nw7", **SHORT_API)
    assert len(expected.split()) > 5
    file = tmp_path / "prompt.txt"
    file.write_text("w9 w8\nw7", encoding="utf-8")
    for options, stdin in [
        (("--prompt", "w9 w8\nw7"), b"ignored"),
        (("--prompt-file", file), b"ignored"),
        ((), b"w9 w8\nw7"),
    ]:
        code, out, err = cli(*options, *SHORT, stdin=stdin)
        assert (code, out) == (0, expected + "\n")
        assert err.startswith("prefill  6 tokens")


def test_templates_systems_and_raw_prompts(cli, started):
    """BOS comes from the tokenizer, and only where there is no template."""
    for options in [(), ("--system", "w5 w6"), ("--raw",)]:
        assert cli(*PROMPT, *SHORT, *options)[0] == 0
    assert [generation.prompts for generation in started] == [
        [[USER, 1, 2, tiny.EOS, BOT]],
        [[SYSTEM, 5, 6, tiny.EOS, USER, 1, 2, tiny.EOS, BOT]],
        [[tiny.BOS, 1, 2]],
    ]


def test_text_comes_as_it_is_made(cli, monkeypatch):
    """Each token's text has left the buffer of stdout before the next step."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    monkeypatch.setattr(sys, "stdout", stdout)
    seen = []
    step = generate_module.Engine.step

    def watched(engine, prefix):
        seen.append(stdout.buffer.getvalue())
        step(engine, prefix)

    monkeypatch.setattr(generate_module.Engine, "step", watched)
    cli(*PROMPT, *SHORT)
    assert len(seen) == 11
    words = [len(text.split()) for text in seen]
    assert words == sorted(words) and words[0] <= 1 and words[-1] >= 8
    assert all(stdout.buffer.getvalue().startswith(text) for text in seen)


def test_the_seed_decides(cli, model):
    warm = (*PROMPT, *SHORT, "--temperature", 1)
    texts = [cli(*warm, "--seed", seed)[1] for seed in (3, 3, 4, 2**40 + 5)]
    assert texts[0] == texts[1] == text_of(model, temperature=1.0, seed=3, **SHORT_API) + "\n"
    assert len(set(texts)) == 3
    assert cli(*warm)[1] == cli(*warm, "--seed", 0)[1]


def test_every_sample_is_printed(cli, model):
    settings = dict(temperature=1.0, top_k=100, seed=3, num_samples=3, compile_mode="none")
    outputs = generate(model, "w1 w2", **SHORT_API, **settings).outputs
    sampling = ("--temperature", 1, "--top-k", 100, "--seed", 3, "--num-samples", 3)
    code, out, err = cli(*PROMPT, *SHORT, *sampling)
    lines = [(f"--- {i} of 3 (length)", output.text) for i, output in enumerate(outputs, start=1)]
    assert out.splitlines() == [line for pair in lines for line in pair]
    assert code == 0 and "decode   36 tokens" in err


def test_every_option_reaches_the_run(cli, started):
    """Values other than the defaults, read back from where they are used."""
    options = dict(
        budget=40, policy="epikv-band", sinks=3, recent=7, window=9, seed=5, temperature=0.7
    )
    limits = dict(top_k=50, top_p=0.9, min_p=0.05, max_new_tokens=6)
    arguments = [
        part
        for name, value in (options | limits).items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    cli(*PROMPT, *arguments, "--band-a", "0-1", "--band-b", "0,2", "--ignore-eos")
    (generation,) = started
    del options["temperature"]
    config = EvictionConfig(band_a=(0, 1), band_b=(0, 2), **options)
    assert generation.engine.cache.config == config
    sampling = generate_module.Sampling(0.7, 50, 0.9, 0.05, 5)
    assert generation.engine.state.sampling == sampling
    assert (generation.max_new_tokens, generation.stop_ids) == (6, set())


@pytest.mark.parametrize(
    "options",
    [
        dict(policy="lag-kv", lag=3, lag_reference="previous", slot_map="head"),
        dict(policy="lag-kv", lag=3, lag_reference="next", slot_map="shared"),
        dict(policy="epikv-seg", lag=6, quotas=(5, 3, 1)),
        dict(policy="key-diff", slot_map="head", value_reserve=4, value_statistic="var"),
        dict(policy="epikv", value_reserve=9, value_statistic="norm"),
    ],
    ids=str,
)
def test_every_option_of_some_policies_reaches_the_run(cli, started, options):
    """Likewise, for options that not every policy has."""
    options = dict(budget=40, recent=7) | options
    arguments = []
    for name, value in options.items():
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        arguments += [f"--{name.replace('_', '-')}", value]
    code, *_ = cli(*PROMPT, *arguments, "--max-new-tokens", 3)
    assert code == 0
    config = started[0].engine.cache.config
    assert config == EvictionConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    "policy", [name for name, policy in POLICIES.items() if policy.cache_type() is SlotCache]
)
def test_every_policy_runs(cli, started, tmp_path, policy):
    """By its name alone, or with what it needs, past its budget, and says the text that the library
    makes of it."""
    size = () if policy == "full" else ("--budget", 24)
    options = ("--max-new-tokens", 60, "--ignore-eos")
    for calibration in tiny.needed(policy, 3).values():
        path = tiny.write_calibration(tmp_path / "calibration.json", calibration)
        options += ("--calibration", path)
    code, out, err = cli(*PROMPT, "--policy", policy, *size, *options)
    (generation,) = started
    assert type(generation.engine.cache.policy) is POLICIES[policy]
    (output,) = generation.result().outputs
    assert (code, out) == (0, output.text + "\n")
    assert len(output.tokens) == 60
    assert f"tokens   {64 if policy == 'full' else 24} kept" in err


@pytest.mark.parametrize(
    "policy, options, window",
    [
        ("epikv", {}, 11),
        ("epikv-fit", {}, 11),
        ("epikv", dict(band_a=(2,)), 11),
        ("epikv-band", dict(window=9), 9),
        ("streaming", {}, 64),
    ],
)
def test_a_calibration_reaches_the_run(cli, started, tmp_path, policy, options, window):
    """Every number of it, and the window is its own unless another is named."""
    calibration = tiny.calibration(3, seed=5)
    path = tiny.write_calibration(tmp_path / "calibration.json", calibration)
    arguments = ["--policy", policy, "--calibration", path, "--budget", 40, "--max-new-tokens", 3]
    for name, value in options.items():
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        arguments += [f"--{name.replace('_', '-')}", value]
    assert cli(*PROMPT, *arguments)[0] == 0
    config = started[0].engine.cache.config
    assert config == EvictionConfig(40, policy, calibration=calibration, **options)
    assert config.calibration == calibration != replace(calibration, weight_a=1.0)
    assert config.window == window


@pytest.mark.parametrize("text, quotas", [("64,32,8", (64, 32, 8)), ("5,0,0", (5, 0, 0))])
def test_quotas_are_a_list(text, quotas):
    assert parse_arguments(["--quotas", text]).quotas == quotas


@pytest.mark.parametrize("text, blocks", [("1", (1,)), ("0-2", (0, 1, 2)), ("2,0", (2, 0))])
def test_bands_are_read_in_three_forms(text, blocks):
    assert parse_arguments(["--band-a", text]).band_a == blocks


def test_the_defaults_are_those_of_the_library():
    """Under the same names, so that the command line and `stream` do the same."""
    given = vars(parse_arguments([]))
    parameters = inspect.signature(stream).parameters
    shared = [name for name in given if name in parameters]
    assert {name: given[name] for name in shared} == {
        name: parameters[name].default for name in shared
    }
    config = EvictionConfig(generate_module.DEFAULT_BUDGET)
    # The config's to fill in:
    left = {"budget": 4096, "recent": 128, "window": 64, "slot_map": "shared"}
    for field in fields(EvictionConfig):
        if field.name not in left:
            assert given[field.name] == getattr(config, field.name), field.name
    assert {name: given[name] for name in left} == dict.fromkeys(left)
    assert {name: getattr(config, name) for name in left} == left
    assert {*parameters} - {*given} == {"model", "prompts", "eviction"}


@pytest.mark.parametrize(
    "options, mode",
    [([], "blocks"), (["--compile-mode", "step"], "step"), (["--no-compile"], "none")],
)
def test_compile_modes(options, mode):
    assert parse_arguments(options).compile_mode == mode


def test_the_demo_model_is_the_default(monkeypatch, capsys):
    loaded = []

    def stop(*args):
        loaded.append(args)
        raise OSError("enough")

    monkeypatch.setattr(Transformer, "from_pretrained", stop)
    options = [*PROMPT, "--device", "cpu", "--dtype", "float16", "--quantize", "int8"]
    assert main(options) == 2
    assert main([*options, "--checkpoint", "some/where"]) == 2
    assert loaded == [(where, "cpu", torch.float16, "int8") for where in (DEMO, "some/where")]
    assert capsys.readouterr().err == "error: enough\n" * 2


STATISTICS = {
    "prompt_tokens",
    "new_tokens",
    "compile_seconds",
    "prefill_seconds",
    "decode_seconds",
    "decode_steps",
    "decode_tokens_per_second",
    "decode_bytes_per_second",
    "peak_memory",
    "kv_bytes",
    "kv_bytes_full_cache",
    "tokens_kept",
    "tokens_evicted",
    "memory_bandwidth",
    "bandwidth_share",
}


def test_statistics_as_json_are_one_line(cli):
    """5 + 20 - 1 = 24 tokens stored in 16 slots; 3 blocks x 2 x 2 x 12 x 4 = 576 bytes each."""
    options = ("--max-new-tokens", 20, "--ignore-eos", "--budget", 16, "--stats", "json")
    code, out, err = cli(*PROMPT, *options)
    assert code == 0 and len(out.split()) > 10 and "{" not in out
    assert err.count("\n") == 1
    record = json.loads(err)
    assert record.keys() == STATISTICS
    expected = dict(
        prompt_tokens=5,
        new_tokens=20,
        decode_steps=19,
        tokens_kept=16,
        tokens_evicted=8,
        kv_bytes=16 * 576,
        kv_bytes_full_cache=24 * 576,
        compile_seconds=0,
    )
    assert {name: record[name] for name in expected} == expected
    share = record["decode_bytes_per_second"] / record["memory_bandwidth"]
    assert record["bandwidth_share"] == pytest.approx(share)


def test_statistics_as_text(cli):
    _, _, err = cli(*PROMPT, "--max-new-tokens", 20, "--ignore-eos", "--budget", 16)
    prefill, decode, compile, memory, tokens = err.splitlines()
    assert re.fullmatch(r"prefill  5 tokens in \d+\.\d\d s", prefill)
    assert re.match(r"decode   20 tokens in \d+\.\d\d s: [\d.]+ tokens/s, [\d.]+ GB/s, ", decode)
    assert compile == "compile  0.0 s"
    assert re.search(r"peak \d\.\d\d GB; KV cache 0\.0 MB, a full one 0\.0 MB", memory)
    assert tokens == "tokens   16 kept, 8 evicted"


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("budget", [16, 24, 64])
def test_the_marks_stand_around_the_kept_tokens(cli, started, monkeypatch, budget, terminal):
    """A text that evicts much, one whose last token only is not in the cache, and one between."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    _, out, _ = cli(
        *PROMPT, "--max-new-tokens", 40, "--ignore-eos", "--budget", budget, "--show-kept"
    )
    (generation,) = started
    (output,) = generation.result().outputs
    kept = set(output.kept)
    assert len(kept) == min(budget, 44)
    before, after = ("\033[1;32m", "\033[0m") if terminal else ("[", "]")
    expected, first = "", True
    tokens = list(enumerate(output.tokens, start=5))
    for is_kept, run in groupby(tokens, key=lambda pair: pair[0] in kept):
        text = ""
        for _, token in run:
            if token < tiny.BOS:  # special tokens do not show
                text += f"w{token}" if first else f" w{token}"
                first = False
        expected += before + text + after if is_kept else text
    assert out == expected + "\n"
    assert out.count(before) == out.count(after) > 0


def test_the_marks_of_several_samples(cli, started):
    sampling = ("--temperature", 1, "--num-samples", 2, "--budget", 16)
    _, out, _ = cli(*PROMPT, "--max-new-tokens", 30, "--ignore-eos", "--show-kept", *sampling)
    outputs = started[0].result().outputs
    lines = out.splitlines()
    assert lines[::2] == ["--- 1 of 2 (length)", "--- 2 of 2 (length)"]
    for line, output in zip(lines[1::2], outputs, strict=True):
        marked = " ".join(re.findall(r"\[(.*?)\]", line)).split()
        kept = [output.tokens[p - 5] for p in output.kept if p >= 5]
        assert marked == [f"w{token}" for token in kept if token < tiny.BOS]
        assert line.replace("[", "").replace("]", "") == output.text


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_trace_shows_eight_steps(cli, tmp_path, n_rows):
    """In the format of trace viewers, each with its operators, and the text is the same."""
    trace = tmp_path / "trace.json"
    command = (*PROMPT, "--budget", 16, "--max-new-tokens", 14, "--ignore-eos")
    command += ("--num-samples", n_rows, "--temperature", 0)
    assert cli(*command, "--profile", trace)[:2] == cli(*command)[:2]
    events = tiny.read_json(trace)["traceEvents"]
    notes = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event for event in notes if event["name"] == "step"]
    reads = [event for event in notes if event["name"] == "read_tokens"]
    assert len(steps) == len(reads) == 8
    heads = [event for event in events if event["name"] == "aten::argmax" and event["ph"] == "X"]
    for step in steps:
        within = [e for e in heads if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        assert within


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("n_new", [1, 2])
def test_a_run_without_steps_to_trace(cli, tmp_path, n_new, n_rows):
    """The first token comes with the prefill, and the profiler starts in the step of the second."""
    command = ("--max-new-tokens", n_new, "--ignore-eos", "--num-samples", n_rows)
    code, _, err = cli(*PROMPT, *command, "--profile", tmp_path / "trace.json")
    assert code == 2
    assert err == "error: the run was over before there was a step to trace; let it run longer\n"


def test_the_shortest_run_with_a_step_to_trace(cli, tmp_path):
    trace = tmp_path / "trace.json"
    command = ("--max-new-tokens", 3, "--ignore-eos", "--profile", trace)
    assert cli(*PROMPT, *command)[0] == 0
    events = tiny.read_json(trace)["traceEvents"]
    notes = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert notes.count("step") == 1


def test_a_trace_needs_a_folder_and_no_chat(cli, unloadable, tmp_path):
    """Told before the model is loaded."""
    code, out, err = cli(*PROMPT, "--profile", tmp_path / "none" / "trace.json")
    assert (code, out, err) == (2, "", f"error: no such folder: {tmp_path / 'none'}\n")
    code, out, err = cli(*PROMPT, "--profile", tmp_path)
    message = f"error: {tmp_path} is a folder; name a file for the profile\n"
    assert (code, out, err) == (2, "", message)
    code, out, err = cli("--chat", "--profile", tmp_path / "trace.json")
    assert (code, out) == (2, "") and "--chat goes without" in err and "--profile" in err


OPTIONS = """--checkpoint --prompt --prompt-file --chat --system --raw --budget --policy --sinks
    --recent --window --calibration --band-a --band-b --lag --lag-reference --quotas
    --value-reserve --value-statistic --slot-map --kv-dtype --max-new-tokens --temperature --top-k
    --top-p --min-p --seed --num-samples --ignore-eos --device --dtype --quantize --compile-mode
    --no-compile --stats --show-kept --profile""".split()


def test_help_names_every_option_in_its_group(cli, unloadable, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    usage, *groups = re.split(r"^(?=\w+:$)", out, flags=re.MULTILINE)
    headings = [group.splitlines()[0] for group in groups]
    assert headings == ["options:", "model:", "prompt:", "cache:", "sampling:", "output:"]
    described = re.findall(r"^  (?:-h, )?(--[\w-]+)", "".join(groups), flags=re.MULTILINE)
    assert sorted(described) == sorted([*OPTIONS, "--help"])
    for policy in POLICIES:
        assert policy in out
    assert all(option in usage for option in OPTIONS)


# 13. Chat ----------------------------------------------------------------------------------------


def test_a_turn_holds_the_whole_conversation(cli, started):
    """Empty lines are no turns."""
    turns = b"w1 w2\n\n   \nw3\nw4"
    code, out, err = cli("--chat", "--max-new-tokens", 8, "--budget", 20, stdin=turns)
    answers = [generation.result().outputs[0] for generation in started]
    assert code == 0
    assert out.split("\n") == [answer.text for answer in answers] + [""]
    spoken = [[t for t in answer.tokens if t < tiny.BOS] for answer in answers]
    assert all(spoken)
    first = [USER, 1, 2, tiny.EOS, BOT]
    second = [*first, *spoken[0], tiny.EOS, USER, 3, tiny.EOS, BOT]
    third = [*second, *spoken[1], tiny.EOS, USER, 4, tiny.EOS, BOT]
    assert [generation.prompts for generation in started] == [[first], [second], [third]]
    assert err.count("prefill") == 3 and "error" not in err


def test_the_system_message_stands_before_a_chat(cli, started):
    cli("--chat", "--system", "w7", "--max-new-tokens", 3, "--stats", "json", stdin=b"w1\nw2\n")
    start = [SYSTEM, 7, tiny.EOS, USER, 1, tiny.EOS, BOT]
    assert started[0].prompts == [start]
    assert started[1].prompts[0][: len(start)] == start
    assert started[1].prompts[0].count(SYSTEM) == 1


def test_a_turn_too_long_is_told_and_the_chat_goes_on(cli, started):
    turns = f"w1\n{'w2 ' * 300}\nw3\n".encode()
    code, out, err = cli("--chat", "--max-new-tokens", 8, stdin=turns)
    assert code == 0
    answers = [generation.result().outputs[0] for generation in started]
    assert out.split("\n") == [answer.text for answer in answers] + [""]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "context of 256" in errors[0]
    spoken = [t for t in answers[0].tokens if t < tiny.BOS]
    expected = [USER, 1, tiny.EOS, BOT, *spoken, tiny.EOS, USER, 3, tiny.EOS, BOT]
    assert [generation.prompts[0] for generation in started] == [expected[:4], expected]


def test_a_chat_asks_only_on_a_terminal(cli, started):
    options = ("--chat", "--max-new-tokens", 3)
    _, piped, _ = cli(*options, stdin=b"w1\nw2\n")
    _, typed, _ = cli(*options, stdin=b"w1\nw2\n", terminal=True)
    first, second, rest = piped.split("\n")
    assert typed == f"> {first}\n> {second}\n> {rest}"


def interrupt_at(monkeypatch, n_steps):
    """Ctrl-C instead of the step after the first `n_steps` of the process."""
    step, calls = generate_module.Engine.step, []

    def interrupted(engine, prefix):
        calls.append(prefix)
        if len(calls) == n_steps + 1:
            raise KeyboardInterrupt
        step(engine, prefix)

    monkeypatch.setattr(generate_module.Engine, "step", interrupted)


def test_ctrl_c_stops_an_answer_and_not_the_chat(cli, started, monkeypatch):
    interrupt_at(monkeypatch, 4)
    options = ("--chat", "--max-new-tokens", 20, "--ignore-eos")
    code, out, err = cli(*options, stdin=b"w1\nw2\n")
    first, second = (generation.result().outputs[0] for generation in started)
    assert code == 0 and err.count("prefill") == 2
    assert out == f"{first.text}\n{second.text}\n"
    assert (len(first.tokens), len(second.tokens)) == (5, 20)
    spoken = [t for t in first.tokens if t < tiny.BOS]
    assert started[1].prompts[0][: 4 + len(spoken)] == [USER, 1, tiny.EOS, BOT, *spoken]


def test_a_chat_without_a_template_says_what_to_do(cli, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    tiny.edit_json(copy / "tokenizer_config.json", drop=["chat_template"])
    _, out, err = cli("--chat", "--checkpoint", copy, stdin=b"w1\n")
    assert out == "" and err.count("\n") == 1 and "no chat template" in err


# 14. Signals, pipes and processes ----------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--num-samples", 2), ("--show-kept",)], ids=str)
def test_ctrl_c_leaves_the_text_so_far(cli, started, monkeypatch, options):
    interrupt_at(monkeypatch, 6)
    code, out, err = cli(*PROMPT, *SHORT, "--temperature", 1, *options)
    assert code == 130
    outputs = started[0].result().outputs
    for output in outputs:
        assert (len(output.tokens), output.stop_reason) == (7, "interrupted")
        assert output.text in out.replace("[", "").replace("]", "")
    assert err.startswith(f"prefill  {5 * len(outputs)} tokens")


def environment():
    """One in which output to a pipe is buffered, as in a shell."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return kept | {"OMP_NUM_THREADS": "1"}


def command(folder, *options):
    base = ["--checkpoint", folder, "--device", "cpu", "--no-compile"]
    return [sys.executable, str(SCRIPT), *map(str, [*base, *options])]


def call(folder, *options, stdin=b""):
    """Run the script in a process of its own: exit code, and stdout and stderr as bytes."""
    done = subprocess.run(
        command(folder, *options), input=stdin, capture_output=True, env=environment()
    )
    return done.returncode, done.stdout, done.stderr


def test_a_process_reads_a_pipe_and_writes_bytes(folder, model):
    code, out, err = call(folder, *SHORT, "--stats", "json", stdin=b"w1 w2\n")
    assert code == 0
    assert out.decode() == text_of(model, **SHORT_API) + "\n"
    assert json.loads(err)["new_tokens"] == 12


def test_an_error_is_the_exit_code_of_the_process(folder):
    code, out, err = call(folder, *PROMPT, "--budget", 0)
    is_refused((code, out.decode(), err.decode()), "budget must be at least 1")


def test_a_terminal_that_lacks_characters_shows_the_rest(cli, tmp_path, monkeypatch):
    folder = tiny.make_tokenizer(tiny.make_model(tmp_path))
    model = Transformer.from_pretrained(folder, device="cpu")
    expected = text_of(model, "hi", raw=True, **SHORT_API)
    assert not expected.isascii()
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    monkeypatch.setattr(sys, "stdout", terminal)
    code, *_ = cli("--checkpoint", folder, "--prompt", "hi", "--raw", *SHORT)
    assert code == 0
    assert terminal.buffer.getvalue() == expected.encode("ascii", "replace") + b"\n"


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    """The same checkpoint with a context that takes minutes to fill."""
    folder = tiny.make_model(tmp_path_factory.mktemp("long"), max_position_embeddings=200_000)
    return tiny.make_tokenizer(folder, word_tokenizer(), chat_template=TEMPLATE)


def start(folder, *options):
    """A process with three unbuffered pipes, that heeds Ctrl-C whatever this one does."""
    return subprocess.Popen(
        command(folder, *options),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def read(pipe, n_bytes):
    data = b""
    while len(data) < n_bytes and (more := pipe.read(n_bytes - len(data))):
        data += more
    return data


ENDLESS = (*PROMPT, "--budget", 32, "--ignore-eos")  # until something stops it


def test_ctrl_c_stops_a_process_that_has_begun_to_write(long_folder):
    process = start(long_folder, *ENDLESS, "--stats", "json")
    begun = read(process.stdout, 400)  # of far more than 32 tokens, while it runs
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130
    text = (begun + rest).decode()
    assert re.fullmatch(r"w\d+( w\d+)*\n", text)
    record = json.loads(err)
    assert len(text.split()) <= record["new_tokens"] < 190_000
    assert record["tokens_kept"] == 32


def test_ctrl_c_before_the_text_leaves_no_traceback(long_folder):
    """In a chat that waits for its first turn."""
    process = start(long_folder, "--chat", "--max-new-tokens", 4, "--stats", "json")
    process.stdin.write(b"w1\n")
    assert json.loads(process.stderr.readline())["prompt_tokens"] == 4  # and now it waits
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.parametrize(
    "options",
    [(), ("--num-samples", 2, "--max-new-tokens", 3), ("--show-kept", "--max-new-tokens", 3)],
    ids=["streamed", "samples", "marked"],
)
def test_a_reader_that_leaves_is_no_error(long_folder, options):
    """Like `| head`: after ten bytes of a stream, or before a text that comes at the end."""
    process = start(long_folder, *ENDLESS, *options)
    if not options:
        assert len(read(process.stdout, 10)) == 10
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 0
    assert b"Traceback" not in err and b"Exception" not in err and b"error" not in err


def test_a_full_disk_is_told_in_one_line(folder):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(folder, *PROMPT, *SHORT),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
        )
    is_refused((done.returncode, "", done.stderr.decode()), "No space left on device")


# 15. Number formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_demo_answers_in_any_format(cli, dtype):
    """The first words are those of float32: of a prompt whose answer leaves no doubt."""
    options = ("--checkpoint", DEMO, "--prompt", "1 2 3 4 5 6 7", "--raw", "--max-new-tokens", 10)
    _, expected, _ = cli(*options, "--dtype", "float32")
    code, out, _ = cli(*options, "--dtype", dtype)
    assert code == 0
    assert out == expected
    assert out.startswith(" 8 9 10")

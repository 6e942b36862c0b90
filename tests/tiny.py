"""Tiny random checkpoints in the layout of the Hugging Face hub, for tests."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from epikv import Calibration, FitWeights, nested_floats

SPECIAL_TOKENS = ("<s>", "</s>", "<user>", "<bot>", "<think>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
BOS, EOS = 256, 257


def make_model(folder: Path, family: str = "Llama", *, max_shard_size="1GB", seed=0, **config):
    """Save a random model of `family` with transformers, and return `folder`.

    `config` goes to the family's configuration class. Norms and biases are random as well, and the
    weights large enough for attention to be far from uniform, so that nothing goes unnoticed.
    """
    shape = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    hf_config = getattr(transformers, f"{family}Config")(**shape | config)
    model = getattr(transformers, f"{family}ForCausalLM")(hf_config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.5 * noise
        elif "embed_tokens" in name:
            parameter.data = noise
        else:
            parameter.data = 1.5 * noise / math.sqrt(parameter.shape[1])
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def byte_level_tokenizer(adds_bos: bool = True) -> Tokenizer:
    """One token per byte, so that every character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finish_tokenizer(tokenizer, adds_bos)


def byte_fallback_tokenizer(adds_bos: bool = True) -> Tokenizer:
    """Letters, and a token per byte for all else: the layout of the SentencePiece models."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyz":
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<0x00>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return finish_tokenizer(tokenizer, adds_bos)


def finish_tokenizer(tokenizer: Tokenizer, adds_bos: bool) -> Tokenizer:
    """Add the special tokens and, if wanted, a post-processor that puts BOS first."""
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [bos])
    return tokenizer


def make_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, **config):
    """Write tokenizer.json, and a tokenizer_config.json with `config`. Returns `folder`."""
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        | config,
    )
    return Path(folder)


def make_checkpoint(folder: Path, family: str = "Llama", **config) -> Path:
    """A whole tiny checkpoint: model and tokenizer."""
    return make_tokenizer(make_model(folder, family, **config))


def calibration(n_layers: int, seed=0, n_kv_heads=2) -> Calibration:
    """Of random weights, all of which count, for a model of `n_layers` blocks.

    No block is in both bands, unless there is only one. The heads mix three sums.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64).tolist()
        return nested_floats(numbers, len(shape))

    features = [draw(3, n_layers) for _ in range(6)]
    fit = FitWeights(*features, heads=draw(3, n_layers, n_kv_heads), log_age=-0.8)
    blocks = torch.randperm(n_layers, generator=generator).tolist()
    band_a, band_b = blocks[: max(1, n_layers // 2)], blocks[-max(1, n_layers // 3) :]
    return Calibration(n_layers, 11, tuple(band_a), tuple(band_b), 0.7, 1.6, fit, 0.25)


def needed(policy: str, n_layers: int) -> dict:
    """The settings that `policy` cannot go without, in a model of `n_layers` blocks."""
    return dict(calibration=calibration(n_layers)) if policy == "epikv-fit" else {}


def write_calibration(path: Path, content: Calibration) -> Path:
    """As `Calibration.read` takes it."""
    write_json(path, asdict(content))
    return path


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_json(path: Path, drop=(), **changes) -> None:
    """Change and drop keys of a JSON object in a file."""
    content = read_json(path) | changes
    write_json(path, {key: value for key, value in content.items() if key not in drop})

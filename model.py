# SPDX-License-Identifier: Apache-2.0
"""One decoder for the LLaMA family with a static KV cache, and its checkpoint loader.

`Transformer.forward` serves prefill and decode. In decode every row takes one token, whose keys and
values go into a slot of the cache before the row attends to its slots; in prefill a chunk of one
prompt attends to [cache | chunk], and the cache chooses afterwards what stays.

Shapes: B rows, T tokens, H query heads, H_kv key-value heads, G = H / H_kv, D head dimension,
S slots of the cache.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from epikv import POLICIES, CacheShape, LayerCache, SlotCache, to_int8, upcast

PREFILL_CHUNK = 2048  # prompt tokens in one forward pass: bounds the activations of any prompt


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message is one line."""


# Configuration ---------------------------------------------------------------------------------

# What sets the families apart. A string names the key of config.json that decides.
ARCHITECTURES = {
    "LlamaForCausalLM": dict(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", qk_norm=False
    ),
    "MistralForCausalLM": dict(qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False),
    "Qwen2ForCausalLM": dict(qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False),
    "Qwen3ForCausalLM": dict(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias=False, qk_norm=True
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. `rope_scaling` is empty or a `linear` or `llama3` scaling of RoPE."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def __post_init__(self):
        """Refuse, with ValueError, what no model has."""
        values = [(field.name, field.type, getattr(self, field.name)) for field in fields(self)]
        values += [
            (key, float, self.rope_scaling[key]) for key in self.rope_scaling.keys() - {"type"}
        ]
        for name, kind, value in values:
            if not is_plausible(value, kind):
                raise ValueError(f"{name} is {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} of keys")

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """Read a Hugging Face config.json. Raises CheckpointError for what is not supported."""
        try:
            return cls.translate(hf)
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error}") from None
        except CheckpointError:
            raise
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
            raise CheckpointError(f"config.json has a value that cannot be: {error}") from None

    @classmethod
    def translate(cls, hf: dict) -> "ModelConfig":
        """`from_hf` before its errors are put into words."""
        architecture = (hf.get("architectures") or ["none"])[0]
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"architecture {architecture!r} is not supported; known: {known}")
        is_mistral = architecture == "MistralForCausalLM"  # whose window is 4096 if not denied
        window = hf.get("sliding_window", 4096)
        windowed = hf.get("use_sliding_window", is_mistral and window is not None)
        if windowed or set(hf.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            raise CheckpointError("sliding-window attention is not supported, only full attention")
        if hf.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"activation {hf['hidden_act']!r} is not supported, only 'silu'")
        theta, scaling = read_rope(hf)
        n_heads = hf["num_attention_heads"]
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            n_layers=hf["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=hf.get("num_key_value_heads") or n_heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // n_heads,
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=hf["max_position_embeddings"],
            tied_embeddings=hf.get("tie_word_embeddings", False),
            **{
                field: hf.get(source, False) if isinstance(source, str) else source
                for field, source in ARCHITECTURES[architecture].items()
            },
        )


def is_plausible(value, kind: type) -> bool:
    """Whether `value` may be a size (kind int), a positive number (float), a bool or a dict."""
    if kind not in (int, float):
        return isinstance(value, kind)
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    return is_number and 0 < value < (2**31 if kind is int else math.inf)


def read_rope(hf: dict) -> tuple[float, dict]:
    """RoPE base and scaling from either spelling: `rope_parameters`, or the older two keys."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    required = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    if kind not in required:
        raise CheckpointError(f"rope type {kind!r} is not supported; known: {', '.join(required)}")
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor is not supported: RoPE turns whole heads only")
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    scaling = {} if kind == "default" else {"type": kind}
    return theta, scaling | {key: rope[key] for key in required[kind]}


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of head dimensions. [D/2] float32

    `llama3` slows wavelengths longer than the original context by `factor`, leaves short ones, and
    blends in between (Llama 3.1).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling
    if not scaling:
        return frequency
    slowed = frequency / scaling["factor"]
    if scaling["type"] == "linear":
        return slowed
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * slowed


# The model -------------------------------------------------------------------------------------


class Linear(nn.Module):
    """y = W x + b with uninitialised weight [n_out, n_in] and bias [n_out] or None.

    quantize: a name in `QUANTISED`, or None for a weight of `dtype`.
    """

    def __init__(
        self, n_in: int, n_out: int, bias: bool, dtype: torch.dtype, quantize: str | None = None
    ):
        super().__init__()
        if quantize is None:
            self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype))
        else:
            self.weight = QUANTISED[quantize].empty(n_out, n_in)
        self.bias = nn.Parameter(torch.empty(n_out, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


FUSED_ROWS = 8  # twice as fast as the library's products; 16 rows were as slow


def linear(x: Tensor, weight: "Tensor | Quantised", bias: Tensor | None = None) -> Tensor:
    """F.linear, except that the few rows of a compiled step take products to be fused.

    Inductor makes multiply-and-sums of one weight a loop which streams it, quantised or not, at
    memory speed: on two cores a decode step of a 135M float32 model took a third of the time that
    it takes with the library's matrix products. Run eagerly, it would make copies of the weight. On
    CUDA only quantised weights take it.
    """
    is_quantised = isinstance(weight, Quantised)
    fuses = torch.compiler.is_compiling() and (is_quantised or x.device.type == "cpu")
    if not fuses or x.numel() > FUSED_ROWS * x.shape[-1]:
        return F.linear(x, weight.dequantised(x.dtype) if is_quantised else weight, bias)
    rows = in_memory(upcast(x).flatten(0, -2))  # [R, n_in]
    products = [weight.product(r) if is_quantised else (weight * r).sum(-1) for r in rows]
    y = torch.stack(products).to(x.dtype)  # [R, n_out]
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def in_memory(x: Tensor) -> Tensor:
    """x, which the compiler is to compute once: an operand of `as_strided` has to stand in memory.

    Else it computes the norm that gives x anew for every output, within the loop that reads the
    weight, and a step of a 135M model takes 1.9 times as long with int8 weights.
    """
    return x.as_strided(x.shape, x.stride())


class Quantised(nn.Module):
    """A weight [n_out, n_in] of small integers and, for each group of inputs, a scale.

    levels: the integers, [n_out, ...] as a subclass packs them. scale: [n_out, groups] float32.
    While a checkpoint is loaded it stands where a parameter does: it splits, and takes a copy.
    """

    def __init__(self, levels: Tensor, scale: Tensor):
        super().__init__()
        self.levels = nn.Parameter(levels, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def __len__(self) -> int:
        return len(self.levels)

    def split(self, rows: int | list[int]) -> list["Quantised"]:
        """Parts of the same storage."""
        parts = zip(self.levels.split(rows), self.scale.split(rows), strict=True)
        return [type(self)(levels, scale) for levels, scale in parts]

    def copy_(self, weight: Tensor) -> None:
        """Quantise `weight`, on the device that is to hold it."""
        levels, scale = self.quantise(weight.to(self.scale))
        self.levels.copy_(levels)
        self.scale.copy_(scale)

    @classmethod
    def empty(cls, n_out: int, n_in: int) -> "Quantised":
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """[n_out, n_in]"""
        raise NotImplementedError

    @staticmethod
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Levels and scale of a float32 weight; no entry is off by more than half its scale."""
        raise NotImplementedError

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [n_out, n_in] again."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Times x [n_in], at least float32, as a multiply-and-sum for the compiler. [n_out]"""
        raise NotImplementedError


class Int8(Quantised):
    """One scale for each output. levels: [n_out, n_in] int8, -127 to 127."""

    @classmethod
    def empty(cls, n_out: int, n_in: int) -> "Int8":
        return cls(
            torch.empty(n_out, n_in, dtype=torch.int8), torch.empty(n_out, 1, dtype=torch.float32)
        )

    @property
    def shape(self) -> torch.Size:
        return self.levels.shape

    @staticmethod
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
        return to_int8(weight)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return (self.levels * self.scale).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        return (self.levels * x).sum(-1) * self.scale[:, 0]


class Int4(Quantised):
    """One scale for each output and GROUP inputs. levels: [n_out, groups, GROUP / 2] uint8.

    0 to 15 stand for -8 to 7 scales. A scale may be negative, to have -8 where the group reaches
    farther. A byte holds a level of the group's first half in its low bits, of the second above.
    """

    GROUP = 64

    @classmethod
    def empty(cls, n_out: int, n_in: int) -> "Int4":
        if n_in % cls.GROUP:
            raise ValueError(f"int4 takes inputs in groups of {cls.GROUP}, not {n_in}; use int8")
        n_groups = n_in // cls.GROUP
        levels = torch.empty(n_out, n_groups, cls.GROUP // 2, dtype=torch.uint8)
        return cls(levels, torch.empty(n_out, n_groups, dtype=torch.float32))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), self.scale.shape[1] * self.GROUP))

    @classmethod
    def quantise(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.unflatten(-1, (-1, cls.GROUP))
        least, most = groups.aminmax(dim=-1, keepdim=True)
        # The finer of two scales that reach both ends to half a level.
        down, up = torch.maximum(-least / 8, most / 7.5), torch.maximum(most / 8, -least / 7.5)
        scale = torch.where(down < up, down, -up)
        scale = torch.where(scale == 0, 1, scale)
        levels = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8)
        first, second = levels.chunk(2, dim=-1)
        return first | (second << 4), scale[..., 0]

    def halves(self) -> tuple[Tensor, Tensor]:
        """The halves of all groups, in scales: twice [n_out, groups, GROUP / 2] int32."""
        levels = self.levels.int()  # a CPU does not shift bytes: the product took a third longer
        return (levels & 15) - 8, (levels >> 4) - 8

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        groups = torch.cat(self.halves(), dim=-1) * self.scale[..., None]
        return groups.flatten(1).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        (first, second), x = self.halves(), x.view(-1, 2, self.GROUP // 2)
        return ((first * x[:, 0] + second * x[:, 1]) * self.scale[..., None]).sum((1, 2))


QUANTISED: dict[str, type[Quantised]] = {"int8": Int8, "int4": Int4}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Block(nn.Module):
    """Attention and gated MLP, each on a normalised residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quantize: str | None = None):
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)  # of q, k, v
        self.head_dim = config.head_dim
        self.attention_norm = RMSNorm(hidden, eps, dtype)
        self.qkv = Linear(hidden, sum(self.heads) * self.head_dim, config.qkv_bias, dtype, quantize)
        self.q_norm = RMSNorm(self.head_dim, eps, dtype) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps, dtype) if config.qk_norm else nn.Identity()
        attended = config.n_heads * self.head_dim
        self.out = Linear(attended, hidden, config.out_bias, dtype, quantize)
        self.mlp_norm = RMSNorm(hidden, eps, dtype)
        self.gate_up = Linear(hidden, 2 * inner, config.mlp_bias, dtype, quantize)
        self.down = Linear(inner, hidden, config.mlp_bias, dtype, quantize)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slot: Tensor | None,
        mask: Tensor | None,
        n_cached: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As Transformer.forward. Returns the residual [B, T, hidden] and the tokens' k and v."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=2)  # [B, T, heads, D]
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)  # [B, H, T, D]
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)  # [B, H_kv, T, D]
        v = v.transpose(1, 2)
        if slot is None:
            v = v.contiguous()  # a view would keep q and k alive until the prompt is admitted
            attended = attend_to_prompt(q, k, v, cache, n_cached, mask)
        else:
            cache.write(slot, k, v)
            attended = attend_to_slots(q, cache, mask)
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up), k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [B, heads, T, D] in float32: dimension i turns with i + D/2."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def attend_to_slots(q: Tensor, cache: LayerCache, mask: Tensor | None) -> Tensor:
    """Attention of one token a row, q [B, H, 1, D], to its slots. [B, 1, H * D]

    mask [B, H_kv or 1, 1, P] limits it to some of the first P slots; None means that every slot of
    every row is taken, so that flash attention may run. The heads that share a key-value head stand
    as queries of that one head, so keys and values are never repeated.
    """
    k, v = cache.k, cache.v  # [B, H_kv, S, D]
    if mask is not None:
        k, v = k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]]
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])  # [B, H_kv, G, D]
    if cache.reads_attention:
        weights = attention_weights(grouped, k, mask)  # [B, H_kv, G, P]
        cache.observe(weights)
        y = weights.to(v.dtype) @ v
    else:
        y = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return y.reshape(q.shape[0], 1, -1)


def attend_to_prompt(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, n_cached: int, mask: Tensor | None
) -> Tensor:
    """Causal attention of T tokens to the first `n_cached` slots and themselves. [B, T, H * D]

    mask [B, 1, T, n_cached + T] says instead who sees whom. `is_causal` aligns the diagonal top
    left, so it serves only the first chunk; later ones need it bottom right, where flash attention
    has it without a mask tensor.
    """
    if n_cached == 0 and mask is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        k = torch.cat([cache.k[:, :, :n_cached], k], dim=2)
        v = torch.cat([cache.v[:, :, :n_cached], v], dim=2)
        seen = causal_lower_right(q.shape[2], k.shape[2]) if mask is None else mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    if cache.reads_attention:
        cache.observe_prompt(q, k)
    return y.transpose(1, 2).flatten(2)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)), which SDPA does not return. [B, H_kv, Q, N] at least float32

    The product is in the model's own type, since the keys must not be copied into another.
    q [B, H_kv, Q, D]; k [B, H_kv, N, D]; mask, True where a query may look, broadcasts.
    """
    scores = upcast(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1)


class Transformer(nn.Module):
    """A LLaMA-family decoder with uninitialised weights; `from_pretrained` loads a checkpoint.

    quantize: None, or "int8" or "int4" for the weights of the blocks. The head is int8 in both: by
        it alone, predictions of a 135M model moved by 0.001 nats (KL), and by 0.1 with four bits.
        Embedding, norms and biases keep `dtype`, as a step reads little of them.
    tokenizer: set by `from_pretrained`, else None. defaults: the checkpoint's generation_config.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        quantize: str | None = None,
    ):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.tokenizer: TextTokenizer | None = None
        self.defaults: dict = {}
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.blocks = nn.ModuleList(Block(config, dtype, quantize) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.head = None
        if quantize or not config.tied_embeddings:
            head = quantize and "int8"
            self.head = Linear(config.hidden_size, config.vocab_size, False, dtype, head)
        self.register_buffer("rope", rope_frequencies(config).to(self.embedding.device))
        self.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        quantize: str | None = None,
    ) -> "Transformer":
        """Load a Hugging Face repository id or a local folder: weights, tokenizer, defaults.

        device: None takes CUDA where there is one, else the CPU. dtype: None takes float32 on the
        CPU, else bfloat16. quantize: None, "int8" or "int4" (see the class). Weights go to the
        device, and are quantised there, tensor by tensor.

        Raises CheckpointError in one line for a checkpoint that is missing, damaged or not
        supported, or that the hub or the disk refuses, ValueError for a device that is not there or
        a weight that cannot be quantised.
        """
        device = find_device(device)
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        folder = find_checkpoint(checkpoint)
        hf = read_json(folder / "config.json")
        config = ModelConfig.from_hf(hf)
        tokenizer = TextTokenizer(folder)
        defaults = read_json(folder / "generation_config.json", optional=True)
        with torch.device(device):
            model = cls(config, dtype, quantize)
        if device.type == "cpu":
            move_to_huge_pages(model)
        load_weights(model, folder)
        model.tokenizer = tokenizer
        model.defaults = {"eos_token_id": hf.get("eos_token_id")} | defaults
        return model

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def eos_ids(self) -> set[int]:
        """Every token that ends a text: generation_config's (or config's) and the tokenizer's."""
        ids = self.defaults.get("eos_token_id")
        ids = set(ids) if isinstance(ids, list) else {ids}
        if self.tokenizer is not None:
            ids.add(self.tokenizer.eos_id)
        return ids - {None}

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        cache: SlotCache,
        slot: Tensor | None = None,
        mask: Tensor | None = None,
        n_cached: int = 0,
        run_block: Callable = Block.forward,
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Run `tokens` [B, T] int64 at `position` [B, T] through the blocks.

        Decode gives `slot` [B, l, h], where each row's token (T = 1) is stored, and the `mask` of
        `SlotCache.attention_mask`, or None when all slots are taken. Prefill gives `n_cached`, the
        slots already occupied, and stores nothing; a mask [B, l, 1, T, n_cached + T] says which
        tokens see which, if not each all before it. `run_block`: Block.forward or a compiled form.

        Returns the last residual [B, T, hidden], the residuals after the blocks `cache.reads`, and
        every layer's keys and values [B, H_kv, T, D].
        """
        x = F.embedding(tokens, self.embedding)  # [B, T, hidden]
        if cache.rotary_limit is not None:
            position = position.clamp(max=cache.rotary_limit)
        angle = position[:, None, :, None].float() * self.rope  # [B, 1, T, D/2]
        cos, sin = angle.cos(), angle.sin()
        nothing = [None] * len(self.blocks)
        slots = nothing if slot is None else cache.per_layer(slot)
        masks = nothing if mask is None else cache.per_layer(mask)
        residuals, keys, values = [], [], []
        layers = zip(self.blocks, cache.layers, slots, masks, strict=True)
        for i, (block, layer, layer_slot, layer_mask) in enumerate(layers):
            x, k, v = run_block(block, x, cos, sin, layer, layer_slot, layer_mask, n_cached)
            keys.append(k)
            values.append(v)
            if i in cache.reads:
                residuals.append(x)
        return x, residuals, keys, values

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the next token, at least float32 [B, vocab], from a residual [B, hidden]."""
        x = self.norm(x)
        logits = linear(x, self.embedding) if self.head is None else self.head(x)
        return upcast(logits)

    def prefill(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """Take a prompt [1, N] int64 into a fresh one-row `cache`. Returns logits [1, vocab].

        A prompt of any length passes in chunks no longer than the budget, so memory is that of the
        cache and one chunk. It runs eagerly: a matrix product of thousands of rows gains little
        from compilation, and every new length would compile anew.
        """
        n_tokens = tokens.shape[1]
        cache.protect_prompt(n_tokens)
        start = 0
        for chunk in tokens.split(min(PREFILL_CHUNK, cache.config.budget), dim=1):
            last = self.prefill_chunk(chunk, start, cache)
            start += chunk.shape[1]
        return self.logits(last)

    def prefill_chunk(self, tokens: Tensor, start: int, cache: SlotCache) -> Tensor:
        """Take in tokens [1, T] at positions from `start`. The residual of the last [1, hidden].

        On return all else of the chunk is freed, before the next one needs its room.
        """
        position = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        n_cached = min(start, cache.config.budget)
        x, residuals, k, v = self(tokens, position, cache, n_cached=n_cached)
        cache.admit(k, v, residuals)
        return x[:, -1].clone()

    def new_cache(self, config, batch_size: int = 1) -> SlotCache:
        """An empty cache of this model's shape for `batch_size` rows; `config`: EvictionConfig.

        Raises ValueError when it does not fit in memory.
        """
        model = self.config
        shape = CacheShape(
            n_layers=model.n_layers,
            n_kv_heads=model.n_kv_heads,
            head_dim=model.head_dim,
            hidden_size=model.hidden_size,
            batch_size=batch_size,
            dtype=self.dtype,
        )
        try:
            with torch.device(self.device):
                return POLICIES[config.policy].cache_type()(config, shape)
        except (RuntimeError, TypeError) as error:  # out of memory, on a GPU or a CPU; no such size
            raise ValueError(
                f"no memory for a cache of {config.budget} slots in {batch_size} rows;"
                f" lower the budget or the rows ({one_line(error)})"
            ) from error


def find_device(name: str | None) -> torch.device:
    """The device called `name`, checked to be there; None for CUDA or else the CPU.

    "cuda:1" becomes the current device, since streams and graphs are made on that.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cuda", "cpu", "mps"):
        raise ValueError(f"device {name!r} is not supported; known: cuda, cpu, mps")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError):  # unknown, not compiled in, or without a driver
        raise ValueError(f"device {name!r} is not available here; try cpu") from None
    return device


# Checkpoints -----------------------------------------------------------------------------------

CHECKPOINT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
]


def one_line(error: Exception) -> str:
    """The message of any error, without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def find_checkpoint(checkpoint: str | Path) -> Path:
    """The local folder of a checkpoint, downloaded from the Hugging Face hub if need be."""
    folder = Path(os.path.expanduser(checkpoint))
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(checkpoint), allow_patterns=CHECKPOINT_FILES))
    except HFValidationError:
        raise CheckpointError(f"{checkpoint}: not a folder, nor a Hugging Face repo id") from None
    except Exception as error:  # of the HTTP library, the hub and the disk: no common base class
        reason = one_line(error)
        raise CheckpointError(f"{checkpoint}: no such folder, and no download: {reason}") from None


def read_json(path: Path, optional: bool = False) -> dict:
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def move_to_huge_pages(model: Transformer) -> None:
    """Give all weights of a CPU's model, which are yet to be loaded, one stretch of memory.

    With pages of 4 KB, looking up their addresses is what slows reading: on two cores a decode step
    of a 135M float32 model took 1.25 times as long.
    """
    weights = list(model.parameters())
    sizes = [-(-weight.nbytes // 64) * 64 for weight in weights]  # aligned for vector loads
    parts = empty_bytes(sum(sizes), model.device).split(sizes)
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part[: weight.nbytes].view(weight.dtype).view(weight.shape)


def empty_bytes(n_bytes: int, device: torch.device) -> Tensor:
    """Memory [n_bytes] uint8 whose content is open; on a CPU under Linux in pages of 2 MB."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def load_weights(model: Transformer, folder: Path) -> None:
    """Copy the tensors of a folder's safetensors files into `model`, one at a time.

    Raises CheckpointError for a missing or damaged file, and for a tensor that is missing, unknown
    or of another shape.
    """
    targets = weight_targets(model)
    for name, tensor in read_tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints carry what the config says
            continue
        if name == "lm_head.weight" and model.config.tied_embeddings:
            continue
        if name not in targets:
            raise CheckpointError(f"{folder}: tensor {name!r} is unknown, or stored twice")
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype}; quantised files are not read"
            )
        target = targets.pop(name)
        if tensor.shape != target.shape:
            found, wanted = list(tensor.shape), list(target.shape)
            raise CheckpointError(f"{folder}: {name} has shape {found}, the config says {wanted}")
        target.copy_(tensor)
    if targets:
        raise CheckpointError(f"{folder}: {len(targets)} tensors missing, first {min(targets)!r}")
    if model.head is not None and model.config.tied_embeddings:  # quantised, so a copy
        model.head.weight.copy_(model.embedding)


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all safetensors files that the index names, or of the only one."""
    index = read_json(folder / "model.safetensors.index.json", optional=True)
    try:
        shards = sorted(set(index.get("weight_map", {}).values())) or ["model.safetensors"]
        strays = [shard for shard in shards if Path(shard).name != shard]
    except (TypeError, AttributeError):
        raise CheckpointError(f"{folder}: the index of the safetensors files is damaged") from None
    if strays:
        raise CheckpointError(f"{folder}: the index names a file outside the folder: {strays[0]}")
    for shard in shards:
        path = folder / shard
        if not path.is_file():
            raise CheckpointError(f"{path}: not found")
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged or incomplete: {error}") from None


def weight_targets(model: Transformer) -> dict[str, Tensor | Quantised]:
    """The part of a weight that each tensor of a Hugging Face checkpoint fills."""
    targets = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm.weight}
    if not model.config.tied_embeddings:
        targets["lm_head.weight"] = model.head.weight
    for i, block in enumerate(model.blocks):
        heads = [n * block.head_dim for n in block.heads]
        inner = block.down.weight.shape[1]
        parts = [  # module, the names of the tensors stacked in it, their rows
            (block.attention_norm, ["input_layernorm"], None),
            (block.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], heads),
            (block.q_norm, ["self_attn.q_norm"], None),
            (block.k_norm, ["self_attn.k_norm"], None),
            (block.out, ["self_attn.o_proj"], None),
            (block.mlp_norm, ["post_attention_layernorm"], None),
            (block.gate_up, ["mlp.gate_proj", "mlp.up_proj"], [inner, inner]),
            (block.down, ["mlp.down_proj"], None),
        ]
        for module, names, rows in parts:
            for kind in ("weight", "bias"):
                if (whole := getattr(module, kind, None)) is None:
                    continue
                for name, part in zip(names, whole.split(rows or len(whole)), strict=True):
                    targets[f"model.layers.{i}.{name}.{kind}"] = part
    return targets


# Text ------------------------------------------------------------------------------------------


class GenerationTag(Extension):
    """The tag `generation`, with which templates mark the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class TextTokenizer:
    """The tokenizer.json of a checkpoint with its chat template.

    eos_id: the end-of-sequence token that tokenizer_config.json names, or None.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found, and no other tokenizer format is supported")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json", optional=True)
        # A special token is a string, or an object that holds it.
        self.special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and token
        }
        self.eos_id = self.tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        file = folder / "chat_template.jinja"
        try:
            template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: not text: {error}") from None
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        self.chat_template: str | None = template

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with the BOS that the tokenizer itself puts first, if any."""
        return self.ids(text, add_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's turn.

        messages: `{"role": "system" | "user" | "assistant", "content": text}` in order. The
        template writes every special token, so none is added. Raises CheckpointError without one.
        """
        if self.chat_template is None:
            raise CheckpointError("the checkpoint has no chat template; use --raw (raw=True)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        environment.globals["raise_exception"] = raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
            value, ensure_ascii=ensure_ascii, **options
        )
        try:
            text = environment.from_string(self.chat_template).render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # the template is a program of its own
            raise CheckpointError(f"chat template: {one_line(error)}") from None
        return self.ids(text, add_special_tokens=False)

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        text.encode("utf-8")  # raises UnicodeEncodeError for the lone surrogates of broken input
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    def stream(self) -> "TextStream":
        return TextStream(self.tokenizer)


class TextStream:
    """Text of tokens that arrive a few at a time, never cut inside a character."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.restart()

    def restart(self) -> None:
        self.stream = DecodeStream(skip_special_tokens=True)
        self.tokens: list[int] = []
        self.length = 0  # characters handed out

    def add(self, tokens: list[int]) -> str:
        """The text that became final with `tokens`, maybe none."""
        return "".join(map(self.step, tokens))

    def step(self, token: int) -> str:
        try:
            text = self.stream.step(self.tokenizer, token) or ""
        except Exception:  # stray bytes undid text handed out (byte fallback): go on after them
            self.restart()
            text = self.stream.step(self.tokenizer, token) or ""
        self.tokens.append(token)
        self.length += len(text)
        return text

    def end(self) -> str:
        """What is left: characters that never became whole."""
        return self.tokenizer.decode(self.tokens)[self.length :]


def raise_template_error(message: str):
    raise TemplateError(message)

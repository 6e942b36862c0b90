# SPDX-License-Identifier: Apache-2.0
"""EpiKV: a KV cache of fixed size for reasoning models, without the attention matrix.

The method is "Epiphany-Aware KV Cache Eviction Without the Attention Matrix" (Kolawole and Smith,
arXiv:2606.26472): a token is worth keeping when it moved the residual stream much at an early depth
and little at a late one. The forward pass computes both anyway, so flash attention stays on.

This file needs torch and nothing else, and is meant to be copied. It holds

    EvictionConfig   what to keep: budget, policy, protected tokens
    Policy           a score per token; `POLICIES` names them all
    SlotCache        keys, values, positions and scores in slots that are overwritten in place

A decode step of a model that uses it:

    slot, position = cache.begin_step()              # a free slot, else the victim's
    for block, kv in zip(blocks, cache.layers):
        ...                                          # rotate q and k at `position`
        kv.write(slot, k, v)                         # then attend to kv.k and kv.v
    cache.end_step(slot, position, residuals)        # residuals after the blocks `cache.reads`

Shapes: B rows of a batch, H_kv key-value heads, S slots (the budget), D head dimension, T new
tokens, W window. A slot's index says nothing about its token's position; `SlotCache.position` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NO_POSITION = -1  # in `SlotCache.position`: the slot is empty
FAR = torch.iinfo(torch.int64).max  # later than any position


@dataclass(frozen=True)
class EvictionConfig:
    """What a `SlotCache` keeps.

    budget: slots per row, shared by prompt and generated tokens. Memory grows with it; quality too.
    policy: a name in `POLICIES`.
    sinks: the first tokens of a row, never evicted (StreamingLLM, arXiv:2309.17453). Leave at 4
        unless the model was trained with other attention sinks.
    recent: the last tokens of a row, never evicted. None means min(128, budget // 4). Raising it
        moves any policy towards `streaming`.
    window: tokens in the rolling statistics of a score (the paper's 64).
    band_a, band_b: 0-based blocks whose residual change counts for and against a token. None means
        the policy's own, scaled from 32 blocks to the model's depth.
    seed: of the policy `random`.

    Raises ValueError, in one line, for a combination that cannot work.
    """

    budget: int
    policy: str = "epikv"
    sinks: int = 4
    recent: int | None = None
    window: int = 64
    band_a: tuple[int, ...] | None = None
    band_b: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget}")
        if self.recent is None:
            object.__setattr__(self, "recent", min(128, self.budget // 4))
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent must be 0 or more, got {self.sinks}, {self.recent}")
        if self.budget < self.sinks + self.recent + 1:
            raise ValueError(
                f"budget {self.budget} is smaller than sinks {self.sinks} + recent {self.recent}"
                " + 1: raise it or lower the others"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")
        if not 2 <= self.window <= 4096:
            raise ValueError(f"window must be from 2 to 4096, got {self.window}")
        for band in (self.band_a, self.band_b):
            if band is not None and not POLICIES[self.policy].bands:
                raise ValueError(f"policy {self.policy!r} reads no blocks; drop band_a and band_b")
            if band is not None and len(band) == 0:
                raise ValueError("a band names no block; leave it out for the policy's own")

    def bands(self, n_layers: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of each band in a model of `n_layers` blocks: the named or the scaled ones."""
        default = POLICIES[self.policy].bands
        given = (self.band_a, self.band_b)[: len(default)]
        bands = []
        for paper, named in zip(default, given, strict=True):
            scaled = (min(round(layer * n_layers / 32), n_layers - 1) for layer in paper)
            bands.append(tuple(dict.fromkeys(scaled if named is None else named)))
        for layer in (layer for band in bands for layer in band):
            if not 0 <= layer < n_layers:
                raise ValueError(f"band names block {layer}; the model has 0 to {n_layers - 1}")
        return tuple(bands)


def hash_uniform(*keys: Tensor | int) -> Tensor:
    """Uniform float32 numbers in (0, 1), a pure function of integer `keys`, tensors that broadcast.

    A hash and not a generator, so that a row's numbers depend neither on its batch mates nor on the
    device, nor on whether the step is compiled; sampling uses it too. The rounds are a 32-bit
    permutation found by hash-prospector; both factors are below 2^31, so products fit in int64.
    """
    state = 0
    for key in keys:
        state = (state + 0x9E3779B9 + key) & 0xFFFFFFFF
        state = ((state ^ (state >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        state = state ^ (state >> 15)
    return ((state >> 9).float() + 0.5) / (1 << 23)  # 23 bits + 0.5 is exact: never 0, never 1


class RollingWindow(nn.Module):
    """The last `size` values of `channels` per-token signals, ending at each token."""

    def __init__(self, size: int, channels: int, batch_size: int, dtype: torch.dtype):
        super().__init__()
        self.size = size
        self.register_buffer("last", torch.zeros(batch_size, size - 1, channels, dtype=dtype))

    def forward(self, signal: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Append `signal` [B, T, C] of the tokens at `position` [B, T].

        Returns windows [B, T, C, W], newest value last, and which of them count [B, T, 1, W]: a
        signal is a change from the token before, so p values are behind the one at position p.
        """
        series = torch.cat([self.last, signal], dim=1)  # [B, W-1+T, C]
        self.last.copy_(series[:, series.shape[1] - self.size + 1 :])
        age = torch.arange(self.size - 1, -1, -1, device=signal.device)
        return series.unfold(1, self.size, 1), (age < position[..., None])[:, :, None]


def rolling_mean(windows: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid values of each window, 0 where there is none. [B, T, C]"""
    return (windows * valid).sum(-1) / valid.sum(-1).clamp(min=1)


def rolling_zscore(windows: Tensor, valid: Tensor) -> Tensor:
    """(x - mean) / (population std + 1e-6) of each window's newest value x. [B, T, C]

    Zero while a window holds fewer than two values.
    """
    offset = windows - windows[..., -1:]  # from x, so that a constant has no rounding error
    mean = rolling_mean(offset, valid)
    variance = rolling_mean((offset - mean[..., None]) ** 2, valid)
    return -mean / (variance.sqrt() + 1e-6)


class Policy(nn.Module):
    """Decides which token a full cache forgets: the evictable one with the lowest score.

    A subclass writes `score`, and names in `bands` the blocks it reads, counted for a model of 32
    blocks; without bands, `change` has no channel. Its state, if any, lives in buffers whose first
    axis is the row.
    """

    bands: tuple[Sequence[int], ...] = ()

    def __init__(self, config: EvictionConfig, batch_size: int, dtype: torch.dtype):
        super().__init__()

    def score(self, change: Tensor, position: Tensor) -> Tensor:
        """Score T new tokens, once and for all.

        change: [B, T, len(bands)] at least float32, mean over each band's blocks l of
            g_l(t) = ||h_l(t) - h_l(t-1)||_2, h_l the residual after block l; 0 for the first token.
        position: [B, T] int64, true positions.
        Returns [B, T]; of equal scores the older token goes first.
        """
        raise NotImplementedError


class Streaming(Policy):
    """Forget the oldest token (StreamingLLM, arXiv:2309.17453): all scores equal."""

    def score(self, change: Tensor, position: Tensor) -> Tensor:
        return torch.zeros_like(position, dtype=torch.float32)


class Full(Streaming):
    """Forget nothing. The caller gives it a slot for every token; `generate` does."""


class Random(Policy):
    """Forget a token by a seeded lot drawn when it enters: the control for any score."""

    def __init__(self, config: EvictionConfig, batch_size: int, dtype: torch.dtype):
        super().__init__(config, batch_size, dtype)
        self.seed = config.seed

    def score(self, change: Tensor, position: Tensor) -> Tensor:
        return hash_uniform(self.seed, position)


class EpiKV(Policy):
    """The paper's EpiKV-Flat: z_a(t) - z_b(t), z the rolling z-score of g (arXiv:2606.26472)."""

    bands = ((10,), (21,))
    weight_a = 1.0

    def __init__(self, config: EvictionConfig, batch_size: int, dtype: torch.dtype):
        super().__init__(config, batch_size, dtype)
        self.window = RollingWindow(config.window, 2, batch_size, dtype)

    def score(self, change: Tensor, position: Tensor) -> Tensor:
        z = rolling_zscore(*self.window(change, position))
        return self.weight_a * z[..., 0] - z[..., 1]


class EpiKVBand(EpiKV):
    """The paper's band-adaptive variant: z-scores of two band means, the first weighing 1.29."""

    bands = (range(7, 14), range(18, 26))
    weight_a = 1.29


class EpiKVRaw(EpiKV):
    """Without detrending, the ablation: rolling mean of g_a minus that of g_b."""

    def score(self, change: Tensor, position: Tensor) -> Tensor:
        mean = rolling_mean(*self.window(change, position))
        return mean[..., 0] - mean[..., 1]


class EpiKVSmooth(EpiKV):
    """The rolling mean of EpiKV-Flat's score: the paper's smoothing on its detrended signal."""

    def __init__(self, config: EvictionConfig, batch_size: int, dtype: torch.dtype):
        super().__init__(config, batch_size, dtype)
        self.smoothing = RollingWindow(config.window, 1, batch_size, dtype)

    def score(self, change: Tensor, position: Tensor) -> Tensor:
        flat = super().score(change, position)[..., None]
        return rolling_mean(*self.smoothing(flat, position))[..., 0]


POLICIES: dict[str, type[Policy]] = {
    "epikv": EpiKV,
    "epikv-smooth": EpiKVSmooth,
    "epikv-raw": EpiKVRaw,
    "epikv-band": EpiKVBand,
    "streaming": Streaming,
    "random": Random,
    "full": Full,
}


class LayerCache(nn.Module):
    """Keys and values of one layer, [B, H_kv, S, D] each; keys are stored after RoPE."""

    def __init__(self, batch_size: int, n_kv_heads: int, n_slots: int, head_dim: int, dtype):
        super().__init__()
        shape = (batch_size, n_kv_heads, n_slots, head_dim)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype))
        self.register_buffer("v", torch.zeros(shape, dtype=dtype))

    def write(self, slot: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite `slot` [B] of each row with one token's k and v [B, H_kv, 1, D]."""
        write_slot(self.k, slot, k)
        write_slot(self.v, slot, v)

    def keep(self, kept: Tensor, k: Tensor, v: Tensor) -> None:
        """Refill the slots with the entries `kept` [B, S] of [slots | k and v [B, H_kv, T, D]]."""
        for old, new in ((self.k, k), (self.v, v)):
            index = kept[:, None, :, None].expand_as(old)
            old.copy_(torch.cat([old, new], dim=2).gather(2, index))


def write_slot(buffer: Tensor, slot: Tensor, token: Tensor) -> None:
    """Write `token` [B, H, 1, D] into slot [B] of `buffer` [B, H, S, D], in place."""
    rows = torch.arange(slot.shape[0], device=slot.device)
    buffer[rows, :, slot] = token[:, :, 0]


class SlotCache(nn.Module):
    """A KV cache of `config.budget` slots a row that forgets by overwriting.

    All layers and heads share one map of slots. Every buffer's first axis is the row, every change
    is in place, and no method that runs in a decode step reads a value back to the host or has a
    shape that depends on one, so a step can be compiled and captured. Run it under torch.no_grad(),
    and choose `dtype` here: `.to(dtype)` afterwards would round the scores too.

    Buffers: position [B, S] int64 (-1: empty), score [B, S] and previous [B, len(reads), hidden] in
    float32 (float64 for a float64 cache), length [B] int64 tokens seen, protected [B] int64
    first evictable position. Slots 0 to min(length, S) - 1 are the occupied ones.

    Raises ValueError when a band names a block that the model has not.
    """

    def __init__(
        self,
        config: EvictionConfig,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        hidden_size: int,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.config = config
        self.bands = config.bands(n_layers)
        self.reads = tuple(sorted({layer for band in self.bands for layer in band}))
        n_slots = config.budget
        stat = torch.promote_types(dtype, torch.float32)
        self.layers = nn.ModuleList(
            LayerCache(batch_size, n_kv_heads, n_slots, head_dim, dtype) for _ in range(n_layers)
        )
        self.policy = POLICIES[config.policy](config, batch_size, stat)
        self.register_buffer("position", torch.empty(batch_size, n_slots, dtype=torch.int64))
        self.register_buffer("score", torch.empty(batch_size, n_slots, dtype=stat))
        self.register_buffer("length", torch.empty(batch_size, dtype=torch.int64))
        self.register_buffer("protected", torch.empty(batch_size, dtype=torch.int64))
        self.register_buffer(
            "previous", torch.empty(batch_size, len(self.reads), hidden_size, dtype=stat)
        )
        self.reset()

    def reset(self) -> None:
        """Forget everything, the policy's state included."""
        for buffer in self.buffers():
            buffer.zero_()
        self.position.fill_(NO_POSITION)
        self.protected.fill_(self.config.sinks)

    def protect_prompt(self, n_tokens: int) -> None:
        """Never evict the first `n_tokens`, if they fit in half the budget and leave a free choice.

        A longer prompt competes like any other tokens, its sinks excepted.
        """
        config = self.config
        if n_tokens <= min(config.budget // 2, config.budget - config.recent - 1):
            self.protected.fill_(max(config.sinks, n_tokens))

    def begin_step(self) -> tuple[Tensor, Tensor]:
        """Give the next token of every row a slot: the next free one, else its victim's.

        Returns slot [B] and position [B], both int64. Until `end_step` the slot has its old score,
        which nobody reads: the newest token is never evicted.
        """
        position = self.length.clone()
        slot = torch.where(position < self.config.budget, position, self.victim())
        self.position.scatter_(1, slot[:, None], position[:, None])
        self.length.add_(1)
        return slot, position

    def end_step(self, slot: Tensor, position: Tensor, residuals: list[Tensor]) -> None:
        """Score the token in `slot` [B] by its `residuals` [B, 1, hidden] after blocks `reads`."""
        self.score.scatter_(1, slot[:, None], self.score_tokens(position[:, None], residuals))

    def admit(self, k: list[Tensor], v: list[Tensor], residuals: list[Tensor]) -> None:
        """Take in T prompt tokens at once: of the slots and the new tokens the best S stay.

        k, v: per layer [B, H_kv, T, D]. residuals: [B, T, hidden] after each block of `reads`.
        """
        n_tokens = k[0].shape[2]
        new = self.length[:, None] + torch.arange(n_tokens, device=self.length.device)  # [B, T]
        position = torch.cat([self.position, new], dim=1)  # [B, S+T]
        score = torch.cat([self.score, self.score_tokens(new, residuals)], dim=1)
        self.length.add_(n_tokens)
        kept = self.best(position, score)
        self.position.copy_(position.gather(1, kept))
        self.score.copy_(score.gather(1, kept))
        for layer, new_k, new_v in zip(self.layers, k, v, strict=True):
            layer.keep(kept, new_k, new_v)

    def attention_mask(self, prefix: int) -> Tensor:
        """Which of the first `prefix` slots are occupied, in a step after `begin_step`.

        [B, 1, 1, prefix] bool; `prefix` must reach the longest row, or be the budget.
        """
        slots = torch.arange(prefix, device=self.length.device)
        return (slots < self.length[:, None])[:, None, None]

    def load_row(self, row: int, source: "SlotCache") -> None:
        """Copy the single row of `source` into `row`."""
        for mine, theirs in zip(self.buffers(), source.buffers(), strict=True):
            mine[row].copy_(theirs[0])

    def score_tokens(self, position: Tensor, residuals: list[Tensor]) -> Tensor:
        """Scores [B, T] of the tokens that follow those scored before."""
        change = {}
        for i, (layer, residual) in enumerate(zip(self.reads, residuals, strict=True)):
            residual = residual.to(self.previous.dtype)  # [B, T, hidden]
            before = torch.cat([self.previous[:, i : i + 1], residual[:, :-1]], dim=1)
            norm = torch.linalg.vector_norm(residual - before, dim=-1)
            change[layer] = torch.where(position > 0, norm, 0)  # the first token follows none
            self.previous[:, i].copy_(residual[:, -1])
        bands = [torch.stack([change[layer] for layer in band]).mean(0) for band in self.bands]
        change = torch.stack(bands, dim=-1) if bands else self.score.new_empty(*position.shape, 0)
        score = self.policy.score(change, position).to(self.score.dtype)
        return torch.nan_to_num(score)  # a NaN compares with nothing, and would pin its slot

    def evictable(self, position: Tensor, newest: Tensor) -> Tensor:
        """Tokens that may go when the newest one stands at `newest` [B, 1]. `position`: [B, any]"""
        recent = max(self.config.recent, 1)  # the newest stays in any case
        return (position >= self.protected[:, None]) & (position <= newest - recent)

    def victim(self) -> Tensor:
        """The slot [B] of the lowest score, of the oldest among equals, for the token to come."""
        evictable = self.evictable(self.position, self.length[:, None])
        score = torch.where(evictable, self.score, torch.inf)
        lowest = evictable & (score <= score.amin(dim=1, keepdim=True))
        return torch.where(lowest, self.position, FAR).argmin(dim=1)

    def best(self, position: Tensor, score: Tensor) -> Tensor:
        """The S of N tokens [B, N] to keep, oldest first and empty slots last: indices [B, S].

        Protected tokens rank at +inf and empty slots at -inf. The protected ones always fit: see
        EvictionConfig and `protect_prompt`.
        """
        evictable = self.evictable(position, self.length[:, None] - 1)
        score = torch.where(evictable, score, torch.inf)
        score = torch.where(position == NO_POSITION, -torch.inf, score)
        newest_first = position.argsort(dim=1, descending=True)
        best_first = score.gather(1, newest_first).argsort(dim=1, descending=True, stable=True)
        kept = newest_first.gather(1, best_first)[:, : self.config.budget]
        kept_position = position.gather(1, kept)
        by_age = torch.where(kept_position == NO_POSITION, FAR, kept_position).argsort(dim=1)
        return kept.gather(1, by_age)

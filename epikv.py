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
    for block, kv, at in zip(blocks, cache.layers, cache.per_layer(slot)):
        ...                                          # rotate q and k at `position`
        kv.write(at, k, v)                           # then attend to kv.k and kv.v
    cache.end_step(slot, position, residuals)        # residuals after the blocks `cache.reads`

and, for a policy with `cache.block` tokens in a block, `cache.end_block()` after each step in which
a row's length becomes a multiple of that.

Shapes: B rows of a batch, L layers, H_kv key-value heads, S slots (the budget), D head dimension,
T new tokens, W window. A slot's index says nothing about its token's position; `SlotCache.position`
does. All layers and heads share one map of slots, [B, 1, 1, S], unless `slot_map` gives each layer
its own, [B, L, 1, S], or each head, [B, L, H_kv, S]; below, a map is [B, l, h, S].
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

NO_POSITION = -1  # in `SlotCache.position`: the slot is empty
FAR = torch.iinfo(torch.int64).max  # later than any position


Matrix = tuple[tuple[float, ...], ...]  # of rows


@dataclass(frozen=True)
class FitWeights:
    """The score of `epikv-fit`: sums over a token's features, of which every head has its mixture.

    What a feature of each block counts in each of R sums, [R, L]:
    change: the rolling z-score of g_l (see `Tokens`).
    key_norm, key_variance, value_norm, value_variance: the natural logarithms of L2 norm and sample
        variance over channels, meaned over heads.
    key_similarity: the cosine to the mean of the normalised keys so far, as in KeyDiff, likewise.
    And:
    heads: what each sum counts for each block and key-value head, [R, L, H_kv].
    log_age: what log(1 + age) counts when a token may go, age in tokens since it came.
    """

    change: Matrix
    key_norm: Matrix
    key_variance: Matrix
    value_norm: Matrix
    value_variance: Matrix
    key_similarity: Matrix
    heads: tuple[Matrix, ...]
    log_age: float

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights of the features [R, 6, L], and of the sums [R, L, H_kv]."""
        *features, heads, _ = astuple(self)
        by_feature = torch.tensor(features, dtype=dtype).transpose(0, 1)
        return by_feature, torch.tensor(heads, dtype=dtype)


@dataclass(frozen=True)
class Calibration:
    """What `scripts/calibrate.py` found in a model of `n_layers` blocks.

    window: tokens in the rolling statistics.
    band_a, band_b, weight_a, weight_b: blocks that count for and against a token, and how much.
    fit: the weights of `epikv-fit`.
    recent: the share of the budget that its recency window takes.

    Raises ValueError where they do not go together.
    """

    n_layers: int
    window: int
    band_a: tuple[int, ...]
    band_b: tuple[int, ...]
    weight_a: float
    weight_b: float
    fit: FitWeights
    recent: float

    def __post_init__(self):
        by_feature, by_head = self.fit.tensors(torch.float32)  # raises for lists of unequal length
        n_sums = len(by_head)
        is_whole = by_feature.shape == (n_sums, 6, self.n_layers) and by_head.dim() == 3
        if not (is_whole and by_head.shape[1] == self.n_layers):
            shapes = f"{list(by_feature.shape)} and {list(by_head.shape)}"
            raise ValueError(f"the fit's weights are {shapes} for {self.n_layers} blocks")
        others = torch.tensor([self.weight_a, self.weight_b, self.fit.log_age])
        if not all(weights.isfinite().all() for weights in (by_feature, by_head, others)):
            raise ValueError("a weight is not finite")
        if not (self.band_a and self.band_b):
            raise ValueError("a band names no block")
        if not 0 <= self.recent < 1:
            raise ValueError(f"recent is a share of the budget, got {self.recent}")

    @classmethod
    def read(cls, path: str | Path) -> "Calibration":
        """From a JSON file. Raises OSError, and ValueError for one that is no calibration."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{path} is no calibration ({reason}); see calibrate.py") from None

    @classmethod
    def from_dict(cls, found: dict) -> "Calibration":
        """From its fields, lists in place of tuples; whatever else is there does not matter."""
        *features, heads, log_age = (found["fit"][field.name] for field in fields(FitWeights))
        by_feature = (nested_floats(weights, 2) for weights in features)
        return cls(
            int(found["n_layers"]),
            int(found["window"]),
            tuple(map(int, found["band_a"])),
            tuple(map(int, found["band_b"])),
            float(found["weight_a"]),
            float(found["weight_b"]),
            FitWeights(*by_feature, nested_floats(heads, 3), float(log_age)),
            float(found["recent"]),
        )


def nested_floats(x, depth: int) -> tuple:
    """Tuples of tuples of floats from lists of lists of numbers, `depth` deep."""
    return tuple(nested_floats(y, depth - 1) if depth > 1 else float(y) for y in x)


@dataclass(frozen=True)
class EvictionConfig:
    """What a `SlotCache` keeps.

    budget: slots per row, shared by prompt and generated tokens. Memory grows with it; quality too.
    policy: a name in `POLICIES`.
    sinks: the first tokens of a row, never evicted (StreamingLLM, arXiv:2309.17453). Leave at 4
        unless the model was trained with other attention sinks.
    recent: the last tokens of a row, never evicted. None means min(128, budget // 4), or more where
        the policy's blocks need it; for `epikv-fit` the calibration's share of the budget. Raising
        it moves any policy towards `streaming`.
    window: tokens in the rolling statistics of a score. None means the calibration's, else the
        paper's 64.
    band_a, band_b: 0-based blocks whose residual change counts for and against a token. None means
        the policy's own, scaled from 32 blocks to the model's depth.
    calibration: the model's own bands, their weights and the window, where the policy has bands and
        the fields here are None, and the weights and recency window of `epikv-fit`.
    seed: of the policy `random`.
    lag: tokens in a block of the block-wise policies (LagKV's lag). None means
        min(128, budget // 8).
    lag_reference: "next" or "previous", the block by which `lag-kv` normalises a block.
    quotas: tokens of a block that `epikv-seg` spares first, for the blocks of highest, middle and
        lowest key variance. None means lag // 2, lag // 4, lag // 16.
    value_reserve: of the evictable tokens, as many of the largest values are spared, chosen again
        at each eviction; with any policy. Try 8 to 64, in a budget of several times as many.
    value_statistic: what is large in a value: "range" (max - min), "var" or "norm" over its
        channels, meaned over layers and heads.
    slot_map: "shared" lets all layers and heads forget the same token; "layer" and "head" let each
        choose for itself, where the policy has scores for them (its `slot_maps`). None means the
        first of those.
    kv_dtype: "int8" holds keys and values as integers, half of what 16 bits take. None means the
        model's type.

    Raises ValueError, in one line, for a combination that cannot work.
    """

    budget: int
    policy: str = "epikv"
    sinks: int = 4
    recent: int | None = None
    window: int | None = None
    band_a: tuple[int, ...] | None = None
    band_b: tuple[int, ...] | None = None
    calibration: Calibration | None = None
    seed: int = 0
    lag: int | None = None
    lag_reference: str = "next"
    quotas: tuple[int, int, int] | None = None
    value_reserve: int = 0
    value_statistic: str = "range"
    slot_map: str | None = None
    kv_dtype: str | None = None

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget}")
        policy = POLICIES[self.policy]
        self.check_lag(policy)
        self.check_quotas(policy)
        if self.recent is None:
            object.__setattr__(self, "recent", policy.default_recent(self))
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent must be 0 or more, got {self.sinks}, {self.recent}")
        if self.budget < self.sinks + self.recent + 1:
            raise ValueError(
                f"budget {self.budget} is smaller than sinks {self.sinks} + recent {self.recent}"
                " + 1: raise it or lower the others"
            )
        if policy.blocks and policy.blocks * self.lag > self.recent:
            raise ValueError(
                f"policy {self.policy!r} needs {policy.blocks} x lag {self.lag} tokens to be"
                f" recent, but recent is {self.recent}: lower lag or raise recent"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")
        if self.window is None:
            calibrated = policy.is_calibrated and self.calibration is not None
            object.__setattr__(self, "window", self.calibration.window if calibrated else 64)
        if not 2 <= self.window <= 4096:
            raise ValueError(f"window must be from 2 to 4096, got {self.window}")
        for band in (self.band_a, self.band_b):
            if band is not None and not policy.bands:
                raise ValueError(f"policy {self.policy!r} has no bands; drop band_a and band_b")
            if band is not None and len(band) == 0:
                raise ValueError("a band names no block; leave it out for the policy's own")
        self.check_value_reserve()
        if self.slot_map is None:
            object.__setattr__(self, "slot_map", policy.slot_maps[0])
        if self.slot_map not in policy.slot_maps:
            known = ", ".join(policy.slot_maps)
            raise ValueError(
                f"policy {self.policy!r} has no slot map {self.slot_map!r}; known: {known}"
            )
        if self.kv_dtype not in (None, "int8"):
            raise ValueError(f"unknown kv_dtype {self.kv_dtype!r}; known: int8")
        policy.check(self)

    def check_lag(self, policy: type["Policy"]) -> None:
        if self.lag_reference not in ("next", "previous"):
            raise ValueError(f"lag_reference must be next or previous, got {self.lag_reference!r}")
        if self.lag_reference != "next" and not policy.has_reference:
            raise ValueError(f"policy {self.policy!r} has no lag_reference; drop it")
        if not policy.has_lag:
            if self.lag is not None:
                raise ValueError(f"policy {self.policy!r} has no blocks; drop lag")
            return
        if self.lag is None:
            object.__setattr__(self, "lag", max(1, min(128, self.budget // 8)))
            return
        most = max(1, (self.budget - self.sinks - 1) // max(1, policy.blocks))
        if not 1 <= self.lag <= most:
            raise ValueError(f"lag must be from 1 to {most} in this budget, got {self.lag}")

    def check_quotas(self, policy: type["Policy"]) -> None:
        if not policy.has_quotas:
            if self.quotas is not None:
                raise ValueError(f"policy {self.policy!r} has no quotas; drop them")
            return
        if self.quotas is None:
            object.__setattr__(self, "quotas", (self.lag // 2, self.lag // 4, self.lag // 16))
        descending = sorted(self.quotas, reverse=True)
        if len(self.quotas) != 3 or list(self.quotas) != descending:
            raise ValueError(f"quotas must be three numbers that do not ascend, got {self.quotas}")
        if not 0 <= self.quotas[2] <= self.quotas[0] <= self.lag:
            raise ValueError(f"quotas must be from 0 to lag {self.lag}, got {self.quotas}")

    def check_value_reserve(self) -> None:
        if self.value_reserve and self.policy == "full":
            raise ValueError("policy 'full' forgets nothing; drop value_reserve")
        evictable = self.budget - self.sinks - self.recent
        if not 0 <= self.value_reserve < evictable:
            raise ValueError(
                f"value_reserve must be from 0 to {evictable - 1}, one below the {evictable} slots"
                f" that are neither sinks nor recent, got {self.value_reserve}"
            )
        if self.value_statistic not in VALUE_STATISTICS:
            known = ", ".join(VALUE_STATISTICS)
            raise ValueError(f"unknown value_statistic {self.value_statistic!r}; known: {known}")

    def bands(self, n_layers: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of each band in a model of `n_layers` blocks.

        The named ones, else the calibrated ones, else the policy's own, scaled.
        """
        policy, calibration = POLICIES[self.policy], self.calibration
        given = [self.band_a, self.band_b]
        if calibration is not None and policy.is_calibrated:
            if calibration.n_layers != n_layers:
                blocks = calibration.n_layers
                raise ValueError(f"calibrated was a model of {blocks} blocks; this has {n_layers}")
            if not policy.bands:
                return tuple((block,) for block in range(n_layers))
            calibrated = (calibration.band_a, calibration.band_b)
            given = [band or own for band, own in zip(given, calibrated, strict=True)]
        default = policy.bands
        given = (*given, *[None] * len(default))[: len(default)]
        bands = []
        for paper, named in zip(default, given, strict=True):
            scaled = (scale_block(layer, n_layers) for layer in paper)
            bands.append(tuple(dict.fromkeys(scaled if named is None else named)))
        for layer in (layer for band in bands for layer in band):
            if not 0 <= layer < n_layers:
                raise ValueError(f"band names block {layer}; the model has 0 to {n_layers - 1}")
        return tuple(bands)


def scale_block(block: float, n_layers: int) -> int:
    """The block at the depth that `block` has in a model of 32, in one of `n_layers` blocks."""
    return min(round(block * n_layers / 32), n_layers - 1)


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


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a `SlotCache`: of the model, the batch, and the type of keys and values."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    batch_size: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def score_dtype(self) -> torch.dtype:
        """Of scores and their statistics: float32, or float64 for a float64 cache."""
        return torch.promote_types(self.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """To at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RollingWindow(nn.Module):
    """The last `size` values of `channels` per-token signals, ending at each token."""

    def __init__(self, size: int, channels: int, shape: CacheShape):
        super().__init__()
        self.size = size
        last = torch.zeros(shape.batch_size, size - 1, channels, dtype=shape.score_dtype)
        self.register_buffer("last", last)

    def forward(self, signal: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Append `signal` [B, T, C]; `count` [B, T] values of it exist up to each token.

        Returns windows [B, T, C, W], newest value last, and which of them count [B, T, 1, W].
        """
        series = torch.cat([self.last, signal], dim=1)  # [B, W-1+T, C]
        self.last.copy_(series[:, series.shape[1] - self.size + 1 :])
        age = torch.arange(self.size - 1, -1, -1, device=signal.device)
        return series.unfold(1, self.size, 1), (age < count[..., None])[:, :, None]


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


# Policies --------------------------------------------------------------------------------------


@dataclass
class Tokens:
    """T new tokens of every row.

    position: [B, T] int64, true positions.
    change: [B, T, len(bands)] at least float32, mean over each band's blocks l of
        g_l(t) = ||h_l(t) - h_l(t-1)||_2, h_l the residual after block l; 0 for the first token.
    k, v: [B, L, H_kv, T, D], keys after RoPE; None unless the policy `reads_kv`.
    """

    position: Tensor
    change: Tensor
    k: Tensor | None
    v: Tensor | None


@dataclass
class LastBlocks:
    """The last n = `Policy.blocks` * lag tokens of every row, when blocks end.

    complete: [B] rows whose last block ends here; of the others nothing is used.
    position: [B, n] int64; negative for blocks before the first.
    score: [B, l, h, n]. k, v: [B, L, H_kv, n, D].
    """

    complete: Tensor
    position: Tensor
    score: Tensor
    k: Tensor
    v: Tensor


class Policy(nn.Module):
    """Decides which token a full cache forgets: the evictable one with the lowest score.

    A subclass writes `score`, and says what it needs: `bands`, the blocks whose residuals it reads,
    counted for a model of 32 blocks (without them `change` has no channel); `reads_kv` for keys and
    values; the `slot_maps` it has scores for. A policy that judges whole blocks of tokens has a lag
    (`has_lag`) and writes `revise`, which sees the last `blocks` of them. With `is_calibrated` the
    bands of `config.calibration` take the place of its own; without bands, all blocks of the fit.
    State lives in buffers whose first axis is the row, and is changed in place.
    """

    bands: tuple[Sequence[int], ...] = ()
    reads_kv = False
    slot_maps: tuple[str, ...] = ("shared",)
    has_lag = has_reference = has_quotas = is_calibrated = False
    blocks = revised_block = 0

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__()

    def score(self, tokens: Tokens) -> Tensor:
        """Scores of new tokens, computed once; of equal ones the older token goes first.

        [B, T], or [B, L, H_kv, T] by layer and head, of which the slot map takes means.
        """
        raise NotImplementedError

    def at_age(self, score: Tensor, age: Tensor) -> Tensor:
        """What scores count `age` tokens later, when one of them is to go. Both [B, l, h, N]."""
        return score

    def revise(self, last: LastBlocks) -> Tensor:
        """New scores for the tokens of block `revised_block` among the last `blocks`.

        [B, lag], or [B, L, H_kv, lag] by layer and head.
        """
        raise NotImplementedError

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        """Tokens of the recency window when the configuration names none."""
        return max(min(128, config.budget // 4), cls.blocks * (config.lag or 0))

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """Raise ValueError for a complete configuration that does not go with this policy."""

    @classmethod
    def cache_type(cls) -> type["SlotCache"]:
        """The kind of cache it works with."""
        return SlotCache


class Streaming(Policy):
    """Forget the oldest token (StreamingLLM, arXiv:2309.17453): all scores equal."""

    def score(self, tokens: Tokens) -> Tensor:
        return torch.zeros_like(tokens.position, dtype=torch.float32)


class Full(Streaming):
    """Forget nothing. The caller gives it a slot for every token; `generate` does."""


class Random(Policy):
    """Forget a token by a seeded lot drawn when it enters: the control for any score."""

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.seed = config.seed

    def score(self, tokens: Tokens) -> Tensor:
        return hash_uniform(self.seed, tokens.position)


class EpiKV(Policy):
    """The paper's EpiKV-Flat: z_a(t) - z_b(t), z the rolling z-score of g (arXiv:2606.26472)."""

    bands = ((10,), (21,))
    weights = (1.0, 1.0)
    is_calibrated = True

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.window = RollingWindow(config.window, 2, shape)
        if config.calibration is not None:
            self.weights = (config.calibration.weight_a, config.calibration.weight_b)

    def score(self, tokens: Tokens) -> Tensor:
        # The first token has no change, so p values are there at position p.
        return self.difference(rolling_zscore(*self.window(tokens.change, tokens.position)))

    def difference(self, x: Tensor) -> Tensor:
        """[B, T] of the two bands' x [B, T, 2]."""
        weight_a, weight_b = self.weights
        return weight_a * x[..., 0] - weight_b * x[..., 1]


class EpiKVBand(EpiKV):
    """The paper's band-adaptive variant: z-scores of two band means, the first weighing 1.29."""

    bands = (range(7, 14), range(18, 26))
    weights = (1.29, 1.0)


class EpiKVRaw(EpiKV):
    """Without detrending, the ablation: rolling mean of g_a minus that of g_b."""

    def score(self, tokens: Tokens) -> Tensor:
        return self.difference(rolling_mean(*self.window(tokens.change, tokens.position)))


class EpiKVSmooth(EpiKV):
    """The rolling mean of EpiKV-Flat's score: the paper's smoothing on its detrended signal."""

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.smoothing = RollingWindow(config.window, 1, shape)

    def score(self, tokens: Tokens) -> Tensor:
        flat = super().score(tokens)[..., None]
        return rolling_mean(*self.smoothing(flat, tokens.position))[..., 0]


class EpiKVSeg(EpiKV):
    """The paper's EpiKV-Seg: blocks have quotas by their key variance, tokens EpiKV-Flat's score.

    A complete block whose mean key variance is in the top, middle or bottom third of all blocks up
    to it (of the last `HISTORY`) has the first, second or third quota. Tokens beyond their block's
    quota go first, the oldest block's before others', the lowest score first; when there are none,
    the plain lowest score goes. So the cache stays full, unlike the reference code's.

    Which tokens are beyond is settled when their block completes: from then on they leave in that
    order and the others do not, until there are none. So their score becomes their number in the
    queue of all such tokens, counted from below any score, and the cache needs to know nothing.
    """

    has_lag = has_quotas = True
    blocks = 1
    HISTORY = 1024
    QUEUE = -(2**24)  # below any score; numbers of a queue that starts here are exact in float32

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        history = torch.zeros(shape.batch_size, self.HISTORY, dtype=shape.score_dtype)
        self.register_buffer("history", history)  # key variance of the last blocks, a ring
        self.quotas = config.quotas

    def revise(self, last: LastBlocks) -> Tensor:
        lag = last.position.shape[1]
        block = last.position[:, :1] // lag  # [B, 1]
        variance = torch.nan_to_num(upcast(last.k).var(-1).mean((1, 2, 3)))[:, None]  # [B, 1]
        place = block % self.HISTORY
        kept = torch.where(last.complete[:, None], variance, self.history.gather(1, place))
        self.history.scatter_(1, place, kept)

        count = (block + 1).clamp(max=self.HISTORY)  # blocks to rank among
        there = torch.arange(self.HISTORY, device=block.device) < count
        ranked = torch.where(there, self.history, torch.inf).sort(dim=1).values
        top, middle, bottom = self.quotas
        quota = torch.where(variance >= ranked.gather(1, count // 3), middle, bottom)
        quota = torch.where(variance >= ranked.gather(1, 2 * count // 3), top, quota)

        score = last.score[:, 0, 0]  # [B, lag]
        lowest_first = score.argsort(dim=1, stable=True)  # of equals the older first
        rank = lowest_first.argsort(dim=1)
        return torch.where(rank < lag - quota, self.QUEUE + block * lag + rank, score)


class KeyVariance(Policy):
    """Rolling mean of the key's sample variance over channels, meaned over layers and heads."""

    reads_kv = True

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.window = RollingWindow(config.window, 1, shape)

    def score(self, tokens: Tokens) -> Tensor:
        return self.rolling_variance(tokens.k, tokens.position)

    def rolling_variance(self, x: Tensor, position: Tensor) -> Tensor:
        variance = upcast(x).var(-1).mean((1, 2))[..., None]  # [B, T, 1]
        return rolling_mean(*self.window(variance, position + 1))[..., 0]


class ValueVariance(KeyVariance):
    """Rolling mean of the value's sample variance over channels, meaned over layers and heads."""

    def score(self, tokens: Tokens) -> Tensor:
        return self.rolling_variance(tokens.v, tokens.position)


class KeyNorm(Policy):
    """Minus the key's L2 norm: small keys stay (arXiv:2406.11430, which lets each head choose)."""

    reads_kv = True
    slot_maps = ("shared", "head")

    def score(self, tokens: Tokens) -> Tensor:
        return -torch.linalg.vector_norm(upcast(tokens.k), dim=-1)


class KeyDiff(Policy):
    """Minus the cosine of the key to the mean of the normalised keys so far, itself among them.

    KeyDiff (arXiv:2504.15364) takes the mean over the cache and computes all scores anew at each
    eviction, for each head; here a score is computed once, with what had been seen.
    """

    reads_kv = True
    slot_maps = ("shared", "head")

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        sizes = (shape.batch_size, shape.n_layers, shape.n_kv_heads, 1, shape.head_dim)
        self.register_buffer("total", torch.zeros(sizes, dtype=shape.score_dtype))

    def score(self, tokens: Tokens) -> Tensor:
        key = normalize(upcast(tokens.k), dim=-1)
        finite = torch.nan_to_num(key)  # or a broken key would spoil the total for good
        total = self.total + finite.cumsum(dim=-2)  # [B, L, H_kv, T, D]
        self.total.copy_(total[..., -1:, :])
        return -(key * normalize(total, dim=-1)).sum(-1)


class EpiKVFit(Policy):
    """A calibrated linear score: change after every block, keys, values, and age (`FitWeights`).

    Each head has a score of its own, for what its later queries would miss.
    """

    is_calibrated = reads_kv = True
    slot_maps = ("head", "shared")

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        if config.calibration is None:
            raise ValueError("policy 'epikv-fit' needs a calibration; see scripts/calibrate.py")

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        if config.calibration is None:
            return super().default_recent(config)  # until `check` refuses it
        recent = int(config.calibration.recent * config.budget)
        recent = max(recent, cls.blocks * (config.lag or 0))
        return max(0, min(recent, config.budget - config.sinks - 1))

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        by_feature, by_head = config.calibration.fit.tensors(shape.score_dtype)
        if by_head.shape[2] != shape.n_kv_heads:
            raise ValueError(
                f"calibrated was a model of {by_head.shape[2]} key-value heads;"
                f" this has {shape.n_kv_heads}"
            )
        # No buffers: those are state, and reset to zero.
        self.by_feature = nn.Parameter(by_feature.flatten(1), requires_grad=False)  # [R, 6 L]
        self.by_head = nn.Parameter(by_head.movedim(0, -1), requires_grad=False)  # [L, H_kv, R]
        self.log_age = config.calibration.fit.log_age
        self.window = RollingWindow(config.window, shape.n_layers, shape)
        self.key_diff = KeyDiff(config, shape)

    def score(self, tokens: Tokens) -> Tensor:
        # Matrix products would round a row by how many others there are.
        sums = (self.features(tokens)[:, :, None] * self.by_feature).sum(-1)  # [B, T, R]
        return (sums[:, None, None] * self.by_head[:, :, None]).sum(-1)

    def features(self, tokens: Tokens) -> Tensor:
        """[B, T, 6 L], in the order of `FitWeights`."""
        z = rolling_zscore(*self.window(tokens.change, tokens.position))  # [B, T, L]
        k, v, cosine = tokens.k, tokens.v, -self.key_diff.score(tokens)  # [B, L, H_kv, T]
        by_head = (log_norm(k), log_variance(k), log_norm(v), log_variance(v), cosine)
        return torch.cat([z, *(x.mean(2).transpose(1, 2) for x in by_head)], dim=-1)

    def at_age(self, score: Tensor, age: Tensor) -> Tensor:
        return score + self.log_age * torch.log1p(age.to(score.dtype))


def log_norm(x: Tensor) -> Tensor:
    """Natural logarithm of the L2 norm over channels, from -14 (1e-6) up. [..., D] -> [...]"""
    return torch.linalg.vector_norm(upcast(x), dim=-1).clamp(min=1e-6).log()


def log_variance(x: Tensor) -> Tensor:
    """Natural logarithm of the sample variance over channels, from -28 up. [..., D] -> [...]"""
    return upcast(x).var(-1).clamp(min=1e-12).log()


class LagKV(Policy):
    """Standard deviation over channels of key and value, normalised by a neighbouring block.

    LagKV (arXiv:2504.04704): in each head and channel, a block's keys and values are scaled to the
    minimum and maximum of the next block, or of the previous one (then block 0 takes its own).
    Blocks count from position 0, sinks included. The paper ranks within each block after a softmax;
    here all blocks compete by the sum of the two deviations, which is the same whether a block is
    scored online or at the end of the text.
    """

    slot_maps = ("shared", "head")
    has_lag = has_reference = True
    blocks = 2

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.revised_block = ("next", "previous").index(config.lag_reference)

    def score(self, tokens: Tokens) -> Tensor:
        return torch.zeros_like(tokens.position, dtype=torch.float32)  # until its block is scored

    def revise(self, last: LastBlocks) -> Tensor:
        has_first = (last.position[:, 0] >= 0)[:, None, None, None, None]
        return self.deviation(last.k, has_first) + self.deviation(last.v, has_first)

    def deviation(self, x: Tensor, has_first: Tensor) -> Tensor:
        """[B, L, H_kv, lag] of the block to revise in x [B, L, H_kv, 2 lag, D]."""
        first, second = upcast(x).chunk(2, dim=-2)
        if self.revised_block == 0:
            scored, reference = first, second
        else:
            scored, reference = second, torch.where(has_first, first, second)
        low, high = reference.amin(-2, keepdim=True), reference.amax(-2, keepdim=True)
        return ((scored - low) / (high - low + 1e-9)).std(-1)


POLICIES: dict[str, type[Policy]] = {
    "epikv": EpiKV,
    "epikv-smooth": EpiKVSmooth,
    "epikv-raw": EpiKVRaw,
    "epikv-band": EpiKVBand,
    "epikv-seg": EpiKVSeg,
    "epikv-fit": EpiKVFit,
    "lag-kv": LagKV,
    "key-diff": KeyDiff,
    "k-norm": KeyNorm,
    "key-var": KeyVariance,
    "value-var": ValueVariance,
    "streaming": Streaming,
    "random": Random,
    "full": Full,
}

VALUE_STATISTICS = {  # [..., D] -> [...]
    "range": lambda v: v.amax(-1) - v.amin(-1),
    "var": lambda v: v.var(-1),
    "norm": lambda v: torch.linalg.vector_norm(v, dim=-1),
}


# The cache -------------------------------------------------------------------------------------


class LayerCache(nn.Module):
    """Keys and values of one layer, k and v [B, H_kv, S, D]; keys are stored after RoPE.

    Buffers: held_k and held_v, which are k and v; or int8, and k_scale and v_scale [B, H_kv, S, 1]
    what they are to be multiplied by. k and v are then copies: change what is `stored`.
    """

    reads_attention = False  # True: the model calls `observe` and `observe_prompt`, not here

    def __init__(self, shape: CacheShape, config: EvictionConfig):
        super().__init__()
        self.dtype = shape.dtype
        self.quantises = config.kv_dtype == "int8"
        sizes = (shape.batch_size, shape.n_kv_heads, config.budget, shape.head_dim)
        held = torch.int8 if self.quantises else shape.dtype
        self.register_buffer("held_k", torch.zeros(sizes, dtype=held))
        self.register_buffer("held_v", torch.zeros(sizes, dtype=held))
        scale = torch.zeros(*sizes[:3], 1, dtype=shape.score_dtype) if self.quantises else None
        self.register_buffer("k_scale", scale)
        self.register_buffer("v_scale", None if scale is None else scale.clone())

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """All buffers with an entry [B, H_kv, S, ...] for each token."""
        scales = (self.k_scale, self.v_scale) if self.quantises else ()
        return self.held_k, self.held_v, *scales

    def encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [B, H_kv, any, D] as they are to be stored."""
        if not self.quantises:
            return k, v
        (k, k_scale), (v, v_scale) = to_int8(k), to_int8(v)
        return k, v, k_scale, v_scale

    def decode(self, held: Tensor, scale: Tensor | None) -> Tensor:
        """Keys or values from what is stored of some tokens."""
        return held if scale is None else (held * scale).to(self.dtype)

    @property
    def k(self) -> Tensor:
        return self.decode(self.held_k, self.k_scale)

    @property
    def v(self) -> Tensor:
        return self.decode(self.held_v, self.v_scale)

    def write(self, slot: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrite a slot of each row with one token's k and v [B, H_kv, 1, D].

        slot: [B, H_kv], or [B, 1] for the same in all heads.
        """
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        heads = torch.arange(k.shape[1], device=k.device)
        for buffer, new in zip(self.stored, self.encode(k, v), strict=True):
            buffer[rows, heads, slot] = new[:, :, 0]

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H_kv, N, D] of the slots [B, H_kv or 1, N]."""
        k, v, *scales = (gather_slots(buffer, slot) for buffer in self.stored)
        k_scale, v_scale = scales or (None, None)
        return self.decode(k, k_scale), self.decode(v, v_scale)

    def keep(self, kept: Tensor, k: Tensor, v: Tensor) -> None:
        """Refill the slots with entries [B, H_kv or 1, S] of [slots | k and v [B, H_kv, T, D]]."""
        for buffer, new in zip(self.stored, self.encode(k, v), strict=True):
            buffer.copy_(gather_slots(torch.cat([buffer, new], dim=2), kept))


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as integers from -127 to 127, and their scale [..., 1], at least float32.

    No number is off by more than half the scale.
    """
    x = upcast(x)
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale.clamp(min=1e-30)).round().to(torch.int8), scale


def gather_slots(x: Tensor, slot: Tensor) -> Tensor:
    """Entries [B, H, N, D] of x [B, H, any, D] at the slots [B, H or 1, N]."""
    return x.gather(2, slot[..., None].expand(-1, x.shape[1], -1, x.shape[3]))


class SlotCache(nn.Module):
    """A KV cache of `config.budget` slots a row that forgets by overwriting.

    Every buffer's first axis is the row, every change is in place, and no method that runs in a
    decode step reads a value back to the host or has a shape that depends on one, so a step can be
    compiled and captured. Run it under torch.no_grad(), and choose the dtype in `shape`:
    `.to(dtype)` afterwards would round the scores too.

    Buffers: position [B, l, h, S] int64 (-1: empty), score and value_size [B, l, h, S] and previous
    [B, len(reads), hidden] in float32 (float64 for a float64 cache), length [B] int64 tokens seen,
    protected [B] int64 first evictable position. l and h are 1 where layers or heads share the map.
    reads: the blocks whose residuals `end_step` takes. block: tokens between two calls of
    `end_block`, 0 for none.

    Raises ValueError when a band names a block that the model has not.
    """

    layer_type: type[LayerCache] = LayerCache
    rotary_limit: int | None = None  # an ablation: RoPE's positions stop here, as in some caches
    frees_slots = False  # whether a slot once taken may fall empty again
    captures_blocks = True  # whether `end_block` may be part of a CUDA graph

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__()
        self.config = config
        self.bands = config.bands(shape.n_layers)
        self.reads = tuple(sorted({layer for band in self.bands for layer in band}))
        self.layers = nn.ModuleList(self.layer_type(shape, config) for _ in range(shape.n_layers))
        self.policy = POLICIES[config.policy](config, shape)
        self.block = config.lag or 0
        self.map_sizes = {
            "shared": (1, 1),
            "layer": (shape.n_layers, 1),
            "head": (shape.n_layers, shape.n_kv_heads),
        }[config.slot_map]
        slots = (shape.batch_size, *self.map_sizes, config.budget)
        stat = shape.score_dtype
        self.register_buffer("position", torch.empty(slots, dtype=torch.int64))
        self.register_buffer("score", torch.empty(slots, dtype=stat))
        self.register_buffer("value_size", torch.empty(slots, dtype=stat))
        self.register_buffer("length", torch.empty(shape.batch_size, dtype=torch.int64))
        self.register_buffer("protected", torch.empty(shape.batch_size, dtype=torch.int64))
        previous = (shape.batch_size, len(self.reads), shape.hidden_size)
        self.register_buffer("previous", torch.empty(previous, dtype=stat))
        self.reset()

    def reset(self) -> None:
        """Forget everything, the policy's state included."""
        for buffer in self.buffers():
            buffer.zero_()
        self.position.fill_(NO_POSITION)
        self.protected.fill_(self.config.sinks)

    def protect_prompt(self, n_tokens: int) -> None:
        """Never evict the first `n_tokens`, if they fit in half the budget and leave a free choice.

        That is a token more than the recent ones and the value reserve. A longer prompt competes
        like any other tokens, its sinks excepted.
        """
        config = self.config
        free = config.budget - config.recent - config.value_reserve - 1
        if n_tokens <= min(config.budget // 2, free):
            self.protected.fill_(max(config.sinks, n_tokens))

    def begin_step(self) -> tuple[Tensor, Tensor]:
        """Give the next token of every row a slot: the first empty one, else its victim's.

        Returns slot [B, l, h] and position [B], both int64. Until `end_step` the slot has its old
        score, which nobody reads: the newest token is never evicted.
        """
        position = self.length.clone()
        slot = self.victim()
        at = slot[..., None]
        self.position.scatter_(-1, at, over_map(position[:, None]).expand_as(at))
        self.length.add_(1)
        return slot, position

    def per_layer(self, x: Tensor) -> tuple[Tensor, ...]:
        """Each layer's part [B, ...] of x [B, l, ...]."""
        return x.expand(-1, len(self.layers), *x.shape[2:]).unbind(1)

    def end_step(self, slot: Tensor, position: Tensor, residuals: list[Tensor]) -> None:
        """Score the token in `slot` [B, l, h] by its key, value and `residuals`.

        residuals: [B, 1, hidden] after each block of `reads`.
        """
        at = slot[..., None]
        k, v = self.read(at) if self.reads_kv else (None, None)
        score, value_size = self.score_tokens(position[:, None], k, v, residuals)
        self.score.scatter_(-1, at, score)
        self.value_size.scatter_(-1, at, value_size)

    def end_block(self) -> None:
        """Let a block-wise policy revise the scores of rows whose length is a multiple of `block`.

        To be called after a step that made one so; other rows stay as they are.
        """
        kv = ((layer.k, layer.v) for layer in self.layers)
        self.score.copy_(self.revise(self.length, self.position, self.score, kv))

    def admit(self, k: list[Tensor], v: list[Tensor], residuals: list[Tensor]) -> None:
        """Take in T prompt tokens at once: of the slots and the new tokens the best S stay.

        k, v: per layer [B, H_kv, T, D]. residuals: [B, T, hidden] after each block of `reads`.
        """
        n_tokens = k[0].shape[2]
        new = self.length[:, None] + torch.arange(n_tokens, device=self.length.device)  # [B, T]
        stacked = (torch.stack(k, 1), torch.stack(v, 1)) if self.reads_kv else (None, None)
        score, value_size = self.score_tokens(new, *stacked, residuals)
        position = torch.cat([self.position, over_map(new).expand_as(score)], dim=-1)
        score = torch.cat([self.score, score], dim=-1)  # [B, l, h, S+T]
        value_size = torch.cat([self.value_size, value_size], dim=-1)
        self.length.add_(n_tokens)
        score = self.rescore_candidates(position, score, k, v)
        kept = self.best(position, score, value_size)
        self.position.copy_(position.gather(-1, kept))
        self.score.copy_(score.gather(-1, kept))
        self.value_size.copy_(value_size.gather(-1, kept))
        for layer, mine, new_k, new_v in zip(self.layers, self.per_layer(kept), k, v, strict=True):
            layer.keep(mine, new_k, new_v)

    def attention_mask(self, prefix: int) -> Tensor:
        """Which of the first `prefix` slots are occupied, in a step after `begin_step`.

        [B, l, h, 1, prefix] bool; `prefix` must reach the longest row, or be the budget.
        """
        return self.position[..., None, :prefix] != NO_POSITION

    def load_row(self, row: int, source: "SlotCache") -> None:
        """Copy the single row of `source` into `row`."""
        for mine, theirs in zip(self.buffers(), source.buffers(), strict=True):
            mine[row].copy_(theirs[0])

    @property
    def reads_kv(self) -> bool:
        return self.policy.reads_kv or self.config.value_reserve > 0

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, L, H_kv, N, D] of the slots [B, l, h, N]."""
        layers = zip(self.layers, self.per_layer(slot), strict=True)
        k, v = zip(*(layer.read(mine) for layer, mine in layers), strict=True)
        return torch.stack(k, dim=1), torch.stack(v, dim=1)

    def score_tokens(
        self, position: Tensor, k: Tensor | None, v: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Scores and value sizes [B, l, h, T] of the tokens that follow those scored before."""
        change = {}
        for i, (layer, residual) in enumerate(zip(self.reads, residuals, strict=True)):
            residual = residual.to(self.previous.dtype)  # [B, T, hidden]
            before = torch.cat([self.previous[:, i : i + 1], residual[:, :-1]], dim=1)
            norm = torch.linalg.vector_norm(residual - before, dim=-1)
            change[layer] = torch.where(position > 0, norm, 0)  # the first token follows none
            self.previous[:, i].copy_(residual[:, -1])
        bands = [torch.stack([change[layer] for layer in band]).mean(0) for band in self.bands]
        change = torch.stack(bands, dim=-1) if bands else self.score.new_empty(*position.shape, 0)
        score = self.over_slot_map(self.policy.score(Tokens(position, change, k, v)))
        if not self.config.value_reserve:
            return score, torch.zeros_like(score)
        size = VALUE_STATISTICS[self.config.value_statistic](upcast(v))  # [B, L, H_kv, T]
        return score, self.over_slot_map(size)

    def over_slot_map(self, score: Tensor) -> Tensor:
        """Scores [B, N] or [B, L, H_kv, N] for the slot map [B, l, h, N]: means where it is shared.

        A NaN becomes the lowest number, as it compares with nothing and would pin its slot;
        infinities become the largest numbers, as protected and empty slots have them.
        """
        if score.dim() not in (2, 4):
            found, wanted = list(score.shape), "[B, T] or [B, L, H_kv, T]"
            raise ValueError(f"policy {self.config.policy!r} scores {found}, wanted is {wanted}")
        score = over_map(score) if score.dim() == 2 else score
        score = shared_mean(score.to(self.score.dtype), self.map_sizes)
        score = torch.nan_to_num(score, nan=torch.finfo(score.dtype).min)
        return score.expand(-1, *self.map_sizes, -1)

    def rescore_candidates(
        self, position: Tensor, score: Tensor, k: list[Tensor], v: list[Tensor]
    ) -> Tensor:
        """Scores [B, l, h, S+T] of the slots and T new tokens once all blocks in them are revised.

        k, v: per layer [B, H_kv, T, D] of the new tokens; `length` counts them already.
        """
        if not self.block:
            return score
        n_tokens = k[0].shape[2]
        first = (self.length - n_tokens) // self.block + 1
        for i in range(n_tokens // self.block + 1):  # as many blocks may end among them
            kv = (  # one layer at a time, so that there is no second copy of the whole cache
                (torch.cat([layer.k, new_k], dim=2), torch.cat([layer.v, new_v], dim=2))
                for layer, new_k, new_v in zip(self.layers, k, v, strict=True)
            )
            score = self.revise((first + i) * self.block, position, score, kv)
        return score

    def revise(
        self, end: Tensor, position: Tensor, score: Tensor, kv: Iterable[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Scores of N tokens after a block has ended before position `end` [B].

        position, score: [B, l, h, N]. kv: every layer's keys and values [B, H_kv, N, D]. Rows in
        which no block ends there, or not yet, keep their scores.
        """
        lag, n = self.block, self.policy.blocks * self.block
        last = end[:, None] + torch.arange(-n, 0, device=end.device)  # [B, n]
        in_order, order = position.sort(dim=-1)
        wanted = over_map(last).expand(-1, *self.map_sizes, -1).contiguous()
        found = torch.searchsorted(in_order, wanted).clamp(max=position.shape[-1] - 1)
        at = order.gather(-1, found)  # [B, l, h, n]: `recent` tokens are there, so these are
        k, v = [], []
        for (layer_k, layer_v), mine in zip(kv, self.per_layer(at), strict=True):
            k.append(gather_slots(layer_k, mine))
            v.append(gather_slots(layer_v, mine))
        complete = (end % lag == 0) & (end > 0) & (end <= self.length)
        before = score.gather(-1, at)
        blocks = LastBlocks(complete, last, before, torch.stack(k, 1), torch.stack(v, 1))
        first = self.policy.revised_block * lag
        revised = self.over_slot_map(self.policy.revise(blocks))
        counts = over_map((complete & (last[:, first] >= 0))[:, None])
        revised = torch.where(counts, revised, before[..., first : first + lag])
        return score.scatter(-1, at[..., first : first + lag], revised)

    def evictable(self, position: Tensor, value_size: Tensor, newest: Tensor) -> Tensor:
        """Tokens that may go when the newest one stands at `newest` [B]. [B, l, h, N]"""
        recent = max(self.config.recent, 1)  # the newest stays in any case
        after, until = over_map(self.protected[:, None]), over_map((newest - recent)[:, None])
        may_go = (position >= after) & (position <= until)
        if not self.config.value_reserve:
            return may_go
        newest_first = position.argsort(dim=-1, descending=True)
        size = torch.where(may_go, value_size, -torch.inf).gather(-1, newest_first)
        largest = size.argsort(dim=-1, descending=True, stable=True)
        reserve = newest_first.gather(-1, largest[..., : self.config.value_reserve])
        return may_go.scatter(-1, reserve, False)

    def aged(self, position: Tensor, score: Tensor, newest: Tensor) -> Tensor:
        """Scores [B, l, h, N] as they count when the newest token stands at `newest` [B]."""
        return self.policy.at_age(score, over_map(newest[:, None]) - position)

    def victim(self) -> Tensor:
        """The slot [B, l, h] for the token to come: the first empty one, else the lowest score's.

        Of equal scores the oldest token's.
        """
        evictable = self.evictable(self.position, self.value_size, self.length)
        empty = self.position == NO_POSITION
        score = self.aged(self.position, self.score, self.length)
        score = torch.where(evictable, score, torch.inf)
        score = torch.where(empty, -torch.inf, score)
        lowest = score <= score.amin(dim=-1, keepdim=True)
        n_slots = self.config.budget
        before = torch.arange(-n_slots, 0, device=score.device)  # ages of empty slots, in order
        age = torch.where(empty, before, self.position)
        return torch.where(lowest, age, FAR).argmin(dim=-1)

    def best(self, position: Tensor, score: Tensor, value_size: Tensor) -> Tensor:
        """The S of N tokens [B, l, h, N] to keep, oldest first, empty slots last: [B, l, h, S].

        What may not go always fits: see EvictionConfig and `protect_prompt`.
        """
        evictable = self.evictable(position, value_size, self.length - 1)
        score = self.aged(position, score, self.length - 1)
        kept = best_first(position, score, evictable)[..., : self.config.budget]
        kept_position = position.gather(-1, kept)
        by_age = torch.where(kept_position == NO_POSITION, FAR, kept_position).argsort(dim=-1)
        return kept.gather(-1, by_age)


def best_first(position: Tensor, score: Tensor, evictable: Tensor) -> Tensor:
    """Order [B, l, h, N] of tokens: those that may not go, by score, then the empty slots.

    Of equal ones the newer first.
    """
    score = torch.where(evictable, score, torch.inf)
    score = torch.where(position == NO_POSITION, -torch.inf, score)
    newest_first = position.argsort(dim=-1, descending=True)
    by_score = score.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
    return newest_first.gather(-1, by_score)


def over_map(x: Tensor) -> Tensor:
    """x [B, ...] as [B, 1, 1, ...], to stand beside a slot map."""
    return x[:, None, None]


def shared_mean(x: Tensor, map_sizes: tuple[int, int]) -> Tensor:
    """Mean of x [B, L, H_kv, ...] over layers and heads that share a slot map. [B, l, h, ...]"""
    for axis, size in zip((1, 2), map_sizes, strict=True):
        if size < x.shape[axis]:
            x = x.mean(axis, keepdim=True)
    return x

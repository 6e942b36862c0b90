# SPDX-License-Identifier: Apache-2.0
"""Eviction policies that read attention weights: the baselines of the field, in the same cache.

    from baselines import BASELINES  # with scripts/ in the path
    from epikv import POLICIES

    POLICIES.update(BASELINES)  # then generate(model, prompt, policy="h2o", budget=1024)

Each follows its own paper; `-reference` names the version in the code of EpiKV's authors where that
differs. They hold the same budget under the same rules as every policy: true positions, sinks, and
the prompt rule; the recency window is the paper's. Two leave slots empty for a while: `r-kv` its
buffer, and `thinkv` what it freed (`mean_occupancy` says how many are taken).

`AttentionPolicy` is the class to extend: `rank` says from attention weights which tokens matter.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epikv import (  # noqa: E402
    NO_POSITION,
    POLICIES,
    CacheShape,
    EvictionConfig,
    LayerCache,
    Policy,
    RollingWindow,
    SlotCache,
    Tokens,
    best_first,
    over_map,
    rolling_zscore,
    scale_block,
    shared_mean,
    upcast,
)
from model import Transformer, attention_weights, one_line  # noqa: E402

OBSERVED_QUERIES = 64  # prompt tokens whose attention weights are held at once


# Observing attention ---------------------------------------------------------------------------


class ObservedLayer(LayerCache):
    """Keys and values of one layer, with the attention that the tokens received.

    Buffers: row [B, H_kv, S], the last query's weights, means over the query heads that share a
    key-value head; near [B], for ThinKV, how many slots have at least 1 % of the largest weight of
    their query head, a mean over all of those.
    prompt_rows: [B, H_kv, m, N] of a prompt chunk on its way into the cache, None otherwise.
    """

    reads_attention = True

    def __init__(self, shape: CacheShape, config: EvictionConfig):
        super().__init__(shape, config)
        self.policy = POLICIES[config.policy]
        sizes = (shape.batch_size, shape.n_kv_heads, config.budget)
        self.register_buffer("row", torch.zeros(sizes, dtype=shape.score_dtype))
        self.register_buffer("near", torch.zeros(shape.batch_size, dtype=shape.score_dtype))
        self.prompt_rows: Tensor | None = None

    def observe(self, weights: Tensor) -> None:
        """Take note of one query's weights [B, H_kv, G, P] over the first P slots."""
        self.row[..., : weights.shape[-1]].copy_(weights.mean(dim=2))
        if self.policy.reads_sparsity:
            near = weights >= 0.01 * weights.amax(dim=-1, keepdim=True)
            self.near.copy_(near.to(self.near.dtype).sum(dim=-1).mean(dim=(1, 2)))

    def observe_prompt(self, q: Tensor, k: Tensor) -> None:
        """Take note of a chunk's queries q [B, H, T, D], which looked at k [B, H_kv, N, D].

        The last T of the N tokens are the chunk itself. What is kept are the weights of the last
        queries, or the sum over all of them if the policy accumulates; computed a few queries at a
        time, so that nothing grows with T times N.
        """
        n_queries = q.shape[2] if self.policy.accumulates else min(self.policy.n_rows, q.shape[2])
        q, first = q[:, :, -n_queries:], k.shape[2] - n_queries
        rows = []
        for start in range(0, n_queries, OBSERVED_QUERIES):
            part = q[:, :, start : start + OBSERVED_QUERIES]
            weights = causal_weights(part, k, first + start).mean(dim=2)  # [B, H_kv, t, N]
            rows.append(weights.sum(2, keepdim=True) if self.policy.accumulates else weights)
        rows = torch.cat(rows, dim=2)
        self.prompt_rows = rows.sum(2, keepdim=True) if self.policy.accumulates else rows


def causal_weights(q: Tensor, k: Tensor, first: int) -> Tensor:
    """Attention weights of q [B, H, t, D], the tokens from `first` on, to k [B, H_kv, N, D].

    [B, H_kv, G, t, N]
    """
    n_queries, n_kv_heads = q.shape[2], k.shape[1]
    position = torch.arange(first, first + n_queries, device=q.device)
    mask = torch.arange(k.shape[2], device=q.device) <= position[:, None]  # [t, N]
    grouped = q.unflatten(1, (n_kv_heads, -1)).flatten(2, 3)  # [B, H_kv, G * t, D]
    weights = attention_weights(grouped, k, mask.repeat(q.shape[1] // n_kv_heads, 1))
    return weights.unflatten(2, (-1, n_queries))


@dataclass
class Observed:
    """All N tokens that a row holds, as an attention policy sees them.

    position: [B, l, h, N] int64, negative where there is none. length: [B] tokens seen so far.
    rows: [B, L, H_kv, W, N] weights that the last W queries gave, the query at position p in row
        p % W, or in the one row their sum; means over the query heads of a key-value head.
    entry: [B, l, h, N] what `Policy.score` said when the token entered. score: their last scores.
    protected: [B] first position that may be evicted. map_sizes: (l, h).
    k, v: per layer [B, H_kv, N, D].
    """

    position: Tensor
    length: Tensor
    rows: Tensor
    entry: Tensor
    score: Tensor
    protected: Tensor
    map_sizes: tuple[int, int]
    k: list[Tensor]
    v: list[Tensor]

    @property
    def shared_rows(self) -> Tensor:
        """Rows [B, l, h, W, N], means over what shares a slot map."""
        return shared_mean(self.rows, self.map_sizes)

    @property
    def decoded(self) -> Tensor:
        """Tokens outside the protected prompt and the sinks. [B, l, h, N]"""
        return self.position >= over_map(self.protected[:, None])


class AttentionPolicy(Policy):
    """Decides from attention weights which token goes: the evictable one of the lowest rank.

    A subclass writes `rank`, called after every step for all tokens held. n_rows: queries whose
    weights it wants. accumulates: it wants the sum of all queries' instead, the prompt's included
    if `counts_prompt`. keeps_prompt: protect any prompt that leaves one evictable slot.
    """

    slot_maps = ("head", "layer", "shared")
    n_rows = 1
    accumulates = False
    counts_prompt = True
    keeps_prompt = False
    reads_sparsity = False

    def score(self, tokens: Tokens) -> Tensor:
        return torch.zeros_like(tokens.position, dtype=torch.float32)

    def rank(self, held: Observed) -> Tensor:
        """New scores [B, l, h, N], or [B, L, H_kv or 1, N], of which the slot map takes means."""
        raise NotImplementedError

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return 1

    @classmethod
    def cache_type(cls) -> type[SlotCache]:
        return AttentionCache


class AttentionCache(SlotCache):
    """A slot cache whose scores follow the attention that its tokens receive.

    Buffers: rows [B, L, H_kv, W, S] and entry [B, l, h, S] as in `Observed`.
    """

    layer_type = ObservedLayer

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        policy = POLICIES[config.policy]
        rows = (shape.batch_size, shape.n_layers, shape.n_kv_heads, policy.n_rows, config.budget)
        super().__init__(config, shape)
        self.register_buffer("rows", torch.zeros(rows, dtype=shape.score_dtype))
        self.register_buffer("entry", torch.zeros_like(self.score))
        self.candidates: Observed | None = None  # of a prompt chunk on its way in

    def protect_prompt(self, n_tokens: int) -> None:
        super().protect_prompt(n_tokens)
        free = self.config.budget - self.config.recent - self.config.value_reserve
        if self.policy.keeps_prompt and n_tokens < free:
            self.protected.fill_(max(self.config.sinks, n_tokens))

    def end_step(self, slot: Tensor, position: Tensor, residuals: list[Tensor]) -> None:
        super().end_step(slot, position, residuals)
        at = slot[..., None]
        self.entry.scatter_(-1, at, self.score.gather(-1, at))
        self.note_rows(slot, position)
        self.rank_slots()

    def note_rows(self, slot: Tensor, position: Tensor) -> None:
        """Add the last query's weights to `rows`, and drop what the slot's old token received."""
        sizes = self.rows.shape
        self.rows.scatter_(-1, slot[..., None, None].expand(*sizes[:4], 1), 0)
        row = torch.stack([layer.row for layer in self.layers], dim=1)[:, :, :, None]
        if self.policy.accumulates:
            self.rows.add_(row)
        else:
            place = (position % self.policy.n_rows)[:, None, None, None, None]
            self.rows.scatter_(3, place.expand(*sizes[:3], 1, sizes[4]), row)

    def rank_slots(self) -> None:
        self.score.copy_(self.over_slot_map(self.policy.rank(self.observed())))

    def observed(self) -> Observed:
        return Observed(
            self.position,
            self.length,
            self.rows,
            self.entry,
            self.score,
            self.protected,
            self.map_sizes,
            [layer.k for layer in self.layers],
            [layer.v for layer in self.layers],
        )

    def rescore_candidates(
        self, position: Tensor, score: Tensor, k: list[Tensor], v: list[Tensor]
    ) -> Tensor:
        n_slots = self.config.budget
        self.candidates = Observed(
            position,
            self.length,
            self.candidate_rows(k[0].shape[2]),
            torch.cat([self.entry, score[..., n_slots:]], dim=-1),
            score,
            self.protected,
            self.map_sizes,
            [torch.cat([layer.k, new], 2) for layer, new in zip(self.layers, k, strict=True)],
            [torch.cat([layer.v, new], 2) for layer, new in zip(self.layers, v, strict=True)],
        )
        return self.over_slot_map(self.policy.rank(self.candidates))

    def candidate_rows(self, n_tokens: int) -> Tensor:
        """`rows` over the slots and the `n_tokens` of a chunk: [B, L, H_kv, W, S+T]."""
        new = torch.stack([layer.prompt_rows for layer in self.layers], dim=1)
        for layer in self.layers:
            layer.prompt_rows = None
        cached, own = new[..., :-n_tokens], new[..., -n_tokens:]
        empty = new.new_zeros(*new.shape[:4], self.config.budget - cached.shape[-1])
        new = torch.cat([cached, empty, own], dim=-1)  # [B, L, H_kv, m, S+T]
        before = torch.cat([self.rows, self.rows.new_zeros(*self.rows.shape[:4], n_tokens)], -1)
        if self.policy.accumulates:
            return before + new if self.policy.counts_prompt else before
        n_rows = new.shape[3]
        position = self.length[:, None] + torch.arange(-n_rows, 0, device=new.device)  # [B, m]
        place = (position % self.policy.n_rows)[:, None, None, :, None]
        return before.scatter(3, place.expand_as(new), new)

    def best(self, position: Tensor, score: Tensor, value_size: Tensor) -> Tensor:
        kept = super().best(position, score, value_size)
        self.entry.copy_(self.candidates.entry.gather(-1, kept))
        index = kept[:, :, :, None].expand(*self.rows.shape[:4], -1)
        self.rows.copy_(self.candidates.rows.gather(-1, index))
        self.candidates = None
        return kept


class FreeingPolicy(AttentionPolicy):
    """An attention policy that empties slots when a block of `lag` tokens ends.

    A subclass writes `released`, and `rank` if that needs scores.
    """

    has_lag = True

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.lag = config.lag

    def rank(self, held: Observed) -> Tensor:
        return held.score

    def released(self, held: Observed, evictable: Tensor) -> Tensor:
        """Tokens [B, l, h, S] to free; those that are not evictable stay in any case."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        if config.budget < config.sinks + config.recent + config.lag:
            raise ValueError(
                f"budget {config.budget} is smaller than sinks {config.sinks} + recent"
                f" {config.recent} + lag {config.lag}, the room that is freed: lower lag"
            )

    @classmethod
    def cache_type(cls) -> type[SlotCache]:
        return FreeingCache


class FreeingCache(AttentionCache):
    """An attention cache that empties slots at the ends of blocks, by the policy's `released`.

    Between two blocks tokens take the empty slots. Only a prompt that fills the cache is followed
    by evictions one at a time until the first block ends, by the prompt's scores; tokens that enter
    meanwhile have the score 0.
    """

    frees_slots = True

    def rank_slots(self) -> None:
        pass  # nothing is evicted between two blocks

    def end_block(self) -> None:
        due = (self.length % self.block == 0) & (self.length > 0)
        before = self.score.clone()
        super().rank_slots()
        self.score.copy_(torch.where(over_map(due[:, None]), self.score, before))
        evictable = self.evictable(self.position, self.value_size, self.length - 1)
        released = self.policy.released(self.observed(), evictable)
        released = released & evictable & over_map(due[:, None])
        self.position.masked_fill_(released, NO_POSITION)
        self.rows.masked_fill_(released[:, :, :, None].expand_as(self.rows), 0)


def mean_occupancy(cache: SlotCache) -> Tensor:
    """Share of the slots that are taken, mean over layers and heads. [B]"""
    return (cache.position != NO_POSITION).float().mean(dim=(1, 2, 3))


def pool_neighbours(x: Tensor, position: Tensor, kernel: int) -> Tensor:
    """Largest x [B, l, h, N] among the `kernel` tokens around each, of those held, by position."""
    order = position.argsort(dim=-1)
    in_order = x.gather(-1, order).flatten(0, 2)[:, None]
    pooled = max_pool1d(in_order, kernel, stride=1, padding=kernel // 2).view(x.shape)
    return torch.empty_like(x).scatter(-1, order, pooled)


# The baselines ---------------------------------------------------------------------------------


class H2O(AttentionPolicy):
    """Heavy hitters: attention received since the token entered, prompt queries included.

    H2O (arXiv:2306.14048): each layer and head for itself, half of the budget for recent tokens.
    """

    accumulates = True

    def rank(self, held: Observed) -> Tensor:
        return held.rows[..., 0, :]

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return config.budget // 2


class H2OReference(H2O):
    """One slot map, decode queries only, the last 128 tokens kept, or all that the budget holds."""

    slot_maps = ("shared",)
    counts_prompt = False

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return max(1, min(128, config.budget - config.sinks - 1))


class TOVA(AttentionPolicy):
    """Attention of the last query, mean over heads, each layer for itself (arXiv:2401.06104)."""

    slot_maps = ("layer", "shared")

    def rank(self, held: Observed) -> Tensor:
        return held.shared_rows[..., 0, :]


class RaaS(AttentionPolicy):
    """A time stamp, renewed when the token's page is among the more attended half.

    RaaS (arXiv:2502.11147): pages of 16 tokens, of which the page of the oldest stamp goes, here
    token by token; the prompt stays. A page's weight is the largest of its tokens' (the paper's
    system estimates it from a representative key). That each layer keeps stamps of its own, and
    that half of the tokens are renewed and not those above a weight of 1e-4, is our reading of it.
    """

    slot_maps = ("layer", "shared")
    keeps_prompt = True
    page = 16

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position.float()

    def rank(self, held: Observed) -> Tensor:
        weight = held.shared_rows[..., 0, :]
        page = held.position // self.page
        first = torch.searchsorted(page.sort(dim=-1).values, page)  # a number for each page held
        largest = torch.zeros_like(weight).scatter_reduce(-1, first, weight, "amax")
        weight = largest.gather(-1, first)
        decoded = held.decoded
        ranked = torch.where(decoded, weight, -torch.inf).sort(dim=-1, descending=True).values
        last = self.n_renewed(decoded.sum(dim=-1, keepdim=True)) - 1
        renewed = decoded & (weight >= ranked.gather(-1, last.clamp(min=0)))
        newest = over_map((held.length - 1)[:, None]).to(held.score.dtype)
        return torch.where(renewed, newest, held.score)

    def n_renewed(self, n_tokens: Tensor) -> Tensor:
        return (n_tokens + 1) // 2


class RaaSToken(RaaS):
    """Token by token instead of by page."""

    page = 1


class RaaSReference(RaaSToken):
    """One slot map; renewed at the lower median of the weights or above it."""

    slot_maps = ("shared",)

    def n_renewed(self, n_tokens: Tensor) -> Tensor:
        return n_tokens // 2 + 1


class SnapKV(AttentionPolicy):
    """Attention of the last 32 queries, summed and then max-pooled over 7 neighbours.

    SnapKV (arXiv:2404.14469) at decode: each layer and head for itself, the window of 32 kept.
    Neighbours are those among the tokens still held, the window's own included (which published
    code leaves out before it pools).
    """

    n_rows = 32
    kernel = 7

    def rank(self, held: Observed) -> Tensor:
        return pool_neighbours(held.shared_rows.sum(dim=3), held.position, self.kernel)

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return min(cls.n_rows, config.budget // 2)


class LongFlow(AttentionPolicy):
    """Attention of the last query times the L1 norm of the value, mean over heads.

    LongFlow (arXiv:2603.11504): one token a step; each layer for itself.
    """

    slot_maps = ("layer", "shared")

    def rank(self, held: Observed) -> Tensor:
        return (held.rows[..., 0, :] * self.value_norms(held)).mean(dim=2, keepdim=True)

    def value_norms(self, held: Observed) -> Tensor:
        """[B, L, H_kv, N]"""
        norms = [torch.linalg.vector_norm(v, 1, dim=-1, dtype=held.rows.dtype) for v in held.v]
        return torch.stack(norms, dim=1)


class LongFlowReference(LongFlow):
    """One slot map, the product of the two means instead of the mean of products.

    The authors' may evict the token just written, which no policy does here.
    """

    slot_maps = ("shared",)

    def rank(self, held: Observed) -> Tensor:
        return held.rows[..., 0, :].mean((1, 2)) * self.value_norms(held).mean((1, 2))


class AttentionTimesChange(AttentionPolicy):
    """Accumulated attention plus z_10, both scaled to 0..1 over the decoded tokens.

    `attn_hs_product` in the code of EpiKV's authors, which adds; decode queries only.
    """

    bands = ((10,),)
    slot_maps = ("shared",)
    accumulates = True
    counts_prompt = False

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.window = RollingWindow(config.window, 1, shape)

    def score(self, tokens: Tokens) -> Tensor:
        return rolling_zscore(*self.window(tokens.change, tokens.position))[..., 0]

    def rank(self, held: Observed) -> Tensor:
        attention = held.shared_rows[..., 0, :]
        return scaled_over(attention, held.decoded) + scaled_over(held.entry, held.decoded)

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return super(AttentionPolicy, cls).default_recent(config)  # that of every other policy


def scaled_over(x: Tensor, counts: Tensor) -> Tensor:
    """x [B, l, h, N] scaled so that the smallest and largest that count are 0 and 1."""
    low = torch.where(counts, x, torch.inf).amin(dim=-1, keepdim=True)
    high = torch.where(counts, x, -torch.inf).amax(dim=-1, keepdim=True)
    return torch.where(counts, (x - low) / (high - low + 1e-9), 0)


class RKV(FreeingPolicy):
    """0.1 x importance - 0.9 x redundancy; a full buffer of new tokens is compressed away.

    R-KV (arXiv:2505.24133): importance is the mean attention of the last 8 queries, max-pooled over
    7 neighbours; redundancy the softmax of a key's mean cosine similarity to the others, where of
    each key's near-duplicates (above 0.5, as in the authors' code) the latest does not count. Each
    layer and head keeps budget - lag tokens when a block of `lag` is complete: the buffer is part
    of the budget. The paper's buffer is 128, which `lag` is from a budget of 1,024 on. Weights are
    those over all tokens held, means over the query heads of a head, and the pooling sees the last
    8 tokens too; published code leaves these out before the softmax.
    """

    n_rows = 8
    kernel = 7
    share = 0.1
    threshold = 0.5

    def rank(self, held: Observed) -> Tensor:
        return self.share * self.importance(held) - (1 - self.share) * self.redundancy(held)

    def importance(self, held: Observed) -> Tensor:
        """[B, l, h, N]"""
        return pool_neighbours(held.shared_rows.mean(dim=3), held.position, self.kernel)

    def redundancy(self, held: Observed) -> Tensor:
        """[B, l, h, N]"""
        position = held.position.expand(-1, len(held.k), held.k[0].shape[1], -1)
        layers = [
            latest_spared(normalize(upcast(k), dim=-1), position[:, i], self.threshold)
            for i, k in enumerate(held.k)
        ]
        mean = torch.stack(layers, dim=1)  # [B, L, H_kv, N]
        mean = torch.where(position == NO_POSITION, -torch.inf, mean)
        return shared_mean(mean.softmax(dim=-1), held.map_sizes)

    def released(self, held: Observed, evictable: Tensor) -> Tensor:
        order = best_first(held.position, held.score, evictable)
        return torch.zeros_like(evictable).scatter(-1, order[..., -self.lag :], True)

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return 8


def latest_spared(key: Tensor, position: Tensor, threshold: float) -> Tensor:
    """Mean over all keys i of the cosine of keys i and j, by key j. [B, H_kv, N]

    key: [B, H_kv, N, D] normalised; position: [B, H_kv, N], negative where there is none. Not
    counted are a key with itself and, for each i, the latest j that is closer than `threshold`.
    A few keys i at a time.
    """
    there = position != NO_POSITION
    index = torch.arange(key.shape[2], device=key.device)
    total = torch.zeros_like(position, dtype=key.dtype)
    for start in range(0, key.shape[2], 512):
        part = slice(start, start + 512)
        cosine = key[:, :, part] @ key.transpose(-1, -2)  # [B, H_kv, n, N]
        counts = there[:, :, part][..., None] & there[:, :, None] & (index[part][:, None] != index)
        near = counts & (cosine > threshold)
        when = torch.where(near, position[:, :, None], NO_POSITION)
        latest = near & (when == when.amax(dim=-1, keepdim=True))
        total += torch.where(counts & ~latest, cosine, 0).sum(dim=2)
    return total / there.sum(dim=-1, keepdim=True).clamp(min=1)


class RKVReference(RKV):
    """One slot map, both terms standardised, no near-duplicate spared, means before the pooling."""

    slot_maps = ("shared",)

    def rank(self, held: Observed) -> Tensor:
        there = held.position != NO_POSITION
        importance = standardised(self.importance(held), there)
        redundancy = standardised(self.redundancy(held), there)
        return self.share * importance - (1 - self.share) * redundancy

    def redundancy(self, held: Observed) -> Tensor:
        there = held.position != NO_POSITION  # [B, 1, 1, N]
        count = there.sum(dim=-1, keepdim=True).clamp(min=1)
        layers = []
        for k in held.k:
            key = torch.where(there[:, 0, :, :, None], normalize(upcast(k), dim=-1), 0)
            layers.append((key * key.sum(dim=2, keepdim=True)).sum(-1))  # [B, H_kv, N]
        mean = (torch.stack(layers, dim=1) - 1) / count
        return torch.where(there, mean, -torch.inf).softmax(-1).mean((1, 2), keepdim=True)


def standardised(x: Tensor, counts: Tensor) -> Tensor:
    """(x - mean) / (sample std + 1e-8) over the tokens that count. [B, l, h, N]"""
    n = counts.sum(dim=-1, keepdim=True)
    mean = torch.where(counts, x, 0).sum(dim=-1, keepdim=True) / n.clamp(min=1)
    square = torch.where(counts, (x - mean) ** 2, 0).sum(dim=-1, keepdim=True)
    return (x - mean) / ((square / (n - 1).clamp(min=1)).sqrt() + 1e-8)


class ThinKV(FreeingPolicy):
    """Segments of tokens shrink as thoughts change, to the tokens nearest their keys' clusters.

    ThinKV (arXiv:2510.01290), the eviction half; its quantisation and its paged kernel are left out
    (slots are overwritten in place anyway). The sparsity of a step is the share of tokens with
    less than 1 % of the largest weight of their head, mean over heads and over `layers`; its mean
    over a segment of `lag` steps gives the segment's thought type: transition above the higher of
    the `thresholds`, execution below the lower one, reasoning in between (prompts: reasoning).
    At the end of a transition every earlier segment steps down to the next number of `schedule`.
    While less than a segment's room is free, the least important of the segments that can (a
    transition before an execution before a reasoning), of these the oldest, steps down. Kept are
    the tokens nearest to the centroids of k-means on the keys after RoPE, of all heads together,
    each layer for itself.

    Not as in the paper: a segment is `lag` tokens, 128 from a budget of 1,024 on; when none can
    step down, a segment goes whole in the same order, as a fixed budget demands; and thresholds
    found with the full cache are applied to the tokens held.

    layers, counted for a model of 32 blocks, and thresholds of sparsity are calibrated, as in the
    paper; these are the demo model's, from 6 reasoning traces of DeepSeek-R1-Distill-Llama-8B cut
    to 700 tokens. For another model run this file and put `calibrated_thinkv` of its output into
    POLICIES.
    """

    slot_maps = ("layer", "shared")
    blocks = 1  # the last segment stays whole
    reads_sparsity = True
    layers: tuple[float, ...] = (15, 18, 19, 27)
    thresholds = (0.815, 0.893)
    REASONING, EXECUTION, TRANSITION = range(3)

    @classmethod
    def schedule(cls, lag: int) -> list[int]:
        """Tokens of a segment after each step down: 64, 32, 16, 8, 4 of 128, and never below 4."""
        return [max(min(4, lag), lag >> n) for n in range(1, 6)]

    @classmethod
    def thought(cls, sparsity: float) -> int:
        low, high = cls.thresholds
        if sparsity > high:
            return cls.TRANSITION
        return cls.EXECUTION if sparsity < low else cls.REASONING

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return config.lag

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        super().check(config)
        if config.value_reserve:
            raise ValueError("policy 'thinkv' chooses by clusters of keys; drop value_reserve")

    @classmethod
    def cache_type(cls) -> type[SlotCache]:
        return ThoughtCache


class ThoughtCache(FreeingCache):
    """The slots of ThinKV, with the type and the step-downs of every segment.

    Buffers: sparsity [B], the sum over the `n_steps` [B] of the segment so far; thought and level
    [B, M] of the last M segments. The end of a segment is planned on the host, once in `lag` steps.
    """

    captures_blocks = False
    SEGMENTS = 4096

    def __init__(self, config: EvictionConfig, shape: CacheShape):
        super().__init__(config, shape)
        self.register_buffer("sparsity", torch.zeros(shape.batch_size, dtype=shape.score_dtype))
        self.register_buffer("n_steps", torch.zeros(shape.batch_size, dtype=torch.int64))
        segments = torch.zeros(shape.batch_size, self.SEGMENTS, dtype=torch.int64)
        self.register_buffer("thought", segments)
        self.register_buffer("level", segments.clone())
        scaled = {scale_block(layer, shape.n_layers) for layer in self.policy.layers}
        self.observed_layers = sorted(scaled)

    def note_rows(self, slot: Tensor, position: Tensor) -> None:
        super().note_rows(slot, position)
        near = torch.stack([self.layers[i].near for i in self.observed_layers]).mean(0)
        n_taken = (self.position[:, 0, 0] != NO_POSITION).sum(-1)
        self.sparsity.add_(1 - near / n_taken)
        self.n_steps.add_(1)

    def end_block(self) -> None:
        for row, length in enumerate(self.length.tolist()):
            if length and length % self.block == 0:
                self.end_segment(row, length // self.block - 1)

    def end_segment(self, row: int, last: int) -> None:
        """Give segment number `last` its type, and shrink the earlier ones of a row."""
        lag, policy = self.block, self.policy
        thought, level = self.thought[row].tolist(), self.level[row].tolist()
        if n_steps := self.n_steps[row].item():
            thought[last % self.SEGMENTS] = policy.thought(self.sparsity[row].item() / n_steps)
        level[last % self.SEGMENTS] = 0
        self.sparsity[row], self.n_steps[row] = 0, 0

        held = [p for p in self.position[row, 0, 0].tolist() if p != NO_POSITION]
        protected = self.protected[row].item()
        sizes: dict[int, int] = {}
        recent = max(self.config.recent, lag)
        settled = ((last + 1) * lag - recent) // lag * lag  # whole segments before the recent ones
        for p in held:
            if protected <= p < settled:
                sizes[p // lag] = sizes.get(p // lag, 0) + 1
        quotas = dict(sizes)
        schedule = policy.schedule(lag)

        def step_down(segment: int) -> None:
            place = segment % self.SEGMENTS
            level[place] = min(level[place] + 1, len(schedule))
            quotas[segment] = min(quotas[segment], schedule[level[place] - 1])

        if thought[last % self.SEGMENTS] == policy.TRANSITION:
            for segment in sizes:
                step_down(segment)
        fixed = len(held) - sum(sizes.values())
        while quotas and fixed + sum(quotas.values()) + lag > self.config.budget:
            first = sorted(quotas, key=lambda s: (-thought[s % self.SEGMENTS], s))
            able = [segment for segment in first if quotas[segment] > schedule[-1]]
            if able:
                step_down(able[0])
            else:
                quotas.pop(first[0])
        for segment, size in sizes.items():
            if quotas.get(segment, 0) < size:
                self.shrink(row, segment, max(protected, segment * lag), quotas.get(segment, 0))
        self.thought[row] = torch.tensor(thought)
        self.level[row] = torch.tensor(level)

    def shrink(self, row: int, segment: int, first: int, n_kept: int) -> None:
        """Empty the slots of a segment's tokens from position `first` on but for `n_kept`."""
        position = self.position[row].flatten(0, 1)  # [l, S]
        inside = (position >= first) & (position < (segment + 1) * self.block)
        # Every layer holds as many tokens of a segment as any other, in order of position here.
        slots = torch.where(inside, position, position.max() + 1).argsort(dim=1)
        slots = slots[:, : int(inside[0].sum())]  # [l, n]
        if n_kept:
            keys = torch.stack([layer.k[row] for layer in self.layers])  # [L, H_kv, S, D]
            at = slots.expand(len(self.layers), -1)[:, None, :, None]
            keys = keys.gather(2, at.expand(-1, keys.shape[1], -1, keys.shape[3]))
            keys = upcast(keys).transpose(1, 2).flatten(2)  # [L, n, H_kv * D]
            if len(slots) == 1:  # one map for all layers
                keys = keys.transpose(0, 1).flatten(1)[None]
            kept = nearest_to_centroids(keys, n_kept)
            gone = torch.ones_like(slots, dtype=torch.bool).scatter(1, kept, False)
            slots = slots[gone].view(len(slots), -1)
        self.position[row] = position.scatter(1, slots, NO_POSITION).view_as(self.position[row])


def nearest_to_centroids(x: Tensor, k: int, n_iterations: int = 10) -> Tensor:
    """Indices [L, k] of the points of x [L, n, C] nearest to the centroids of k-means.

    The centroids start at k points spread evenly over the order of x. Each takes the nearest point
    that no earlier centroid has taken, of nearly equal ones the first: two points are as far from
    their mean, and rounding must not decide.
    """
    n = x.shape[1]
    centroids = x[:, [i * n // k for i in range(k)]]
    for _ in range(n_iterations):
        member = torch.cdist(x, centroids).argmin(dim=-1)  # [L, n]
        weight = torch.nn.functional.one_hot(member, k).to(x.dtype)  # [L, n, k]
        size = weight.sum(dim=1)[..., None]
        mean = weight.transpose(1, 2) @ x / size.clamp(min=1)
        centroids = torch.where(size > 0, mean, centroids)
    limits = torch.finfo(x.dtype)
    distance = torch.cdist(x, centroids).nan_to_num(nan=limits.max, posinf=limits.max)
    order = torch.arange(n, device=x.device)
    free = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    taken = []
    for i in range(k):
        to_free = torch.where(free, distance[..., i], torch.inf)  # [L, n]
        limit = to_free.amin(dim=1, keepdim=True) * (1 + limits.eps**0.5)
        taken.append(torch.where(free & (to_free <= limit), order, n).amin(dim=1))
        free.scatter_(1, taken[-1][:, None], False)
    return torch.stack(taken, dim=1)


class ThinKVReference(FreeingPolicy):
    """The simplified ThinKV of EpiKV's authors: quotas by the entropy of a block's attention.

    When less than a block's room is free, the tokens that may go, in order, form blocks of `lag`.
    The entropy of the last query's attention in a block, mean over the last four layers, puts it in
    the lowest, middle or highest third, which keep lag / 2, lag / 4 and lag / 16 tokens: those with
    the most attention in the last layer. One slot map.
    """

    slot_maps = ("shared",)
    blocks = 1

    def released(self, held: Observed, evictable: Tensor) -> Tensor:
        lag, evictable = self.lag, evictable[:, 0, 0]  # [B, S]
        position = held.position[:, 0, 0]
        n_slots = position.shape[1]
        short = (position == NO_POSITION).sum(dim=1, keepdim=True) < lag  # [B, 1]
        in_order = torch.where(evictable, position, position.amax() + 1).argsort(dim=1)
        block = in_order.argsort(dim=1) // lag  # [B, S]
        blocks = position.new_zeros(len(position), n_slots // lag + 1)
        n_blocks = -(-evictable.sum(dim=1, keepdim=True) // lag)  # [B, 1]

        weight = held.rows[:, -4:, :, 0].mean(dim=(1, 2))
        weight = torch.where(evictable, weight, 0)
        total = blocks.to(weight.dtype).scatter_add(1, block, weight)
        share = weight / (total.gather(1, block) + 1e-9)
        surprise = torch.where(evictable, -share * (share + 1e-12).log(), 0)
        entropy = blocks.to(weight.dtype).scatter_add(1, block, surprise)
        there = torch.arange(blocks.shape[1], device=block.device) < n_blocks
        ranked = torch.where(there, entropy, torch.inf).sort(dim=1).values
        quota = torch.where(entropy <= ranked.gather(1, 2 * n_blocks // 3), lag // 4, lag // 16)
        quota = torch.where(entropy <= ranked.gather(1, n_blocks // 3), lag // 2, quota)

        attention = torch.where(evictable, held.rows[:, -1, :, 0].mean(dim=1), -1)
        best = attention.argsort(dim=1, descending=True, stable=True)
        best = best.gather(1, block.gather(1, best).argsort(dim=1, stable=True))
        place = best.argsort(dim=1) - block * lag  # within the block: 0 is the most attended
        return over_map(short & (place >= quota.gather(1, block)))

    @classmethod
    def default_recent(cls, config: EvictionConfig) -> int:
        return super(AttentionPolicy, cls).default_recent(config)  # that of every other policy


BASELINES: dict[str, type[AttentionPolicy]] = {
    "h2o": H2O,
    "h2o-reference": H2OReference,
    "tova": TOVA,
    "raas": RaaS,
    "raas-token": RaaSToken,
    "raas-reference": RaaSReference,
    "thinkv": ThinKV,
    "thinkv-reference": ThinKVReference,
    "r-kv": RKV,
    "r-kv-reference": RKVReference,
    "longflow": LongFlow,
    "longflow-reference": LongFlowReference,
    "snapkv": SnapKV,
    "attn-hs": AttentionTimesChange,
}


# Calibrating ThinKV ----------------------------------------------------------------------------


def valleys(samples: Tensor) -> list[tuple[float, float]]:
    """Interior minima of the density of `samples` [N], deepest first: (place, depth).

    The density is a Gaussian kernel estimate (bandwidth by Silverman's rule) at 256 points; the
    depth of a minimum is its density over the lower of the peaks beside it.
    """
    x = samples.double().sort().values
    quartiles = torch.quantile(x, torch.tensor([0.25, 0.75], dtype=x.dtype))
    spread = min(x.std().item(), (quartiles[1] - quartiles[0]).item() / 1.349)
    if spread == 0:
        return []
    width = 0.9 * spread * len(x) ** -0.2
    grid = torch.linspace(x[0].item(), x[-1].item(), 256, dtype=x.dtype)
    density = (-0.5 * ((grid[:, None] - x) / width) ** 2).exp().mean(1)
    inside = density[1:-1]
    low = ((inside < density[:-2]) & (inside <= density[2:])).nonzero()[:, 0] + 1
    found = [
        (grid[i].item(), (density[i] / torch.min(density[:i].max(), density[i:].max())).item())
        for i in low.tolist()
    ]
    return sorted(found, key=lambda valley: valley[1])


def thresholds_between_modes(samples: Tensor) -> tuple[float, float]:
    """The two deepest valleys between three modes of `samples` [N], else their tertiles."""
    places = [place for place, _ in valleys(samples)[:2]]
    if len(places) < 2:
        places = torch.quantile(samples.double(), torch.tensor([1 / 3, 2 / 3]).double()).tolist()
    return min(places), max(places)


def calibrate_thinkv(model: Transformer, texts: list[list[int]], segment: int = 64) -> dict:
    """Four blocks and two thresholds for ThinKV from texts of equal length that the model reads.

    Sparsity is that of the full cache, a mean over the last `segment` steps at each step. The
    layers are those whose second deepest valley is the deepest: the most clearly tri-modal ones.
    """
    n_tokens = len(texts[0])
    config = EvictionConfig(n_tokens, "thinkv", lag=1)
    cache = model.new_cache(config, len(texts))
    steps = []  # [L, B] each
    for tokens in torch.tensor(texts, device=model.device).unbind(1):
        slot, position = cache.begin_step()
        mask = cache.attention_mask(n_tokens)
        model(tokens[:, None], position[:, None], cache, slot, mask)
        near = torch.stack([layer.near for layer in cache.layers])
        steps.append(1 - near / cache.length)
    sparsity = torch.stack(steps).unfold(0, segment, 1).mean(-1)  # [steps, L, B]
    by_layer = sparsity.transpose(0, 1).flatten(1).cpu()  # [L, steps * B]

    def second_valley(layer: int) -> float:
        return ([depth for _, depth in valleys(by_layer[layer])] + [1.0, 1.0])[1]

    layers = sorted(sorted(range(len(by_layer)), key=second_valley)[:4])
    return {
        "n_layers": len(by_layer),
        "layers": layers,
        "thresholds": thresholds_between_modes(by_layer[layers].mean(0)),
        "valleys": [second_valley(layer) for layer in layers],
    }


def calibrated_thinkv(calibration: dict) -> type[ThinKV]:
    """ThinKV with the layers and thresholds of `calibrate_thinkv`."""
    layers = tuple(layer * 32 / calibration["n_layers"] for layer in calibration["layers"])
    thresholds = tuple(calibration["thresholds"])
    return type("ThinKV", (ThinKV,), {"layers": layers, "thresholds": thresholds})


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrate ThinKV for a model; prints JSON.")
    parser.add_argument("--checkpoint", required=True, help="Hugging Face repo id or local folder")
    parser.add_argument("--traces", type=Path, required=True, help="JSON lines: prompt, trace")
    parser.add_argument("--tokens", type=int, default=900, help="of each trace (default: 900)")
    parser.add_argument("--limit", type=int, default=8, help="traces to read (default: 8)")
    args = parser.parse_args()
    try:
        lines = args.traces.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        texts = [record["prompt"] + record["trace"] for record in records]
        model = Transformer.from_pretrained(args.checkpoint)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{args.traces}, {args.checkpoint}: {one_line(error)}")
    texts = [model.tokenizer.encode(text) for text in texts]
    texts = [tokens[: args.tokens] for tokens in texts if len(tokens) >= args.tokens]
    if not texts:
        parser.error(f"{args.traces}: no trace has {args.tokens} tokens; lower --tokens")
    POLICIES["thinkv"] = ThinKV
    with torch.no_grad():
        print(json.dumps(calibrate_thinkv(model, texts[: args.limit])))


if __name__ == "__main__":
    main()

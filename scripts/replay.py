# SPDX-License-Identifier: Apache-2.0
"""Feed a model given texts under a policy and a budget, and look at what it predicts: `Replay`."""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epikv import NO_POSITION, POLICIES, Calibration, EvictionConfig, SlotCache  # noqa: E402
from generate import DTYPES, Engine, Sampling, full_budget, parse_calibration  # noqa: E402
from model import QUANTISED, Transformer  # noqa: E402

CHUNK = 32


@dataclass(frozen=True)
class Trace:
    """A text of which the first part is prefilled and the second replayed."""

    id: str
    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Setting:
    """A policy, a budget (None for `full`), and a recency window (None: the policy's own)."""

    policy: str
    budget: int | None = None
    recent: int | None = None

    def __str__(self) -> str:
        return self.line if self.budget is None else f"{self.line}, {self.budget}"

    @property
    def line(self) -> str:
        """What stays the same along a line of a plot against the budget."""
        return self.policy + ("" if self.recent is None else f", recent {self.recent}")

    @property
    def slot_map(self) -> str:
        """Who shares a slot map: everything, a layer's heads, or nobody."""
        return POLICIES[self.policy].slot_maps[0]

    def config(
        self, n_tokens: int, seed: int = 0, calibration: Calibration | None = None
    ) -> EvictionConfig:
        """For rows of up to `n_tokens`.

        A budget that holds all of them becomes that of the full cache. Both then run the same
        shapes, and a policy that forgets nothing differs from it by nothing, not by rounding.
        """
        budget = self.budget
        if budget is None or budget >= n_tokens:
            budget = full_budget(n_tokens)
        return EvictionConfig(
            budget, self.policy, recent=self.recent, seed=seed, calibration=calibration
        )


class Forced(nn.Module):
    """Stands where the sampler does: the next token [B] is given, logits [B, vocab] are kept."""

    def __init__(self, batch_size: int, vocab_size: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("token", torch.zeros(batch_size, dtype=torch.int64))
        self.register_buffer("logits", torch.zeros(batch_size, vocab_size, dtype=dtype))

    def draw(self, logits: Tensor, position: Tensor) -> None:
        self.logits.copy_(logits)


class Replay:
    """A model with a cache, one row for each prompt, that is fed the tokens it is given.

    n_tokens: how many will be fed; their decode steps are compiled beforehand.
    positions: "true", or "cache-length" to let those of RoPE stop at the budget, as they do where a
        position is taken from the length of an evicting cache: the ablation of the authors' code.
    chunked: whether CHUNK tokens pass at once, see `feed_chunk`; None where they can.

    Raises ValueError for more tokens than the model's context holds.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Transformer,
        config: EvictionConfig,
        prompts: list[list[int]],
        n_tokens: int,
        compile_mode: str = "blocks",
        positions: str = "true",
        chunked: bool | None = None,
    ):
        longest = max(map(len, prompts)) + n_tokens
        if longest > model.config.max_positions:
            context = model.config.max_positions
            raise ValueError(f"{longest} tokens do not fit in the model's context of {context}")
        self.model = model
        self.lengths = [len(prompt) for prompt in prompts]
        self.n_fed = 0
        engine = Engine(model, config, Sampling(), len(prompts), compile_mode)
        self.engine, self.cache = engine, engine.cache
        dtype = torch.promote_types(model.dtype, torch.float32)
        with torch.device(model.device):
            engine.state = Forced(len(prompts), model.config.vocab_size, dtype)
        self.chunked = takes_chunks(config) if chunked is None else chunked
        limit = config.budget if positions == "cache-length" else None
        self.cache.rotary_limit = limit
        if not self.chunked:
            engine.warm_up([self.prefix(step) for step in range(n_tokens)])
        self.cache.rotary_limit = None  # a prompt comes before any eviction
        engine.prefill(prompts)
        self.cache.rotary_limit = limit
        self.logits = engine.state.logits.clone()  # [B, vocab] after the last token

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor:
        """Take the next T tokens of every row, [B, T]. The logits before each: [B, T, vocab].

        Those after the last are in `logits`, and in `held` [B, T] is the share of slots that are
        taken after each of the T steps, of those that could be.
        """
        tokens = tokens.to(self.model.device)
        before, self.held = [self.logits[:, None]], torch.ones_like(tokens, dtype=torch.float64)
        if self.chunked:  # by policies that never free a slot
            for chunk in tokens.split(CHUNK, dim=1):
                before.append(self.feed_chunk(chunk))
        else:
            for step, token in enumerate(tokens.unbind(1)):
                before.append(self.feed_token(token))
                self.held[:, step] = share_held(self.cache)
        logits = torch.cat(before, dim=1)
        self.logits = logits[:, -1]
        return logits[:, :-1]

    def feed_token(self, token: Tensor) -> Tensor:
        """One decode step with `token` [B], as in generation. Returns logits [B, 1, vocab]."""
        self.engine.state.token.copy_(token)
        self.engine.step(self.prefix(self.n_fed))
        self.n_fed += 1
        block = self.cache.block
        if block and any((length + self.n_fed) % block == 0 for length in self.lengths):
            self.engine.end_block()
        return self.engine.state.logits[:, None].clone()

    def prefix(self, step: int) -> int | None:
        return self.engine.prefix(min(self.lengths) + step + 1, max(self.lengths) + step + 1)

    def feed_chunk(self, tokens: Tensor) -> Tensor:
        """T decode steps in one pass, with `tokens` [B, T]. Returns logits [B, T, vocab].

        Who leaves in these steps is known before: only tokens older than the recency window, which
        T does not exceed, and those have their scores. So each step's query gets a mask that hides
        what has gone by then, and large matrix products take the place of many small ones, which
        is three times faster on a CPU.
        """
        cache, n_tokens = self.cache, tokens.shape[1]
        occupied = cache.position != NO_POSITION  # [B, l, h, S]
        leaves = torch.full_like(cache.position, n_tokens)  # in which step a slot is overwritten
        slots, positions = [], []
        for step in range(n_tokens):
            slot, position = cache.begin_step()
            leaves.scatter_(-1, slot[..., None], step)
            slots.append(slot)
            positions.append(position)
        slot, position = torch.stack(slots, -1), torch.stack(positions, -1)  # [B, l, h, T], [B, T]
        step = torch.arange(n_tokens, device=tokens.device)
        stays = occupied[..., None, :] & (leaves[..., None, :] > step[:, None])  # [B, l, h, T, S]
        causal = (step <= step[:, None]).expand(*stays.shape[:-1], -1)  # [B, l, h, T, T]
        mask = torch.cat([stays, causal], dim=-1)
        if mask.shape[2] > 1:
            mask = mask.repeat_interleave(self.model.config.n_heads // mask.shape[2], dim=2)
        x, residuals, k, v = self.model(
            tokens,
            position,
            cache,
            mask=mask,
            n_cached=cache.config.budget,
        )
        for layer, at, new_k, new_v in zip(cache.layers, cache.per_layer(slot), k, v, strict=True):
            for buffer, new in zip(layer.stored, layer.encode(new_k, new_v), strict=True):
                buffer.scatter_(2, at[..., None].expand_as(new), new)
        score, value_size = cache.score_tokens(
            position, torch.stack(k, 1), torch.stack(v, 1), residuals
        )
        cache.score.scatter_(-1, slot, score)
        cache.value_size.scatter_(-1, slot, value_size)
        self.n_fed += n_tokens
        return self.model.logits(x)

    def save(self) -> tuple[int, Tensor, list[Tensor]]:
        """All that `feed` changes, to come back to with `restore`."""
        return self.n_fed, self.logits, [buffer.clone() for buffer in self.cache.buffers()]

    def restore(self, saved: tuple[int, Tensor, list[Tensor]]) -> None:
        self.n_fed, self.logits, buffers = saved
        for buffer, content in zip(self.cache.buffers(), buffers, strict=True):
            buffer.copy_(content)


def share_held(cache: SlotCache) -> Tensor:
    """Slots taken, of those that can be by now, mean over layers and heads. [B] float64"""
    taken = (cache.position != NO_POSITION).sum(-1).double().mean((1, 2))
    return taken / cache.length.clamp(max=cache.config.budget)


def takes_chunks(config: EvictionConfig) -> bool:
    """Whether a token's score is final when it enters, so that victims are known CHUNK ahead."""
    final = POLICIES[config.policy].cache_type() is SlotCache and not config.lag
    return final and config.recent >= CHUNK


def reads_attention(config: EvictionConfig) -> bool:
    return POLICIES[config.policy].cache_type().layer_type.reads_attention


# Settings and options -------------------------------------------------------------------------


def by_setting(records: Iterable[dict]) -> dict[Setting, list[dict]]:
    """The records of every setting, by budget and name."""
    groups: dict[Setting, list[dict]] = {}
    for record in records:
        setting = Setting(record["policy"], record["budget"], record["recent"])
        groups.setdefault(setting, []).append(record)
    return dict(sorted(groups.items(), key=lambda item: (item[0].budget or 0, item[0].line)))


def parse_settings(args: argparse.Namespace) -> list[Setting]:
    """Every policy at every budget and recency window. Raises ValueError for one that cannot be."""
    windows = [None] if args.recent is None else parse_numbers(args.recent, "recent")
    settings = [
        Setting("full") if policy == "full" else Setting(policy, budget, recent)
        for budget in parse_numbers(args.budgets, "budgets")
        for policy in map(str.strip, args.policies.split(","))
        for recent in windows
    ]
    for setting in settings:
        setting.config(10**9, args.seed, args.calibration)
    return list(dict.fromkeys(settings))


def parse_numbers(text: str, name: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas, got {text!r}") from None


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options of `load_model` and `describe`."""
    add = parser.add_argument
    demo = ROOT / "models/SmolLM2-135M-Instruct"
    add("--checkpoint", default=str(demo), help="repo id or folder (default: the demo model)")
    add("--seed", type=int, default=0, help="of all random choices (default: 0)")
    add("--device", help="cuda or cpu (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="default: float32 on cpu, else bfloat16")
    add("--quantize", choices=QUANTISED, help="hold the weights so (default: in the dtype)")
    add(
        "--no-compile",
        dest="compile_mode",
        action="store_const",
        const="none",
        default="blocks",
        help="run eagerly",
    )


def add_settings(parser: argparse.ArgumentParser, policies: str, budgets: str) -> None:
    """The options of a model and of `parse_settings`, with defaults."""
    add_model(parser)
    add = parser.add_argument
    add("--policies", default=policies, help=f"names with commas (default: {policies})")
    add("--budgets", default=budgets, help=f"slots, with commas (default: {budgets})")
    add("--recent", help="last tokens always kept, with commas (default: the policy's)")
    add("--calibration", type=parse_calibration, help="of the model, a file of calibrate.py")


def check_numbers(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for one of the named options that is below 1."""
    for name in names:
        if (number := getattr(args, name)) is not None and number < 1:
            raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {number}")


def load_model(args: argparse.Namespace) -> Transformer:
    """The model, under torchrun on the GPU of this process."""
    device = args.device
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    dtype = DTYPES.get(args.dtype)
    return Transformer.from_pretrained(args.checkpoint, device, dtype, args.quantize)


def fingerprint(calibration: Calibration | None) -> str | None:
    """Sixteen digits by which results know their calibration again."""
    return calibration and hashlib.sha256(repr(calibration).encode()).hexdigest()[:16]


def describe(args: argparse.Namespace, model: Transformer) -> dict:
    """What results depend on in the model and the machine, to stand in the settings of a run."""
    weights = next(model.blocks[-1].down.parameters()).flatten()[:256].tolist()
    on_gpu = model.device.type == "cuda"
    return {
        "checkpoint": Path(args.checkpoint).name,
        "weights": hashlib.sha256(repr((model.config, weights)).encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantize": args.quantize,
        "device": torch.cuda.get_device_name() if on_gpu else model.device.type,
        "compile_mode": args.compile_mode,
        "torch": torch.__version__,
        "seed": args.seed,
    }

# SPDX-License-Identifier: Apache-2.0
"""What others do with the same weights: transformers' decoding, and kvpress on top of it.

A contender of `benchmark.py` is any object with

    prepare(context, length)   take in the first `length` tokens of a text; not timed
    run(tokens)                feed `tokens` [n] to every row; seconds per step
    step_bytes(length)         bytes of weights, keys and values that a step reads by then
    budget, kv_bytes, compile_seconds   tokens held at most or None, bytes allocated, time so spent

All are fed the given tokens, whatever they predict, so that none has a shorter or an easier text.
"""

import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

INTERVAL = 16  # steps between two compressions of kvpress; its README takes 10 for 512 tokens


@dataclass(frozen=True)
class Context:
    """A text [N], and every layer's keys and values [1, H_kv, T, D] of its first T tokens."""

    tokens: Tensor
    kv: list[tuple[Tensor, Tensor]]

    def rows(self, length: int, n_rows: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [n_rows, H_kv, length, D] of the first tokens, the same in all rows."""
        return [
            (
                k[:, :, :length].expand(n_rows, -1, -1, -1),
                v[:, :, :length].expand(n_rows, -1, -1, -1),
            )
            for k, v in self.kv
        ]


class TokenClock:
    """A streamer for transformers' generate that notes when each token comes."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def seconds_per_token(self) -> float:
        """Over the decode steps: the first two calls are the prompt and the prefill's token."""
        return (self.times[-1] - self.times[1]) / (len(self.times) - 2)


class Forced:
    """A logits processor that leaves only the token that `tokens` [n] has after `start`."""

    def __init__(self, tokens: Tensor, start: int):
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        at = input_ids.shape[1] - self.start
        forced = torch.full_like(scores, -torch.inf)
        return forced.index_fill_(1, self.tokens[at : at + 1], 0)


class Loop:
    """A plain loop over transformers' forward, with its default cache."""

    budget: int | None = None
    compile_seconds = 0.0

    def __init__(self, peer, n_rows: int):
        self.peer, self.n_rows = peer, n_rows
        names = inspect.signature(peer.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # in older ones

    def prepare(self, context: Context, length: int) -> None:
        self.length = length
        self.cache = self.new_cache()
        for i, (k, v) in enumerate(context.rows(length, self.n_rows)):
            self.cache.update(k, v, i)

    def new_cache(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.peer.config)

    @torch.no_grad()
    def run(self, tokens: Tensor) -> float:
        fed = tokens[:, None, None].expand(-1, self.n_rows, 1)
        wait(tokens)
        start = time.perf_counter()
        for token in fed:
            self.step(token)
            self.length += 1
        wait(tokens)
        return (time.perf_counter() - start) / len(tokens)

    def step(self, token: Tensor) -> None:
        logits = self.peer(token, **{self.cache_name: self.cache}).logits
        logits[:, -1].argmax(-1)  # that it is not fed saves nothing

    def step_bytes(self, length: int) -> int:
        weights = sum(weight.nbytes for weight in self.peer.parameters())
        if self.peer.lm_head.weight is not self.peer.model.embed_tokens.weight:
            weights -= self.peer.model.embed_tokens.weight.nbytes  # it is only looked up
        held = min(length, self.budget or length)
        layers = self.cache.layers
        return weights + sum(
            2 * self.n_rows * held * layer.keys[0, :, 0].nbytes for layer in layers
        )

    @property
    def kv_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class Generate(Loop):
    """transformers' generate() with its default cache."""

    options: dict = {}

    def run(self, tokens: Tensor) -> float:
        """Its prefill takes the first token and is not timed."""
        clock, n = TokenClock(), len(tokens)
        past = tokens.new_zeros(self.length)  # that they are in the cache is all that counts
        rows = torch.cat([past, tokens[:1]]).expand(self.n_rows, -1)
        self.peer.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=n,
            do_sample=False,
            logits_processor=[Forced(tokens.roll(-1), rows.shape[1])],
            streamer=clock,
            **{self.cache_name: self.cache},
            **self.options,
        )
        self.length += n
        return clock.seconds_per_token()


class StaticGenerate(Generate):
    """transformers' generate() with a cache of `longest` tokens and a compiled forward."""

    def __init__(self, peer, n_rows: int, longest: int):
        from transformers import CompileConfig, StaticCache

        super().__init__(peer, n_rows)
        self.static = StaticCache(config=peer.config, max_cache_len=longest)
        # Its own default on CUDA; on a CPU it compiles only when told so.
        mode = "reduce-overhead" if peer.device.type == "cuda" else "default"
        compiled = CompileConfig(fullgraph=True, dynamic=False, mode=mode)
        compiled._compile_all_devices = True
        self.options = {"compile_config": compiled}

    def new_cache(self):
        self.static.reset()
        return self.static

    def prepare(self, context: Context, length: int) -> None:
        """Compiles at the first time; the few steps that this takes are counted in."""
        super().prepare(context, length)
        start = time.perf_counter()
        self.run(context.tokens[length : length + 3])
        self.compile_seconds = self.compile_seconds or time.perf_counter() - start
        super().prepare(context, length)

    def run(self, tokens: Tensor) -> float:
        with torch._dynamo.config.patch(recompile_limit=256):  # a variant for each batch and length
            return super().run(tokens)


class KVPress(Loop):
    """kvpress' DecodingPress on the plain loop: `budget` tokens after every INTERVAL steps."""

    def __init__(self, peer, n_rows: int, press_name: str, budget: int):
        super().__init__(peer, n_rows)
        kvpress = import_kvpress()
        base = getattr(kvpress, press_name)()
        self.budget = budget
        self.press = kvpress.DecodingPress(base, INTERVAL, budget, hidden_states_buffer_size=0)

    def prepare(self, context: Context, length: int) -> None:
        super().prepare(context, length)
        self.press.reset()
        for layer, cached in zip(self.peer.model.layers, self.cache.layers, strict=True):
            kept = self.press.compress(layer.self_attn, None, cached.keys, cached.values, None, {})
            cached.keys, cached.values = kept

    def run(self, tokens: Tensor) -> float:
        layers = self.peer.model.layers
        hooks = [
            layer.self_attn.register_forward_hook(self.hook, with_kwargs=True) for layer in layers
        ]
        seconds = super().run(tokens)
        for hook in hooks:
            hook.remove()
        return seconds

    def hook(self, module, inputs, kwargs, output):
        """Its own hook, with the names that attention had before transformers 5.3."""
        kwargs = kwargs | {"past_key_values": self.cache, "cache_position": [self.length]}
        return self.press.forward_hook(module, inputs, kwargs, output)

    def step(self, token: Tensor) -> None:
        """As `Loop.step`, at the true position, which the length of the cache is not."""
        position = torch.full_like(token, self.length)
        options = {self.cache_name: self.cache, "position_ids": position}
        self.peer(token, **options).logits[:, -1].argmax(-1)


def import_kvpress():
    """kvpress, without its patch of attention, which serves none of these presses and slows all."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    import kvpress

    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    return kvpress


def wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def load_peer(checkpoint: Path, dtype: torch.dtype, device: torch.device):
    """The checkpoint in transformers, or None, with a word on stderr, where that is missing."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        print(f"skipped transformers and kvpress: {error}; see the extra bench", file=sys.stderr)
        return None
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device)


def peer_contenders(peer, n_rows: int, budget: int, longest: int) -> dict[str, Callable]:
    """What makes each contender, by name, for texts of up to `longest` tokens."""
    if peer is None:
        return {}
    makers = {
        "transformers generate()": lambda: Generate(peer, n_rows),
        "transformers forward loop": lambda: Loop(peer, n_rows),
        "transformers static cache, compiled": lambda: StaticGenerate(peer, n_rows, longest),
    }
    try:
        import_kvpress()
    except ImportError as error:
        print(f"skipped kvpress: {error}; see the extra bench", file=sys.stderr)
        return makers
    for name in ("LagKV", "KeyDiff", "Knorm"):
        makers[f"kvpress {name}"] = lambda name=name: KVPress(peer, n_rows, f"{name}Press", budget)
    return makers

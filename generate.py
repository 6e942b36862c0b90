# SPDX-License-Identifier: Apache-2.0
"""Generate text from a checkpoint within a fixed KV budget: `generate()`, `stream()`, command line.

    model = Transformer.from_pretrained("deepseek-ai/DeepSeek-R1-Distill-Llama-8B")
    result = generate(model, "How many primes are below 100?", budget=4096)
    print(result.outputs[0].text)

One decode step is `decode_step`: choose a slot, run the blocks, score the token, sample the next.
"""

import argparse
import errno
import functools
import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function, schedule

from epikv import (
    POLICIES,
    VALUE_STATISTICS,
    Calibration,
    EvictionConfig,
    SlotCache,
    hash_uniform,
)
from model import QUANTISED, Block, Transformer, empty_bytes, one_line

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_BUDGET = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPILE_MODES = ("blocks", "step", "none")

# Sampling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature: 0 takes the likeliest token, exactly; one number, or one for each row.
    top_k, top_p, min_p: draw among the k likeliest; among the likeliest that make up the share p
        of the probability; among those at least min_p times as likely as the likeliest.
        None sets no limit.
    seed: the same seed, prompts and settings give the same tokens.

    Raises ValueError for a value outside its range.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not all(temperature >= 0 for temperature in self.temperatures(1)):  # nor NaN
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ValueError(f"top-k must be a whole number of at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min-p must be from 0 to 1, got {self.min_p}")
        if not self.draws:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    name = name.replace("_", "-")
                    raise ValueError(f"{name} has no effect at temperature 0; set a temperature")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")

    def temperatures(self, batch_size: int) -> list[float]:
        """The temperature of each row."""
        if isinstance(self.temperature, Sequence):
            return list(self.temperature)
        return [self.temperature] * batch_size

    @property
    def draws(self) -> bool:
        """Whether any row takes another token than the likeliest."""
        return any(temperature > 0 for temperature in self.temperatures(1))

    @classmethod
    def for_model(cls, model: Transformer, seed: int = 0, **given) -> "Sampling":
        """The checkpoint's generation_config, with what is `given` (not None) in its place."""
        given = {name: value for name, value in given.items() if value is not None}
        defaults = {}
        if model.defaults.get("do_sample"):
            found = {name: model.defaults.get(name) for name in ("top_k", "top_p", "min_p")}
            defaults = {name: value for name, value in found.items() if value}
            temperature = model.defaults.get("temperature")
            defaults["temperature"] = 1.0 if temperature is None else temperature
        try:
            if not cls(given.get("temperature", defaults.get("temperature", 0.0))).draws:
                defaults = {}
            return cls(seed=seed, **defaults | given)
        except TypeError as error:
            raise ValueError(f"a sampling setting is no number: {error}") from None


def sample(
    logits: Tensor, sampling: Sampling, temperature: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """Draw the next token of every row, the likeliest where its temperature is 0. [B] int64

    logits [B, vocab]; temperature [B]; seed [1]; position [B] of the last token. The largest of
    probability / exponential noise is a draw that needs no value on the host; the noise depends on
    the seed and on the row's number, the position and the token, and on nothing else.
    """
    scaled = logits / temperature.clamp(min=1e-6)[:, None]
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kept = scaled.topk(sampling.top_k)
        scaled = torch.full_like(scaled, -torch.inf).scatter(-1, kept.indices, kept.values)
    probability = scaled.softmax(dim=-1)
    if sampling.top_p is not None:
        ranked = probability.sort(dim=-1, descending=True).values
        inside = ranked.cumsum(dim=-1) - ranked < sampling.top_p  # mass before it falls short of p
        least = torch.where(inside, ranked, torch.inf).amin(dim=-1, keepdim=True)
        probability = torch.where(probability < least, 0, probability)
    if sampling.min_p is not None:
        least = sampling.min_p * probability.amax(dim=-1, keepdim=True)
        probability = torch.where(probability < least, 0, probability)
    row = torch.arange(logits.shape[0], device=logits.device)
    token = torch.arange(logits.shape[-1], device=logits.device)
    noise = -hash_uniform(seed[:, None], row[:, None], position[:, None], token).log()
    drawn = (probability / noise).argmax(dim=-1)
    return torch.where(temperature > 0, drawn, logits.argmax(dim=-1))


# The decode step -------------------------------------------------------------------------------


class DecodeState(nn.Module):
    """What a decode step reads and writes besides the cache, on the device.

    Buffers: token [B] to feed next; recent [B, R], the last R tokens drawn, a ring that `n_drawn`
    [1] steps through; temperature [B]; seed [1].
    """

    RING = 64

    def __init__(self, sampling: Sampling, batch_size: int):
        super().__init__()
        self.sampling = sampling
        self.draws = sampling.draws
        self.register_buffer("token", torch.zeros(batch_size, dtype=torch.int64))
        self.register_buffer("recent", torch.zeros(batch_size, self.RING, dtype=torch.int64))
        self.register_buffer("n_drawn", torch.zeros(1, dtype=torch.int64))
        temperatures = torch.tensor(sampling.temperatures(batch_size), dtype=torch.float32)
        self.register_buffer("temperature", temperatures)
        self.register_buffer("seed", torch.tensor([sampling.seed]))

    def draw(self, logits: Tensor, position: Tensor) -> None:
        """Sample the token after `position` [B] from `logits` [B, vocab] and make it the next."""
        if self.draws:
            token = sample(logits, self.sampling, self.temperature, self.seed, position)
        else:
            token = logits.argmax(dim=-1)
        self.token.copy_(token)
        self.recent.index_copy_(1, self.n_drawn % self.RING, token[:, None])
        self.n_drawn.add_(1)


def prepare(cache: SlotCache, prefix: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slot and position of the step's tokens, and the mask of the first `prefix` slots."""
    slot, position = cache.begin_step()
    mask = None if prefix is None else cache.attention_mask(prefix)
    return slot, position, mask


def finish(
    model: Transformer,
    cache: SlotCache,
    state: DecodeState,
    slot: Tensor,
    position: Tensor,
    x: Tensor,
    residuals: list[Tensor],
) -> None:
    """Score the step's tokens from `residuals`, and draw the next from the last residual x."""
    cache.end_step(slot, position, residuals)
    state.draw(model.logits(x[:, -1]), position)


def decode_step(
    model: Transformer,
    cache: SlotCache,
    state: DecodeState,
    prefix: int | None,
    prepare: Callable = prepare,
    run_block: Callable = Block.forward,
    finish: Callable = finish,
) -> None:
    """Feed every row its next token and draw the one after: model, eviction and sampling.

    All inputs and outputs are buffers of `cache` and `state`, changed in place. `prefix` bounds the
    occupied slots while rows fill; None says that all slots of all rows are taken. The three
    callables may be compiled forms of the defaults.
    """
    slot, position, mask = prepare(cache, prefix)
    x, residuals, _, _ = model(
        state.token[:, None], position[:, None], cache, slot, mask, run_block=run_block
    )
    finish(model, cache, state, slot, position, x, residuals)


@functools.cache
def compiled_step(mode: str, device_type: str) -> Callable:
    """`decode_step` compiled for a mode of COMPILE_MODES; one for all engines of the process."""
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    if mode == "none" or device_type == "mps":
        return decode_step
    if mode == "step":
        return compiled(decode_step, mode="reduce-overhead" if device_type == "cuda" else "default")
    return functools.partial(  # one compiled block serves all; "step" compiles each anew
        decode_step,
        prepare=compiled(prepare),
        run_block=compiled(Block.forward),
        finish=compiled(finish),
    )


class Engine:
    """A model with a cache of `batch_size` rows and a compiled decode step.

    Reusable: each run starts from an empty cache, and settings once compiled stay compiled.

    compile_mode: "blocks" compiles one block and reuses it, and on CUDA captures the whole step in
        one graph; "step" compiles the step as one function, slow to start; "none" runs eagerly.
    compile_seconds: time spent warming up, compilation and capture included.
    """

    def __init__(
        self,
        model: Transformer,
        config: EvictionConfig,
        sampling: Sampling,
        batch_size: int = 1,
        compile_mode: str = "blocks",
    ):
        if compile_mode not in COMPILE_MODES:
            known = ", ".join(COMPILE_MODES)
            raise ValueError(f"unknown compile mode {compile_mode!r}; known: {known}")
        n_temperatures = len(sampling.temperatures(batch_size))
        if n_temperatures != batch_size:
            raise ValueError(f"got {n_temperatures} temperatures for {batch_size} rows")
        self.model = model
        self.budget = config.budget
        self.cache = model.new_cache(config, batch_size)
        # Prompts of several rows pass one at a time through a cache of their own, so that no row
        # is padded for another's sake.
        self.prompt_cache = model.new_cache(config) if batch_size > 1 else self.cache
        with torch.device(model.device):
            self.state = DecodeState(sampling, batch_size)
        self.captures = compile_mode == "blocks" and model.device.type == "cuda"
        self.graphs: dict[int | None, torch.cuda.CUDAGraph] = {}
        self.block_graph: torch.cuda.CUDAGraph | None = None
        self.warm: set[int | None] = set()
        self.run_step = compiled_step(compile_mode, model.device.type)
        # To read tokens stalls a GPU, so they are read a few at a time, and CUDA has the next few
        # steps to run meanwhile.
        self.steps_per_read = 1 if model.device.type == "cpu" else 16
        self.reads_ahead = model.device.type == "cuda"
        self.compile_seconds = 0.0

    def prefix(self, shortest: int, longest: int) -> int | None:
        """Slots to attend to when rows hold `shortest` to `longest` tokens: a bucket, None for all.

        Buckets grow fourfold from 512, so that few are ever compiled.
        """
        if shortest >= self.budget and not self.cache.frees_slots:
            return None
        bucket = 512
        while bucket < min(longest, self.budget):
            bucket *= 4
        return min(bucket, self.budget)

    def warm_up(self, prefixes: Sequence[int | None]) -> None:
        """Compile, and on CUDA capture, the step for `prefixes`. Leaves cache and state dirty."""
        if self.run_step is decode_step:
            return
        start = time.perf_counter()
        warm = self.capture if self.captures else self.step
        try:
            # Each prefix, batch size and budget is a variant of its own; the default allows eight.
            with torch._dynamo.config.patch(recompile_limit=256):
                for prefix in dict.fromkeys(prefixes):
                    if prefix not in self.warm:
                        warm(prefix)
                        self.warm.add(prefix)
            if self.captures and self.cache.block and self.cache.captures_blocks:
                self.block_graph = self.block_graph or record(self.cache.end_block)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = one_line(error).partition(" Set TORCHDYNAMO")[0]
            raise ValueError(
                f"cannot compile ({reason}); install a C++ compiler (g++) or use --no-compile"
            ) from None
        synchronize(self.model.device)
        self.compile_seconds += time.perf_counter() - start

    def capture(self, prefix: int | None) -> None:
        """Record the whole step in one CUDA graph."""
        step = functools.partial(self.run_step, self.model, self.cache, self.state, prefix)
        self.graphs[prefix] = record(step)

    def step(self, prefix: int | None) -> None:
        """Run one decode step; on CUDA it returns before the device has finished."""
        if prefix in self.graphs:
            self.graphs[prefix].replay()
        else:
            self.run_step(self.model, self.cache, self.state, prefix)

    def end_block(self) -> None:
        """After a step that ended a block of a block-wise policy in some row."""
        if self.block_graph is not None:
            self.block_graph.replay()
        else:
            self.cache.end_block()

    def prefill(self, prompts: list[list[int]]) -> None:
        """Start afresh: take in a prompt per row and draw each row's first token."""
        logits = []  # [1, vocab] of every row
        for row, prompt in enumerate(prompts):
            if row == 0 or prompt != prompts[row - 1]:  # samples of one prompt share its prefill
                self.prompt_cache.reset()
                tokens = torch.tensor([prompt], device=self.model.device)
                last = self.model.prefill(tokens, self.prompt_cache)
            logits.append(last)
            if self.prompt_cache is not self.cache:
                self.cache.load_row(row, self.prompt_cache)
        self.state.draw(torch.cat(logits), self.cache.length - 1)

    def read_tokens(self, count: int) -> Callable[[], list[list[int]]]:
        """The last `count` tokens drawn (at most DecodeState.RING) in every row.

        Returns a function that waits for them, and only for them: on CUDA, steps run in between go
        on meanwhile.
        """
        is_cuda = self.model.device.type == "cuda"
        recent, n_drawn = (
            buffer.to("cpu", non_blocking=is_cuda, copy=True)
            for buffer in (self.state.recent, self.state.n_drawn)
        )
        copied = torch.cuda.current_stream().record_event() if is_cuda else None

        def wait() -> list[list[int]]:
            if copied is not None:
                copied.synchronize()
            end = n_drawn.item()
            return [[row[i % len(row)] for i in range(end - count, end)] for row in recent.tolist()]

        return wait


def record(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `function` does, after two runs that compile and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# Generation ------------------------------------------------------------------------------------


@dataclass
class Output:
    """One row's continuation: tokens without the prompt or the end-of-sequence token, and text.

    pieces: the text as it came; to join it at every token would take longer and longer.
    stop_reason: "eos", "length" (max_new_tokens), or "interrupted".
    kept: true positions of the tokens still in the cache, ascending, prompt included.
    """

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    stop_reason: str = "interrupted"
    kept: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Statistics:
    """Cost of a run, all rows together. Times in seconds, sizes in bytes.

    decode_seconds: without what is done with tokens in between, when a GPU runs on.
    """

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    decode_tokens_per_second: float
    decode_bytes_per_second: float  # weights and occupied slots, once a step
    peak_memory: int  # of the device; of the process on a CPU
    kv_bytes: int
    kv_bytes_full_cache: int
    tokens_kept: int
    tokens_evicted: int


@dataclass
class Result:
    outputs: list[Output]
    statistics: Statistics


@dataclass(frozen=True)
class Delta:
    """What a row has gained: tokens, and the text that became final with them."""

    row: int
    tokens: list[int]
    text: str


class Generation:
    """A run of an engine: iterate over it for `Delta`s as they come, then read `result()`.

    The iteration may be left at any time and taken up again; `result()` holds what there is so
    far. An engine has one cache, so it serves one run at a time.
    """

    def __init__(
        self, engine: Engine, prompts: list[list[int]], max_new_tokens: int, stop_ids: set[int]
    ):
        self.engine = engine
        self.prompts = prompts
        self.shortest, self.longest = min(map(len, prompts)), max(map(len, prompts))
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.outputs = [Output() for _ in prompts]
        tokenizer = engine.model.tokenizer
        self.texts = [tokenizer.stream() if tokenizer else None for _ in prompts]
        self.open_rows = set(range(len(prompts)))
        block = engine.cache.block
        self.block_phases = {-len(prompt) % block for prompt in prompts} if block else set()
        self.prefill_seconds = self.decode_seconds = 0.0
        self.n_steps = 0
        self.deltas = self.run()

    def __iter__(self) -> Iterator[Delta]:
        return self.deltas

    def __next__(self) -> Delta:
        return next(self.deltas)

    def run(self) -> Iterator[Delta]:
        """The whole run: warm-up, prefill, and decoding until every row has ended."""
        engine = self.engine
        engine.warm_up([self.prefix(step) for step in range(self.max_new_tokens - 1)])
        start = time.perf_counter()
        engine.prefill(self.prompts)
        tokens = engine.read_tokens(1)()
        self.prefill_seconds = time.perf_counter() - start
        decoded = self.decode()
        while tokens is not None:
            yield from self.accept(tokens)
            start = time.perf_counter()
            tokens = next(decoded, None) if self.open_rows else None
            self.decode_seconds += time.perf_counter() - start

    def decode(self) -> Iterator[list[list[int]]]:
        """Tokens of every row, a few steps at a time, which may come after the next few began."""
        engine, n_steps, reads = self.engine, self.max_new_tokens - 1, deque()
        for first in range(0, n_steps, engine.steps_per_read):
            steps = range(first, min(first + engine.steps_per_read, n_steps))
            for step in steps:
                engine.step(self.prefix(step))
                if self.ends_block(step):
                    engine.end_block()
            reads.append(engine.read_tokens(len(steps)))
            unread = int(engine.reads_ahead and steps.stop < n_steps)  # for now
            while len(reads) > unread:
                tokens = reads.popleft()()
                self.n_steps += len(tokens[0])
                yield tokens

    def prefix(self, step: int) -> int | None:
        return self.engine.prefix(self.shortest + step + 1, self.longest + step + 1)

    def ends_block(self, step: int) -> bool:
        """Whether a block of a block-wise policy is complete in some row after `step`."""
        return bool(self.block_phases) and (step + 1) % self.engine.cache.block in self.block_phases

    def accept(self, tokens: list[list[int]]) -> Iterator[Delta]:
        """Hand out what each open row gained, up to its end."""
        for row in sorted(self.open_rows):
            output, new = self.outputs[row], []
            for token in tokens[row]:
                if token in self.stop_ids:
                    output.stop_reason = "eos"
                    break
                new.append(token)
            output.tokens += new
            if output.stop_reason != "eos" and len(output.tokens) == self.max_new_tokens:
                output.stop_reason = "length"
            text = self.texts[row].add(new) if self.texts[row] else ""
            if output.stop_reason != "interrupted":
                self.open_rows.remove(row)
                output.kept = self.kept(row)
                text += self.texts[row].end() if self.texts[row] else ""
            output.pieces.append(text)
            yield Delta(row, new, text)

    def kept(self, row: int) -> list[int]:
        """Positions of a row's own tokens in the cache; it may have run past its end."""
        end = len(self.prompts[row]) + len(self.outputs[row].tokens)
        positions = self.engine.cache.position[row].unique().tolist()
        return [p for p in positions if 0 <= p < end]

    def result(self) -> Result:
        """Outputs and statistics of what has been generated so far."""
        for row in self.open_rows:
            self.outputs[row].kept = self.kept(row)
        return Result(self.outputs, self.statistics())

    def statistics(self) -> Statistics:
        engine, model = self.engine, self.engine.model
        ends = [len(p) + len(o.tokens) for p, o in zip(self.prompts, self.outputs, strict=True)]
        # A row that has ended goes on idly; what it takes in then is not its own.
        lengths = [min(*pair) for pair in zip(engine.cache.length.tolist(), ends, strict=True)]
        held = (engine.cache.position >= 0).float().sum(-1).mean((1, 2)).tolist()
        kept = [min(length, round(n)) for length, n in zip(lengths, held, strict=True)]
        caches = {engine.cache, engine.prompt_cache}
        kv_bytes = sum(buffer.nbytes for cache in caches for buffer in cache.layers.buffers())
        read = self.n_steps * weight_bytes(model) + slot_bytes(engine.cache) * sum(
            min(len(prompt) + step, engine.budget)
            for prompt in self.prompts
            for step in range(1, self.n_steps + 1)
        )
        seconds = self.decode_seconds or float("inf")
        return Statistics(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            new_tokens=sum(len(output.tokens) for output in self.outputs),
            compile_seconds=engine.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            decode_steps=self.n_steps,
            decode_tokens_per_second=sum(len(o.tokens) - 1 for o in self.outputs if o.tokens)
            / seconds,
            decode_bytes_per_second=read / seconds,
            peak_memory=peak_memory(model.device),
            kv_bytes=kv_bytes,
            kv_bytes_full_cache=slot_bytes(engine.cache) * sum(lengths),
            tokens_kept=sum(kept),
            tokens_evicted=sum(lengths) - sum(kept),
        )


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that one decode step reads: all but an embedding that is only looked up."""
    total = sum(weight.nbytes for weight in model.parameters())
    return total if model.head is None else total - model.embedding.nbytes


def slot_bytes(cache: SlotCache) -> int:
    """Bytes of one token's keys and values."""
    return sum(buffer[0, :, 0].nbytes for layer in cache.layers for buffer in layer.stored)


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def stream(
    model: Transformer,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    budget: int | None = None,
    policy: str = "epikv",
    max_new_tokens: int | None = None,
    temperature: float | Sequence[float] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    num_samples: int = 1,
    system: str | None = None,
    raw: bool = False,
    ignore_eos: bool = False,
    compile_mode: str = "blocks",
    **eviction,
) -> Generation:
    """Continue one or several prompts, as an iterator of text and tokens as they are made.

    prompts: a text, texts, or lists of token ids; each is a row of the batch. A text is one user
        turn of a conversation, unless `raw`.
    budget: slots per row, 4096 by default; the policy `full` takes none. policy, eviction: as in
        EvictionConfig.
    max_new_tokens: per row; None goes to the end of the model's context.
    temperature, top_k, top_p, min_p, seed: as in Sampling; None takes the checkpoint's default.
    num_samples: rows for each prompt. system: system message. raw: no chat template.
    ignore_eos: go on after every end-of-sequence token. compile_mode: as in Engine.

    Raises ValueError, in one line, for settings or prompts that cannot work.
    """
    rows = [row for row in tokenize(model, prompts, system, raw) for _ in range(num_samples)]
    if not rows:
        raise ValueError("there is nothing to continue: no prompt, or num-samples below 1")
    max_new_tokens = fit_context(model, rows, max_new_tokens)
    config = eviction_config(budget, policy, seed=seed, **eviction)
    if policy == "full":
        config = replace(config, budget=full_budget(max(map(len, rows)) + max_new_tokens))
    sampling = Sampling.for_model(
        model, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    engine = Engine(model, config, sampling, len(rows), compile_mode)
    return Generation(engine, rows, max_new_tokens, set() if ignore_eos else model.eos_ids)


def generate(model: Transformer, prompts, **settings) -> Result:
    """Continue one or several prompts; the arguments are those of `stream`."""
    generation = stream(model, prompts, **settings)
    for _ in generation:
        pass
    return generation.result()


def tokenize(model: Transformer, prompts, system: str | None, raw: bool) -> list[list[int]]:
    """The prompts of `stream` as lists of token ids."""
    if raw and system:
        raise ValueError("a system message needs the chat template; drop --raw (raw=True)")
    rows = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(prompt, int):
            raise ValueError("a prompt of token ids is a list inside the list: [[1, 2, 3]]")
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise ValueError("the model has no tokenizer: give prompts as lists of token ids")
            if not prompt.strip():
                raise ValueError("the prompt is empty")
            if raw:
                prompt = model.tokenizer.encode(prompt)
            else:
                messages = system_message(system) + [{"role": "user", "content": prompt}]
                prompt = model.tokenizer.encode_chat(messages)
        if len(prompt) == 0:
            raise ValueError("the prompt is empty")
        for token in prompt:
            if not 0 <= token < model.config.vocab_size:
                last = model.config.vocab_size - 1
                raise ValueError(f"token id {token} is outside the vocabulary, 0 to {last}")
        rows.append(list(prompt))
    return rows


def system_message(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def fit_context(model: Transformer, rows: list[list[int]], max_new_tokens: int | None) -> int:
    """The number of tokens to generate, checked against the model's context length."""
    longest, context = max(map(len, rows)), model.config.max_positions
    room = context - longest
    if room < 1 or (max_new_tokens or 1) > room:
        raise ValueError(
            f"a prompt of {longest} tokens leaves {room} of the model's context of {context}, but"
            f" max-new-tokens is {max_new_tokens}; lower it or shorten the prompt"
        )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max-new-tokens must be at least 1, got {max_new_tokens}")
    return room if max_new_tokens is None else max_new_tokens


def eviction_config(budget: int | None, policy: str, **eviction) -> EvictionConfig:
    """EvictionConfig with a default budget; raises ValueError for a budget that has no meaning."""
    if policy == "full" and budget is not None:
        raise ValueError(f"policy 'full' keeps every token; drop the budget of {budget}")
    return EvictionConfig(DEFAULT_BUDGET if budget is None else budget, policy, **eviction)


def full_budget(n_tokens: int) -> int:
    """Slots for `n_tokens`, rounded up so that similar lengths share one compiled step."""
    return -(-n_tokens // 1024) * 1024


# Command line ----------------------------------------------------------------------------------


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"error: {message}\n")


def parse_blocks(text: str) -> tuple[int, ...]:
    """Blocks from "10", "7-13" or "7,9,11"."""
    try:
        if "-" in text[1:]:
            first, last = map(int, text.split("-"))
            blocks = tuple(range(first, min(last, first + 999) + 1))  # no model has 1,000 blocks
        else:
            blocks = tuple(map(int, text.split(",")))
    except ValueError:
        blocks = ()
    if not blocks:
        raise argparse.ArgumentTypeError(f"{text!r} names no blocks; try 10, 7-13 or 7,9")
    return blocks


def parse_calibration(path: str) -> Calibration:
    try:
        return Calibration.read(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(one_line(error)) from None


def parse_quotas(text: str) -> tuple[int, ...]:
    """Quotas from "64,32,8"."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of quotas; try 64,32,8") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="generate.py",
        description="Generate text from a LLaMA-family checkpoint within a KV cache of fixed size.",
        epilog="A prompt may also come through a pipe. Text goes to stdout, statistics to stderr.",
    )
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", help="Hugging Face repo id or local folder (default: the demo model)")
    add("--device", help="cuda, cpu or mps (default: cuda where there is one, else cpu)")
    add("--dtype", choices=DTYPES, help="default: float32 on cpu, else bfloat16")
    add("--quantize", choices=QUANTISED, help="hold the weights as int8 or int4 (default: neither)")
    add(
        "--compile-mode",
        choices=COMPILE_MODES,
        default="blocks",
        help="compile one block and reuse it, or the step as one function, or nothing",
    )
    add("--no-compile", dest="compile_mode", action="store_const", const="none", help="run eagerly")
    group = parser.add_argument_group("prompt")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", help="the user's turn, or with --raw the text to continue")
    add("--prompt-file", type=Path, help="a UTF-8 file that holds the prompt")
    add("--chat", action="store_true", help="talk in turns; Ctrl-C stops an answer, Ctrl-D leaves")
    group.add_argument("--system", help="system message before the conversation")
    group.add_argument("--raw", action="store_true", help="continue the text without chat template")
    add = parser.add_argument_group("cache").add_argument
    add("--budget", type=int, help=f"tokens kept, prompt included (default: {DEFAULT_BUDGET})")
    add("--policy", default="epikv", help=f"what to forget: {', '.join(POLICIES)} (default: epikv)")
    add("--sinks", type=int, default=4, help="first tokens, always kept (default: 4)")
    add("--recent", type=int, help="last tokens, always kept (default: budget / 4, at most 128)")
    add("--window", type=int, help="tokens in a score's statistics (default: 64)")
    add("--calibration", type=parse_calibration, help="a file of scripts/calibrate.py")
    add("--band-a", type=parse_blocks, help="blocks whose change speaks for a token: 10, 7-13, 7,9")
    add("--band-b", type=parse_blocks, help="blocks whose change speaks against it")
    add(
        "--lag",
        type=int,
        help="tokens in a block of lag-kv, epikv-seg (default: budget / 8, <= 128)",
    )
    add(
        "--lag-reference",
        choices=("next", "previous"),
        default="next",
        help="the block that lag-kv normalises a block by (default: next)",
    )
    add("--quotas", type=parse_quotas, help="of epikv-seg, per block: 64,32,8 (default: scaled)")
    add(
        "--value-reserve",
        type=int,
        default=0,
        help="spare as many of the largest values (default: 0)",
    )
    add(
        "--value-statistic",
        choices=VALUE_STATISTICS,
        default="range",
        help="what is large in a value (default: range)",
    )
    add(
        "--slot-map",
        choices=("shared", "head"),
        help="head: each layer and head forgets for itself, in lag-kv, key-diff, k-norm and"
        " epikv-fit (default: head in epikv-fit, else shared)",
    )
    add("--kv-dtype", choices=("int8",), help="hold keys and values so (default: in the dtype)")
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=int, help="default: to the end of the model's context")
    add("--temperature", type=float, help="0 takes the likeliest token (default: the checkpoint's)")
    add("--top-k", type=int, help="draw among the k likeliest (default: the checkpoint's)")
    add("--top-p", type=float, help="draw among the likeliest with the share p (default: likewise)")
    add("--min-p", type=float, help="drop tokens below p times the likeliest (default: likewise)")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    add("--num-samples", type=int, default=1, help="texts to draw (default: 1)")
    add("--ignore-eos", action="store_true", help="go on after the end of the text")
    add = parser.add_argument_group("output").add_argument
    add("--stats", choices=("text", "json"), default="text", help="form of the statistics")
    add("--show-kept", action="store_true", help="put what is still in the cache in brackets")
    add("--profile", type=Path, metavar="FILE", help="trace some steps, for chrome://tracing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    args = parse_arguments(argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal without a character still shows the rest
    try:
        code = run_command(args)
        sys.stdout.flush()
        return code
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        code = getattr(error, "errno", None)
        if code in (errno.EPIPE, errno.ENOSPC):  # stdout takes no more: drop what it still holds
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == errno.EPIPE:  # the reader of the pipe has left, and there is nobody to tell
            return 0
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run_command(args: argparse.Namespace) -> int:
    own = ("checkpoint", "device", "dtype", "quantize", "prompt", "prompt_file", "chat", "stats")
    own += ("show_kept", "profile")
    settings = {name: value for name, value in vars(args).items() if name not in own}
    # What needs no model to be seen wrong is said before one is loaded.
    eviction_config(**{field.name: settings[field.name] for field in fields(EvictionConfig)})
    temperature = 1.0 if args.temperature is None else args.temperature
    Sampling(temperature, args.top_k, args.top_p, args.min_p, args.seed)
    for name in ("max_new_tokens", "num_samples"):
        if (value := settings[name]) is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {value}")
    if args.chat:
        if args.num_samples != 1 or args.raw or args.show_kept or args.profile:
            raise ValueError("--chat goes without --num-samples, --raw, --show-kept and --profile")
        if sys.stdin is None:
            raise ValueError("--chat needs an open stdin")
        return chat(load(args), args, settings)
    if args.profile and not args.profile.parent.is_dir():
        raise ValueError(f"no such folder: {args.profile.parent}")
    if args.profile and args.profile.is_dir():
        raise ValueError(f"{args.profile} is a folder; name a file for the profile")
    prompt = read_prompt(args)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    model = load(args)
    generation = stream(model, prompt, **settings)
    streams = args.num_samples == 1 and not args.show_kept
    deltas = profiled(generation, args.profile) if args.profile else generation
    finished = show(deltas, quiet=not streams)
    result = generation.result()
    if not streams:
        print_outputs(model, result, len(generation.prompts[0]), args.show_kept)
    print_statistics(result.statistics, model.device, args.stats)
    return 0 if finished else 130


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the command line, a file or a pipe."""
    if args.prompt is not None:
        return args.prompt
    try:
        if args.prompt_file is not None:
            return args.prompt_file.read_text(encoding="utf-8")
        if sys.stdin is not None and not sys.stdin.isatty():
            return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        source = args.prompt_file or "the prompt on stdin"
        raise ValueError(f"{source} is not UTF-8: bad byte at offset {error.start}") from None
    raise ValueError("no prompt: give --prompt, --prompt-file or --chat, or pipe one in")


def load(args: argparse.Namespace) -> Transformer:
    checkpoint = args.checkpoint
    if checkpoint is None:
        demo = Path(__file__).resolve().parent / "models" / DEMO_MODEL.split("/")[1]
        checkpoint = demo if demo.is_dir() else DEMO_MODEL
    dtype = DTYPES.get(args.dtype)
    return Transformer.from_pretrained(checkpoint, args.device, dtype, args.quantize)


def show(deltas: Iterable[Delta], quiet: bool = False) -> bool:
    """Run a generation, printing its text as it comes unless `quiet`. False if Ctrl-C ended it."""
    try:
        for delta in deltas:
            if not quiet:
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        return False
    finally:
        if not quiet:
            print(flush=True)
    return True


def profiled(generation: Generation, path: Path) -> Iterator[Delta]:
    """The deltas of a generation, and in `path` a trace of eight of the times it went on for them.

    All rows gain a token in the first, after compilation and prefill, and start the profiler in the
    second. Raises ValueError for a run that is over by then.
    """

    def write(trace: profile) -> None:
        trace.export_chrome_trace(str(path))

    engine = generation.engine
    for name in ("step", "end_block", "read_tokens"):  # not named in every run: it takes time
        setattr(engine, name, record_function(name)(getattr(engine, name)))
    n = len(generation.prompts)
    when = schedule(wait=n, warmup=n, active=8 * n, repeat=1)
    with profile(schedule=when, on_trace_ready=write) as profiler:
        for delta in generation:
            profiler.step()
            yield delta
    if profiler.step_num <= 2 * n:
        raise ValueError("the run was over before there was a step to trace; let it run longer")


def chat(model: Transformer, args: argparse.Namespace, settings: dict) -> int:
    """Answer a user's turns, each from the whole conversation, until the input ends."""
    messages = system_message(args.system)
    while True:
        try:
            user = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not user.strip():
            continue
        messages.append({"role": "user", "content": user})
        try:
            generation = stream(model, [model.tokenizer.encode_chat(messages)], **settings)
        except ValueError as error:  # too long, say; the conversation before it stays
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        show(generation)
        result = generation.result()
        messages.append({"role": "assistant", "content": result.outputs[0].text})
        print_statistics(result.statistics, model.device, args.stats)
        del generation  # with its cache, before the next turn makes one


def print_outputs(model: Transformer, result: Result, prompt_length: int, marked: bool) -> None:
    """Print every output, under a number if there are several, with the kept tokens `marked`."""
    for number, output in enumerate(result.outputs, start=1):
        if len(result.outputs) > 1:
            print(f"--- {number} of {len(result.outputs)} ({output.stop_reason})")
        print(mark_kept(model, output, prompt_length) if marked else output.text)


def mark_kept(model: Transformer, output: Output, prompt_length: int) -> str:
    """An output's text with the tokens still in the cache in colour, or in a pipe in brackets."""
    before, after = ("\033[1;32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    kept, marking = set(output.kept), False
    parts, stream = [], model.tokenizer.stream()
    for position, token in enumerate(output.tokens, start=prompt_length):
        if (position in kept) != marking:
            parts.append(after if marking else before)
            marking = not marking
        parts.append(stream.add([token]))
    return "".join(parts) + stream.end() + (after if marking else "")


@functools.cache
def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second at which the device reads its memory: the best of ten sums of 256 MB."""
    numbers = empty_bytes(2**28, device).view(torch.float32).fill_(1)
    n_sums = 1 if device.type == "cpu" else 16  # a GPU's is over about as soon as it is launched
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(n_sums):
            numbers.sum()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / n_sums)
    return numbers.nbytes / min(seconds)


def print_statistics(statistics: Statistics, device: torch.device, form: str) -> None:
    """Write the statistics to stderr, as text or as one line of JSON."""
    bandwidth = memory_bandwidth(device)
    share = statistics.decode_bytes_per_second / bandwidth
    if form == "json":
        record = asdict(statistics) | {"memory_bandwidth": bandwidth, "bandwidth_share": share}
        print(json.dumps(record), file=sys.stderr)
        return
    s = statistics
    print(
        f"prefill  {s.prompt_tokens} tokens in {s.prefill_seconds:.2f} s\n"
        f"decode   {s.new_tokens} tokens in {s.decode_seconds:.2f} s:"
        f" {s.decode_tokens_per_second:.1f} tokens/s, {s.decode_bytes_per_second / 1e9:.1f} GB/s,"
        f" {share:.0%} of the measured {bandwidth / 1e9:.1f} GB/s\n"
        f"compile  {s.compile_seconds:.1f} s\n"
        f"memory   peak {s.peak_memory / 1e9:.2f} GB; KV cache {s.kv_bytes / 1e6:.1f} MB,"
        f" a full one {s.kv_bytes_full_cache / 1e6:.1f} MB\n"
        f"tokens   {s.tokens_kept} kept, {s.tokens_evicted} evicted",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Check in one command, in at most 8 minutes, what only a CUDA GPU can show.

    python scripts/check_gpu.py [--output check_gpu.json]
    python scripts/check_gpu.py --tiny   # what makes sense on a CPU, with a tiny model

Needs no checkpoint and no network: weights are random, in the shape of
DeepSeek-R1-Distill-Llama-8B in bfloat16 (with fewer blocks where it says so), and of a small model
in float32 where victims and tokens are compared with the CPU's.

Every part runs in a process of its own and every check catches its own failure, so that neither a
crash nor a full memory ends the others. Checks for which there is no time are skipped; a second
run, which finds its compiled code on the disk, gets further. Prints a Markdown table last and
writes JSON. The exit status is 1 if a check failed; a goal that was not reached is no failure,
and means nothing with --tiny.
"""

import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import BASELINES  # noqa: E402
from benchmark import Decoder, alternate, policy_settings, row  # noqa: E402
from epikv import POLICIES, EvictionConfig, SlotCache  # noqa: E402
from generate import (  # noqa: E402
    ArgumentParser,
    Engine,
    Generation,
    Sampling,
    memory_bandwidth,
    peak_memory,
    slot_bytes,
    synchronize,
    weight_bytes,
)
from memory import LLAMA_8B  # noqa: E402
from model import (  # noqa: E402
    QUANTISED,
    ModelConfig,
    Transformer,
    attend_to_prompt,
    attend_to_slots,
    one_line,
)
from records import check_output, told_in_one_line  # noqa: E402
from tables import markdown  # noqa: E402

SECONDS = 440  # for all parts together
GRACE = 30  # seconds after its time that a part has for the check it is at
ROUNDS = 5  # of a timing, after one not counted
TIE = 1e-4  # scores or logits nearer than this may change places by rounding

# Sizes -------------------------------------------------------------------------------------------

ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPE |= dict(rope_theta=5e5, original_max_position_embeddings=8192)
SHAPE_8B = ModelConfig.from_hf(LLAMA_8B | dict(rope_parameters=ROPE))
SMALL = dict(vocab_size=512, hidden_size=256, intermediate_size=512, n_layers=4, n_heads=8)
SMALL = replace(SHAPE_8B, **SMALL, n_kv_heads=2, head_dim=32)


@dataclass(frozen=True)
class Sizes:
    """What the checks run on, and how much of it.

    mode: compile mode of the engines. shape: of the model that is timed. budgets, batches: timed
    together. budget: of all else. copied: bytes of the copy probe. n_steps: of a round of a timing.
    n_tokens: of the long prompt, and of the long answer. n_compared: steps in which victims and
    tokens are compared.
    """

    device: str
    dtype: torch.dtype
    mode: str
    shape: ModelConfig
    budgets: tuple[int, ...]
    batches: tuple[int, ...]
    budget: int
    copied: int
    n_steps: int
    n_tokens: int
    n_compared: int

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def model(self, n_layers: int | None = None, quantize: str | None = None) -> Transformer:
        """A random model of the shape, with `n_layers` blocks instead of its own."""
        shape = replace(self.shape, n_layers=n_layers or self.shape.n_layers)
        return random_model(shape, self.dtype, self.device, quantize)

    def tokens(self, n_tokens: int) -> list[int]:
        return random_tokens(self.shape, n_tokens).tolist()


FULL = dict(device="cuda", dtype=torch.bfloat16, mode="blocks", shape=SHAPE_8B)
FULL |= dict(budgets=(1024, 4096, 8192), batches=(1, 8, 32), budget=4096, copied=2**30)
FULL = Sizes(**FULL, n_steps=20, n_tokens=65_536, n_compared=1000)
TINY = dict(device="cpu", dtype=torch.float32, mode="none", shape=SMALL)
TINY |= dict(budgets=(32, 64), batches=(1, 2), budget=64, copied=2**22)
TINY = Sizes(**TINY, n_steps=2, n_tokens=512, n_compared=20)


def random_model(
    shape: ModelConfig, dtype: torch.dtype, device: str, quantize: str | None = None
) -> Transformer:
    """Seeded normal weights that keep the size of what passes through; norms of 1.

    Quantised ones have levels that are equally likely, and scales for about that size.
    """
    with torch.device(device):
        model = Transformer(shape, dtype, quantize)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            levels = torch.iinfo(weight.dtype)
            weight.random_(levels.min, levels.max + 1, generator=generator)
        elif name.endswith("scale"):  # one for each output, of int8, or for each group, of int4
            weight.fill_(2**-12 if weight.shape[1] == 1 else 2**-8)
        elif weight.dim() == 1:
            weight.fill_(1)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return model


def random_tokens(shape: ModelConfig, *size: int) -> Tensor:
    return torch.randint(shape.vocab_size, size, generator=torch.Generator().manual_seed(1))


class Filled(Decoder):
    """A decoder whose rows hold random tokens in all slots but `free`: no prefill, one variant."""

    def __init__(
        self,
        model: Transformer,
        config: EvictionConfig,
        mode: str,
        batch_size: int = 1,
        free: int = 0,
    ):
        self.length = config.budget - free
        self.engine = Engine(model, config, Sampling(), batch_size, mode)
        self.engine.warm_up([self.engine.prefix(self.length + 1, self.length + 1)])
        self.block = self.engine.cache.block
        fill(self.engine.cache, self.length)

    def run(self, n_steps: int) -> float:
        """Seconds per step, each of which takes the token that the one before drew."""
        synchronize(self.engine.model.device)
        start = time.perf_counter()
        for _ in range(n_steps):
            self.step()
        synchronize(self.engine.model.device)
        return (time.perf_counter() - start) / n_steps


def fill(cache: SlotCache, length: int) -> None:
    """Let every row hold `length` random tokens."""
    cache.reset()
    for layer in cache.layers:
        layer.k.normal_()
        layer.v.normal_()
    cache.position[..., :length] = torch.arange(length, device=cache.position.device)
    cache.score.uniform_()
    cache.length.fill_(length)


def race(decoders: dict[str, Decoder], n_steps: int) -> dict:
    """Milliseconds of a step of two decoders in turn, and how many times the second the first is.

    Means over rounds, as one step of a block-wise policy takes longer than the others.
    """
    steps = {name: functools.partial(one.run, n_steps) for name, one in decoders.items()}
    first, second = alternate(steps, ROUNDS).items()
    found = {f"ms_{name}": 1e3 * sum(seconds) / ROUNDS for name, seconds in (first, second)}
    return found | {"ratio": sum(first[1]) / sum(second[1])}


# Parts: iterators over checks, each a name and a function that returns a record -------------------

Checks = Iterator[tuple[str, Callable[[], dict]]]


# Attention


def flash(sizes: Sizes) -> Checks:
    """Attention is right, and can be flash attention alone."""
    model = sizes.model(4)
    for name, attend in attentions(model, sizes.budget).items():
        yield f"attention of {name}", functools.partial(error_of, attend)
    yield "step, torch's choice over flash alone", lambda: race_flash(model, sizes)
    # Last, as a profiler slows what comes after it.
    yield "prefill and decode with flash alone", lambda: run_flash(model, sizes)


def attentions(model: Transformer, budget: int) -> dict[str, Callable[[], Tensor]]:
    """Every way in which the model attends, in two rows of random tokens."""
    cache = model.new_cache(EvictionConfig(budget), 2)
    fill(cache, budget)
    layer, shape = cache.layers[0], (2, model.config.n_heads, 256, model.config.head_dim)
    q = torch.randn(shape, device=model.device).to(model.dtype)
    k, v = (torch.randn_like(q[:, : model.config.n_kv_heads]) for _ in range(2))
    one = q[:, :, :1].contiguous()
    mask = torch.rand(2, 1, 1, budget, device=q.device) > 0.3
    return {
        "a token to all slots": lambda: attend_to_slots(one, layer, None),
        "a token to some slots": lambda: attend_to_slots(one, layer, mask),
        "a prompt": lambda: attend_to_prompt(q, k, v, layer, 0, None),
        "a prompt after slots": lambda: attend_to_prompt(q, k, v, layer, budget, None),
    }


def error_of(attend: Callable[[], Tensor]) -> dict:
    """Against the same attention with weights that stand in memory."""
    y = attend()
    with sdpa_kernel([SDPBackend.MATH]):
        wanted = attend()
    error = ((y - wanted).abs().max() / wanted.abs().max()).item()
    return dict(largest_error=error, must="at most 0.02 of the largest", holds=error <= 0.02)


def race_flash(model: Transformer, sizes: Sizes) -> dict:
    """Steps captured with whatever attention torch prefers, and with flash attention alone."""
    budget = max(sizes.budgets)
    chosen = Filled(model, EvictionConfig(budget), sizes.mode)
    # Compiled code is found again by its shapes, whatever attention was allowed: hence others.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        alone = Filled(model, EvictionConfig(budget - 8), sizes.mode)
    return race({"chosen": chosen, "flash": alone}, sizes.n_steps) | {"budget": budget}


def run_flash(model: Transformer, sizes: Sizes) -> dict:
    """A prompt beyond the budget, and saturated steps; attention that is not flash would raise."""
    engine = Engine(model, EvictionConfig(sizes.budget), Sampling(), compile_mode="none")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), profiled(sizes) as events:
        engine.prefill([sizes.tokens(sizes.budget * 3 // 2)])
        for _ in range(4):
            engine.step(None)
    names = [name for name in device_names(events, sizes) if "flash" in name]
    return dict(flash_kernels=len(names), kernels=names, must="at least 1", holds=bool(names))


@contextmanager
def profiled(sizes: Sizes) -> Iterator[list]:
    """A list that holds the profiler's events afterwards.

    Once in a process: a second session may record nothing.
    """
    events = []
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * sizes.on_cuda
    with profile(activities=activities) as profiler:
        yield events
        synchronize(torch.device(sizes.device))
    events.extend(profiler.events())
    if not device_names(events, sizes):
        raise RuntimeError("the profiler saw no kernel; is CUPTI there?")


def device_names(events: list, sizes: Sizes) -> list[str]:
    """Names of what ran on the device itself, on a CPU of operators."""
    device = DeviceType.CUDA if sizes.on_cuda else DeviceType.CPU
    return sorted({event.name for event in events if event.device_type == device})


# One graph


def one_graph(sizes: Sizes, mode: str) -> Checks:
    """A step is one launch of one graph, which nothing interrupts or records anew."""
    model = sizes.model(4)
    if mode == "blocks":
        yield "every policy, eager: no value asked for", lambda: ask_no_value(model, sizes)
    decoder = Filled(model, EvictionConfig(sizes.budget), mode)
    decoder.run(3)  # reduce-overhead records in its second run
    yield "step, 4 blocks", lambda: {"ms": row(rounds(decoder, sizes))["ms_per_step"]}
    n_steps = 25 * sizes.n_steps
    yield f"{n_steps} steps, where a sync raises", lambda: run_undisturbed(decoder, n_steps)
    yield "launches a step", lambda: launches(decoder, sizes)


def rounds(decoder: Decoder, sizes: Sizes) -> list[float]:
    """Seconds of a step, in each round."""
    return alternate({"": functools.partial(decoder.run, sizes.n_steps)}, ROUNDS)[""]


@contextmanager
def syncs_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ask_no_value(model: Transformer, sizes: Sizes) -> dict:
    """A step and the end of a block; eagerly, as nothing in a captured step could raise."""
    failures = {}
    settings = policy_settings("all", model.config.n_layers, model.config.n_kv_heads)
    for name, options in settings.items():
        decoder = Filled(model, EvictionConfig(sizes.budget, **options), "none")
        try:
            with syncs_raise():
                decoder.engine.step(None)
                if decoder.block:
                    decoder.engine.end_block()
        except RuntimeError as error:
            failures[name] = one_line(error)
    found = dict(settings=len(settings), failed=len(failures), failures=failures)
    return found | dict(must="none failed", holds=not failures)


def run_undisturbed(decoder: Decoder, n_steps: int) -> dict:
    """Steps in which a sync or a compilation raises; counts what was recorded meanwhile."""
    before = n_recorded(decoder)
    with syncs_raise(), torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(n_steps):
            decoder.engine.step(None)
    more = n_recorded(decoder) - before
    return dict(recorded_meanwhile=more, must="none", holds=more == 0)


def n_recorded(decoder: Decoder) -> int:
    """Graphs of the engine and of the compiler, and steps for which that gave up recording one."""
    counters = torch._dynamo.utils.counters
    compiled = counters["stats"]["unique_graphs"] + counters["inductor"]["cudagraph_skips"]
    return len(decoder.engine.graphs) + compiled


def launches(decoder: Decoder, sizes: Sizes) -> dict:
    with profiled(sizes) as events:
        for _ in range(sizes.n_steps):
            decoder.engine.step(None)
    counts = count_launches([event.name for event in events])
    counts = {kind: count / sizes.n_steps for kind, count in counts.items()}
    kernels = device_names(events, sizes)
    words = ("flash", "fmha", "sdpa", "attention")
    attention = [name for name in kernels if any(word in name.lower() for word in words)]
    # A replay may set the two numbers of the random state, which are no part of the step.
    holds = counts["graphs"] == 1 and counts["kernels"] <= 2 and counts["records"] == 0
    found = counts | dict(attention=", ".join(attention), all_kernels=kernels)
    return found | dict(must="1 graph, at most 2 kernels, 0 records", holds=holds)


def count_launches(names: list[str]) -> dict[str, int]:
    """Calls of the CUDA runtime and driver among a profiler's event names."""
    kinds = {
        "graphs": ("cudaGraphLaunch", "cuGraphLaunch"),
        "kernels": ("cudaLaunchKernel", "cuLaunchKernel"),
        "records": ("cudaStreamBeginCapture", "cudaGraphInstantiate", "cuGraphInstantiate"),
    }
    return {kind: sum(name.startswith(calls) for name in names) for kind, calls in kinds.items()}


# Speed


def speed(sizes: Sizes) -> Checks:
    """Tokens and bytes a second of saturated steps, beside what a copy of memory reaches."""
    model = sizes.model()
    yield "machine", lambda: machine(model, sizes)
    streaming = functools.partial(
        Filled, model, EvictionConfig(sizes.budget, "streaming"), sizes.mode
    )
    name = f"epikv over streaming, budget {sizes.budget:,}"
    yield name, lambda: over_streaming(model, dict(policy="epikv"), streaming(), sizes)
    for batch_size in sizes.batches:
        for budget in sizes.budgets:
            check = functools.partial(
                throughput, model, EvictionConfig(budget), sizes, batch_size=batch_size
            )
            yield f"epikv, batch {batch_size}, budget {budget:,}", check
    yield f"generation over steps, budget {sizes.budget:,}", lambda: race_generation(model, sizes)
    free = (ROUNDS + 1) * sizes.n_steps + 1  # or else the cache that forgets nothing would have to
    for budget in sizes.budgets:
        config = EvictionConfig(budget, "full")
        check = functools.partial(throughput, model, config, sizes, free=free)
        yield f"full, batch 1, {budget - free:,} of {budget:,} slots taken", check


def machine(model: Transformer, sizes: Sizes) -> dict:
    found = {
        "device": torch.cuda.get_device_name() if sizes.on_cuda else "cpu",
        "copy_gigabytes_per_second": copy_bandwidth(model.device, sizes.copied) / 1e9,
        "sum_gigabytes_per_second": memory_bandwidth(model.device) / 1e9,
        "weights_gigabytes": weight_bytes(model) / 1e9,
    }
    versions = dict(cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    return found | dict(torch=torch.__version__, versions=versions)


@functools.cache
def copy_bandwidth(device: torch.device, n_bytes: int) -> float:
    """Bytes read and written per second: the best of five times ten copies, after one not counted.

    Ten in a row, since a GPU takes about as long to wait for as to copy once.
    """
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 10 * 2 * source.nbytes / min(seconds[1:])


def throughput(
    model: Transformer, config: EvictionConfig, sizes: Sizes, batch_size: int = 1, free: int = 0
) -> dict:
    """Steps with `free` slots left in every row; bytes are of the weights and the taken slots."""
    decoder = Filled(model, config, sizes.mode, batch_size, free)
    held = batch_size * decoder.length * slot_bytes(decoder.engine.cache)
    n_bytes = weight_bytes(model) + held
    times = row(rounds(decoder, sizes))
    n_bytes_per_second = n_bytes * times["tokens_per_second"]  # of one row: steps per second
    share = n_bytes_per_second / copy_bandwidth(model.device, sizes.copied)
    found = {
        "tokens_per_second": batch_size * times["tokens_per_second"],
        "ms": times["ms_per_step"],
        "gigabytes_per_second": n_bytes_per_second / 1e9,
        "share_of_copy": share,
        "details": times | {"compile_seconds": decoder.engine.compile_seconds},
    }
    wanted = dict(goal="share of copy at least 0.8", holds=share >= 0.8)
    return found | (wanted if batch_size == 1 and not free else {})


def race_generation(model: Transformer, sizes: Sizes) -> dict:
    """Steps whose tokens are read and handed out, over bare ones of the same engine."""
    decoder = Filled(model, EvictionConfig(sizes.budget), sizes.mode)
    bare = statistics.median(rounds(decoder, sizes))
    n_new = ROUNDS * sizes.n_steps + 1  # the first comes with the prefill
    generation = Generation(decoder.engine, [sizes.tokens(sizes.budget)], n_new, set())
    start = time.perf_counter()
    for _ in generation:
        pass
    decoding = time.perf_counter() - start - generation.prefill_seconds
    seconds = decoding / generation.n_steps
    found = dict(ms_generation=1e3 * seconds, ms_steps=1e3 * bare, ratio=seconds / bare)
    return found | dict(goal="ratio at most 1.02", holds=seconds / bare <= 1.02)


def quantised(sizes: Sizes) -> Checks:
    """The steps with weights of fewer bits."""
    for name in QUANTISED:
        yield name, functools.partial(step_quantised, name, sizes)


def step_quantised(name: str, sizes: Sizes) -> dict:
    return throughput(sizes.model(quantize=name), EvictionConfig(sizes.budget), sizes)


def policies(sizes: Sizes) -> Checks:
    """The steps of every policy over those of `streaming`, which computes no score."""
    model = sizes.model()
    reference = Filled(model, EvictionConfig(sizes.budget, "streaming"), sizes.mode)
    for name, options in policy_settings(
        "all", model.config.n_layers, model.config.n_kv_heads
    ).items():
        if name in POLICIES and name not in ("streaming", "epikv"):  # see `speed`
            check = functools.partial(over_streaming, model, options, reference, sizes)
            yield f"{name} over streaming, budget {sizes.budget:,}", check


def over_streaming(model: Transformer, options: dict, reference: Decoder, sizes: Sizes) -> dict:
    decoder = Filled(model, EvictionConfig(sizes.budget, **options), sizes.mode)
    n_steps = max(sizes.n_steps, decoder.block)  # whole blocks
    found = race({"policy": decoder, "streaming": reference}, n_steps)
    wanted = dict(goal="ratio at most 1.01", holds=found["ratio"] <= 1.01)
    return found | (wanted if options == dict(policy="epikv") else {})


def attention_read(sizes: Sizes) -> Checks:
    """The steps of a policy that reads attention weights, which then stand in memory."""
    POLICIES.update(BASELINES)
    model = sizes.model()
    for batch_size in sizes.batches[:2]:
        check = functools.partial(race_h2o, model, sizes, batch_size)
        yield f"h2o over epikv, batch {batch_size}, budget {max(sizes.budgets):,}", check


def race_h2o(model: Transformer, sizes: Sizes, batch_size: int) -> dict:
    decoders = {
        name: Filled(model, EvictionConfig(max(sizes.budgets), name), sizes.mode, batch_size)
        for name in ("h2o", "epikv")
    }
    found = race(decoders, sizes.n_steps)
    return found | dict(goal="ratio at least 3", holds=found["ratio"] >= 3)


# Victims


def victims(sizes: Sizes) -> Checks:
    """Victims and tokens of the small model in float32, against the CPU's."""
    torch.set_num_threads(1)  # for tensors as small as these, more would wait for each other
    torch.set_float32_matmul_precision("highest")
    model = random_model(SMALL, torch.float32, "cpu")
    prompts = [random_tokens(SMALL, n).tolist() for n in (5, 40, 100, 300)]
    for name, options in policy_settings("all", SMALL.n_layers, SMALL.n_kv_heads).items():
        if name in POLICIES:
            # To compile the others takes longer than the rest of their check.
            mode = sizes.mode if name == "epikv" else "none"
            config = EvictionConfig(128, **options)
            yield name, functools.partial(compare_victims, model, config, prompts, mode, sizes)


@dataclass
class Trace:
    """N steps of B rows, on the CPU.

    position, score: [N+1, B, l, h, S], of the slots before the first step and after each; scores as
    they count for the next victim. token: [N, B] drawn in each step.
    """

    position: Tensor
    score: Tensor
    token: Tensor

    def rows(self) -> list["Trace"]:
        """A trace of each row."""
        parts = (x.split(1, dim=1) for x in (self.position, self.score, self.token))
        return [Trace(*row) for row in zip(*parts, strict=True)]


def trace(
    model: Transformer,
    config: EvictionConfig,
    prompts: list[list[int]],
    fed: Tensor,
    mode: str,
    captures: bool,
) -> Trace:
    """Decode after `prompts`; each step is fed a row of `fed` [N, B] and not what was drawn.

    So that a token drawn otherwise has no consequences. captures: the step runs as a CUDA graph,
    also where it is not compiled.
    """
    engine = Engine(model, config, Sampling(), len(prompts), mode)
    generation = Generation(engine, prompts, len(fed) + 1, set())
    prefixes = [generation.prefix(step) for step in range(len(fed))]
    engine.warm_up(prefixes)
    if captures:
        for prefix in set(prefixes) - engine.warm:
            engine.capture(prefix)
    engine.prefill(prompts)
    cache, states, drawn = engine.cache, [], []
    for step, tokens in enumerate(fed.to(model.device)):
        states.append(state_of(cache))
        engine.state.token.copy_(tokens)
        engine.step(prefixes[step])
        if generation.ends_block(step):
            engine.end_block()
        drawn.append(engine.state.token.clone())
    states.append(state_of(cache))
    position, score = (torch.stack(part).cpu() for part in zip(*states, strict=True))
    return Trace(position, score, torch.stack(drawn).cpu())


def state_of(cache: SlotCache) -> tuple[Tensor, Tensor]:
    return cache.position.clone(), cache.aged(cache.position, cache.score, cache.length).clone()


def compare_victims(
    model: Transformer, config: EvictionConfig, prompts: list[list[int]], mode: str, sizes: Sizes
) -> dict:
    """All prompts in one batch, and one of them alone; the worst record of a row."""
    records, on_device = [], deepcopy(model).to(sizes.device)
    for rows in (prompts, prompts[1:2]):
        fed = random_tokens(model.config, sizes.n_compared, len(rows))
        logits = []
        keep = functools.partial(keep_output, logits)
        hook = model.head.register_forward_hook(keep)
        wanted = trace(model, config, rows, fed, "none", captures=False).rows()
        hook.remove()
        best = torch.stack(logits[-len(fed) :]).topk(2).values  # [N, B, 2]
        margins = (best[..., 0] - best[..., 1]).unbind(1)
        found = trace(on_device, config, rows, fed, mode, sizes.on_cuda).rows()
        records += map(compare_rows, wanted, found, margins)
    worst = min(records, key=lambda record: (record["holds"], record["same_victims"]))
    n_whole = sum(record["same_victims"] == sizes.n_compared for record in records)
    return {"rows_that_never_part": n_whole, "of": len(records)} | worst | {"rows": records}


def keep_output(outputs: list[Tensor], module, inputs, output: Tensor) -> None:
    """A hook, with the list that it fills."""
    outputs.append(output)


def compare_rows(wanted: Trace, found: Trace, margin: Tensor) -> dict:
    """Where two traces of a row part, and how near the scores or logits were to each other there.

    margin: [N] between the two likeliest tokens of the first. Tokens count up to the step whose
    victims differ, since then they may differ as well.
    """
    n_steps, gap = len(wanted.token), 0.0
    victim = first_difference(wanted.position, found.position)
    same_victims = n_steps if victim is None else max(0, victim - 1)  # state n is after step n - 1
    if victim:
        scores = wanted.score[victim - 1][wanted.position[victim] != found.position[victim]]
        gap = (scores.max() - scores.min()).item()
    token = first_difference(wanted.token[:same_victims], found.token[:same_victims])
    if token is not None:
        gap = max(gap, margin[token].item())
    return {
        "same_victims": same_victims,
        "same_tokens": same_victims if token is None else token,
        "gap_where_they_part": gap,
        "must": f"all of {n_steps:,} steps, or a gap of at most {TIE}",
        "holds": victim != 0 and gap <= TIE,
    }


def first_difference(one: Tensor, other: Tensor) -> int | None:
    """The first index at which [N, ...] differ."""
    differs = (one != other).flatten(1).any(dim=1)
    return int(differs.int().argmax()) if differs.any() else None


# Memory


def memory(sizes: Sizes) -> Checks:
    """Peak memory does not grow with the prompt or the answer."""
    yield "prompts, all blocks", lambda: prompt_peaks(sizes.model(), sizes)
    yield "answer after the longest prompt, 2 blocks", lambda: answer_peaks(sizes.model(2), sizes)


def peak_of(run: Callable[[], object], sizes: Sizes) -> int:
    """Peak bytes during a run; on a CPU of the process since its start."""
    if sizes.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    run()
    return peak_memory(torch.device(sizes.device))


def flatness(peaks: list[int], sizes: Sizes) -> dict:
    growth = max(peaks) / peaks[0]
    found = dict(peak_gigabytes=max(peaks) / 1e9, over_the_first=growth, peaks=peaks)
    return found | (dict(must="at most 1.01", holds=growth <= 1.01) if sizes.on_cuda else {})


def prompt_peaks(model: Transformer, sizes: Sizes) -> dict:
    """Peaks of prompts of an eighth of the length, a quarter, a half, and all of it."""
    engine = Engine(model, EvictionConfig(sizes.budget), Sampling(), compile_mode="none")
    peaks = [
        peak_of(functools.partial(engine.prefill, [sizes.tokens(sizes.n_tokens // part)]), sizes)
        for part in (8, 4, 2, 1)
    ]
    return {"longest": sizes.n_tokens} | flatness(peaks, sizes)


def answer_peaks(model: Transformer, sizes: Sizes) -> dict:
    """Peaks and times of the quarters of a long answer."""
    decoder = Filled(model, EvictionConfig(sizes.budget, band_a=(0,), band_b=(1,)), sizes.mode)
    decoder.engine.prefill([sizes.tokens(sizes.n_tokens)])
    decoder.length = sizes.n_tokens
    peaks, milliseconds = [], []
    for _ in range(4):
        quarter = functools.partial(decoder.run, sizes.n_tokens // 4)
        peaks.append(peak_of(lambda run=quarter: milliseconds.append(1e3 * run()), sizes))
    found = {"generated": int(decoder.engine.cache.length) - sizes.n_tokens}
    found |= {"ms": min(milliseconds), "ms_of_quarters": milliseconds}
    return found | flatness(peaks, sizes)


# Running -----------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[[Sizes], Checks], int]] = {  # and seconds that it may take
    "flash": (flash, 80),
    "graph": (functools.partial(one_graph, mode="blocks"), 70),
    "speed": (speed, 120),
    "victims": (victims, 75),
    "memory": (memory, 95),
    "attention read": (attention_read, 60),
    "reduce-overhead": (functools.partial(one_graph, mode="step"), 60),
    "quantised": (quantised, 60),
    "policies": (policies, 120),
}
NEED_CUDA = ("graph", "reduce-overhead")


def work(part: str, sizes: Sizes, deadline: float, sender: Connection) -> None:
    """Send a name and a record for every check of a part, then None."""
    checks = PARTS[part][0](sizes)
    while check := attempt(lambda: next(checks, None)):
        start = time.monotonic()
        if isinstance(check, dict):  # the part cannot start, or go on
            name, record = part, check
        elif start > deadline:
            name, record = check[0], {"skipped": "no time left"}
        else:
            name, record = check[0], attempt(check[1])
        sender.send((name, record | {"seconds": time.monotonic() - start}))
        gc.collect()
        if sizes.on_cuda:
            torch.cuda.empty_cache()
    sender.send(None)


def attempt(function: Callable):
    """What it returns, or a record that says why it did not."""
    try:
        return function()
    except Exception as error:  # whatever it is, the next check may work
        return {"error": f"{type(error).__name__}: {one_line(error)}"}


def run_part(part: str, sizes: Sizes, seconds: float) -> dict[str, dict]:
    """Records of a part's checks, from a process that is ended when its time is over."""
    # A fork need not load the libraries again, but CUDA does not work in one.
    context = get_context("spawn" if sizes.on_cuda else "fork")
    receiver, sender = context.Pipe(duplex=False)
    deadline = time.monotonic() + seconds
    process = context.Process(target=work, args=(part, sizes, deadline, sender))
    process.start()
    sender.close()  # this end of it, so that a dead process is noticed
    records = {}
    try:
        while (message := receive(receiver, deadline + GRACE)) is not None:
            name, records[name] = message
            print(f"{part}: {name}: {told(records[name])}", file=sys.stderr, flush=True)
    except TimeoutError:
        records["its process"] = {"error": f"stopped after {seconds + GRACE:.0f} s"}
    except EOFError:
        process.join(GRACE)
        records["its process"] = {"error": f"ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    return records


def receive(receiver: Connection, until: float) -> tuple[str, dict] | None:
    if not receiver.poll(max(0.0, until - time.monotonic())):
        raise TimeoutError
    return receiver.recv()


# Reporting ---------------------------------------------------------------------------------------


def told(record: dict) -> str:
    """What was measured, in words, without lists."""
    for kind in ("error", "skipped"):
        if kind in record:
            return f"{kind}: {record[kind][:200]}"
    left_out = ("must", "goal", "holds", "seconds")
    return ", ".join(
        f"{name.replace('_', ' ')} {number(value)}"
        for name, value in record.items()
        if name not in left_out and not isinstance(value, (list, dict))
    )


def number(value: float | str) -> str:
    """Four digits of a float, as a ratio needs them; the start of a text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def has_failed(record: dict) -> bool:
    return "error" in record or ("must" in record and not record["holds"])


def table(result: dict[str, dict[str, dict]]) -> str:
    lines = []
    for part, records in result.items():
        for name, record in records.items():
            wanted = f"goal: {record['goal']}" if "goal" in record else record.get("must", "")
            verdict = {True: "yes", False: "no", None: ""}[record.get("holds")]
            verdict = "FAILED" if has_failed(record) else verdict
            lines.append([part, name, told(record).replace("|", "/"), wanted, verdict])
    return markdown(["part", "check", "measured", "wanted", "so it is"], lines)


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--tiny", action="store_true", help="a tiny model on the CPU, without what needs CUDA")
    add("--output", type=Path, default=Path("check_gpu.json"), help="default: check_gpu.json")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --tiny runs on a CPU")
    with told_in_one_line(parser):
        check_output(args.output, ".json")
    deadline, result = time.monotonic() + SECONDS, {}
    for part, (_, seconds) in PARTS.items():
        left = deadline - time.monotonic()
        if args.tiny and part in NEED_CUDA:
            result[part] = {"all": {"skipped": "needs CUDA"}}
        elif left < GRACE:  # which would hardly load the libraries
            result[part] = {"all": {"skipped": "no time left"}}
        else:
            result[part] = run_part(part, TINY if args.tiny else FULL, min(seconds, left))
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    sys.exit(any(has_failed(record) for records in result.values() for record in records.values()))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Time the decode step: against transformers and kvpress, per policy, and that of labelling.

    python scripts/benchmark.py                  # batch 1, budget 512
    python scripts/benchmark.py --batches 1,4,16 --budgets 256,1024,4096
    python scripts/benchmark.py --policies all   # the step of every policy, baselines included
    python scripts/benchmark.py --parts labels   # label_importance.py, against a fresh prefill

Greedy, the checkpoint's own weights in float32 on a CPU (bfloat16 on CUDA), and ours also in the
`--formats` bfloat16, int8 and int4. Times of things that
are compared alternate in short rounds of one process, and a ratio is the median over the rounds (of
policies, the ratio of the sums), so that a busy machine slows both sides.

- `peers` feeds all contenders the same text, whatever they predict: first where each holds as many
  tokens as the budget, then at several positions of a long text. Those that are not installed (the
  extra `bench`) are skipped.
- `processes` gives each contender a process of its own: the peak of its memory while it decodes at
  the last position (twice the budget, for those that have one), and its compilation, without and
  with a cache on disk.
- `step` tells, from a profile, what the time of a step goes to; on a CPU.

Prints Markdown, and writes it, JSON and plots.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import BASELINES, mean_occupancy  # noqa: E402
from calibrate import N_SUMS  # noqa: E402
from epikv import POLICIES, Calibration, EvictionConfig, FitWeights  # noqa: E402
from generate import (  # noqa: E402
    ArgumentParser,
    Engine,
    Sampling,
    full_budget,
    memory_bandwidth,
    slot_bytes,
    synchronize,
    weight_bytes,
)
from label_importance import (  # noqa: E402
    Answerer,
    Reader,
    Window,
    attention_matrix,
    cut_windows,
    effect_matrix,
)
from memory import peak_bytes  # noqa: E402
from model import ModelConfig, Transformer, find_device, one_line, read_json  # noqa: E402
from peers import INTERVAL, Context, load_peer, peer_contenders  # noqa: E402
from plots import line_plot  # noqa: E402
from records import check_output  # noqa: E402
from tables import markdown  # noqa: E402

STEPS, ROUNDS = INTERVAL, 5  # so that each round of kvpress has one compression
ROOM = STEPS * (ROUNDS + 2)  # tokens that a contender takes in after its position
LABEL_TOKENS, ANSWER_TOKENS = 1000, 128  # of the text that is labelled, and of its answers
TEXT = "A river begins as a trickle in the hills and grows with every stream that joins it. "
FORMATS = {  # of our weights: options of Transformer.from_pretrained
    "bfloat16": dict(dtype=torch.bfloat16),
    "int8": dict(quantize="int8"),
    "int4": dict(quantize="int4"),
}
# How much faster ours, as it is or in the better of some formats, is to be than the fastest of
# those with such words in their names (or without any, than ours as it is), in a short text, where
# all hold as many tokens as the budget, or at the end of a long one.
GOALS = (
    ("transformers, the faster of generate() and loop", 2.0, "short", ("generate()", "loop"), ()),
    ("transformers, static cache, compiled", 1.3, "short", ("static",), ()),
    ("kvpress, the fastest press", 2.2, "short", ("kvpress",), ()),
    ("full cache of ours", 1.5, "long", ("full",), ()),
    ("transformers' loop, by bfloat16 or int8", 3.5, "short", ("loop",), ("bfloat16", "int8")),
    ("ours in float32, by bfloat16 or int8", 1.5, "short", (), ("bfloat16", "int8")),
)


class Decoder:
    """An engine as a contender: see `peers.py`."""

    def __init__(
        self, model: Transformer, config: EvictionConfig, n_rows: int = 1, mode: str = "blocks"
    ):
        self.engine = Engine(model, config, Sampling(), n_rows, mode)
        self.n_rows = n_rows
        self.block = self.engine.cache.block
        self.budget = None if config.policy == "full" else config.budget

    def prepare(self, context: Context, length: int) -> None:
        engine = self.engine
        self.length = length
        engine.warm_up([engine.prefix(n, n) for n in range(length + 1, length + ROOM)])
        if self.budget is None:  # whose cache is what the context holds
            k, v = zip(*context.rows(length, self.n_rows), strict=True)
            engine.cache.reset()
            engine.cache.admit(list(k), list(v), [])
        else:
            engine.prefill([context.tokens[:length].tolist()] * self.n_rows)

    def run(self, tokens: Tensor) -> float:
        """Feed `tokens` [n] to every row; returns seconds per step."""
        synchronize(self.engine.model.device)
        start = time.perf_counter()
        for token in tokens:
            self.engine.state.token.copy_(token)
            self.step()
        synchronize(self.engine.model.device)
        return (time.perf_counter() - start) / len(tokens)

    def step(self) -> None:
        self.length += 1
        self.engine.step(self.engine.prefix(self.length, self.length))
        if self.block and self.length % self.block == 0:
            self.engine.end_block()

    def step_bytes(self, length: int) -> int:
        held = min(length, self.budget or length)
        tokens = self.n_rows * held * slot_bytes(self.engine.cache)
        return weight_bytes(self.engine.model) + tokens

    @property
    def kv_bytes(self) -> int:
        return sum(x.nbytes for layer in self.engine.cache.layers for x in layer.stored)

    @property
    def compile_seconds(self) -> float:
        return self.engine.compile_seconds

    def occupancy(self, tokens: Tensor) -> float:
        """Mean share of the slots taken, after each step of a few blocks (of one step without)."""
        shares = []
        for i in range(4 * self.block or 1):
            self.run(tokens[i % len(tokens)][None])
            shares.append(mean_occupancy(self.engine.cache).item())
        return statistics.mean(shares)


def alternate(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each contender returns, in turn, over `rounds` rounds after one not counted."""
    seconds = {name: [] for name in contenders}
    for counted in [False] + [True] * rounds:
        for name, contender in contenders.items():
            value = contender()
            if counted:
                seconds[name].append(value)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def row(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {
        "tokens_per_second": 1 / median,
        "ms_per_step": 1e3 * median,
        "ms_quartiles": [1e3 * low, 1e3 * high],
    }


# Against peers ----------------------------------------------------------------------------------


def contender_makers(
    models: dict[str, Transformer],
    peer,
    policies: dict[str, dict],
    n_rows: int,
    budget: int,
    longest: int,
    mode: str = "blocks",
) -> dict[str, Callable]:
    """What makes each contender, by name, for texts of up to `longest` tokens; ours come first.

    models: by format, where "" is the checkpoint's own; the others run the first of the policies.
    mode: compile mode of ours.
    """
    configs = {name: EvictionConfig(budget, **options) for name, options in policies.items()}
    first = next(iter(configs))
    settings = {name: ("", config) for name, config in configs.items()}
    settings["full"] = ("", EvictionConfig(full_budget(longest), "full"))
    settings |= {f"{first} {form}": (form, configs[first]) for form in models if form}
    ours = {
        name: lambda form=form, config=config: Decoder(models[form], config, n_rows, mode)
        for name, (form, config) in settings.items()
    }
    return ours | peer_contenders(peer, n_rows, budget, longest)


def read_context(model: Transformer, length: int, n_tokens: int) -> Context:
    """A text of `n_tokens`, the first `length` of which have gone through the model."""
    tokens = torch.tensor(make_prompt(model, n_tokens), device=model.device)
    cache = model.new_cache(EvictionConfig(full_budget(length), "full"))
    model.prefill(tokens[None, :length], cache)  # the slots of a full cache are in order
    return Context(
        tokens, [(layer.k[:, :, :length], layer.v[:, :, :length]) for layer in cache.layers]
    )


def race(
    contenders: dict, context: Context, position: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds per step of each contender at `position`, over rounds of STEPS tokens.

    And the bytes per second at which memory was read between the rounds.
    """
    runs = {}
    for name, contender in contenders.items():
        contender.prepare(context, position)
        parts = iter(context.tokens[position:].split(STEPS))
        runs[name] = lambda contender=contender, parts=parts: contender.run(next(parts))
    device = context.tokens.device
    runs[""] = lambda: memory_bandwidth.__wrapped__(device)  # of this moment, not a remembered one
    seconds = alternate(runs, ROUNDS)
    return seconds, seconds.pop("")


def measure_at(position: int, contenders: dict, context: Context, n_rows: int) -> list[dict]:
    """A record for each contender, ours first, at `position` of the text."""
    seconds, bandwidths = race(contenders, context, position)
    ours, *_ = seconds.values()
    records = []
    for name, times in seconds.items():
        contender, measured = contenders[name], row(times)
        rates = [contender.step_bytes(position) / time for time in times]
        measured["tokens_per_second"] *= n_rows
        measured["bandwidth_share"] = ratio(rates, bandwidths)
        measured |= {"kv_bytes": contender.kv_bytes, "speed_of_ours": ratio(times, ours)}
        measured |= {"seconds": times, "bandwidths": bandwidths}
        records.append({"contender": name, "position": position} | measured)
    return records


def compare_peers(makers: dict, context: Context, positions: list[int], n_rows: int) -> list[dict]:
    """The records of all contenders at all `positions`."""
    contenders, records = {}, []
    for name, make in makers.items():
        try:
            contenders[name] = make()
        except (ValueError, RuntimeError) as error:  # no memory for its cache
            print(f"skipped {name}: {one_line(error)}", file=sys.stderr)
    for position in positions:
        print(f"batch {n_rows}, position {position:,}", file=sys.stderr)
        records += measure_at(position, contenders, context, n_rows)
    return records


def peers_table(records: list[dict]) -> dict[str, dict]:
    """A row for each contender: its step at each position, and what else the last one tells."""
    rows: dict[str, dict] = {}
    for record in records:
        cells = rows.setdefault(record["contender"], {})
        low, high = record["ms_quartiles"]
        step = f"{record['ms_per_step']:.1f} ({low:.1f} to {high:.1f})"
        cells[f"ms at {record['position']:,}"] = step
        if record["position"] == records[-1]["position"]:
            cells["tokens/s"] = f"{record['tokens_per_second']:.1f}"
            cells["ours is faster by"] = f"{record['speed_of_ours']:.2f}"
            cells["KV MB"] = f"{record['kv_bytes'] / 1e6:.1f}"
            cells["share of bandwidth"] = f"{record['bandwidth_share']:.0%}"
    return rows


def goals_table(records: dict[str, list[dict]]) -> dict[str, dict]:
    """What was to be reached, and what was, against the fastest of each goal's contenders."""
    rows = {}
    for name, goal, text, words, formats in GOALS:
        last = records[text][-1]["position"]
        seconds = {r["contender"]: r["seconds"] for r in records[text] if r["position"] == last}
        first = next(iter(seconds))
        ours = [f"{first} {form}" for form in formats] if formats else [first]
        theirs = [other for other in seconds if any(word in other for word in words)]
        theirs = theirs if words else [first]
        reached = [
            min(ratio(seconds[other], seconds[mine]) for other in theirs)
            for mine in ours
            if mine in seconds and theirs
        ]
        if reached:
            rows[name] = {"at token": last, "goal": goal, "reached": max(reached)}
    return rows


def plot_peers(path: Path, title: str, records: list[dict]) -> None:
    series: dict[str, list] = {}
    for record in records:
        point = (record["position"], record["ms_per_step"], *record["ms_quartiles"])
        series.setdefault(record["contender"], []).append(point)
    try:
        line_plot(path, title, "position in the text, tokens", "ms per step", series, log_y=True)
    except ValueError as error:
        print(f"no plot: {one_line(error)}", file=sys.stderr)


# Each in a process of its own -------------------------------------------------------------------


def measure_alone(
    checkpoint: Path,
    policies: dict,
    name: str,
    n_rows: int,
    budget: int,
    position: int,
    mode: str,
    folder: str,
) -> dict[str, float]:
    """Peak memory of contender `name` while it decodes, and its compilation, cached in `folder`.

    For a process of its own. The context is one of zeros, which take no room.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    POLICIES.update(BASELINES)
    config = ModelConfig.from_hf(read_json(checkpoint / "config.json"))
    device = find_device(None)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    form = "".join(form for form in FORMATS if name.endswith(f" {form}"))
    ours = form or name in (*policies, "full")
    models = {form: load_model(checkpoint, form)} if ours else {}
    peer = None if ours else load_peer(checkpoint, dtype, device)
    longest = full_budget(position + ROOM)
    contender = contender_makers(models, peer, policies, n_rows, budget, longest, mode)[name]()
    if contender.budget:  # which is full by then, and the same ever after
        position = min(position, 2 * contender.budget)
    zeros = torch.zeros((), dtype=dtype, device=device)
    kv = zeros.expand(1, config.n_kv_heads, position, config.head_dim)
    tokens = torch.zeros(position + ROOM, dtype=torch.int64, device=device)
    contender.prepare(Context(tokens, [(kv, kv)] * config.n_layers), position)
    contender.run(tokens[:STEPS])
    if device.type == "cpu":  # the start had a peak of its own; Linux alone can forget it
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.reset_peak_memory_stats()
    contender.run(tokens[:STEPS])
    peak = peak_bytes(device.type)
    return {"peak_memory": peak, "compile_seconds": contender.compile_seconds}


def measure_processes(names: list[str], *what) -> dict[str, dict]:
    """A row for each contender; what: the arguments of `measure_alone` around its name."""
    checkpoint, policies, *rest = what
    rows = {}
    for name in names:
        print(f"{name} in a process of its own", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            try:
                cold = last = in_own_process(checkpoint, policies, name, *rest, folder)
                times = {}
                if cold["compile_seconds"]:  # a compiler at work leaves its own things in memory
                    last = in_own_process(checkpoint, policies, name, *rest, folder)
                    times["compile cold, s"] = cold["compile_seconds"]
                    times["compile warm, s"] = last["compile_seconds"]
                rows[name] = {"peak MB": last["peak_memory"] / 1e6} | times
            # Out of memory, or killed: a RuntimeError too.
            except (RuntimeError, MemoryError, OSError, ValueError) as error:
                rows[name] = {"peak MB": one_line(error)}
    return rows


def in_own_process(*what) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure_alone, *what).result()


# Of our own -------------------------------------------------------------------------------------


def any_calibration(n_layers: int, n_kv_heads: int) -> Calibration:
    """One of a model of that shape: the time of a step does not depend on the weights."""
    features = [((0.5,) * n_layers,) * N_SUMS] * 6
    heads = (((0.5,) * n_kv_heads,) * n_layers,) * N_SUMS
    fit = FitWeights(*features, heads=heads, log_age=0.5)
    return Calibration(n_layers, 64, (0,), (n_layers - 1,), 1.0, 1.0, fit, 0.25)


def policy_settings(names: str, n_layers: int = 1, n_kv_heads: int = 1) -> dict[str, dict]:
    """Settings of EvictionConfig by name: of "all" policies and variants, or of those listed.

    n_layers, n_kv_heads: of the model. Raises ValueError for a name that is none.
    """
    known = {}
    for name, policy in POLICIES.items():
        if name != "full":
            known[name] = dict(policy=name)
            for slot_map in policy.slot_maps[1:]:
                known[f"{name} ({slot_map} map)"] = dict(policy=name, slot_map=slot_map)
    for name in ("epikv-fit", "epikv-fit (shared map)"):
        known[name]["calibration"] = any_calibration(n_layers, n_kv_heads)
    known["lag-kv (previous)"] = dict(policy="lag-kv", lag_reference="previous")
    known["epikv (value reserve 16)"] = dict(policy="epikv", value_reserve=16)
    if names == "all":
        return known
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"unknown policy {unknown[0]!r}; known: all, {', '.join(known)}")
    return {name: known[name] for name in names.split(",")}


def compare_policies(
    model: Transformer, budget: int, settings: dict[str, dict], mode: str = "blocks"
) -> dict:
    """Saturated steps of policies, each in turn with `streaming`, which computes no score.

    Over 1,024 steps, so that what block-wise policies do at the end of a block is shared out. The
    times are means over a round for the same reason, and the ratio is that of the sums.
    """
    tokens = torch.tensor(make_prompt(model, budget + 64), device=model.device)
    fed = tokens[budget:]
    decoders = {}
    for name, options in ({"streaming": dict(policy="streaming")} | settings).items():
        print(f"compiling {name}", file=sys.stderr)
        decoders[name] = Decoder(model, EvictionConfig(budget, **options), mode=mode)
        decoders[name].prepare(Context(tokens, []), budget)
    seconds = {name: [] for name in decoders}
    beside = {name: [] for name in decoders}  # of streaming, in the same moment
    for n in range(16):
        print(f"round {n + 1} of 16", file=sys.stderr)
        for name, decoder in decoders.items():
            beside[name].append(decoders["streaming"].run(fed[:16]))
            seconds[name].append(decoder.run(fed))
    return {
        name: {"slot_map": decoders[name].engine.cache.config.slot_map}
        | row(times)
        | {
            "time_over_streaming": sum(times) / sum(beside[name]),
            "mean_occupancy": decoders[name].occupancy(fed),
        }
        for name, times in seconds.items()
    }


def compare_labels(model: Transformer) -> dict:
    """Labels of the windows in the middle of a text, against a fresh prefill for each of them.

    A window in the middle takes as long as the mean over the text. Attention and effects come for
    all windows at once.
    """
    windows = cut_windows(0, LABEL_TOKENS, 32, 16)
    middle = len(windows) // 2
    batch = windows[max(0, middle - 8) : middle + 8]
    tokens = make_prompt(model, LABEL_TOKENS)
    reader = Reader(model, tokens)
    answerers = {
        n_rows: Answerer(reader, LABEL_TOKENS, n_rows, ANSWER_TOKENS) for n_rows in (1, len(batch))
    }

    def loss(windows: list[Window], start: int | None = None) -> None:
        reader.loss_increases(windows, reader.occlude(windows, None, start))

    def flip(windows: list[Window], start: int | None = None) -> None:
        suffix = reader.occlude(windows, None, start)
        answerers[len(windows)].answers(windows, suffix, drops=True)

    contenders = {
        "loss, fresh prefill": (1, lambda: loss([windows[middle]], 0)),
        "loss": (len(batch), lambda: loss(batch)),
        "attention": (len(windows), lambda: attention_matrix(model, tokens)),
        "effect": (len(windows), lambda: effect_matrix(model, tokens)),
        "flip, fresh prefill": (1, lambda: flip([windows[middle]], 0)),
        "flip": (len(batch), lambda: flip(batch)),
    }
    seconds = alternate({name: timed(*one) for name, one in contenders.items()}, rounds=3)
    return {
        name: {
            "seconds_per_window": statistics.median(times),
            "times_faster": ratio(seconds[fresh_of(name)], times),
        }
        for name, times in seconds.items()
    }


def fresh_of(name: str) -> str:
    return f"{'flip' if name.startswith('flip') else 'loss'}, fresh prefill"


def timed(n_windows: int, run: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a run for each of its windows."""

    def measure() -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / n_windows

    return measure


def make_prompt(model: Transformer, n_tokens: int) -> list[int]:
    tokens = model.tokenizer.encode(TEXT)
    return (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]


# Of one step ------------------------------------------------------------------------------------

# What a step spends time on, by words in the names of the profiler's events; the first that fits.
PARTS_OF_A_STEP = {
    "attention": ("aten::_scaled_dot_product",),
    "head, sampling, scores": ("argmax",),
    "slot to overwrite": ("argmin",),
    "output projection, MLP": ("silu",),
    "QKV projection, RoPE, write": ("index_put",),
    "guards of compiled code": ("Cache Lookup",),
    "calls of compiled code": ("CompiledFxGraph", "Compiled Region", "Prologue", "bytecode"),
    "other operators": ("",),
}


def profile_step(model: Transformer, budget: int, mode: str = "blocks") -> dict[str, dict]:
    """A row for each part of a saturated step of `epikv`, and for all of it by the clock."""
    if model.device.type != "cpu":
        raise ValueError("the part step needs a CPU; see check_gpu.py")
    torch._dynamo.reset()  # what was compiled without names for its kernels
    tokens = torch.tensor(make_prompt(model, budget + ROOM), device=model.device)
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        decoder = Decoder(model, EvictionConfig(budget), mode=mode)
        decoder.prepare(Context(tokens, []), budget)
        decoder.run(tokens[:STEPS])
        seconds = [decoder.run(tokens[:STEPS]) for _ in range(ROUNDS)]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            decoder.run(tokens[:STEPS])
    read = {
        "attention": [budget * slot_bytes(decoder.engine.cache)],
        "head, sampling, scores": [weight_bytes(model) - n_bytes(*model.blocks)],
        "output projection, MLP": [n_bytes(b.out, b.gate_up, b.down) for b in model.blocks],
        "QKV projection, RoPE, write": [n_bytes(b.qkv) for b in model.blocks],
    }
    milliseconds, calls = dict.fromkeys(PARTS_OF_A_STEP, 0.0), dict.fromkeys(PARTS_OF_A_STEP, 0.0)
    for event in profiler.key_averages():
        part = part_of_a_step(event.key)
        milliseconds[part] += event.self_cpu_time_total / 1e3 / STEPS
        calls[part] += event.count / STEPS
    rows = {
        part: {"ms": ms, "share": f"{ms / sum(milliseconds.values()):.0%}", "events": calls[part]}
        | ({"GB/s": sum(read[part]) / ms / 1e6} if part in read and ms else {})
        for part, ms in milliseconds.items()
    }
    rows["all, under the profiler"] = {"ms": sum(milliseconds.values())}
    rows["all, by the clock"] = {"ms": 1e3 * statistics.median(seconds)}
    return rows


def part_of_a_step(event: str) -> str:
    return next(
        part for part, words in PARTS_OF_A_STEP.items() if any(word in event for word in words)
    )


def n_bytes(*modules: nn.Module) -> int:
    return sum(weight.nbytes for module in modules for weight in module.parameters())


# Reporting --------------------------------------------------------------------------------------


class Report:
    """Tables that are printed at once, and written to `output` and beside it, with their data."""

    def __init__(self, output: Path, options: dict):
        self.output = output
        told = " ".join(f"--{name} {value}" for name, value in options.items())
        self.text, self.data = f"`benchmark.py {told}`\n", {"options": options}
        print(self.text, end="")

    def add(self, title: str, rows: dict[str, dict], data=None) -> None:
        """A table, and in the JSON file, under its title, what it was made of."""
        section = f"\n{title}\n\n{table(rows)}\n"
        print(section, end="", flush=True)
        self.text += section
        self.data[title] = rows if data is None else data
        self.output.with_suffix(".md").write_text(self.text.lstrip(), encoding="utf-8")
        self.output.write_text(json.dumps(self.data, indent=2) + "\n", encoding="utf-8")


def table(rows: dict[str, dict]) -> str:
    """A Markdown table with a column for each key of the rows, some of which may lack some."""
    columns = list(dict.fromkeys(key for record in rows.values() for key in record))
    titles = ["", *(column.replace("_", " ") for column in columns)]
    cells = [
        [name, *(show(record.get(column, "")) for column in columns)]
        for name, record in rows.items()
    ]
    return markdown(titles, cells)


def show(value) -> str:
    if isinstance(value, list):
        return " to ".join(show(item) for item in value)
    if isinstance(value, str):
        return value
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


def describe(model: Transformer) -> dict:
    """The machine, and the time that reading the weights once takes at the bandwidth it gives."""
    bandwidth = memory_bandwidth(model.device)
    return {
        "torch": torch.__version__,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "memory_gigabytes_per_second": bandwidth / 1e9,
        "weights_megabytes": weight_bytes(model) / 1e6,
        "ms_to_read_weights": 1e3 * weight_bytes(model) / bandwidth,
    }


def report_peers(report: Report, models: dict, peer, args: argparse.Namespace) -> None:
    """In a short text, as long as the budget, and in a long one, for each batch and budget."""
    model = models[""]
    policies = policy_settings(args.policies, model.config.n_layers, model.config.n_kv_heads)
    last = max(args.positions)
    context = read_context(model, max(last, *args.budgets), max(last, *args.budgets) + ROOM)
    for n_rows, budget in product(args.batches, args.budgets):
        where = f"batch {n_rows}, budget {budget:,}"
        texts = {
            "short": (budget + ROOM, [budget]),
            "long": (full_budget(last + ROOM), args.positions),
        }
        records = {}
        for text, (longest, positions) in texts.items():
            what = (n_rows, budget, longest, args.compile_mode)
            makers = contender_makers(models, peer, policies, *what)
            records[text] = compare_peers(makers, context, positions, n_rows)
            report.add(f"a {text} text, {where}", peers_table(records[text]), records[text])
        report.add(f"goals, {where}", goals_table(records))
        if len(args.positions) > 1:
            name = f"{args.output.stem}-batch{n_rows}-budget{budget}.png"
            title = f"{args.checkpoint.name}, {where}"
            plot_peers(args.output.with_name(name), title, records["long"])


def report_processes(report: Report, models: dict, peer, args: argparse.Namespace) -> None:
    config = models[""].config
    policies = policy_settings(args.policies, config.n_layers, config.n_kv_heads)
    for n_rows, budget in product(args.batches, args.budgets):
        names = list(contender_makers(models, peer, policies, n_rows, budget, budget))
        what = (args.checkpoint, policies, n_rows, budget, max(args.positions), args.compile_mode)
        title = f"processes, batch {n_rows}, budget {budget:,}"
        report.add(title, measure_processes(names, *what))


def report_step(report: Report, models: dict, peer, args: argparse.Namespace) -> None:
    for budget in args.budgets:
        for form, model in models.items():
            form = form or str(model.dtype).removeprefix("torch.")
            title = f"what a step spends, {form}, budget {budget:,}"
            report.add(title, profile_step(model, budget, args.compile_mode))


def report_policies(report: Report, models: dict, peer, args: argparse.Namespace) -> None:
    model = models[""]
    policies = policy_settings(args.policies, model.config.n_layers, model.config.n_kv_heads)
    for budget in args.budgets:
        report.add(
            f"policies, budget {budget:,}",
            compare_policies(model, budget, policies, args.compile_mode),
        )


def numbers(text: str) -> list[int]:
    """Whole numbers of at least 1, ascending, from "1,4,16"."""
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; try 1,4,16")
    return found


def formats(text: str) -> list[str]:
    """Names of FORMATS, from "bfloat16,int8"."""
    found = text.split(",")
    for form in found:
        if form not in FORMATS:
            known = ", ".join(FORMATS)
            raise argparse.ArgumentTypeError(f"unknown format {form!r}; known: {known}")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    demo = ROOT / "models/SmolLM2-135M-Instruct"
    add("--checkpoint", type=Path, default=demo, help="local folder (default: the demo model)")
    add("--batches", type=numbers, default=[1], help="rows of peers and processes (default: 1)")
    add("--budgets", type=numbers, default=[512], help="slots (default: 512)")
    places = "1000,4000,8080"  # and up to 8,192
    add("--positions", type=numbers, default=numbers(places), help=f"of a text (default: {places})")
    add("--formats", type=formats, default=[], help=f"of ours beside: {','.join(FORMATS)}")
    add(
        "--compile-mode",
        choices=("blocks", "step"),
        default="blocks",
        help="of ours, as generate.py",
    )
    add("--parts", help="of peers,processes (the default),policies,labels,step")
    add("--policies", help="all, or names with commas (default: epikv); alone: the part policies")
    add("--output", type=Path, default=Path("benchmark.json"), help="default: benchmark.json")
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    args.parts = (args.parts or ("policies" if args.policies else "peers,processes")).split(",")
    args.policies = args.policies or "epikv"
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be, before a model is loaded."""
    for part in args.parts:
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    check_output(args.output, ".json")
    for options in policy_settings(args.policies).values():
        for budget in args.budgets:
            EvictionConfig(budget, **options)


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """What was measured, as options of the command, without paths."""
    names = ("parts", "batches", "budgets", "positions", "policies", "formats", "compile_mode")
    found = {name.replace("_", "-"): getattr(args, name) for name in names}
    return {
        name: value if isinstance(value, str) else ",".join(map(str, value))
        for name, value in found.items()
        if value
    }


def check_length(length: int, config: ModelConfig) -> None:
    """Raises ValueError for a text that goes beyond the model's context."""
    most = config.max_positions - ROOM
    if length > most:
        raise ValueError(f"positions and budgets of this model go to {most:,}, not {length:,}")


def load_model(checkpoint: Path, form: str) -> Transformer:
    """The checkpoint in one of FORMATS, or "" as it is."""
    return Transformer.from_pretrained(checkpoint, **FORMATS.get(form, {}))


def main() -> None:
    args = parse_arguments()
    needs_peer = {"peers", "processes"} & set(args.parts)
    longest = max(args.budgets + (args.positions if needs_peer else []))
    try:
        models = {form: load_model(args.checkpoint, form) for form in ["", *args.formats]}
        check_length(longest, models[""].config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    model = models[""]
    report = Report(args.output, options_of(args))
    report.add(args.checkpoint.name, {"this machine": describe(model)})
    peer = load_peer(args.checkpoint, model.dtype, model.device) if needs_peer else None
    try:
        for part in args.parts:
            PARTS[part](report, models, peer, args)
    except (ValueError, RuntimeError, MemoryError) as error:
        sys.exit(f"error: {error}")


PARTS = {
    "peers": report_peers,
    "processes": report_processes,
    "policies": report_policies,
    "labels": lambda report, models, *_: report.add("labels", compare_labels(models[""])),
    "step": report_step,
}

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Time the decode step: against transformers, per policy, over length, and its compilation.

    python scripts/benchmark.py [--parts length,policies,peers,compile] [--output benchmark.json]
    python scripts/benchmark.py --policies all   # the step of every policy, baselines included
    python scripts/benchmark.py --parts labels   # label_importance.py, against a fresh prefill

Batch 1, greedy, the checkpoint's own weights in float32 on a CPU (bfloat16 on CUDA). Times of
things that are compared alternate in short rounds of one process, and a ratio is the median over
the rounds (of policies, the ratio of the sums), so that a busy machine slows both sides. Prints a
Markdown table a part and writes JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import BASELINES, mean_occupancy  # noqa: E402
from calibrate import N_SUMS  # noqa: E402
from epikv import POLICIES, Calibration, EvictionConfig, FitWeights  # noqa: E402
from generate import (  # noqa: E402
    Engine,
    Sampling,
    memory_bandwidth,
    peak_memory,
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
from model import Transformer  # noqa: E402

PEER_TOKENS = 32  # that transformers generates a round
LABEL_TOKENS, ANSWER_TOKENS = 1500, 128  # of the text that is labelled, and of its answers
TEXT = "A river begins as a trickle in the hills and grows with every stream that joins it. "


class Decoder:
    """An engine that is driven step by step."""

    def __init__(self, model: Transformer, prompt: list[int], config: EvictionConfig):
        budget = config.budget
        self.engine = Engine(model, config, Sampling())
        self.engine.warm_up([self.engine.prefix(1, budget), None])
        self.engine.prefill([prompt])
        self.length = len(prompt)
        self.block = self.engine.cache.block

    def run(self, n_steps: int) -> float:
        """Decode `n_steps` tokens; returns seconds per step."""
        synchronize(self.engine.model.device)
        start = time.perf_counter()
        for _ in range(n_steps):
            self.length += 1
            self.engine.step(self.engine.prefix(self.length, self.length))
            if self.block and self.length % self.block == 0:
                self.engine.end_block()
        synchronize(self.engine.model.device)
        return (time.perf_counter() - start) / n_steps

    def occupancy(self) -> float:
        """Mean share of the slots taken, after each step of a few blocks (of one step without)."""
        shares = []
        for _ in range(4 * self.block or 1):
            self.run(1)
            shares.append(mean_occupancy(self.engine.cache).item())
        return statistics.mean(shares)


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


def compare_peers(model: Transformer, checkpoint: Path, budget: int) -> dict:
    """Our saturated decode at `budget` against transformers with as many tokens in its cache."""
    import transformers

    n_new = PEER_TOKENS
    prompt = make_prompt(model, budget - n_new)
    peer = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=model.dtype)
    peer.to(model.device)
    tokens = torch.tensor([prompt], device=model.device)
    length = dict(max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False)

    def generate(**options) -> float:
        clock = TokenClock()
        peer.generate(tokens, streamer=clock, **length, **options)
        return clock.seconds_per_token()

    def plain_loop() -> float:
        cache = transformers.DynamicCache(config=peer.config)
        with torch.no_grad():
            token = peer(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            for _ in range(n_new - 1):
                token = peer(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            synchronize(model.device)
        return (time.perf_counter() - start) / (n_new - 1)

    compiled = transformers.CompileConfig(fullgraph=True, dynamic=False, mode="default")
    compiled._compile_all_devices = True  # transformers compiles on a CPU only when told so
    ours = Decoder(model, make_prompt(model, budget), EvictionConfig(budget))
    seconds = alternate(
        {
            "epikv": lambda: ours.run(n_new - 1),
            "transformers generate()": generate,
            "transformers forward loop": plain_loop,
            "transformers static cache, compiled": lambda: generate(
                cache_implementation="static", compile_config=compiled
            ),
        },
        rounds=9,
    )
    return {
        name: row(times) | {"speed_of_ours": ratio(times, seconds["epikv"])}
        for name, times in seconds.items()
    }


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


def compare_policies(model: Transformer, budget: int, settings: dict[str, dict]) -> dict:
    """Saturated steps of policies, each in turn with `streaming`, which computes no score.

    Over 1,024 steps, so that what block-wise policies do at the end of a block is shared out. The
    times are means over a round for the same reason, and the ratio is that of the sums.
    """
    prompt = make_prompt(model, budget)
    decoders = {}
    for name, options in ({"streaming": dict(policy="streaming")} | settings).items():
        print(f"compiling {name}", file=sys.stderr)
        decoders[name] = Decoder(model, prompt, EvictionConfig(budget, **options))
    seconds = {name: [] for name in decoders}
    beside = {name: [] for name in decoders}  # of streaming, in the same moment
    for n in range(16):
        print(f"round {n + 1} of 16", file=sys.stderr)
        for name, decoder in decoders.items():
            beside[name].append(decoders["streaming"].run(16))
            seconds[name].append(decoder.run(64))
    return {
        name: {"slot_map": decoders[name].engine.cache.config.slot_map}
        | row(times)
        | {
            "time_over_streaming": sum(times) / sum(beside[name]),
            "mean_occupancy": decoders[name].occupancy(),
        }
        for name, times in seconds.items()
    }


def compare_lengths(model: Transformer, budget: int) -> dict:
    """Step time and peak memory 1,000 and 8,000 tokens into a text, within `budget`."""
    decoders, peaks = {}, {}
    for length in (1000, 8000):
        config = EvictionConfig(budget)
        decoder = decoders[length] = Decoder(model, make_prompt(model, 64), config)
        decoder.run(length - decoder.length)
        peaks[length] = peak_memory(model.device)
    seconds = alternate(
        {length: lambda decoder=decoder: decoder.run(10) for length, decoder in decoders.items()},
        rounds=21,
    )
    return {
        f"token {length:,}": row(times)
        | {"time_over_first": ratio(times, seconds[1000]), "peak_memory": peaks[length]}
        for length, times in seconds.items()
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


def measure_compilation(checkpoint: Path, budget: int) -> dict:
    """Seconds to compile all of a run's decode steps in new processes, without and with a cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(checkpoint)]
        command += ["--budget", str(budget), "--max-new-tokens", str(budget + 8), "--ignore-eos"]
        command += ["--prompt", "Hello", "--stats", "json"]
        result = {}
        for name in ("cold", "warm"):
            done = subprocess.run(
                command,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            record = json.loads(done.stderr.splitlines()[-1])
            result[name] = {"compile_seconds": record["compile_seconds"]}
    return result


def make_prompt(model: Transformer, n_tokens: int) -> list[int]:
    tokens = model.tokenizer.encode(TEXT)
    return (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]


def print_table(title: str, rows: dict[str, dict]) -> None:
    """A Markdown table with a column for each key of the rows."""
    columns = list(dict.fromkeys(key for record in rows.values() for key in record))
    print(f"\n{title}\n\n| | {' | '.join(column.replace('_', ' ') for column in columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, record in rows.items():
        print(f"| {name} | {' | '.join(show(record[column]) for column in columns)} |", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    demo = ROOT / "models/SmolLM2-135M-Instruct"
    add("--checkpoint", type=Path, default=demo, help="local folder (default: the demo model)")
    add("--budget", type=int, default=512, help="slots (default: 512)")
    # Length first: a process's peak memory only grows, and the peers need more.
    add("--parts", help="default: length,policies,peers,compile; with --policies only policies")
    add("--policies", help="of the part policies: all, or names with commas (default: epikv)")
    add("--output", type=Path, default=Path("benchmark.json"), help="default: benchmark.json")
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    policies = args.policies or "epikv"
    try:
        for options in policy_settings(policies).values():
            EvictionConfig(args.budget, **options)
    except ValueError as error:
        parser.error(str(error))
    parts = {
        "peers": lambda: compare_peers(model, args.checkpoint, args.budget),
        "policies": lambda: compare_policies(
            model,
            args.budget,
            policy_settings(policies, model.config.n_layers, model.config.n_kv_heads),
        ),
        "length": lambda: compare_lengths(model, args.budget),
        "compile": lambda: measure_compilation(args.checkpoint, args.budget),
        "labels": lambda: compare_labels(model),
    }
    default = "policies" if args.policies else "length,policies,peers,compile"
    names = (args.parts or default).split(",")
    if "peers" in names and args.budget <= PEER_TOKENS:
        parser.error(f"the part peers needs a budget above {PEER_TOKENS}, got {args.budget}")
    for name in names:
        if name not in parts:
            parser.error(f"unknown part {name!r}; known: {', '.join(parts)}")
    try:
        model = Transformer.from_pretrained(args.checkpoint)
    except ValueError as error:
        parser.error(str(error))
    result = {"machine": {"this machine": describe(model)}}
    print_table(f"budget {args.budget}, {args.checkpoint.name}", result["machine"])
    for name in names:
        result[name] = parts[name]()
        print_table(name, result[name])
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

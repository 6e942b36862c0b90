# SPDX-License-Identifier: Apache-2.0
"""How far a policy's predictions are from the full cache's, on given texts: teacher-forced replay.

    python scripts/fidelity.py --traces FILE.jsonl --policies epikv,streaming --budgets 128,256

Texts are fed token by token under the full cache and under every policy and budget, all in step. At
each token the distribution of the next is compared with the full cache's: the loss gap in nats (on
the text's own next token), the KL divergence, and whether the likeliest token agrees. No answer key
is needed, and a small model shows differences in minutes. Also told is the share of slots held, of
those that can be by then: some policies leave slots empty for a while.

A file of --traces holds JSON lines with `id`, `prompt` and `trace`: the prompt is prefilled, the
trace replayed. One of --problems holds `id` and `problem`: the model writes the traces itself, with
a full cache. Prints a Markdown table with standard errors over the traces; the output folder holds
it, plots, and a record for every trace and setting. The same command goes on where it was stopped,
and more policies, budgets or recency windows may be added to a folder.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import BASELINES  # noqa: E402
from epikv import POLICIES, EvictionConfig  # noqa: E402
from generate import ArgumentParser, generate  # noqa: E402
from model import Transformer  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import (  # noqa: E402
    RunFolder,
    process_rank,
    read_lines,
    read_records,
    told_in_one_line,
    wait_for_others,
)
from replay import (  # noqa: E402
    CHUNK,
    Replay,
    Setting,
    Trace,
    add_settings,
    by_setting,
    check_numbers,
    describe,
    fingerprint,
    load_model,
    parse_settings,
    reads_attention,
    takes_chunks,
)
from tables import markdown  # noqa: E402

LABELS = {
    "loss_gap": "loss gap, nats per token",
    "kl": "KL divergence, nats per token",
    "agreement": "same likeliest token, share",
    "held": "slots held, share",
}
MEASURES = tuple(LABELS)
# Tokens by how far the text has run past the budget.
DISTANCES = {
    "before": (-math.inf, 0),
    "to 127": (0, 128),
    "to 511": (128, 512),
    "beyond": (512, math.inf),
}
AT_ONCE = 8  # settings that share one replay of the full cache; more would take more memory


@dataclass(frozen=True, order=True)
class Kind:
    """How predictions are computed: whether by the chunk, and whether with attention weights."""

    chunked: bool
    reads_attention: bool

    @classmethod
    def of(cls, config: EvictionConfig) -> "Kind":
        return cls(takes_chunks(config), reads_attention(config))

    @property
    def full_cache(self) -> Setting:
        """What forgets nothing; without a budget, `h2o` does not either."""
        return Setting("h2o" if self.reads_attention else "full")


def compare(full: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """Loss gap, KL, agreement of logits [B, T, vocab] with the full cache's. [3, B, T] float64"""
    full, other = full.log_softmax(-1), other.log_softmax(-1)
    difference = full - other
    loss_gap = difference.gather(-1, target[..., None])[..., 0]
    kl = (full.exp() * difference).sum(-1)
    agreement = full.argmax(-1) == other.argmax(-1)
    return torch.stack([loss_gap.double(), kl.double(), agreement.double()])


def replay(
    model: Transformer,
    traces: list[Trace],
    configs: dict[Hashable, EvictionConfig],
    compile_mode: str = "blocks",
    positions: str = "true",
) -> dict[Hashable, Tensor]:
    """The `MEASURES` [4, B, N] of every configuration at the N tokens of B traces of equal length.

    Each is compared with a full cache that computes, and rounds, as it does (see `Kind`), so a
    policy that forgets nothing has a gap of exactly zero. (ThinKV forgets with room to spare.)
    """
    tokens = torch.tensor([trace.tokens for trace in traces], device=model.device)  # [B, N]
    prompts = [trace.prompt for trace in traces]

    def start(config: EvictionConfig, **options) -> Replay:
        return Replay(model, config, prompts, tokens.shape[1], compile_mode, **options)

    kinds = {name: Kind.of(config) for name, config in configs.items()}
    full = {
        kind: start(kind.full_cache.config(longest(traces)), chunked=kind.chunked)
        for kind in {*kinds.values()}
    }
    others = {name: start(config, positions=positions) for name, config in configs.items()}
    found = {name: [] for name in configs}
    for chunk in tokens.split(CHUNK, dim=1):
        wanted = {kind: one.feed(chunk) for kind, one in full.items()}
        for name, other in others.items():
            measures = compare(wanted[kinds[name]], other.feed(chunk), chunk)
            found[name].append(torch.cat([measures, other.held[None]]).cpu())
    return {name: torch.cat(values, dim=-1) for name, values in found.items()}


def longest(traces: list[Trace]) -> int:
    """Tokens of the longest prompt and trace."""
    return max(len(trace.prompt) + len(trace.tokens) for trace in traces)


def write_traces(model: Transformer, problems: list[dict], args: argparse.Namespace) -> list[Trace]:
    """What the model writes on each problem with a full cache, up to `args.tokens` tokens."""
    traces = []
    for first in range(0, len(problems), args.batch_size):
        batch = problems[first : first + args.batch_size]
        prompts = [
            model.tokenizer.encode_chat([{"role": "user", "content": problem["problem"]}])
            for problem in batch
        ]
        result = generate(
            model,
            prompts,
            policy="full",
            max_new_tokens=args.tokens,
            seed=(args.seed + first) % 2**32,
            compile_mode=args.compile_mode,
        )
        for problem, prompt, output in zip(batch, prompts, result.outputs, strict=True):
            print(f"{problem['id']}: {len(output.tokens)} tokens written", file=sys.stderr)
            traces.append(Trace(problem["id"], prompt, output.tokens))
    return traces


# Records and tables ----------------------------------------------------------------------------


def summarise(values: Tensor, traces: list[Trace], budget: int | None) -> list[dict]:
    """A record for each trace: means of `values` [4, B, N] over all tokens, and by distance."""
    limit = math.inf if budget is None else budget
    records = []
    for row, trace in enumerate(traces):
        # The distribution compared at a token follows all those before it.
        past = len(trace.prompt) + torch.arange(len(trace.tokens)) - limit
        record = {"trace": trace.id, "all": means(values[:, row])}
        for name, (low, high) in DISTANCES.items():
            inside = (past >= low) & (past < high)
            if inside.any():
                record[name] = means(values[:, row, inside])
        records.append(record)
    return records


def means(values: Tensor) -> dict[str, float]:
    return dict(zip(MEASURES, [round(mean, 7) for mean in values.mean(-1).tolist()], strict=True))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error over the traces (0 for a single one)."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error


def table(results: dict[Setting, list[dict]]) -> str:
    """A Markdown table: a row for each setting, means and standard errors over the traces."""
    rows = []
    for setting, records in results.items():
        cells = [cell([record["all"][measure] for record in records]) for measure in MEASURES]
        rows.append([str(setting), setting.slot_map, *cells])
    return markdown(["", "slot map", *(LABELS[measure] for measure in MEASURES)], rows)


def distance_table(results: dict[Setting, list[dict]], measure: str) -> str:
    """One measure by how many tokens the text has run past the budget."""
    rows = []
    for setting, records in results.items():
        groups = [[r[name][measure] for r in records if name in r] for name in DISTANCES]
        rows.append([str(setting), *(cell(values) if values else "" for values in groups)])
    return markdown([f"{LABELS[measure]}, by tokens past the budget", *DISTANCES], rows)


def cell(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.4f} ± {error:.4f}" if len(values) > 1 else f"{mean:.4f}"


def plot(results: dict[Setting, list[dict]], folder: Path) -> None:
    """The measures against the budget, a line for each policy and recency window."""
    for measure in ("loss_gap", "kl", "agreement"):
        lines: dict[str, list[tuple[float, float, float, float]]] = {}
        for setting, records in results.items():
            if setting.budget is None:  # no difference at all
                continue
            mean, error = mean_and_error([record["all"][measure] for record in records])
            point = (setting.budget, mean, mean - error, mean + error)
            lines.setdefault(setting.line, []).append(point)
        title = "Difference from the full cache, mean and standard error over traces"
        if lines:
            path = folder / f"{measure}.png"
            line_plot(path, title, "budget, slots", LABELS[measure], lines, log_x=True)


# Command line ----------------------------------------------------------------------------------


def tokenize_trace(record: dict, tokenizer) -> Trace:
    tokens = tokenizer.ids(record["trace"], add_special_tokens=False)
    return Trace(record["id"], tokenizer.encode(record["prompt"]), tokens)


def cut(traces: list[Trace], n_tokens: int, limit: int | None) -> list[Trace]:
    """The first `limit` traces that have `n_tokens` tokens, cut to them."""
    long = [trace for trace in traces if len(trace.tokens) >= n_tokens and trace.prompt]
    if not long:
        longest = max((len(trace.tokens) for trace in traces), default=0)
        raise ValueError(f"no trace has {n_tokens} tokens, the longest {longest}; lower --tokens")
    return [Trace(trace.id, trace.prompt, trace.tokens[:n_tokens]) for trace in long[:limit]]


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--traces", type=Path, help="JSON lines: id, prompt, trace")
    source.add_argument("--problems", type=Path, help="JSON lines: id, problem; the model writes")
    add_settings(parser, "epikv,streaming,random", "256")
    add = parser.add_argument
    add("--tokens", type=int, default=1500, help="of each trace (default: 1500)")
    add("--limit", type=int, help="traces to take (default: all)")
    add("--batch-size", type=int, default=16, help="traces at once (default: 16)")
    add(
        "--positions",
        choices=("true", "cache-length"),
        default="true",
        help="an ablation: cache-length lets RoPE's positions stop at the budget (default: true)",
    )
    add("--output", type=Path, default=Path("fidelity"), help="folder (default: fidelity)")
    return parser


def find_traces(args: argparse.Namespace, model: Transformer, records: list[dict]) -> list[Trace]:
    """The traces of --traces; or what the model writes on --problems, once for a folder."""
    if args.traces is not None:
        return [tokenize_trace(record, model.tokenizer) for record in records]
    file = args.output / "traces.jsonl"
    if process_rank()[0] == 0 and not file.exists():
        traces = write_traces(model, records[: args.limit], args)
        scratch = file.with_suffix(".part")
        scratch.write_text("".join(json.dumps(asdict(trace)) + "\n" for trace in traces))
        scratch.replace(file)
    wait_for_others(file.exists)
    return [Trace(**fields) for fields in read_lines(args.output, "traces")]


def run(
    args: argparse.Namespace,
    model: Transformer,
    traces: list[Trace],
    settings: list[Setting],
    folder: RunFolder,
) -> None:
    """Replay what the folder has no records of yet, as much of it as is this process's share."""
    rank, world = process_rank()
    # Those that share a full cache stand together.
    kinds = {s: Kind.of(s.config(args.tokens, calibration=args.calibration)) for s in settings}
    mine = sorted(settings, key=kinds.__getitem__)[rank::world]
    todo = missing(traces, mine, folder.path)
    work = []
    for first in range(0, len(traces), args.batch_size):
        batch = traces[first : first + args.batch_size]
        left = [s for s in mine if any((s, trace.id) in todo for trace in batch)]
        work += [(batch, left[i : i + AT_ONCE]) for i in range(0, len(left), AT_ONCE)]
    total = sum(len(batch) * len(group) for batch, group in work)
    start, finished = time.perf_counter(), 0
    for batch, group in work:
        configs = {s: s.config(longest(batch), args.seed, args.calibration) for s in group}
        found = replay(model, batch, configs, args.compile_mode, args.positions)
        for setting in group:
            for record in summarise(found[setting], batch, setting.budget):
                if (setting, record["trace"]) in todo:
                    folder.append(asdict(setting) | record)
        finished += len(batch) * len(group)
        left = (time.perf_counter() - start) / finished * (total - finished)
        print(f"{finished} of {total} replays, {left / 60:.0f} minutes left", file=sys.stderr)


def settings_of(args: argparse.Namespace, model: Transformer, source: Path) -> dict:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return describe(args, model) | {
        "texts": f"{source.name}, sha256 {digest}",
        **{name: getattr(args, name) for name in ("tokens", "limit", "batch_size", "positions")},
        "calibration": fingerprint(args.calibration),
    }


def missing(traces: list[Trace], settings: list[Setting], folder: Path) -> set[tuple[Setting, str]]:
    """What the folder has no record of."""
    results = by_setting(read_lines(folder, "records"))
    done = {(setting, record["trace"]) for setting in results for record in results[setting]}
    return {(setting, trace.id) for setting in settings for trace in traces} - done


def report(folder: Path, described: dict, n_traces: int) -> None:
    """Print the table of all records, and put it and the plots into the folder."""
    results = by_setting(read_lines(folder, "records"))
    text = (
        f"{described['checkpoint']}, {n_traces} traces x {described['tokens']} tokens,"
        f" {described['dtype']}, positions {described['positions']}; means ± standard errors over"
        f" traces\n\n{table(results)}\n"
    )
    for measure in ("loss_gap", "kl", "agreement"):
        text += f"\n{distance_table(results, measure)}\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot(results, folder)
    print(text, end="")


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    with told_in_one_line(parser):
        rank, _ = process_rank()
        need_matplotlib()
        settings = parse_settings(args)
        check_numbers(args, "tokens", "batch_size", "limit")
        source = args.traces or args.problems
        fields = ("id", "prompt", "trace") if args.traces else ("id", "problem")
        records = read_records(source, dict.fromkeys(fields, str))
        model = load_model(args)
        described = settings_of(args, model, source)
        with RunFolder(args.output, described, rank) as folder:
            traces = cut(find_traces(args, model, records), args.tokens, args.limit)
            run(args, model, traces, settings, folder)
        if rank == 0:
            wait_for_others(lambda: not missing(traces, settings, args.output))
            report(args.output, described, len(traces))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How many problems a model solves under each policy and budget: pass@1, with intervals.

    python scripts/evaluate.py --checkpoint MODEL --dataset math500 \\
        --policies full,epikv,streaming --budgets 512,1024 --output runs/math500

Every answer is a line in the output folder the moment it ends, so the same command takes up a run
that was killed, and redoes its tables. Under torchrun each process takes its share of the batches.
Writes `table.md` (accuracy, and paired differences to the first policy), `time.md`, and plots.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from answers import is_right, last_boxed  # noqa: E402
from baselines import BASELINES  # noqa: E402
from epikv import POLICIES, EvictionConfig  # noqa: E402
from generate import (  # noqa: E402
    DTYPES,
    ArgumentParser,
    Engine,
    Generation,
    Output,
    Sampling,
    fit_context,
    full_budget,
    peak_memory,
    tokenize,
)
from model import Transformer, one_line  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import RunFolder, drop_torn_line, process_rank, read_records  # noqa: E402
from tables import bootstrap, markdown, mcnemar, wilson  # noqa: E402

# DeepSeek's advice for its R1 models, which goes without a system message.
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
FIELDS = {"id": str, "problem": str, "answer": str}
# Repository, configuration, split, and columns of id, problem, answer (no id: the row's number).
HUB = {
    "math500": ("HuggingFaceH4/MATH-500", None, "test", ("unique_id", "problem", "answer")),
    "aime2024": ("Maxwell-Jia/AIME_2024", None, "train", ("ID", "Problem", "Answer")),
    "aime2025": ("MathArena/aime_2025", None, "train", ("problem_idx", "problem", "answer")),
    "gsm8k": ("openai/gsm8k", "main", "test", (None, "question", "answer")),
}
OUTCOMES = ("correct", "wrong", "no answer", "capped", "failed")
POLL_SECONDS, PATIENCE_SECONDS = 30, 600  # of the first process, for the others' answers

PAIRED_TITLES = ["problems", "difference, points", "95 % interval", "McNemar p"]
PLOTS = {
    "accuracy": "pass@1, %",
    "tokens": "tokens generated",
    "capped": "capped, %",
    "time": "seconds per problem and sample",
}

Key = tuple[str, int | None]  # policy and budget; None for the full cache

# Problems --------------------------------------------------------------------------------------


def load_problems(dataset: str) -> list[dict[str, str]]:
    """The problems of a name in HUB or of a JSON-lines file, as `id`, `problem`, `answer`."""
    if dataset in HUB:
        problems = load_from_hub(dataset)
    elif Path(dataset).exists():
        problems = read_records(Path(dataset), FIELDS)
    else:
        raise ValueError(f"dataset {dataset!r} is no file and none of {', '.join(HUB)}")
    if not problems:
        raise ValueError(f"dataset {dataset!r} holds no problems")
    return [{field: problem[field] for field in FIELDS} for problem in problems]


def load_from_hub(name: str) -> list[dict[str, str]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("a dataset of the hub needs: pip install -e .[eval]") from None
    repo, config, split, (id_column, problem, answer) = HUB[name]
    try:
        rows = load_dataset(repo, config, split=split)
    except Exception as error:  # of the network, the hub, the cache or the format: its own types
        raise ValueError(
            f"cannot load {repo} ({one_line(error)}); give a JSON-lines file with id, problem,"
            " answer"
        ) from None
    return [
        {
            "id": str(row[id_column] if id_column else number),
            "problem": row[problem],
            "answer": final_answer(str(row[answer])),
        }
        for number, row in enumerate(rows)
    ]


def final_answer(solution: str) -> str:
    """The answer itself: GSM8K has it after the solution, behind "#### "."""
    _, mark, number = solution.rpartition("#### ")
    return number.replace(",", "").strip() if mark else solution


# Work ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One sample of one problem."""

    id: str
    sample: int
    prompt: list[int]
    truth: str


@dataclass(frozen=True)
class Batch:
    """Rows that are generated together, the `number`th of a policy and budget."""

    key: Key
    number: int
    rows: list[Row]


def cut_batches(rows: list[Row], keys: list[Key], size: int) -> list[Batch]:
    """All the work, in batches that are the same in every run, wherever it is taken up."""
    starts = range(0, len(rows), size)
    return [
        Batch(key, number, rows[start : start + size])
        for key in keys
        for number, start in enumerate(starts)
    ]


def key_at(policy: str, budget: int) -> Key:
    """A policy at a budget, of which the full cache has none."""
    return policy, None if policy == "full" else budget


def name_of(key: Key, row: Row) -> tuple:
    return (*key, row.id, row.sample)


def latest(records: list[dict]) -> dict[tuple, dict]:
    """One record for each row: a failure gives way to a later try, in whatever file that is."""
    found = {}
    for record in records:
        name = tuple(record[field] for field in ("policy", "budget", "id", "sample"))
        if record["outcome"] != "failed" or name not in found:
            found[name] = record
    return found


@dataclass
class Runner:
    """A model that generates batches, with one engine for each policy and budget."""

    model: Transformer
    configs: dict[Key, EvictionConfig]
    sampling: Sampling
    batch_size: int
    max_new_tokens: int
    compile_mode: str
    times: Path  # JSON lines, apart from the records: no two runs take the same time
    key: Key | None = None
    engine: Engine | None = None

    def engine_of(self, key: Key) -> Engine:
        if self.engine is None or self.key != key:
            self.engine = None  # its cache goes before the next one comes
            shape = (self.sampling, self.batch_size, self.compile_mode)
            self.engine, self.key = Engine(self.model, self.configs[key], *shape), key
        return self.engine

    def start(self, batch: Batch) -> Generation:
        """A generation of a batch's rows, filled up with copies of the last: one shape for all.

        The seed differs between batches and not between policies, whose differences then vary less.
        """
        engine = self.engine_of(batch.key)
        engine.state.seed.fill_(batch_seed(self.sampling.seed, batch.number))
        prompts = [row.prompt for row in batch.rows]
        prompts += prompts[-1:] * (self.batch_size - len(prompts))
        return Generation(engine, prompts, self.max_new_tokens, self.model.eos_ids)

    def run(self, batch: Batch) -> Iterator[dict]:
        """A record for each row as it ends; if something breaks, a failure for all that is left."""
        left = dict(enumerate(batch.rows))
        outputs = [Output() for _ in left]
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)
        try:
            generation = self.start(batch)
            outputs = generation.outputs
            for delta in generation:
                if delta.row in left and outputs[delta.row].stop_reason != "interrupted":
                    yield grade(batch.key, left.pop(delta.row), outputs[delta.row])
                if not left:  # a copy that fills up may go on
                    break
        except Exception as error:  # no memory, say; the next batch may have enough
            self.engine = None
            for number, row in left.items():
                yield failure(batch.key, row, outputs[number], error)
        else:
            self.write_time(batch, generation)

    def write_time(self, batch: Batch, generation: Generation) -> None:
        record = {
            "policy": batch.key[0],
            "budget": batch.key[1],
            "batch": batch.number,
            "rows": len(batch.rows),
            "seconds": generation.prefill_seconds + generation.decode_seconds,
            "tokens": sum(len(output.tokens) for output in generation.outputs[: len(batch.rows)]),
            "peak_memory": peak_memory(self.model.device),
        }
        with self.times.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def batch_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])


def grade(key: Key, row: Row, output: Output) -> dict:
    """The record of a row that has ended. One at the limit is capped, whatever its box.

    `right` tells of the last box alone, for the papers that count a capped one as well.
    """
    answer = last_boxed(output.text)
    try:
        right = answer is not None and is_right(answer, row.truth)
    except Exception as error:
        return failure(key, row, output, error)
    if output.stop_reason == "length":
        outcome = "capped"
    elif answer is None:
        outcome = "no answer"
    else:
        outcome = "correct" if right else "wrong"
    return record_of(key, row, output, outcome) | {"right": right}


def failure(key: Key, row: Row, output: Output, error: Exception) -> dict:
    text = f"{type(error).__name__}: {one_line(error)}"
    return record_of(key, row, output, "failed") | {"error": text}


def record_of(key: Key, row: Row, output: Output, outcome: str) -> dict:
    policy, budget = key
    return {
        "policy": policy,
        "budget": budget,
        "id": row.id,
        "sample": row.sample,
        "outcome": outcome,
        "stopped": None if output.stop_reason == "interrupted" else output.stop_reason,
        "answer": last_boxed(output.text),
        "tokens": len(output.tokens),
        "text": output.text,
    }


def work(runner: Runner, batches: list[Batch], folder: RunFolder, tells: bool) -> None:
    """Run what is not yet recorded, a batch with a row missing as a whole."""
    records = latest(folder.records)
    done = {name for name, record in records.items() if record["outcome"] != "failed"}
    wanted = [b for b in batches if any(name_of(b.key, row) not in done for row in b.rows)]
    start = time.perf_counter()
    for count, batch in enumerate(wanted, start=1):
        errors = []
        for record in runner.run(batch):
            if (*batch.key, record["id"], record["sample"]) not in done:
                folder.append(record)
                errors += [record["error"]] if record["outcome"] == "failed" else []
        if tells:
            left = (time.perf_counter() - start) / count * (len(wanted) - count)
            failed = f", {len(errors)} failed: {errors[-1]}" if errors else ""
            print(
                f"{label(batch.key)}: {count} of {len(wanted)} batches,"
                f" {left / 60:.0f} minutes left{failed}",
                file=sys.stderr,
            )


def wait_for_rows(path: Path, settings: dict, names: set[tuple]) -> dict[tuple, dict]:
    """The folder's records once all of `names` have one, or none has come for too long."""
    n_found, since = -1, time.monotonic()
    while True:
        found = latest(RunFolder(path, settings).records)
        if len(found) != n_found:
            n_found, since = len(found), time.monotonic()
        if names <= found.keys() or time.monotonic() - since > PATIENCE_SECONDS:
            return found
        time.sleep(POLL_SECONDS)


# Statistics ------------------------------------------------------------------------------------


def solved_shares(records: list[dict]) -> dict[str, float]:
    """Of each problem the share of its samples that are correct, failures left out."""
    samples = {}
    for record in records:
        if record["outcome"] != "failed":
            samples.setdefault(record["id"], []).append(record["outcome"] == "correct")
    return {name: statistics.mean(map(float, found)) for name, found in samples.items()}


def accuracy(shares: dict[str, float], n_samples: int) -> tuple[float, float, float]:
    """pass@1 and its interval."""
    values = [*shares.values()]
    mean = statistics.mean(values)
    return mean, *(wilson(mean, len(values)) if n_samples == 1 else bootstrap(values))


# Report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The records of the policies and budgets asked for, in their order."""

    policies: list[str]
    budgets: list[int]
    n_samples: int
    n_rows: int  # of each policy and budget
    records: dict[Key, list[dict]]


def label(key: Key) -> str:
    return key[0] if key[1] is None else f"{key[0]}, {key[1]}"


def accuracy_table(results: Results) -> str:
    titles = ["", "pass@1, %", "95 % interval", "problems", "samples", *OUTCOMES[:3]]
    titles += ["capped (right)", "failed", "tokens", "capped, %"]
    rows = [accuracy_row(key, found, results) for key, found in results.records.items()]
    return markdown(titles, rows)


def accuracy_row(key: Key, records: list[dict], results: Results) -> list[str]:
    counts = {name: sum(r["outcome"] == name for r in records) for name in OUTCOMES}
    right = sum(r["outcome"] == "capped" and r["right"] for r in records)
    shares = solved_shares(records)
    score = interval = tokens = capped = ""
    if shares:
        mean, low, high = (100 * x for x in accuracy(shares, results.n_samples))
        score, interval = f"{mean:.1f}", f"{low:.1f} to {high:.1f}"
        tokens, capped = f"{mean_tokens(records):.0f}", f"{100 * capped_rate(records):.1f}"
    numbers = [len(shares), len(records) - counts["failed"], *map(counts.get, OUTCOMES[:3])]
    ends = [f"{counts['capped']} ({right})", str(counts["failed"]), tokens, capped]
    return [label(key), score, interval, *map(str, numbers), *ends]


def mean_tokens(records: list[dict]) -> float:
    return statistics.mean(r["tokens"] for r in records if r["outcome"] != "failed")


def capped_rate(records: list[dict]) -> float:
    return statistics.mean(r["stopped"] == "length" for r in records if r["outcome"] != "failed")


def paired_table(results: Results) -> str:
    """Every policy against the first at the same budget, over the problems that both have."""
    first, *others = results.policies
    rows = []
    for budget in results.budgets:
        base = solved_shares(results.records[key_at(first, budget)])
        for policy in others:
            shares = solved_shares(results.records[key_at(policy, budget)])
            both = [(shares[name], base[name]) for name in base if name in shares]
            rows.append([policy, str(budget), *paired_cells(both, results.n_samples)])
    return markdown([f"against {first}", "budget", *PAIRED_TITLES], rows)


def paired_cells(both: list[tuple[float, float]], n_samples: int) -> list[str]:
    if not both:
        return ["0", "", "", ""]
    differences = [100 * (one - other) for one, other in both]
    low, high = bootstrap(differences)
    p = ""
    if n_samples == 1:
        p = f"{mcnemar(sum(d > 0 for d in differences), sum(d < 0 for d in differences)):.4f}"
    mean = statistics.mean(differences)
    return [str(len(both)), f"{mean:+.1f}", f"{low:+.1f} to {high:+.1f}", p]


def report(results: Results, settings: dict) -> str:
    """All that `table.md` says: nothing but the records and the settings goes in."""
    text = f"{settings['checkpoint']} on {settings['dataset']}, decoding {settings['decoding']}\n"
    text += f"\n{accuracy_table(results)}\n"
    if len(results.policies) > 1:
        text += f"\n{paired_table(results)}\n"
    for key, records in results.records.items():
        if len(records) < results.n_rows:
            text += f"\nMissing of {label(key)}: {results.n_rows - len(records)} answers.\n"
    return text


def read_times(path: Path, keys: list[Key]) -> dict[Key, dict]:
    """For each policy and budget the sums over the batches of all processes."""
    sums = {}
    for file in sorted(path.glob("times*.jsonl")):
        *lines, _ = file.read_text(encoding="utf-8").split("\n")  # the last may be half written
        for record in map(json.loads, lines):
            found = sums.setdefault((record["policy"], record["budget"]), {})
            for name in ("rows", "seconds", "tokens"):
                found[name] = found.get(name, 0) + record[name]
            found["memory"] = max(found.get("memory", 0), record["peak_memory"])
    return {key: sums[key] for key in keys if key in sums}


def time_table(times: dict[Key, dict]) -> str:
    """Time without compilation; a row's is its share of its batch's."""
    titles = ["", "s per 1,000 tokens", "tokens/s", PLOTS["time"], "peak memory, GB"]
    rows = []
    for key, found in times.items():
        seconds, tokens = found["seconds"], max(1, found["tokens"])
        numbers = [1000 * seconds / tokens, tokens / seconds, seconds / found["rows"]]
        numbers.append(found["memory"] / 1e9)
        rows.append([label(key), *(f"{number:.2f}" for number in numbers)])
    return markdown(titles, rows)


def points_of(results: Results, times: dict[Key, dict], key: Key) -> dict[str, tuple]:
    """Value, low and high of what is plotted of a policy and budget, as far as there is any."""
    records, points = results.records[key], {}
    if shares := solved_shares(records):
        points["accuracy"] = tuple(100 * x for x in accuracy(shares, results.n_samples))
        points["tokens"] = (mean_tokens(records),) * 3
        points["capped"] = (100 * capped_rate(records),) * 3
    if key in times:
        points["time"] = (times[key]["seconds"] / times[key]["rows"],) * 3
    return points


def draw_plots(path: Path, title: str, results: Results, times: dict[Key, dict]) -> None:
    """A plot of each of PLOTS against the budget, the full cache as a level line."""
    points = {key: points_of(results, times, key) for key in results.records}
    for name, y_label in PLOTS.items():
        series = {}
        for policy in results.policies:
            for budget in sorted(results.budgets):
                if point := points[key_at(policy, budget)].get(name):
                    series.setdefault(policy, []).append((budget, *point))
        if series:
            line_plot(path / f"{name}.png", title, "budget", y_label, series, log_x=True)


# Command line ----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--checkpoint", required=True, help="Hugging Face repo id or local folder")
    add("--dataset", required=True, help=f"{', '.join(HUB)}, or JSON lines: id, problem, answer")
    add("--policies", default="epikv,streaming,full", help="others are compared to the first")
    add("--budgets", default="1024", help="slots, with commas (default: 1024)")
    add("--limit", type=int, help="problems (default: all)")
    add("--samples", type=int, default=1, help="of each problem (default: 1)")
    decoding = parser.add_mutually_exclusive_group()
    decoding.add_argument("--temperature", type=float, help="default: the checkpoint's")
    decoding.add_argument("--greedy", action="store_true", help="take the likeliest token")
    add("--max-new-tokens", type=int, help="default: what the context leaves the longest prompt")
    add("--batch-size", type=int, default=8, help="rows at once (default: 8)")
    add("--seed", type=int, default=0, help="default: 0")
    add("--dtype", choices=DTYPES, help="default: float32 on cpu, else bfloat16")
    add("--device", help="default: cuda where there is one, else cpu")
    add("--recent", type=int, help="last tokens always kept (default: the policy's)")
    add("--no-compile", dest="compile_mode", action="store_const", const="none", default="blocks")
    add("--output", type=Path, default=Path("evaluation"), help="folder (default: evaluation)")
    return parser


def check(args: argparse.Namespace) -> None:
    """What needs neither model nor dataset to be seen wrong."""
    for name in ("limit", "samples", "max_new_tokens", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {value}")
    Sampling(args.temperature or 0, seed=args.seed)
    need_matplotlib()
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("grading needs math-verify: pip install -e .[eval]")


def parse_list(text: str) -> list[str]:
    return [*dict.fromkeys(text.split(","))]


def parse_budgets(text: str) -> list[int]:
    try:
        return [*map(int, parse_list(text))]
    except ValueError:
        raise ValueError(f"budgets must be numbers with commas, got {text!r}") from None


def make_config(key: Key, args: argparse.Namespace, longest: int) -> EvictionConfig:
    """The cache of a policy and budget; the full one holds `longest` tokens."""
    policy, budget = key
    if policy == "full":
        return EvictionConfig(full_budget(longest), "full")
    return EvictionConfig(budget, policy, recent=args.recent, seed=args.seed)


def load_model(args: argparse.Namespace) -> Transformer:
    """The model, under torchrun on the GPU of this process."""
    device = args.device
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    model = Transformer.from_pretrained(args.checkpoint, device, DTYPES.get(args.dtype))
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # where streams and graphs are made
    return model


def settings_of(args: argparse.Namespace, runner: Runner, digest: str) -> dict:
    """All that the records depend on, but for policies and budgets: a folder takes more of them."""
    path = Path(args.checkpoint)
    decoding = asdict(runner.sampling)
    del decoding["seed"]
    return {
        "checkpoint": str(path.resolve()) if path.is_dir() else args.checkpoint,
        "dataset": Path(args.dataset).name,
        "sha256": digest,
        "limit": args.limit,
        "samples": args.samples,
        "decoding": decoding if runner.sampling.draws else "greedy",
        "instruction": INSTRUCTION,
        "seed": args.seed,
        "max_new_tokens": runner.max_new_tokens,
        "batch_size": args.batch_size,
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "device": runner.model.device.type,
        "compile_mode": args.compile_mode,
        "recent": args.recent,
        "torch": torch.__version__,
    }


def make_rows(model: Transformer, problems: list[dict[str, str]], n_samples: int) -> list[Row]:
    """All samples of a problem side by side, as one user's turn each."""
    texts = [f"{problem['problem']}\n\n{INSTRUCTION}" for problem in problems]
    prompts = tokenize(model, texts, system=None, raw=False)
    return [
        Row(problem["id"], sample, prompt, problem["answer"])
        for problem, prompt in zip(problems, prompts, strict=True)
        for sample in range(n_samples)
    ]


def make_runner(
    args: argparse.Namespace, model: Transformer, rows: list[Row], keys: list[Key], times: Path
) -> Runner:
    prompts = [row.prompt for row in rows]
    max_new_tokens = fit_context(model, prompts, args.max_new_tokens)
    longest = max(map(len, prompts)) + max_new_tokens
    configs = {key: make_config(key, args, longest) for key in keys}
    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling.for_model(model, args.seed, temperature=temperature)
    return Runner(
        model, configs, sampling, args.batch_size, max_new_tokens, args.compile_mode, times
    )


def evaluate(args: argparse.Namespace, rank: int, n_processes: int) -> None:
    """The whole run of the process `rank`; the first one reports."""
    check(args)
    policies, budgets = parse_list(args.policies), parse_budgets(args.budgets)
    keys = [*dict.fromkeys(key_at(policy, budget) for policy in policies for budget in budgets)]
    for key in keys:
        make_config(key, args, longest=1)
    problems = load_problems(args.dataset)
    digest = hashlib.sha256(json.dumps(problems).encode()).hexdigest()
    model = load_model(args)
    rows = make_rows(model, problems[: args.limit], args.samples)
    times = args.output / (f"times.{rank}.jsonl" if rank else "times.jsonl")
    runner = make_runner(args, model, rows, keys, times)
    settings = settings_of(args, runner, digest)
    folder = RunFolder(args.output, settings, rank)
    if times.exists():
        drop_torn_line(times)
    batches = cut_batches(rows, keys, args.batch_size)
    work(runner, batches[rank::n_processes], folder, tells=rank == 0)
    if rank == 0:
        names = {key: [name_of(key, row) for row in rows] for key in keys}
        found = wait_for_rows(args.output, settings, {n for group in names.values() for n in group})
        records = {key: [found[n] for n in group if n in found] for key, group in names.items()}
        results = Results(policies, budgets, args.samples, len(rows), records)
        write_report(args.output, results, settings)


def write_report(path: Path, results: Results, settings: dict) -> None:
    """Print the tables, and put them and the plots into the folder."""
    text = report(results, settings)
    print(text)
    (path / "table.md").write_text(text, encoding="utf-8")
    times = read_times(path, [*results.records])
    (path / "time.md").write_text(time_table(times) + "\n", encoding="utf-8")
    title = f"{Path(settings['checkpoint']).name} on {settings['dataset']}"
    draw_plots(path, title, results, times)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    try:
        evaluate(args, *process_rank())
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        parser.error(one_line(error))


if __name__ == "__main__":
    main()

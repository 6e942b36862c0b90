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
from epikv import POLICIES, Calibration  # noqa: E402
from generate import (  # noqa: E402
    ArgumentParser,
    Engine,
    Generation,
    Output,
    Sampling,
    fit_context,
    peak_memory,
    tokenize,
)
from model import Transformer, one_line  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import (  # noqa: E402
    RunFolder,
    drop_torn_line,
    process_rank,
    read_lines,
    read_records,
    told_in_one_line,
    wait_for_others,
)
from replay import (  # noqa: E402
    Setting,
    add_settings,
    by_setting,
    check_numbers,
    describe,
    fingerprint,
    load_model,
    parse_settings,
    share_held,
)
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
LONGEST_ANSWER = 32_768  # tokens, unless the user says otherwise: a loop would fill the context

PAIRED_TITLES = ["problems", "difference, points", "95 % interval", "McNemar p"]
PLOTS = {
    "accuracy": "pass@1, %",
    "tokens": "tokens generated",
    "capped": "capped, %",
    "time": "seconds per problem and sample",
}

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
    final = number_after_solution if name == "gsm8k" else str
    try:
        return [
            {
                "id": str(row[id_column] if id_column else number),
                "problem": row[problem],
                "answer": final(row[answer]),
            }
            for number, row in enumerate(load_dataset(repo, config, split=split))
        ]
    except Exception as error:  # of the network, the hub, the cache or the format: its own types
        raise ValueError(
            f"cannot load {repo} ({one_line(error)}); give a JSON-lines file with id, problem,"
            " answer"
        ) from None


def number_after_solution(text: str) -> str:
    """GSM8K has the answer behind "#### ", with commas between the thousands."""
    return text.rpartition("#### ")[2].replace(",", "").strip()


# Work ------------------------------------------------------------------------------------------


Name = tuple[Setting, str, int]  # of an answer: setting, problem, sample


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

    setting: Setting
    number: int
    rows: list[Row]


def cut_batches(rows: list[Row], settings: list[Setting], size: int) -> list[Batch]:
    """All the work, in batches that are the same in every run, wherever it is taken up."""
    starts = range(0, len(rows), size)
    return [
        Batch(setting, number, rows[start : start + size])
        for setting in settings
        for number, start in enumerate(starts)
    ]


def latest(records: list[dict]) -> dict[Name, dict]:
    """One record for each row: a failure gives way to a later try, in whatever file that is."""
    found = {}
    for record in records:
        setting = Setting(record["policy"], record["budget"], record["recent"])
        name = setting, record["id"], record["sample"]
        if record["outcome"] != "failed" or name not in found:
            found[name] = record
    return found


@dataclass
class Runner:
    """A model that generates batches, with one engine for each policy and budget."""

    model: Transformer
    longest: int  # tokens of a row, prompt and answer
    sampling: Sampling
    batch_size: int
    max_new_tokens: int
    compile_mode: str
    calibration: Calibration | None
    times: Path  # JSON lines, apart from the records: no two runs take the same time
    setting: Setting | None = None
    engine: Engine | None = None

    def engine_of(self, setting: Setting) -> Engine:
        if self.engine is None or self.setting != setting:
            self.engine = None  # its cache goes before the next one comes
            config = setting.config(self.longest, self.sampling.seed, self.calibration)
            shape = (self.sampling, self.batch_size, self.compile_mode)
            self.engine, self.setting = Engine(self.model, config, *shape), setting
        return self.engine

    def start(self, batch: Batch) -> Generation:
        """A generation of a batch's rows, filled up with copies of the last: one shape for all.

        The seed differs between batches and not between policies, whose differences then vary less.
        """
        engine = self.engine_of(batch.setting)
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
                    yield grade(batch.setting, left.pop(delta.row), outputs[delta.row])
                if not left:  # a copy that fills up may go on
                    break
        except ValueError:  # of the settings, such as no compiler: no batch would fare better
            raise
        except Exception as error:  # no memory, say; the next batch may have enough
            self.engine = None
            for number, row in left.items():
                yield failure(batch.setting, row, outputs[number], error)
        else:
            self.write_time(batch, generation)

    def write_time(self, batch: Batch, generation: Generation) -> None:
        record = {
            **asdict(batch.setting),
            "batch": batch.number,
            "rows": len(batch.rows),
            "seconds": generation.prefill_seconds + generation.decode_seconds,
            "tokens": sum(len(output.tokens) for output in generation.outputs[: len(batch.rows)]),
            "peak_memory": peak_memory(self.model.device),
            "held": share_held(generation.engine.cache).mean().item(),
        }
        with self.times.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def batch_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])


def grade(setting: Setting, row: Row, output: Output) -> dict:
    """The record of a row that has ended. One at the limit is capped, whatever its box.

    `right` tells of the last box alone, for the papers that count a capped one as well. A box that
    the grader cannot read in time is not right: nothing that one would write as an answer is so.
    """
    answer = last_boxed(output.text)
    try:
        right = answer is not None and is_right(answer, row.truth)
    except TimeoutError:
        right = False
    except Exception as error:
        return failure(setting, row, output, error)
    if output.stop_reason == "length":
        outcome = "capped"
    elif answer is None:
        outcome = "no answer"
    else:
        outcome = "correct" if right else "wrong"
    return record_of(setting, row, output, outcome) | {"right": right}


def failure(setting: Setting, row: Row, output: Output, error: Exception) -> dict:
    text = f"{type(error).__name__}: {one_line(error)}"
    return record_of(setting, row, output, "failed") | {"error": text}


def record_of(setting: Setting, row: Row, output: Output, outcome: str) -> dict:
    return {
        **asdict(setting),
        "id": row.id,
        "sample": row.sample,
        "outcome": outcome,
        "stopped": None if output.stop_reason == "interrupted" else output.stop_reason,
        "answer": last_boxed(output.text),
        "tokens": len(output.tokens),
        "text": output.text,
    }


def names_of(batch: Batch) -> list[Name]:
    return [(batch.setting, row.id, row.sample) for row in batch.rows]


def work(runner: Runner, batches: list[Batch], folder: RunFolder, tells: bool) -> None:
    """Run what is not yet recorded, a batch with a row missing as a whole."""
    records = latest(read_lines(folder.path, "records"))
    done = {name for name, record in records.items() if record["outcome"] != "failed"}
    wanted = [batch for batch in batches if any(name not in done for name in names_of(batch))]
    start = time.perf_counter()
    for count, batch in enumerate(wanted, start=1):
        errors = []
        for record in runner.run(batch):
            if (batch.setting, record["id"], record["sample"]) not in done:
                folder.append(record)
                errors += [record["error"]] if record["outcome"] == "failed" else []
        if tells:
            left = (time.perf_counter() - start) / count * (len(wanted) - count)
            failed = f", {len(errors)} failed: {errors[-1]}" if errors else ""
            print(
                f"{batch.setting}: {count} of {len(wanted)} batches,"
                f" {left / 60:.0f} minutes left{failed}",
                file=sys.stderr,
            )


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
    if n_samples == 1 or len({*values}) == 1:  # of equal values all bootstrap samples are the same
        return mean, *wilson(mean, len(values))
    return mean, *bootstrap(values)


# Report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The records of the settings asked for, in their order."""

    n_samples: int
    records: dict[Setting, list[dict]]

    @property
    def budgets(self) -> list[int]:
        return sorted({s.budget for s in self.records if s.budget is not None})

    def line(self, name: str, budget: int) -> list[dict]:
        """The records of a policy's line at a budget; the full cache has the same at all."""
        for setting, records in self.records.items():
            if setting.line == name and setting.budget in (budget, None):
                return records
        return []

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(setting.line for setting in self.records))


def accuracy_table(results: Results) -> str:
    titles = ["", "slot map", "pass@1, %", "95 % interval", "problems", "samples", *OUTCOMES[:3]]
    titles += ["capped (right)", "failed", "right with capped, %", "tokens", "capped, %"]
    rows = [accuracy_row(setting, results) for setting in results.records]
    return markdown(titles, rows)


def accuracy_row(setting: Setting, results: Results) -> list[str]:
    records = results.records[setting]
    counts = {name: sum(r["outcome"] == name for r in records) for name in OUTCOMES}
    capped_right = sum(r["outcome"] == "capped" and r["right"] for r in records)
    n_graded = len(records) - counts["failed"]
    shares = solved_shares(records)
    score = interval = right = tokens = capped = ""
    if shares:
        mean, low, high = (100 * x for x in accuracy(shares, results.n_samples))
        score, interval = f"{mean:.1f}", f"{low:.1f} to {high:.1f}"
        right = f"{100 * (counts['correct'] + capped_right) / n_graded:.1f}"
        tokens, capped = f"{mean_tokens(records):.0f}", f"{100 * capped_rate(records):.1f}"
    numbers = [len(shares), n_graded, *map(counts.get, OUTCOMES[:3])]
    ends = [f"{counts['capped']} ({capped_right})", str(counts["failed"]), right, tokens, capped]
    return [str(setting), setting.slot_map, score, interval, *map(str, numbers), *ends]


def mean_tokens(records: list[dict]) -> float:
    return statistics.mean(r["tokens"] for r in records if r["outcome"] != "failed")


def capped_rate(records: list[dict]) -> float:
    return statistics.mean(r["stopped"] == "length" for r in records if r["outcome"] != "failed")


def paired_table(results: Results) -> str:
    """Every line against the first at the same budget, over the problems that both have."""
    first, *others = results.lines
    rows = []
    for budget in results.budgets:
        base = solved_shares(results.line(first, budget))
        for other in others:
            shares = solved_shares(results.line(other, budget))
            both = [(shares[name], base[name]) for name in base if name in shares]
            rows.append([other, str(budget), *paired_cells(both, results.n_samples)])
    return markdown([f"against {first}", "budget", *PAIRED_TITLES], rows)


def paired_cells(both: list[tuple[float, float]], n_samples: int) -> list[str]:
    if not both:
        return ["0", "", "", ""]
    differences = [100 * (one - other) for one, other in both]
    low, high = bootstrap(differences)
    interval = f"{low:+.1f} to {high:+.1f}" if any(differences) else "none differs"
    p = ""
    if n_samples == 1:
        p = f"{mcnemar(sum(d > 0 for d in differences), sum(d < 0 for d in differences)):.4f}"
    mean = statistics.mean(differences)
    return [str(len(both)), f"{mean:+.1f}", interval, p]


def report(results: Results, settings: dict) -> str:
    """All that `table.md` says: nothing but the records and the settings goes in."""
    text = f"{settings['checkpoint']} on {settings['dataset']}, decoding {settings['decoding']}\n"
    text += f"\n{accuracy_table(results)}\n"
    if len(results.lines) > 1 and results.budgets:
        text += f"\n{paired_table(results)}\n"
    return text


def sum_times(records: list[dict]) -> dict[Setting, dict]:
    """For each setting the sums over the batches of all processes."""
    sums = {}
    for setting, found in by_setting(records).items():
        sums[setting] = {
            name: sum(r[name] for r in found) for name in ("rows", "seconds", "tokens")
        }
        sums[setting]["memory"] = max(record["peak_memory"] for record in found)
        sums[setting]["held"] = statistics.mean(record["held"] for record in found)
    return sums


def time_table(times: dict[Setting, dict], on_gpu: bool) -> str:
    """Time without compilation; a row's is its share of its batch's, which waits for its slowest.

    The peak memory of a process on a CPU only grows, so it tells nothing of a setting.
    """
    titles = ["", "tokens/s", PLOTS["time"], "peak memory, GB", "slots held in the end, %"]
    rows = []
    for setting, found in times.items():
        numbers = [found["tokens"] / found["seconds"], found["seconds"] / found["rows"]]
        memory = f"{found['memory'] / 1e9:.2f}" if on_gpu else ""
        cells = [*(f"{number:.2f}" for number in numbers), memory, f"{100 * found['held']:.0f}"]
        rows.append([str(setting), *cells])
    return markdown(titles, rows)


def points_of(results: Results, times: dict[Setting, dict]) -> dict[str, dict[Setting, tuple]]:
    """Of each of PLOTS value, low and high by setting, as far as there is any."""
    points = {name: {} for name in PLOTS}
    for setting, records in results.records.items():
        if shares := solved_shares(records):
            low_to_high = accuracy(shares, results.n_samples)
            points["accuracy"][setting] = tuple(100 * x for x in low_to_high)
            points["tokens"][setting] = (mean_tokens(records),) * 3
            points["capped"][setting] = (100 * capped_rate(records),) * 3
        if setting in times:
            seconds = times[setting]["seconds"] / times[setting]["rows"]
            points["time"][setting] = (seconds,) * 3
    return points


def draw_plots(path: Path, title: str, results: Results, times: dict[Setting, dict]) -> None:
    """A plot of each of PLOTS against the budget, the full cache as a level line."""
    for name, points in points_of(results, times).items():
        series = {}
        for setting, point in points.items():
            for budget in results.budgets if setting.budget is None else [setting.budget]:
                series.setdefault(setting.line, []).append((budget, *point))
        if series:
            series = {line: sorted(found) for line, found in series.items()}
            line_plot(path / f"{name}.png", title, "budget", PLOTS[name], series, log_x=True)


# Command line ----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--dataset", required=True, help=f"{', '.join(HUB)}, or JSON lines: id, problem, answer")
    add_settings(parser, "epikv,streaming,random,full", "1024")
    add("--limit", type=int, help="problems (default: all)")
    add("--samples", type=int, default=1, help="of each problem (default: 1)")
    decoding = parser.add_mutually_exclusive_group()
    decoding.add_argument("--temperature", type=float, help="default: the checkpoint's")
    decoding.add_argument("--greedy", action="store_true", help="take the likeliest token")
    add(
        "--max-new-tokens",
        type=int,
        help=f"default: {LONGEST_ANSWER:,}, or what the context leaves",
    )
    add("--batch-size", type=int, default=8, help="rows at once (default: 8)")
    add("--output", type=Path, default=Path("evaluation"), help="folder (default: evaluation)")
    return parser


def check(args: argparse.Namespace) -> None:
    """What needs neither model nor dataset to be seen wrong."""
    check_numbers(args, "limit", "samples", "max_new_tokens", "batch_size")
    Sampling(args.temperature or 0, seed=args.seed)
    need_matplotlib()
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("grading needs math-verify: pip install -e .[eval]")


def settings_of(args: argparse.Namespace, runner: Runner, rows: list[Row], digest: str) -> dict:
    """All that the records depend on, but for policies and budgets: a folder takes more of them."""
    decoding = asdict(runner.sampling)
    del decoding["seed"]
    return describe(args, runner.model) | {
        "dataset": Path(args.dataset).name,
        "sha256": digest,
        "limit": args.limit,
        "samples": args.samples,
        "decoding": decoding if runner.sampling.draws else "greedy",
        "first_prompt": runner.model.tokenizer.decode(rows[0].prompt),
        "max_new_tokens": runner.max_new_tokens,
        "batch_size": args.batch_size,
        "calibration": fingerprint(args.calibration),
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
    args: argparse.Namespace, model: Transformer, rows: list[Row], times: Path
) -> Runner:
    prompts = [row.prompt for row in rows]
    max_new_tokens = fit_context(model, prompts, args.max_new_tokens)
    if args.max_new_tokens is None:
        max_new_tokens = min(max_new_tokens, LONGEST_ANSWER)
    temperature = 0.0 if args.greedy else args.temperature
    sampling = Sampling.for_model(model, args.seed, temperature=temperature)
    longest = max(map(len, prompts)) + max_new_tokens
    shape = (args.batch_size, max_new_tokens, args.compile_mode, args.calibration)
    return Runner(model, longest, sampling, *shape, times)


def evaluate(args: argparse.Namespace, rank: int, n_processes: int) -> None:
    """The whole run of the process `rank`; the first one reports."""
    check(args)
    settings = parse_settings(args)
    problems = load_problems(args.dataset)
    digest = hashlib.sha256(json.dumps(problems).encode()).hexdigest()
    model = load_model(args)
    rows = make_rows(model, problems[: args.limit], args.samples)
    times = args.output / (f"times.{rank}.jsonl" if rank else "times.jsonl")
    runner = make_runner(args, model, rows, times)
    described = settings_of(args, runner, rows, digest)
    batches = cut_batches(rows, settings, args.batch_size)
    with RunFolder(args.output, described, rank) as folder:
        if times.exists():
            drop_torn_line(times)
        work(runner, batches[rank::n_processes], folder, tells=rank == 0)
    if rank == 0:
        names = [name for batch in batches for name in names_of(batch)]
        wait_for_others(lambda: latest(read_lines(args.output, "records")).keys() >= {*names})
        found = latest(read_lines(args.output, "records"))
        records = {setting: [] for setting in settings}
        for name in names:
            records[name[0]].append(found[name])
        write_report(args.output, Results(args.samples, records), described)


def write_report(path: Path, results: Results, described: dict) -> None:
    """Print the tables, and put them and the plots into the folder."""
    text = report(results, described)
    (path / "table.md").write_text(text, encoding="utf-8")
    times = sum_times(read_lines(path, "times"))
    times = {setting: times[setting] for setting in results.records if setting in times}
    on_gpu = described["device"] not in ("cpu", "mps")
    (path / "time.md").write_text(time_table(times, on_gpu) + "\n", encoding="utf-8")
    draw_plots(path, f"{described['checkpoint']} on {described['dataset']}", results, times)
    print(text)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    POLICIES.update(BASELINES)
    with told_in_one_line(parser):
        evaluate(args, *process_rank())


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Recall of facts planted in a long text, against the budget and how long ago they were told.

    python scripts/passkey.py --policies epikv,streaming --budgets 128,256,512

A text of made-up sentences tells several numbers, each once. At its end, as many times as there are
numbers, the cache is put back to where it was and one of them is asked for; the answer is what the
model finds likeliest. All of it is made from the seed. A policy that keeps the last tokens
alone must fail beyond its budget; one that knows what matters can win; the full cache, which is
always among the results, says how much the model can recall at all.

Prints a Markdown table with Wilson intervals; the output folder holds it, plots, and a record for
every answer. The same command goes on where it was stopped, and more policies, budgets or recency
windows may be added to a folder.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baselines import BASELINES  # noqa: E402
from epikv import POLICIES  # noqa: E402
from generate import ArgumentParser  # noqa: E402
from model import Transformer  # noqa: E402
from plots import line_plot, need_matplotlib  # noqa: E402
from records import (  # noqa: E402
    RunFolder,
    process_rank,
    read_lines,
    told_in_one_line,
    wait_for_others,
)
from replay import (  # noqa: E402
    CHUNK,
    Replay,
    Setting,
    add_settings,
    by_setting,
    check_numbers,
    describe,
    fingerprint,
    load_model,
    parse_numbers,
    parse_settings,
)
from tables import markdown, wilson  # noqa: E402

INTRODUCTION = "A walk through the town, with some numbers to remember on the way.\n"
# Unlike each other: a small model asked for one of several passwords mistakes them, even with
# all of them before its eyes.
FACTS = (
    " The password of the harbour is",
    " Miss Blake opened locker number",
    " The train to Dover carries the number",
    " The phone in the kitchen rings at",
    " The safe in the cellar opens with",
    " Our room in the hotel was",
    " The dog wears a tag that says",
    " The ticket in my pocket bears",
)
PEOPLE = "miller teacher sailor farmer painter doctor tailor singer hunter gardener".split()
DEEDS = "waited for|walked past|looked at|painted|talked about|swept|measured|admired".split("|")
THINGS = "old gate|stone wall|wooden cart|green boat|open window|tall tree|narrow street".split("|")
TIMES = "in the rain|at noon|before supper|all morning|on a Sunday|without a word".split("|")
CODE_DIGITS = 4
ANSWER_TOKENS = 6  # enough for the digits, one token each, and a space


@dataclass(frozen=True)
class Question:
    """A number that was told `distance` tokens before the end of the text, or a little more."""

    distance: int
    tokens: list[int]
    answer: str


@dataclass(frozen=True)
class Trial:
    id: int
    tokens: list[int]
    questions: list[Question]


def make_trial(
    number: int, encode: Callable[[str], list[int]], n_tokens: int, distances: list[int], seed: int
) -> Trial:
    """A text of `n_tokens` tokens with a number told at each of the distances from its end.

    Raises ValueError where two distances leave no room for a sentence.
    """
    draw = random.Random(f"{seed} {number}")
    facts = draw.sample(FACTS, len(distances))
    parts: list[list[int]] = []  # sentences, the last first
    questions, length = [], 0
    for distance, fact in zip(sorted(distances), facts, strict=True):
        if length > distance:
            raise ValueError(f"distance {distance} is too close to the one before: move it apart")
        while length < distance:
            parts.append(encode(filler(draw)))
            length += len(parts[-1])
        code = "".join(draw.choices("0123456789", k=CODE_DIGITS))
        questions.append(Question(distance, encode(fact), code))
        parts.append(encode(f"{fact} {code}."))
        length += len(parts[-1])
    while length < n_tokens:
        parts.append(encode(filler(draw)))
        length += len(parts[-1])
    tokens = [token for part in reversed(parts) for token in part]
    return Trial(number, tokens[-n_tokens:], questions)


def filler(draw: random.Random) -> str:
    """A sentence that tells nothing."""
    person, deed = draw.choice(PEOPLE), draw.choice(DEEDS)
    return f" The {person} {deed} the {draw.choice(THINGS)} {draw.choice(TIMES)}."


def recall(replay, trials: list[Trial], decode: Callable[[list[int]], str]) -> list[list[str]]:
    """Feed the trials' texts, one a row, and ask their questions: each trial's answers.

    replay: a `Replay`, or what has its `feed`, `logits`, `save` and `restore`.
    """
    for chunk in torch.tensor([trial.tokens for trial in trials]).split(CHUNK, dim=1):
        replay.feed(chunk)
    saved = replay.save()
    answers: list[list[str]] = [[] for _ in trials]
    for questions in zip(*(trial.questions for trial in trials), strict=True):
        found = ask(replay, [question.tokens for question in questions])
        for row, tokens in zip(answers, found, strict=True):
            row.append(decode(tokens))
        replay.restore(saved)
    return answers


def ask(replay, questions: list[list[int]]) -> list[list[int]]:
    """The likeliest tokens after each row's question. The questions' lengths may differ."""
    answers: list[list[int]] = [[] for _ in questions]
    for step in range(max(map(len, questions)) + ANSWER_TOKENS):
        tokens = replay.logits.argmax(-1).tolist()
        for row, question in enumerate(questions):
            if step < len(question):
                tokens[row] = question[step]
            elif len(answers[row]) < ANSWER_TOKENS:
                answers[row].append(tokens[row])
        replay.feed(torch.tensor(tokens)[:, None])
    return answers


def first_number(text: str) -> str:
    """The digits that a text begins with, after spaces."""
    text = text.lstrip()
    end = next((i for i, letter in enumerate(text) if not letter.isdigit()), len(text))
    return text[:end]


# Tables ----------------------------------------------------------------------------------------


def recalled(records: list[dict]) -> float:
    """The share of the records that name the number told."""
    return sum(record["found"] == record["answer"] for record in records) / len(records)


def cell(records: list[dict]) -> str:
    share = recalled(records)
    low, high = wilson(share, len(records))
    return f"{share:.0%} ({low:.0%} to {high:.0%})"


def by_distance(records: Iterable[dict]) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = {}
    for record in records:
        groups.setdefault(record["distance"], []).append(record)
    return dict(sorted(groups.items()))


def table(results: dict[Setting, list[dict]]) -> str:
    """A Markdown table: a row for each setting, recall by distance, with Wilson intervals."""
    distances = sorted({record["distance"] for found in results.values() for record in found})
    rows = []
    for setting, records in results.items():
        groups = by_distance(records)
        cells = [cell(groups[d]) if d in groups else "" for d in distances]
        rows.append([str(setting), setting.slot_map, *cells, cell(records)])
    titles = ["recall after", "slot map", *(f"{distance} tokens" for distance in distances), "all"]
    return markdown(titles, rows)


def plot(results: dict[Setting, list[dict]], folder: Path) -> None:
    """Recall against the budget, and for each budget against the distance."""
    budgets = sorted({setting.budget for setting in results if setting.budget is not None})
    against_budget: dict[str, list] = {}
    against_distance: dict[int, dict[str, list]] = {budget: {} for budget in budgets}
    for setting, records in results.items():
        for budget in budgets if setting.budget is None else [setting.budget]:
            against_budget.setdefault(setting.line, []).append(point(budget, records))
            line = [point(d, found) for d, found in by_distance(records).items()]
            against_distance[budget][setting.line] = line
    title, recall = "Recall of planted facts", "share recalled, 95 % interval"
    if budgets:
        line_plot(folder / "recall.png", title, "budget, slots", recall, against_budget, log_x=True)
    for budget, lines in against_distance.items():
        path, told = folder / f"recall-{budget}.png", "tokens since the fact was told"
        line_plot(path, f"{title}, budget {budget}", told, recall, lines)


def point(x: float, records: list[dict]) -> tuple[float, float, float, float]:
    share = recalled(records)
    return x, share, *wilson(share, len(records))


# Command line ----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_settings(parser, "epikv,streaming,random", "128,256,512")
    add = parser.add_argument
    add("--distances", default="100,200,400,600", help="tokens since each of the facts was told")
    add("--trials", type=int, default=16, help="texts (default: 16)")
    add("--batch-size", type=int, default=16, help="texts at once (default: 16)")
    add("--output", type=Path, default=Path("passkey"), help="folder (default: passkey)")
    return parser


def run(
    args: argparse.Namespace,
    model: Transformer,
    trials: list[Trial],
    settings: list[Setting],
    folder: RunFolder,
) -> None:
    """Put the questions that the folder has no answers to, this process's share of them."""
    rank, world = process_rank()
    todo = missing(trials, settings, folder.path)
    introduction = model.tokenizer.encode(INTRODUCTION)
    work = []
    for first in range(0, len(trials), args.batch_size):
        batch = trials[first : first + args.batch_size]
        ids = {trial.id for trial in batch}
        for setting in settings[rank::world]:
            if any(setting == asked and trial in ids for asked, trial, _ in todo):
                work.append((batch, setting))
    start = time.perf_counter()
    for finished, (batch, setting) in enumerate(work, start=1):
        n_tokens = len(batch[0].tokens) + max(
            len(question.tokens) for trial in batch for question in trial.questions
        )
        n_tokens += ANSWER_TOKENS
        config = setting.config(len(introduction) + n_tokens, args.seed, args.calibration)
        replay = Replay(model, config, [introduction] * len(batch), n_tokens, args.compile_mode)
        answers = recall(replay, batch, model.tokenizer.decode)
        for trial, texts in zip(batch, answers, strict=True):
            for question, text in zip(trial.questions, texts, strict=True):
                record = {"trial": trial.id, "distance": question.distance}
                record |= {"answer": question.answer, "found": first_number(text)}
                if (setting, trial.id, question.distance) in todo:
                    folder.append(asdict(setting) | record)
        left = (time.perf_counter() - start) / finished * (len(work) - finished)
        print(f"{finished} of {len(work)} runs, {left / 60:.0f} minutes left", file=sys.stderr)


def missing(
    trials: list[Trial], settings: list[Setting], folder: Path
) -> set[tuple[Setting, int, int]]:
    """The questions that the folder has no answers to: setting, trial and distance."""
    results = by_setting(read_lines(folder, "records"))
    done = {(s, r["trial"], r["distance"]) for s in results for r in results[s]}
    asked = {(trial.id, question.distance) for trial in trials for question in trial.questions}
    return {(setting, *question) for setting in settings for question in asked} - done


def report(folder: Path, described: dict) -> None:
    """Print the table of all records, and put it and the plots into the folder."""
    results = by_setting(read_lines(folder, "records"))
    n_texts = len({record["trial"] for found in results.values() for record in found})
    text = f"{described['checkpoint']}, {n_texts} texts, {described['dtype']}\n\n{table(results)}\n"
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
        args.policies = f"full,{args.policies}"
        settings = parse_settings(args)
        check_numbers(args, "trials", "batch_size")
        distances = parse_numbers(args.distances, "distances")
        if len(distances) > len(FACTS) or min(distances) < 1 or len({*distances}) < len(distances):
            raise ValueError(
                f"distances must be 1 to {len(FACTS)} different numbers from 1, got"
                f" {args.distances!r}"
            )
        model = load_model(args)

        def encode(text: str) -> list[int]:
            return model.tokenizer.ids(text, add_special_tokens=False)

        # Room for the first fact, which comes up to a sentence early.
        n_tokens = max(distances) + 3 * max(len(encode(f"{fact} 0000.")) for fact in FACTS)
        trials = [make_trial(i, encode, n_tokens, distances, args.seed) for i in range(args.trials)]
        described = describe(args, model) | {
            "distances": distances,
            "batch_size": args.batch_size,
            "calibration": fingerprint(args.calibration),
        }
        with RunFolder(args.output, described, rank) as folder:
            run(args, model, trials, settings, folder)
        if rank == 0:
            wait_for_others(lambda: not missing(trials, settings, args.output))
            report(args.output, described)


if __name__ == "__main__":
    main()

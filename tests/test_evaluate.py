"""Accuracy under each policy: outcomes, statistics, and runs that are killed and shared."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny
import torch

import evaluate
import replay
from baselines import BASELINES
from epikv import NO_POSITION, POLICIES
from evaluate import OUTCOMES, Results
from generate import Delta, Output, generate
from model import Transformer
from records import ROOT
from replay import Setting
from tables import bootstrap, mcnemar, wilson

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}a:"
PROBLEMS = [{"id": f"p{i}", "problem": f"{i} + {i}?", "answer": str(2 * i)} for i in range(5)]
# Five problems with two samples in batches of four: the last batch has two rows, and two copies.
REAL = "--budgets 64 --samples 2 --temperature 1 --max-new-tokens 12 --batch-size 4 --no-compile"
REAL = REAL.split()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Policies as they were, no torchrun, no waiting; nothing drawn, but the plots by name."""

    def sleep(seconds):
        pytest.fail("waits for others")

    monkeypatch.setattr("records.time", SimpleNamespace(sleep=sleep))
    for name, policy in BASELINES.items():
        monkeypatch.setitem(POLICIES, name, policy)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    plots = {}

    def line_plot(path, title, x_label, y_label, series, log_x=False):
        plots[path.name] = series

    monkeypatch.setattr(evaluate, "line_plot", line_plot)
    return plots


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny.make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)
    return tiny.make_tokenizer(folder, chat_template=TEMPLATE)


def write_problems(path, problems=PROBLEMS):
    text = "".join(json.dumps(problem) + "\n" for problem in problems)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def command(tmp_path, folder, monkeypatch, capsys):
    """Runs the script in the folder `run`, and returns what it printed."""
    dataset = write_problems(tmp_path / "problems.jsonl")

    def run(*options, output="run", problems=None):
        if problems is not None:
            write_problems(dataset, problems)
        paths = ["--checkpoint", folder, "--dataset", dataset, "--output", tmp_path / output]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, paths), *options])
        evaluate.main()
        return capsys.readouterr()

    return run


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Problems --------------------------------------------------------------------------------------

HUB_ROWS = {
    "HuggingFaceH4/MATH-500": {"unique_id": "test/1", "problem": "1+1?", "answer": "#### 1,2"},
    "Maxwell-Jia/AIME_2024": {"ID": "2024-I-1", "Problem": "1+1?", "Answer": 2},
    "MathArena/aime_2025": {"problem_idx": 7, "problem": "1+1?", "answer": 2},
    "openai/gsm8k": {"question": "1+1?", "answer": "One #### and\n1+1=<<1+1=2>>2\n#### 1,002"},
}


@pytest.mark.parametrize(
    "name, arguments, id, answer",
    [
        ("math500", ("HuggingFaceH4/MATH-500", None, "test"), "test/1", "#### 1,2"),
        ("aime2024", ("Maxwell-Jia/AIME_2024", None, "train"), "2024-I-1", "2"),
        ("aime2025", ("MathArena/aime_2025", None, "train"), "7", "2"),
        ("gsm8k", ("openai/gsm8k", "main", "test"), "0", "1002"),
    ],
)
def test_datasets_of_the_hub(monkeypatch, name, arguments, id, answer):
    asked = []

    def load_dataset(repo, config, *, split):
        asked.append((repo, config, split))
        return [HUB_ROWS[repo]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    wanted = [{"id": id, "problem": "1+1?", "answer": answer}]
    assert evaluate.load_problems(name) == wanted and asked == [arguments]


def test_a_hub_out_of_reach(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"openai/gsm8k \(no route to host\); give a JSON-lines"):
        evaluate.load_problems("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install -e \.\[eval\]"):
        evaluate.load_problems("gsm8k")


@pytest.mark.parametrize("name, column", [("aime2025", "problem_idx"), ("gsm8k", "answer")])
def test_renamed_columns_of_the_hub(monkeypatch, capsys, name, column):
    """In one line as well, which names the column."""
    rows = [{f"{key}_": value for key, value in HUB_ROWS[evaluate.HUB[name][0]].items()}]
    rows[0] |= {"problem": "1+1?", "question": "1+1?"}
    loader = SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setitem(sys.modules, "datasets", loader)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--dataset", name, "--checkpoint", "/nowhere"])
    with pytest.raises(SystemExit) as exit:
        evaluate.main()
    message = f"cannot load {evaluate.HUB[name][0]} ('{column}'); give a JSON-lines file with id,"
    assert capsys.readouterr().err == f"error: {message} problem, answer\n"
    assert exit.value.code == 2


# Work ------------------------------------------------------------------------------------------


class Scripted:
    """A generation of what its prompts say: "eos|text", "length|text", or "boom|text"."""

    seen = []  # prompts and seed of every batch, and rows read
    breaks = True  # at "boom"; if not, that ends like others
    error = RuntimeError
    order = 1  # -1: the last row ends first

    def __init__(self, engine, prompts, max_new_tokens, stop_ids):
        self.engine = engine
        texts = [engine.model.tokenizer.decode(prompt) for prompt in prompts]
        self.script = [text.partition("\n\n")[0].partition("|")[::2] for text in texts]
        self.outputs = [Output() for _ in prompts]
        self.prefill_seconds, self.decode_seconds = 1.0, 2.0
        self.read = []
        self.seen.append((texts, engine.state.seed.item(), self.read))

    def __iter__(self):
        for row, (stop, text) in [*enumerate(self.script)][:: self.order]:
            output = self.outputs[row]
            output.pieces, output.tokens = [text[:1]], [0]
            yield Delta(row, [0], text[:1])
            if stop == "boom" and self.breaks:
                raise self.error("out of\nmemory")
            output.pieces, output.tokens = [text], [0] * len(text)
            output.stop_reason = stop.replace("boom", "eos")
            self.read.append(row)
            yield Delta(row, [0] * (len(text) - 1), text[1:])


@pytest.fixture
def scripted(monkeypatch):
    position = torch.tensor([[0, 9, NO_POSITION, 8], [0, 1, *[NO_POSITION] * 2]])[:, None, None]
    config = SimpleNamespace(budget=4)
    cache = SimpleNamespace(position=position, length=torch.tensor([10, 2]), config=config)

    def engine(model, *_):
        state = SimpleNamespace(seed=torch.zeros(1).long())
        return SimpleNamespace(model=model, state=state, cache=cache)

    monkeypatch.setattr(evaluate, "Engine", engine)
    monkeypatch.setattr(evaluate, "Generation", Scripted)
    monkeypatch.setattr(Scripted, "seen", [])
    return Scripted.seen


def say(*replies, answer="4"):
    return [{"id": f"p{i}", "problem": r, "answer": answer} for i, r in enumerate(replies)]


def test_outcomes(tmp_path, command, scripted):
    """One of each, but for two ways to fail."""
    replies = [r"eos|so \boxed{4}", r"eos|\boxed{5}", "eos|four", r"length|\boxed{3} \boxed{4}"]
    replies += [r"length|\boxed{5}", "length|hm", "boom|half"]
    command("--policies", "streaming", "--batch-size", "1", problems=say(*replies))
    records = read_lines(tmp_path / "run/records.jsonl")
    keys = ("id", "outcome", "stopped", "answer", "tokens", "text")
    found = [tuple(record[key] for key in keys) for record in records]
    assert found == [
        ("p0", "correct", "eos", "4", 12, r"so \boxed{4}"),
        ("p1", "wrong", "eos", "5", 9, r"\boxed{5}"),
        ("p2", "no answer", "eos", None, 4, "four"),
        ("p3", "capped", "length", "4", 19, r"\boxed{3} \boxed{4}"),
        ("p4", "capped", "length", "5", 9, r"\boxed{5}"),
        ("p5", "capped", "length", None, 2, "hm"),
        ("p6", "failed", None, None, 1, "h"),
    ]
    assert [r.get("right") for r in records] == [True, False, False, True, False, False, None]
    assert records[6]["error"] == "RuntimeError: out of memory"
    assert all((r["policy"], r["budget"], r["sample"]) == ("streaming", 1024, 0) for r in records)
    # One of six is correct, with the capped one that is right two; (12 + 9 + 4 + 19 + 9 + 2) / 6
    # tokens; half of the six are capped.
    (line,) = [
        line for line in (tmp_path / "run/table.md").read_text().splitlines() if "1024" in line
    ]
    cells = line.strip("| ").split(" | ")
    assert cells[:3] == ["streaming, 1024", "shared", "16.7"]
    assert cells[4:] == ["6", "6", "1", "1", "1", "3 (1)", "1", "33.3", "9", "50.0"]


def test_a_failure_is_no_wrong_answer(tmp_path, command, scripted):
    """Of three answers one is right: by Wilson 6.1 to 79.2 %, as if the fourth were not there."""
    replies = [r"eos|\boxed{4}", r"eos|\boxed{5}", "boom|x", "eos|five"]
    out = command("--policies", "streaming", "--batch-size", "1", problems=say(*replies)).out
    row = "| streaming, 1024 | shared | 33.3 | 6.1 to 79.2 | 3 | 3 | 1 | 1 | 1 | 0 (0) | 1 | 33.3 |"
    assert row in out


def test_a_batch_that_breaks_fails_what_is_left_of_it(tmp_path, command, scripted):
    replies = [r"eos|\boxed{4}", "boom|x", r"eos|\boxed{4}", r"eos|\boxed{4}"]
    err = command("--policies", "streaming", "--batch-size", "3", problems=say(*replies)).err
    records = read_lines(tmp_path / "run/records.jsonl")
    outcomes = [(record["id"], record["outcome"]) for record in records]
    assert outcomes == [("p0", "correct"), ("p1", "failed"), ("p2", "failed"), ("p3", "correct")]
    assert "1 of 2 batches" in err and "2 failed: RuntimeError: out of memory" in err


def test_answers_without_verdict(tmp_path, command, scripted, monkeypatch):
    """One that takes too long to read is wrong; where the grader breaks, it is a failure."""

    def is_right(answer, truth):
        raise (TimeoutError if answer == "5" else RecursionError)("no\nverdict")

    monkeypatch.setattr(evaluate, "is_right", is_right)
    replies = [r"eos|\boxed{4}", "eos|none", r"eos|\boxed{5}", r"length|\boxed{5}"]
    command("--policies", "streaming", problems=say(*replies))
    records = read_lines(tmp_path / "run/records.jsonl")
    outcomes = [(r["outcome"], r["answer"], r.get("right")) for r in records]
    assert outcomes[:2] == [("failed", "4", None), ("no answer", None, False)]
    assert outcomes[2:] == [("wrong", "5", False), ("capped", "5", False)]
    assert records[0]["error"] == "RecursionError: no verdict"


def test_bad_settings_end_the_run(tmp_path, command, scripted, monkeypatch, capsys):
    """A ValueError, such as of a compiler that is missing, is no failure of one batch."""
    monkeypatch.setattr(Scripted, "error", ValueError)
    with pytest.raises(SystemExit) as exit:
        command("--policies", "streaming", "--batch-size", "1", problems=say("eos|a", "boom|x"))
    assert exit.value.code == 2 and capsys.readouterr().err.endswith("error: out of memory\n")
    assert [record["id"] for record in read_lines(tmp_path / "run/records.jsonl")] == ["p0"]


def test_failures_are_tried_again(tmp_path, command, scripted, monkeypatch):
    """With their whole batch, of which nothing else is written; successes are left alone."""
    replies = [r"eos|\boxed{4}", r"boom|\boxed{4}", r"eos|\boxed{4}", r"eos|\boxed{4}"]
    options = ("--policies", "streaming", "--batch-size", "2")
    out = command(*options, problems=say(*replies)).out
    assert "| streaming, 1024 | shared | 100.0 |" in out and "| 3 | 0 | 0 | 0 (0) | 1 |" in out
    monkeypatch.setattr(Scripted, "breaks", False)
    scripted.clear()
    out = command(*options).out
    assert len(scripted) == 1  # the second batch is done
    records = read_lines(tmp_path / "run/records.jsonl")
    assert [record["id"] for record in records] == ["p0", "p1", "p2", "p3", "p1"]
    assert "| streaming, 1024 | shared | 100.0 |" in out and "| 4 | 0 | 0 | 0 (0) | 0 |" in out


def test_a_failure_gives_way_in_whatever_file(tmp_path):
    """But not to that of another recency window."""
    setting = {"policy": "a", "budget": 1, "recent": None}
    failed = setting | {"id": "p", "sample": 0, "outcome": "failed"}
    good, other = failed | {"outcome": "wrong"}, failed | {"recent": 2}
    for records in ([failed, good, other], [other, good, failed]):
        wanted = {(Setting("a", 1), "p", 0): good, (Setting("a", 1, 2), "p", 0): other}
        assert evaluate.latest(records) == wanted


def test_batches_are_filled_up_and_differ_by_seed(command, scripted):
    """Samples lie side by side; the copies are not waited for; policies share their seeds."""
    options = ("--policies", "streaming,full", "--batch-size", "3", "--samples", "2")
    command(*options, problems=say("eos|a", "eos|b"))
    names = [[text[:5] for text in texts] for texts, _, _ in scripted]
    assert names == [["eos|a", "eos|a", "eos|b"], ["eos|b"] * 3] * 2
    assert [read for _, _, read in scripted] == [[0, 1, 2], [0]] * 2
    seeds = [seed for _, seed, _ in scripted]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert evaluate.batch_seed(1, 11) != evaluate.batch_seed(11, 1)


def test_a_copy_that_ends_first_is_no_answer(tmp_path, command, scripted, monkeypatch):
    monkeypatch.setattr(Scripted, "order", -1)
    command("--policies", "streaming", "--batch-size", "3", problems=say("eos|a", "eos|b"))
    records = read_lines(tmp_path / "run/records.jsonl")
    assert [(r["id"], r["outcome"]) for r in records] == [("p1", "no answer"), ("p0", "no answer")]


def test_the_prompt_is_one_turn_with_the_instruction(command, scripted):
    command("--policies", "streaming", "--batch-size", "1", problems=say("eos|a"))
    instruction = r"Please reason step by step, and put your final answer within \boxed{}."
    assert scripted[0][0] == [f"eos|a\n\n{instruction};a:"]


def test_the_work_is_that_of_generate(tmp_path, command, folder):
    """Every batch as the library does it on an engine of its own, the last one short."""
    command("--policies", "epikv,full", *REAL)
    records = read_lines(tmp_path / "run/records.jsonl")
    model = Transformer.from_pretrained(folder, device="cpu")
    texts = [f"{p['problem']}\n\n{evaluate.INSTRUCTION}" for p in PROBLEMS for _ in range(2)]
    names = [(p["id"], sample) for p in PROBLEMS for sample in range(2)]
    for policy, budget in (("epikv", 64), ("full", None)):
        wanted = {}
        for number in range(3):
            prompts = texts[4 * number : 4 * number + 4]
            prompts += prompts[-1:] * (4 - len(prompts))
            settings = dict(temperature=1, max_new_tokens=12, compile_mode="none")
            seed = evaluate.batch_seed(0, number)
            result = generate(model, prompts, policy=policy, budget=budget, seed=seed, **settings)
            here = names[4 * number : 4 * number + 4]
            wanted |= dict(zip(here, result.outputs, strict=False))
        found = [r for r in records if (r["policy"], r["budget"]) == (policy, budget)]
        assert sorted((r["id"], r["sample"]) for r in found) == names
        for record in found:
            output = wanted[record["id"], record["sample"]]
            assert record["text"] == output.text and record["tokens"] == len(output.tokens)
            assert record["stopped"] == output.stop_reason
    assert len({record["text"] for record in records}) > 10
    assert {line["held"] for line in read_lines(tmp_path / "run/times.jsonl")} == {1}


def test_two_runs_write_the_same(tmp_path, command):
    """Byte for byte; what takes other times has other files. Another seed writes other texts."""
    for output in ("one", "two"):
        command("--policies", "epikv,random", *REAL, output=output)
    command("--policies", "epikv,random", *REAL, "--seed", "1", output="three")
    names = ("records.jsonl", "table.md", "settings.json")
    one, two, three = (
        [(tmp_path / run / name).read_bytes() for name in names] for run in ("one", "two", "three")
    )
    assert one == two and one[0] != three[0]


def test_a_run_cut_anywhere_ends_the_same(tmp_path, command):
    """Every number of whole lines, each with half a line more; what is done is not done again."""
    command("--policies", "epikv,streaming", *REAL)
    file, table = tmp_path / "run/records.jsonl", tmp_path / "run/table.md"
    whole, wanted = file.read_bytes(), table.read_bytes()
    lines = whole.splitlines(keepends=True)
    for n in range(0, len(lines), 3):
        file.write_bytes(b"".join(lines[:n]) + lines[n][:20])
        table.unlink()
        command("--policies", "epikv,streaming", *REAL)
        assert file.read_bytes() == whole and table.read_bytes() == wanted


def test_a_finished_run_only_reports(tmp_path, command, monkeypatch):
    out = command("--policies", "epikv,streaming", *REAL).out
    monkeypatch.setattr(evaluate, "Engine", None)
    assert command("--policies", "epikv,streaming", *REAL).out == out


def test_a_policy_is_added_to_a_folder(tmp_path, command):
    command("--policies", "streaming", *REAL)
    before = (tmp_path / "run/records.jsonl").read_bytes()
    out = command("--policies", "streaming,epikv", *REAL).out
    after = (tmp_path / "run/records.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 2 * before.count(b"\n") == 20
    assert "| streaming, 64 |" in out and "| epikv, 64 |" in out and "against streaming" in out


def test_recency_windows_side_by_side(tmp_path, command):
    """Each is a line of its own, and done once; more of them go into the same folder."""
    command("--policies", "streaming,full", "--recent", "1", *REAL)
    before = (tmp_path / "run/records.jsonl").read_bytes()
    out = command("--policies", "streaming,full", "--recent", "1,40", *REAL).out
    after = (tmp_path / "run/records.jsonl").read_bytes()
    assert after.startswith(before)
    records = read_lines(tmp_path / "run/records.jsonl")
    found = [(r["policy"], r["budget"], r["recent"]) for r in records]
    keys = [("streaming", 64, 1), ("full", None, None), ("streaming", 64, 40)]
    assert found == [key for key in keys for _ in range(10)]
    rows = [line[2:].partition(" |")[0] for line in out.splitlines() if line.startswith("| ")]
    lines = ["streaming, recent 1, 64", "streaming, recent 40, 64", "full"]
    pairs = ["against streaming, recent 1", "---", "streaming, recent 40", "full"]
    assert rows == ["", "---", *lines, *pairs]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--seed", "1"], "holds a run with seed 0, not 1"),
        (["--samples", "1"], "holds a run with samples 2, not 1"),
        (["--greedy"], "holds a run with decoding {'temperature': 1.0"),
        (["--limit", "4"], "holds a run with limit None, not 4"),
        (["--max-new-tokens", "13"], "holds a run with max_new_tokens 12, not 13"),
        (["--batch-size", "5"], "holds a run with batch_size 4, not 5"),
        (["--dtype", "bfloat16"], "holds a run with dtype 'float32', not 'bfloat16'"),
        (["--quantize", "int8"], "holds a run with quantize None, not 'int8'"),
        (["--no-compile"], "holds a run with compile_mode 'blocks', not 'none'"),
    ],
)
def test_other_settings_are_refused(command, scripted, capsys, options, words):
    rest = [o for o in REAL if o not in ("--temperature", "1")] if "--greedy" in options else REAL
    first = [o for o in REAL if o not in options] if "--no-compile" in options else REAL
    command("--policies", "streaming", *first)
    with pytest.raises(SystemExit) as exit:
        command("--policies", "streaming", *rest, *options)
    assert exit.value.code == 2 and words in capsys.readouterr().err


def test_a_calibration_through_the_command(tmp_path, folder, command, capsys):
    """The answers are those of the library with it, and a folder is of one calibration."""
    path, other = (
        tiny.write_calibration(tmp_path / f"{seed}.json", tiny.calibration(4, seed))
        for seed in (0, 1)
    )
    options = ["--policies", "epikv-fit", "--budgets", "48", "--recent", "4", "--greedy"]
    options += ["--max-new-tokens", "20", "--limit", "1", "--no-compile"]
    command(*options, "--calibration", str(path))
    (record,) = read_lines(tmp_path / "run/records.jsonl")
    assert (record["policy"], record["budget"], record["recent"]) == ("epikv-fit", 48, 4)
    of_folder = tiny.read_json(tmp_path / "run/settings.json")["calibration"]
    model = Transformer.from_pretrained(folder, device="cpu")
    text = f"{PROBLEMS[0]['problem']}\n\n{evaluate.INSTRUCTION}"
    settings = dict(policy="epikv-fit", budget=48, recent=4, max_new_tokens=20)
    settings |= dict(temperature=0.0, compile_mode="none")
    texts = {
        seed: generate(model, text, calibration=tiny.calibration(4, seed), **settings)
        .outputs[0]
        .text
        for seed in (0, 1)
    }
    assert record["text"] == texts[0] != texts[1]
    without = ["--policies", "streaming", *options[2:]]
    for again in ([*options, "--calibration", str(other)], without):
        with pytest.raises(SystemExit):
            command(*again)
        assert f"holds a run with calibration {of_folder!r}, not " in capsys.readouterr().err


def test_other_problems_are_refused(command, scripted, capsys):
    command("--policies", "streaming", *REAL)
    with pytest.raises(SystemExit):
        command("--policies", "streaming", *REAL, problems=PROBLEMS[:4])
    assert "holds a run with sha256" in capsys.readouterr().err


def test_checkpoints_are_known_by_their_contents(tmp_path, folder, command, scripted, capsys):
    """Not by where they lie: a copy goes on, another model or prompt of that name does not."""
    options = ("--policies", "streaming", *REAL)
    command(*options)
    n_batches = len(scripted)
    copy = tmp_path / "copy" / folder.name
    shutil.copytree(folder, copy)
    command(*options, "--checkpoint", str(copy))
    assert len(scripted) == n_batches
    tiny.make_tokenizer(copy, chat_template=TEMPLATE.replace("a:", "b:"))
    other = tiny.make_model(tmp_path / "other" / folder.name, num_hidden_layers=4, seed=1)
    tiny.make_tokenizer(other, chat_template=TEMPLATE)
    for checkpoint, name in ((copy, "first_prompt '0 + 0?"), (other, "weights '")):
        with pytest.raises(SystemExit) as exit:
            command(*options, "--checkpoint", str(checkpoint))
        assert f"holds a run with {name}" in capsys.readouterr().err and exit.value.code == 2
    assert len(scripted) == n_batches


# Processes -------------------------------------------------------------------------------------


def test_two_processes_share_the_work(tmp_path, command, monkeypatch):
    """The first waits until the second has done all, then has the table of one process alone.

    Here the second runs while the first sleeps, is cut within its last line, and goes on.
    """
    out = command("--policies", "epikv,streaming", *REAL, output="alone").out
    files = [tmp_path / "run/records.jsonl", tmp_path / "run/records.1.jsonl"]
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        assert len(read_lines(files[0])) == 10 and not (tmp_path / "run/table.md").exists()
        monkeypatch.setenv("RANK", "1")
        evaluate.main()
        if len(naps) == 1:
            *lines, last = files[1].read_bytes().splitlines(keepends=True)
            files[1].write_bytes(b"".join(lines) + last[:20])

    monkeypatch.setattr("records.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = command("--policies", "epikv,streaming", *REAL)
    assert printed.out == out and naps == [5, 5]
    *progress, waiting = printed.err.splitlines()
    done = ["epikv, 64: 1 of 3", "epikv, 64: 2 of 3", "streaming, 64: 3 of 3"]
    assert [line.partition(" batches")[0] for line in progress] == done
    assert waiting.startswith("waiting for the other processes")
    shares = [{(r["policy"], r["id"]) for r in read_lines(file)} for file in files]
    assert all(shares)
    lines = sum((file.read_bytes().splitlines() for file in files), [])
    assert sorted(lines) == sorted((tmp_path / "alone/records.jsonl").read_bytes().splitlines())
    # Of six batches, and the one that was cut a second time.
    assert [len(read_lines(tmp_path / f"run/times{n}.jsonl")) for n in ("", ".1")] == [3, 4]
    assert "| epikv, 64 |" in (tmp_path / "run/time.md").read_text(encoding="utf-8")


def test_a_process_takes_its_own_gpu(monkeypatch):
    """As torchrun numbers them, unless a device is named."""
    asked = []

    def from_pretrained(checkpoint, device, dtype, quantize):
        asked.append(device)
        return SimpleNamespace(device=torch.device(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(replay.Transformer, "from_pretrained", from_pretrained)
    for local, device in ((None, None), ("3", None), ("3", "cpu")):
        if local:
            monkeypatch.setenv("LOCAL_RANK", local)
        options = dict(checkpoint="x", device=device, dtype=None, quantize=None)
        replay.load_model(SimpleNamespace(**options))
    assert asked == ["cuda:0", "cuda:3", "cpu"]


# Forks `main` over and over, and kills it at random: when the records have reached some length, or
# after some time, and at last before it is done. Then it may end. Then two processes at once, one
# of which is killed and started again.
KILLER = f"""
import multiprocessing, os, random, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "scripts")!r})
import evaluate
import math_verify
import records
import torch

torch.set_num_threads(1)
records.POLL_SECONDS = 0.05
evaluate.line_plot = lambda *_, **__: None
fork = multiprocessing.get_context("fork")
base, *options = sys.argv[1:]


def child(output, rank, world):
    os.environ |= {{"RANK": str(rank), "WORLD_SIZE": str(world)}}
    sys.argv = ["evaluate.py", *options, "--output", f"{{base}}/{{output}}"]
    sys.stdout = sys.stderr = open(os.devnull, "w")
    evaluate.main()


def start(output, rank=0, world=1):
    process = fork.Process(target=child, args=(output, rank, world))
    process.start()
    return process


def size(output):
    file = Path(base, output, "records.jsonl")
    return file.stat().st_size if file.exists() else 0


begin = time.monotonic()
process = start("whole")
process.join()
assert process.exitcode == 0
duration, total = time.monotonic() - begin, size("whole")
draw, kills = random.Random(0), 0
while kills < 10 or not 0 < size("killed") < total:
    process, begin = start("killed"), time.monotonic()
    until = size("killed") + draw.random() * total / 8 if kills % 2 else total
    delay = duration * draw.random() if kills % 2 == 0 else 1e9
    while process.is_alive() and size("killed") < until and time.monotonic() - begin < delay:
        time.sleep(0.0005)
    process.kill()
    process.join()
    kills += 1
    print(size("killed"), total)
    if size("killed") == total:  # done too soon: once more from the start, not to kill a report
        for file in Path(base, "killed").iterdir():
            file.unlink()
for output, killed in (("killed", []), ("shared", [1])):
    world = 1 + len(killed)
    processes = [start(output, rank, world) for rank in range(world)]
    for rank in killed:
        time.sleep(duration / 3)
        processes[rank].kill()
        processes[rank] = start(output, rank, world)
    for process in processes:
        process.join()
        assert process.exitcode == 0
"""


def test_runs_that_are_killed(tmp_path, folder):
    """Ten times or more at random, and one of two processes that share a folder: the end is the
    same."""
    dataset = write_problems(tmp_path / "problems.jsonl")
    options = ["--checkpoint", str(folder), "--dataset", str(dataset)]
    options += ["--policies", "epikv,streaming,full", *REAL]
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=85,
    )
    assert run.returncode == 0, run.stderr
    cuts = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    partial = [0 < size < total for size, total in cuts]
    assert len(cuts) >= 10 and sum(partial) >= 3 and partial[-1]  # what the last run goes on from
    for name in ("records.jsonl", "table.md", "settings.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(read_lines(tmp_path / "whole/records.jsonl")) == 30
    shared = [(tmp_path / f"shared/records{n}.jsonl").read_bytes() for n in ("", ".1")]
    whole = (tmp_path / "whole/records.jsonl").read_bytes()
    assert sorted(b"".join(shared).splitlines()) == sorted(whole.splitlines())
    assert (tmp_path / "shared/table.md").read_bytes() == (tmp_path / "whole/table.md").read_bytes()


# Statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "right, n, interval",
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0, 0.1611))]
    + [(1, 29, (0.0061, 0.1718)), (20, 20, (1 - 0.1611, 1))],
)
def test_wilson_as_published(right, n, interval):
    """Newcombe, Statistics in Medicine 17 (1998), table I."""
    assert wilson(right / n, n) == pytest.approx(interval, abs=5e-5)


@pytest.mark.parametrize(
    "values, interval",
    [
        ([0.5] * 3, (0.5, 0.5)),
        ([0.0, 1.0], (0, 1)),  # each has a chance of a quarter
        ([0.0, 1.0, 1.0, 1.0], (0.25, 1)),  # all zeros 0.4 %, at most one one 5.1 %
        ([0.0] * 10 + [1.0] * 10, (0.3, 0.7)),  # at most 5 of 20: 2.07 %, at most 6: 5.77 %
    ],
)
def test_bootstrap_by_hand(values, interval):
    assert bootstrap(values) == pytest.approx(interval)


def test_bootstrap_is_always_the_same():
    values = torch.arange(50.0).sin().tolist()
    assert bootstrap(values) == bootstrap(values)


@pytest.mark.parametrize(
    "first, second, p",
    [(1, 5, 0.21875), (5, 1, 0.21875), (0, 0, 1), (3, 3, 1), (0, 5, 0.0625), (2, 8, 0.109375)],
)
def test_mcnemar_by_hand(first, second, p):
    """1 of 6: 2 x (1 + 6) / 64; 2 of 10: 2 x (1 + 10 + 45) / 1024; never above 1."""
    assert mcnemar(first, second) == p


def some(*outcomes):
    """Records by outcome: a word for each problem, or one for each sample with commas.

    "capped right" is capped with a right box.
    """
    return [
        {"id": str(i), "sample": sample, "tokens": 10 * (i + 1)}
        | {"outcome": outcome.removesuffix(" right")}
        | ({} if outcome == "failed" else {"right": outcome in ("correct", "capped right")})
        | {"stopped": "length" if "capped" in outcome else "eos"}
        for i, samples in enumerate(outcomes)
        for sample, outcome in enumerate(samples.split(","))
    ]


STREAMING = Setting("streaming", 8)


def cells_of(*outcomes, n_samples=1):
    """The row of a table by its titles."""
    table = evaluate.accuracy_table(Results(n_samples, {STREAMING: some(*outcomes)}))
    titles, _, row = (line[2:-2].split(" | ") for line in table.splitlines())
    return dict(zip(titles, row, strict=True))


def test_samples_count_within_their_problem():
    """Halves and wholes, failures left out; a problem of failures alone is none."""
    records = some("correct,wrong", "correct,failed", "failed,failed", "capped,no answer")
    shares = evaluate.solved_shares(records)
    assert shares == {"0": 0.5, "1": 1, "3": 0}
    # Of 27 draws one has mean 0, one has mean 1: both ends are within 1 / 27 = 3.7 %.
    assert evaluate.accuracy(shares, n_samples=2) == pytest.approx((0.5, 0, 1))
    assert evaluate.mean_tokens(records) == (10 + 10 + 20 + 40 + 40) / 5
    assert evaluate.capped_rate(records) == 1 / 5


@pytest.mark.parametrize(
    "samples, score, interval",
    [
        # 1 / (1 + z^2 / 4) = 4 / 7.8415
        ("correct,correct", "100.0", "51.0 to 100.0"),
        ("wrong,capped right", "0.0", "0.0 to 49.0"),
        # 1/2 -+ z sqrt(1 / 16 + z^2 / 64) / (1 + z^2 / 4) = 1/2 -+ 0.68605 / 1.96036
        ("correct,wrong", "50.0", "15.0 to 85.0"),
    ],
)
def test_problems_that_are_all_alike(samples, score, interval):
    """Four of the same share: not for certain, as the bootstrap has it, but by Wilson."""
    row = cells_of(*[samples] * 4, n_samples=2)
    assert (row["pass@1, %"], row["95 % interval"]) == (score, interval)
    assert (row["problems"], row["samples"]) == ("4", "8")


def test_right_with_capped_by_hand():
    """One correct and two capped with a right box of five that did not fail; of eight samples."""
    row = cells_of("correct", "capped right", "wrong", "capped right", "capped", "failed")
    assert row["right with capped, %"] == "60.0" and row["pass@1, %"] == "20.0"
    assert row["capped (right)"] == "3 (2)" and row["capped, %"] == "60.0"
    options = ("correct,capped right", "capped right,failed", "wrong,correct", "capped,capped")
    row = cells_of(*options, n_samples=2)  # 4 of 7; shares of 1/2, 0, 1/2 and 0
    assert row["right with capped, %"] == "57.1" and row["pass@1, %"] == "25.0"


@pytest.mark.parametrize("policy, slot_map", [("streaming", "shared"), ("h2o", "head")])
def test_the_slot_map_is_in_the_table(policy, slot_map):
    results = Results(1, {Setting(policy, 64): some("correct")})
    assert f"| {policy}, 64 | {slot_map} | 100.0 |" in evaluate.accuracy_table(results)


B = Setting("b", 8)


def paired(first, second, n_samples=1, other=B):
    """The only row of the table, after its name and budget."""
    results = Results(n_samples, {Setting("a", 8): some(*first), other: some(*second)})
    titles, _, line = evaluate.paired_table(results).splitlines()
    assert titles.startswith("| against a | budget |")
    name, budget, *cells = line[2:-2].split(" | ")
    assert (name, budget) == (other.line, "8")
    return cells


@pytest.mark.parametrize("other", [B, Setting("full"), Setting("a", 8, 2)])
def test_paired_differences(other):
    """One problem won, five lost, one like the other, one failed: -4 of 7."""
    first = ["wrong", *["correct"] * 5, "capped", "correct"]
    second = ["correct", *["wrong"] * 5, "no answer", "failed"]
    cells = paired(first, second, other=other)
    assert cells[:2] == ["7", "-57.1"] and cells[3] == "0.2188"
    low, high = map(float, cells[2].split(" to "))
    assert low == pytest.approx(-100, abs=0.1) and high in (0, 14.3)


def test_paired_differences_of_samples():
    """No McNemar; every problem half better: no doubt within these."""
    cells = paired(["wrong,correct"] * 3, ["correct,correct"] * 3, n_samples=2)
    assert cells == ["3", "+50.0", "+50.0 to +50.0", ""]
    assert paired(["failed"], ["correct"]) == ["0", "", "", ""]


def test_no_differences():
    """That none was seen is no interval without a width; one won and one lost are a difference."""
    alike = paired(["wrong", "correct", "failed"], ["no answer", "correct", "correct"])
    assert alike == ["2", "+0.0", "none differs", "1.0000"]
    cells = paired(["wrong,correct"] * 3, ["correct,wrong"] * 3, n_samples=2)
    assert cells == ["3", "+0.0", "none differs", ""]
    assert paired(["wrong", "correct"], ["correct", "wrong"])[2] == "-100.0 to +100.0"


def test_pairs_at_every_budget():
    """Against the first at the same budget, or at its only one; the budgets ascend."""
    records = {Setting("b", 16): some("wrong"), Setting("full"): some("correct")}
    records |= {Setting("b", 8): some("correct"), Setting("c", 8): some("wrong")}

    def rows(results):
        lines = evaluate.paired_table(results).splitlines()[2:]
        return [tuple(line[2:-2].split(" | ")[i] for i in (0, 1, 2, 3)) for line in lines]

    assert rows(Results(1, records)) == [
        ("full", "8", "1", "+0.0"),
        ("c", "8", "1", "-100.0"),
        ("full", "16", "1", "+100.0"),
        ("c", "16", "0", ""),
    ]
    first = {Setting("full"): records.pop(Setting("full"))}
    assert rows(Results(1, first | records)) == [
        ("b", "8", "1", "+0.0"),
        ("c", "8", "1", "-100.0"),
        ("b", "16", "1", "-100.0"),
        ("c", "16", "0", ""),
    ]


def test_only_failures(tmp_path, alone):
    """A row of a table without numbers, and no plot of them."""
    results = Results(1, {STREAMING: some("failed")})
    row = "| streaming, 8 | shared |  |  | 0 | 0 | 0 | 0 | 0 | 0 (0) | 1 |  |  |  |"
    assert row in evaluate.accuracy_table(results)
    evaluate.draw_plots(tmp_path, "", results, {})
    assert alone == {}


def test_plots(tmp_path, alone):
    """By budget, ascending; the full cache is level over all of them."""
    records = {Setting("full"): some("correct", "correct")}
    for budget, outcome in ((16, "correct"), (8, "capped")):
        records[Setting("a", budget)] = some("wrong", outcome)
    records[Setting("a", 16, 2)] = some("wrong", "wrong")
    results = Results(1, records)
    times = {Setting("a", 8): {"rows": 2, "seconds": 3.0, "tokens": 5, "memory": 0, "held": 1}}
    evaluate.draw_plots(tmp_path, "", results, times)
    assert [*alone] == ["accuracy.png", "tokens.png", "capped.png", "time.png"]
    assert [*alone["accuracy.png"]] == ["full", "a", "a, recent 2"]
    full, a, other = alone["accuracy.png"].values()
    # Wilson of 2 / 2, 0 / 2 and 1 / 2: 1 / (1 + z^2 / 2) = 34.24 %, and 1/2 -+ 40.55 %.
    assert full == [(8, *full[0][1:]), (16, *full[0][1:])]
    assert full[0][1:] == pytest.approx((100, 34.24, 100), abs=0.01)
    assert len(a) == 2 and len(other) == 1
    assert a[0] == pytest.approx((8, 0, 0, 65.76), abs=0.01)
    assert a[1] == pytest.approx((16, 50, 9.45, 90.55), abs=0.01)
    assert other[0] == pytest.approx((16, 0, 0, 65.76), abs=0.01)
    both = [(8, 15, 15, 15), (16, 15, 15, 15)]
    assert alone["tokens.png"] == {"full": both, "a": both, "a, recent 2": both[1:]}
    assert alone["capped.png"]["a"] == [(8, 50, 50, 50), (16, 0, 0, 0)]
    assert alone["time.png"] == {"a": [(8, 1.5, 1.5, 1.5)]}


def test_times_add_up():
    """Over batches, by setting; memory is the largest, and tells nothing on a CPU."""
    batch = {"policy": "a", "budget": 8, "recent": None, "rows": 2, "seconds": 3.0, "tokens": 600}
    records = [batch | {"peak_memory": gb * 10**9, "held": gb / 4} for gb in (2, 1)]
    records.append(records[0] | {"recent": 5})
    times = evaluate.sum_times(records)
    found = times[Setting("a", 8)]
    sums = {"rows": 4, "seconds": 6.0, "tokens": 1200}
    assert len(times) == 2 and found == sums | {"memory": 2 * 10**9, "held": 0.375}
    assert times[Setting("a", 8, 5)]["tokens"] == 600
    for on_gpu, memory in ((True, "2.00"), (False, "")):
        titles, _, line = evaluate.time_table({Setting("a", 8): found}, on_gpu).splitlines()
        assert line == f"| a, 8 | 200.00 | 1.50 | {memory} | 38 |"
        names = "tokens/s | seconds per problem and sample | peak memory, GB | slots held"
        assert titles.startswith(f"|  | {names}")


def test_times_of_batches(tmp_path, command, scripted):
    """Prefill and decoding of the rows asked for, without the copies; a torn line is mended.

    Of the slots, 3 of 4 are held in one row; in the other, of 2 tokens, 2 of those it can hold.
    """
    options = ("--budgets", "64", "--batch-size", "2")
    problems = say("eos|a", "eos|bb", "eos|cccc")
    command("--policies", "streaming", *options, problems=problems)
    file = tmp_path / "run/times.jsonl"
    first, second = read_lines(file)
    assert first.pop("peak_memory") > 10**7 and second.pop("peak_memory") > 10**7
    setting = {"policy": "streaming", "budget": 64, "recent": None}
    assert first == setting | dict(batch=0, rows=2, seconds=3, tokens=3, held=0.875)
    assert second == setting | dict(batch=1, rows=1, seconds=3, tokens=4, held=0.875)
    table = (tmp_path / "run/time.md").read_text(encoding="utf-8")
    assert table.splitlines()[2:] == ["| streaming, 64 | 1.17 | 2.00 |  | 88 |"]  # 7 / 6, 6 / 3
    file.write_text(
        json.dumps(first | {"peak_memory": 0}) + "\n" + json.dumps(second)[:30], encoding="utf-8"
    )
    command("--policies", "epikv", *options)
    assert [line["policy"] for line in read_lines(file)] == ["streaming", "epikv", "epikv"]
    table = (tmp_path / "run/time.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 3 and table.splitlines()[2].startswith("| epikv, 64 |")


def test_all_outcomes_are_counted():
    row = cells_of(*OUTCOMES)
    counts = {"correct": "1", "wrong": "1", "no answer": "1", "capped (right)": "1 (0)"}
    assert counts.items() <= row.items()
    assert (row["failed"], row["problems"], row["samples"]) == ("1", "4", "4")


# Bad input -------------------------------------------------------------------------------------

GOOD = json.dumps(PROBLEMS[0])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--policies", "lru"], "unknown policy 'lru'; known: "),
        (["--policies", ""], "unknown policy ''; known: "),
        (["--budgets", "few"], "budgets must be numbers with commas, got 'few'"),
        (["--budgets", "4"], "budget 4 is smaller than sinks 4 + recent 1 + 1"),
        (["--budgets", "0"], "budget must be at least 1, got 0"),
        (["--recent", "-1"], "sinks and recent must be 0 or more, got 4, -1"),
        (["--recent", "2,few"], "recent must be numbers with commas, got '2,few'"),
        (["--policies", "epikv-fit"], "policy 'epikv-fit' needs a calibration; see scripts/"),
        (["--calibration", "/nowhere.json"], "No such file or directory: '/nowhere.json'"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--samples", "0"], "samples must be at least 1, got 0"),
        (["--batch-size", "-2"], "batch-size must be at least 1, got -2"),
        (["--max-new-tokens", "0"], "max-new-tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be 0 or more, got -1.0"),
        (["--greedy", "--temperature", "1"], "not allowed with argument --greedy"),
        (["--seed", "-1"], "seed must be from 0 to 2^32 - 1, got -1"),
        (["--dataset", "math50"], "dataset 'math50' is no file and none of math500, aime2024"),
        (["{"], "line 2: no JSON: "),
        ([GOOD], "line 2: id 'p0' comes twice"),
        (['{"id": "b", "problem": "x"}'], "line 2: no field 'answer'"),
        (['{"id": "b", "problem": "x", "answer": 5}'], "line 2: 'answer' is 5, not a str"),
        ([""], "problems.jsonl' holds no problems"),
        ([], "/nowhere"),  # at last the checkpoint
    ],
)
def test_bad_input_is_told_before_the_model_is_loaded(
    tmp_path, monkeypatch, capsys, options, words
):
    """In one line, without a folder; a line of the dataset stands for that dataset."""
    file = tmp_path / "problems.jsonl"
    lines = [] if options[:1] == [""] else [GOOD]
    if options and not options[0].startswith("--"):
        lines, options = lines + options, []
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths = ["--checkpoint", "/nowhere", "--dataset", str(file), "--output", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *paths, *options])
    with pytest.raises(SystemExit) as exit:
        evaluate.main()
    message = capsys.readouterr().err
    assert exit.value.code == 2 and words in message and message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "package, words",
    [("math_verify", "grading needs math-verify"), ("matplotlib", "plots need matplotlib")],
)
def test_what_is_not_installed_is_told_first(monkeypatch, package, words):
    there = evaluate.importlib.util.find_spec
    monkeypatch.setattr(
        evaluate.importlib.util, "find_spec", lambda name: None if name == package else there(name)
    )
    monkeypatch.setitem(sys.modules, package, None)
    args = evaluate.make_parser().parse_args(["--checkpoint", "/nowhere", "--dataset", "x"])
    with pytest.raises(ValueError, match=rf"{words}: pip install -e \.\[eval\]"):
        evaluate.evaluate(args, 0, 1)


def test_what_the_model_cannot_do(tmp_path, folder, command, capsys):
    """More tokens than its context holds, and a checkpoint that is not for chats."""
    with pytest.raises(SystemExit) as exit:
        command("--policies", "streaming", "--max-new-tokens", "250")
    assert exit.value.code == 2 and "leaves " in capsys.readouterr().err
    bare = tiny.make_tokenizer(tiny.make_model(tmp_path / "bare"))
    with pytest.raises(SystemExit):
        command("--policies", "streaming", "--checkpoint", str(bare))
    assert "error: the checkpoint has no chat template" in capsys.readouterr().err


def test_decoding_is_recorded_as_it_is(tmp_path, folder, command, scripted):
    """And the tokens to the end of the context: 256 less the prompt. The settings are all that the
    records depend on, without paths."""
    command("--greedy", "--policies", "streaming", output="greedy")
    command("--temperature", "0.5", "--policies", "streaming", "--limit", "2", output="drawn")
    greedy, drawn = (tiny.read_json(tmp_path / f"{n}/settings.json") for n in ("greedy", "drawn"))
    assert greedy["decoding"] == "greedy"
    limits = {"top_k": None, "top_p": None, "min_p": None}
    assert drawn["decoding"] == {"temperature": 0.5} | limits
    prompt = f"0 + 0?\n\n{evaluate.INSTRUCTION};a:"
    assert greedy["max_new_tokens"] == 256 - len(prompt) and greedy["first_prompt"] == prompt
    assert greedy["checkpoint"] == folder.name and greedy["dataset"] == "problems.jsonl"
    assert (greedy["dtype"], greedy["device"], greedy["seed"]) == ("float32", "cpu", 0)
    assert sorted(greedy) == sorted(
        "checkpoint weights dtype quantize device compile_mode torch seed dataset sha256 limit"
        " samples decoding first_prompt max_new_tokens batch_size calibration".split()
    )
    assert str(tmp_path) not in (tmp_path / "greedy/settings.json").read_text(encoding="utf-8")
    assert (greedy["limit"], drawn["limit"]) == (None, 2)
    assert len(read_lines(tmp_path / "greedy/records.jsonl")) == 5
    assert [r["id"] for r in read_lines(tmp_path / "drawn/records.jsonl")] == ["p0", "p1"]


def make_runner(*options, max_positions=40_000):
    """For prompts of 1,000 and 10 tokens."""
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    model = SimpleNamespace(config=SimpleNamespace(max_positions=max_positions), defaults=defaults)
    args = ["--checkpoint", "x", "--dataset", "x", "--seed", "3", *options]
    rows = [evaluate.Row("a", 0, [1] * n, "") for n in (1000, 10)]
    return evaluate.make_runner(evaluate.make_parser().parse_args(args), model, rows, None)


@pytest.mark.parametrize("options, temperature, top_p", [([], 0.6, 0.95), (["--greedy"], 0, None)])
def test_a_runner_as_asked_for(monkeypatch, options, temperature, top_p):
    """The checkpoint's decoding unless greedy; a full cache for 1,000 + 100 tokens; what policies
    take from the command line."""
    runner = make_runner("--max-new-tokens", "100", *options)
    assert (runner.sampling.temperature, runner.sampling.top_p) == (temperature, top_p)
    monkeypatch.setattr(evaluate, "Engine", lambda model, config, *_: config)
    random, full = map(runner.engine_of, (Setting("random", 8, 2), Setting("full")))
    assert (random.policy, random.budget, random.seed, random.recent) == ("random", 8, 3, 2)
    assert (full.policy, full.budget) == ("full", 2048)
    budgets = [runner.engine_of(Setting("random", budget)).budget for budget in (1099, 1100)]
    assert budgets == [1099, 2048]  # what holds all is as large as the full cache


@pytest.mark.parametrize(
    "options, max_positions, wanted",
    [([], 40_000, 32_768), ([], 33_768, 32_768), ([], 33_767, 32_767), ([], 1200, 200)]
    + [(["--max-new-tokens", "39000"], 40_000, 39_000)],
)
def test_the_longest_answer(options, max_positions, wanted):
    """32,768 tokens or what the context leaves, unless named."""
    runner = make_runner(*options, max_positions=max_positions)
    assert runner.max_new_tokens == wanted and runner.longest == 1000 + wanted

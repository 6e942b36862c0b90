"""Recall of planted facts: texts, questions, and a stand-in for a model that copies."""

import json
import random
import re
import sys

import pytest
import tiny
import torch

import passkey
import records
from epikv import NO_POSITION, POLICIES, CacheShape, EvictionConfig, Policy, SlotCache
from passkey import ANSWER_TOKENS, Question, Trial, ask, first_number, make_trial, recall


def encode(text):
    return list(text.encode())


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def trials_of(n_trials, n_tokens=800, distances=(100, 300, 600), seed=0):
    return [make_trial(i, encode, n_tokens, [*distances], seed) for i in range(n_trials)]


def test_a_text_tells_each_number_once_and_in_time():
    """The sentence ends `distance` tokens before the end, or up to a filler sentence earlier."""
    for trial in trials_of(20):
        text = decode(trial.tokens)
        assert len(trial.tokens) == 800
        assert [question.distance for question in trial.questions] == [100, 300, 600]
        for question in trial.questions:
            (found,) = re.finditer(re.escape(decode(question.tokens)) + r" (\d{4})\.", text)
            assert found[1] == question.answer
            # A filler sentence has at most 60 letters, a told number at most 44.
            since = len(text) - found.end()
            assert question.distance <= since < question.distance + 60
        assert len({decode(question.tokens) for question in trial.questions}) == 3
        assert len(re.findall(r"\d+", text)) == 3


def test_texts_follow_from_the_seed():
    assert trials_of(3) == trials_of(3) != trials_of(3, seed=1)
    texts = {decode(trial.tokens) for trial in trials_of(10) + trials_of(10, seed=1)}
    assert len(texts) == 20


class Copier:
    """In the place of a Replay: says what followed the last time that it saw the last tokens.

    No model, but the tokens that it sees are those that the policy's cache still holds.
    """

    def __init__(self, policy, budget, n_rows):
        shape = CacheShape(1, 1, 2, 4, batch_size=n_rows, dtype=torch.float32)
        config = EvictionConfig(budget, policy, recent=16, sinks=0)
        self.cache = SlotCache(config, shape)
        self.cache.register_buffer("content", torch.zeros(n_rows, budget, dtype=torch.int64))
        self.residuals = [torch.zeros(n_rows, 1, 4) for _ in self.cache.reads]

    def feed(self, tokens):
        for token in tokens.unbind(1):
            slot, position = self.cache.begin_step()
            self.cache.content.scatter_(1, slot[:, 0], token[:, None])
            self.cache.end_step(slot, position, self.residuals)

    @property
    def logits(self):
        rows = zip(self.cache.position[:, 0, 0].tolist(), self.cache.content.tolist(), strict=True)
        return torch.stack([self.guess(*row) for row in rows])

    def guess(self, position, content):
        held = {p: token for p, token in zip(position, content, strict=True) if p != NO_POSITION}
        last = max(held)

        def match(end):
            """How many tokens before `end` equal the last ones."""
            n = 0
            while held.get(end - n) is not None and held.get(end - n) == held.get(last - n):
                n += 1
            return n

        best = max((p for p in held if p + 1 in held), key=match)
        return torch.eye(256)[held[best + 1]]

    def save(self):
        return [buffer.clone() for buffer in self.cache.buffers()]

    def restore(self, saved):
        for buffer, content in zip(self.cache.buffers(), saved, strict=True):
            buffer.copy_(content)


def recall_of(policy, budget, trials):
    answers = recall(Copier(policy, budget, len(trials)), trials, decode)
    return [
        [first_number(text) == q.answer for q, text in zip(trial.questions, row, strict=True)]
        for trial, row in zip(trials, answers, strict=True)
    ]


def test_what_is_held_is_recalled_and_what_is_gone_is_not(monkeypatch):
    """Recency within its budget and not beyond; a policy that keeps the facts, all; its opposite,
    none."""
    trials = trials_of(3)
    told = torch.zeros(3, 2000, dtype=torch.bool)  # by row and position
    for row, trial in enumerate(trials):
        text = decode(trial.tokens)
        for question in trial.questions:
            start = text.index(decode(question.tokens))
            told[row, start : start + len(question.tokens) + 6] = True

    class Keeper(Policy):
        sign = 1

        def score(self, tokens):
            rows = torch.arange(tokens.position.shape[0])[:, None]
            return self.sign * told[rows, tokens.position].float()

    class Loser(Keeper):
        sign = -1

    monkeypatch.setitem(POLICIES, "keeper", Keeper)
    monkeypatch.setitem(POLICIES, "loser", Loser)
    assert recall_of("streaming", 1000, trials) == [[True, True, True]] * 3
    assert recall_of("streaming", 256, trials) == [[True, False, False]] * 3
    assert recall_of("keeper", 256, trials) == [[True, True, True]] * 3
    assert recall_of("loser", 256, trials) == [[False, False, False]] * 3


def test_questions_of_unlike_length():
    """Each row answers when its own question is over; all start from the same place."""
    text = encode("ab1234 ") + encode("longer5678 ")
    trials = [
        Trial(0, text, [Question(9, encode("ab"), "1234"), Question(3, encode("longer"), "5678")]),
        Trial(1, text, [Question(3, encode("longer"), "5678"), Question(9, encode("ab"), "1234")]),
    ]
    assert recall_of("streaming", 64, trials) == [[True, True], [True, True]]


def test_answers_have_one_length():
    copier = Copier("streaming", 64, 2)
    copier.feed(torch.tensor([encode("abcdefgh abcdefgh "), encode("xyzxyzxyzxyzxyzxyz")]))
    first, second = ask(copier, [encode("ab"), encode("xyzxy")])
    assert decode(first) == "cdefgh" and decode(second) == "zxyzxy"
    assert len(first) == len(second) == ANSWER_TOKENS


@pytest.mark.parametrize(
    "text, number",
    [(" 1234.", "1234"), ("1234", "1234"), ("\n 12 34", "12"), (" x1234", ""), ("", "")],
)
def test_the_first_number(text, number):
    assert first_number(text) == number


def test_recall_by_hand():
    """Three of four; by Wilson (z = 1.96) 0.75 of 4 lies between 0.301 and 0.954."""
    answers = [dict(answer="1", found=found) for found in ("1", "1", "1", "")]
    assert passkey.recalled(answers) == 0.75
    assert passkey.cell(answers) == "75% (30% to 95%)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny.make_checkpoint(folder, max_position_embeddings=2048)


def run_command(monkeypatch, capsys, folder, output, *options):
    command = ["passkey.py", "--checkpoint", str(folder), "--no-compile", "--output", str(output)]
    command += ["--distances", "20,150", "--batch-size", "2", *options]
    monkeypatch.setattr(sys, "argv", command)
    passkey.main()
    return capsys.readouterr()


def test_the_command(monkeypatch, capsys, folder, tmp_path):
    """A row a setting, the full cache always among them; run again it only draws the table."""
    options = ["--trials", "3", "--policies", "epikv,h2o", "--budgets", "64"]
    first = run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    lines = first.out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| recall after",
        "| ---",
        "| full",
        "| epikv, 64",
        "| h2o, 64",
    ]
    assert "6 of 6 runs, 0 minutes left" in first.err  # three settings, two batches
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "settings.json",
        "records.jsonl",
        "table.md",
        "recall.png",
        "recall-64.png",
    }
    written = (tmp_path / "run/records.jsonl").read_text(encoding="utf-8")
    assert len(written.splitlines()) == 3 * 3 * 2
    again = run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    assert again.out == first.out and again.err == ""
    assert (tmp_path / "run/records.jsonl").read_text(encoding="utf-8") == written


def test_a_broken_run_goes_on(monkeypatch, capsys, folder, tmp_path):
    """With every record of a whole run, whichever line was the last."""
    options = ["--trials", "3", "--policies", "random", "--budgets", "64", "--seed", "4"]
    run_command(monkeypatch, capsys, folder, tmp_path / "whole", *options)
    table = (tmp_path / "whole/table.md").read_text(encoding="utf-8")
    whole = (tmp_path / "whole/records.jsonl").read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 4):
        run_command(
            monkeypatch, capsys, folder, tmp_path / f"{length}", "--trials", "1", *options[2:]
        )
        (tmp_path / f"{length}/records.jsonl").write_bytes(whole[:length])
        run_command(monkeypatch, capsys, folder, tmp_path / f"{length}", *options)
        assert (tmp_path / f"{length}/table.md").read_text(encoding="utf-8") == table
        found = (tmp_path / f"{length}/records.jsonl").read_bytes()
        assert sorted(found.splitlines()) == sorted(whole.splitlines())


def test_two_processes_share_the_work(monkeypatch, capsys, folder, tmp_path):
    """The first waits for what the second does meanwhile, and reports all."""
    options = ["--trials", "2", "--policies", "epikv,random,streaming", "--budgets", "64"]
    alone = run_command(monkeypatch, capsys, folder, tmp_path / "alone", *options)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def second_process(seconds):
        monkeypatch.setenv("RANK", "1")
        passkey.main()

    monkeypatch.setattr(records.time, "sleep", second_process)
    shared = run_command(monkeypatch, capsys, folder, tmp_path / "shared", *options)
    assert shared.out == alone.out and "waiting for the other processes" in shared.err
    for name in (
        "records.jsonl",
        "records.1.jsonl",
    ):  # two settings each, of two answers in two texts
        assert len((tmp_path / "shared" / name).read_text(encoding="utf-8").splitlines()) == 8


def test_distances_without_room(monkeypatch, capsys, folder, tmp_path):
    with pytest.raises(ValueError, match="distance 310 is too close to the one before"):
        trials_of(1, distances=(100, 300, 310))
    with pytest.raises(SystemExit) as exit:
        run_command(monkeypatch, capsys, folder, tmp_path, "--distances", "20,21")
    assert exit.value.code == 2
    assert "distance 21 is too close to the one before: move it apart" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--policies", "lru"], "unknown policy 'lru'"),
        (["--budgets", "few"], "budgets must be numbers"),
        (["--policies", "epikv-fit"], "policy 'epikv-fit' needs a calibration"),
        (["--calibration", "/nowhere.json"], "No such file or directory: '/nowhere.json'"),
        (["--trials", "0"], "trials must be at least 1, got 0"),
        (["--batch-size", "-1"], "batch-size must be at least 1, got -1"),
        (["--distances", "5,5"], "distances must be 1 to 8 different numbers from 1, got '5,5'"),
        (["--distances", "0"], "distances must be 1 to 8"),
        (["--distances", "1,2,3,4,5,6,7,8,9"], "distances must be 1 to 8"),
        (["--distances", "far"], "distances must be numbers with commas, got 'far'"),
    ],
)
def test_bad_options_are_told_before_the_model_is_loaded(monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["passkey.py", "--checkpoint", "/nowhere", *options])
    with pytest.raises(SystemExit) as exit:
        passkey.main()
    assert exit.value.code == 2 and words in capsys.readouterr().err


def test_other_settings_are_refused(monkeypatch, capsys, folder, tmp_path):
    run_command(monkeypatch, capsys, folder, tmp_path, "--trials", "1", "--budgets", "64")
    with pytest.raises(SystemExit) as exit:
        run_command(monkeypatch, capsys, folder, tmp_path, "--trials", "1", "--seed", "1")
    assert exit.value.code == 2
    assert "seed 0, not 1; name another output folder" in capsys.readouterr().err
    assert json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))["seed"] == 0


def test_a_calibration_through_the_command(monkeypatch, capsys, folder, tmp_path):
    """It reaches every cache, and a folder is of one calibration."""
    configs = []
    new_replay = passkey.Replay

    def watched(model, config, *rest):
        configs.append(config)
        return new_replay(model, config, *rest)

    monkeypatch.setattr(passkey, "Replay", watched)
    options = ["--trials", "1", "--policies", "epikv,epikv-fit", "--budgets", "64"]
    calibrations = [tiny.calibration(3, seed) for seed in (0, 1)]
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for path, calibration in zip(paths, calibrations, strict=True):
        tiny.write_calibration(path, calibration)
    options += ["--calibration", str(paths[0])]
    out = run_command(monkeypatch, capsys, folder, tmp_path / "run", *options).out
    assert "| epikv-fit, 64 |" in out and "| epikv, 64 |" in out
    given = {config.policy: config.calibration for config in configs}
    assert given == dict.fromkeys(["full", "epikv", "epikv-fit"], calibrations[0])
    of_folder = tiny.read_json(tmp_path / "run/settings.json")["calibration"]
    for again, words in (
        ([*options[:-1], str(paths[1])], f"run holds a run with calibration {of_folder!r}, not "),
        (
            ["--trials", "1", "--policies", "random"],
            f"{of_folder!r}, not None; name another",
        ),
    ):
        with pytest.raises(SystemExit):
            run_command(monkeypatch, capsys, folder, tmp_path / "run", *again)
        assert words in capsys.readouterr().err

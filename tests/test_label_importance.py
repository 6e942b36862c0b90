"""Occlusion labels against a dense model by transformers, window by window."""

import json
import random
import sys

import pytest
import tiny
import torch
import transformers

import label_importance as labels
from label_importance import Answerer, Reader, Window, cut_windows
from model import Transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model(folder):
    return Transformer.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def peer(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


TEXT = torch.randint(256, (70,), generator=torch.Generator().manual_seed(0)).tolist()
WINDOWS = cut_windows(10, 66, 12, 6)
LATE = cut_windows(10, 66, 12, 6, delay=7)


def dense_losses(peer, ids, window=None):
    """Nats of each token after the first, later ones without sight of the window."""
    n = len(ids)
    at = torch.arange(n)
    seen = at <= at[:, None]
    if window is not None:
        seen[window.end + window.delay :, window.begin : window.end] = False
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        logits = peer(torch.tensor([ids]), attention_mask=mask, position_ids=at[None]).logits[0]
    return -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]


def test_windows_by_hand():
    assert cut_windows(3, 10, 4, 2) == [Window(3, 7), Window(5, 9), Window(7, 10), Window(9, 10)]
    assert cut_windows(3, 10, 4, 2, 3) == [Window(3, 7, 3), Window(5, 7, 3)]


def test_the_text_is_read_once_and_rightly(model, peer, monkeypatch):
    """In chunks, each after those before."""
    monkeypatch.setattr(labels, "CHUNK", 16)
    loss = Reader(model, TEXT).loss
    torch.testing.assert_close(loss, dense_losses(peer, TEXT), rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("windows", [WINDOWS, LATE])
def test_drop_is_a_mask_over_the_window(model, peer, batch_size, windows):
    """Every window, by brute force; RoPE's cosines are float32 here, whatever the model's type.

    With a delay the tokens just after it see it, and what they tell counts for nothing.
    """
    found = labels.label_losses(Reader(model, TEXT), windows, None, batch_size)
    base = dense_losses(peer, TEXT)
    wanted = [
        (dense_losses(peer, TEXT, window) - base)[window.end + window.delay :].sum().item()
        for window in windows
    ]
    assert found == pytest.approx(wanted, abs=2e-3) and max(map(abs, wanted)) > 0.5


def test_a_filler_stands_in_the_window(model, peer):
    filler = torch.arange(100, 112)
    found = labels.label_losses(Reader(model, TEXT), WINDOWS, filler, 5)
    base = dense_losses(peer, TEXT)
    wanted = []
    for window in WINDOWS:
        size = window.end - window.begin
        ids = TEXT[: window.begin] + filler[:size].tolist() + TEXT[window.end :]
        wanted.append((dense_losses(peer, ids) - base)[window.end :].sum().item())
    assert found == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("filler", [None, torch.arange(12)])
def test_shared_prefixes_and_batches_change_nothing(model, filler):
    """Against windows read one at a time from the very start, in float64."""
    reader = Reader(model, TEXT)
    found = labels.label_losses(reader, WINDOWS, filler, 4)
    for window, increase in zip(WINDOWS, found, strict=True):
        # A first row that changes the first token makes the whole batch start there.
        whole = [Window(1, 2), window]
        _, alone = reader.loss_increases(whole, reader.occlude(whole, filler))
        assert increase == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("delay", [0, 9])
def test_attention_is_the_mean_of_what_later_tokens_give(model, peer, monkeypatch, delay):
    """By the whole matrix of a dense model; the last tokens get nothing from beyond the delay."""
    monkeypatch.setattr(labels, "CHUNK", 16)
    with torch.no_grad():
        weights = peer(torch.tensor([TEXT]), output_attentions=True).attentions
    matrix = torch.stack(weights)[:, 0].mean((0, 1))  # [N, N]
    wanted = [matrix[at + delay + 1 :, at].mean().item() for at in range(len(TEXT) - delay - 1)]
    found = labels.received_attention(model, TEXT, delay)
    assert found == pytest.approx([*wanted, *[None] * (delay + 1)], abs=1e-5)


@pytest.mark.parametrize("drops", [True, False])
def test_answers_are_greedy_continuations(model, peer, drops):
    """Of the dense model that cannot see the window, token by token."""
    reader, end = Reader(model, TEXT), 60
    windows = [Window(20, 32), Window(48, 60), Window(end, end)]
    filler = None if drops else torch.arange(200, 212)
    answerer = Answerer(reader, end, 4, 8, "none")
    texts = []
    answerer.texts, texts_of = lambda: texts.extend(texts_of()) or texts, answerer.texts
    answerer.answers(windows, reader.occlude(windows, filler), drops)
    for window, text in zip(windows, texts, strict=False):
        ids = TEXT[:end]
        if not drops:
            ids[window.begin : window.end] = filler[: window.end - window.begin].tolist()
        tokens = []
        for _ in range(8):
            tokens.append(greedy(peer, ids, window if drops else None))
            ids = [*ids, tokens[-1]]
        if set(tokens) & model.eos_ids:
            tokens = tokens[: tokens.index(tiny.EOS)]
        assert text == model.tokenizer.decode(tokens)


def greedy(peer, ids, window):
    """The next token; the last one of the text before an answer still saw the window."""
    n, at = len(ids), torch.arange(len(ids))
    seen = at <= at[:, None]
    if window is not None:
        seen[window.end :, window.begin : window.end] = False
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        return int(peer(torch.tensor([ids]), attention_mask=mask).logits[0, -1].argmax())


@pytest.mark.parametrize(
    "text, start",
    [
        ("thought </think> so 5", 16),
        ("a </think> b </think>\n\\boxed{5}", 21),
        ("x \\boxed{1} y \\boxed{2}", 14),
        ("nothing", 7),
    ],
)
def test_where_the_answer_begins(text, start):
    assert labels.answer_start(text) == start


def test_labels_of_tokens_by_hand():
    """Windows 0-3 and 2-5 of values 1 and 4; the last token is covered by none."""
    covering = labels.over_tokens([Window(0, 3), Window(2, 5)], [1, 4], 0, 6)
    assert covering == [[1], [1], [1, 4], [4], [4], []]


GOOD = {"prompt": "Why?<think>", "trace": "Six by seven.</think> It is \\boxed{42}, I think."}


def run_command(monkeypatch, capsys, folder, path, output, *options):
    command = ["label_importance.py", "--checkpoint", str(folder), "--traces", str(path)]
    command += ["--no-compile", "--output", str(output), "--window", "6", "--stride", "3"]
    monkeypatch.setattr(sys, "argv", [*command, *map(str, options)])
    labels.main()
    return capsys.readouterr()


def write_traces(path, n):
    lines = [json.dumps(GOOD | {"id": str(i), "trace": GOOD["trace"] * (i + 1)}) for i in range(n)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_command(monkeypatch, capsys, folder, tmp_path):
    """A line for each trace and filler, a label for each token of the thoughts."""
    path = write_traces(tmp_path / "t.jsonl", 2)
    options = ["--fillers", "drop,eos", "--tokens", 40]
    run = run_command(monkeypatch, capsys, folder, path, tmp_path / "run", *options)
    assert "4 of 4 traces, 0 minutes left" in run.err
    model = Transformer.from_pretrained(folder)
    found = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    assert [(r["trace"], r["filler"]) for r in found] == [
        ("0", "drop"),
        ("0", "eos"),
        ("1", "drop"),
        ("1", "eos"),
    ]
    tokens = model.tokenizer.ids(GOOD["trace"], add_special_tokens=False)
    thoughts = model.tokenizer.ids("Six by seven.</think>", add_special_tokens=False)
    record = found[0]
    assert len(record["loss"]) == min(len(tokens), 40)
    assert record["n_prompt"] == len(model.tokenizer.encode(GOOD["prompt"]))
    assert [loss is None for loss in record["loss"]] == [
        at >= len(thoughts) for at in range(len(record["loss"]))
    ]
    prompt = model.tokenizer.encode(GOOD["prompt"])
    reader = Reader(model, prompt + tokens[:40])
    windows = cut_windows(len(prompt), len(prompt) + len(thoughts), 6, 3)
    first, second = labels.label_losses(reader, windows[:2], None, 2)
    assert record["loss"][0] == pytest.approx(first, abs=1e-4)
    assert record["loss"][3] == pytest.approx((first + second) / 2, abs=1e-4)


def test_a_broken_run_goes_on(monkeypatch, capsys, folder, tmp_path):
    path = write_traces(tmp_path / "t.jsonl", 4)
    run_command(monkeypatch, capsys, folder, path, tmp_path / "run", "--tokens", 30)
    file = tmp_path / "run/records.jsonl"
    whole = file.read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 4):
        file.write_bytes(whole[:length])
        run_command(monkeypatch, capsys, folder, path, tmp_path / "run", "--tokens", 30)
        assert file.read_bytes() == whole


class Oracle:
    """In the place of an Answerer: says 42 but where a window covers position 5."""

    end = 30

    def answers(self, windows, suffix, drops):
        return [None if w.begin <= 5 < w.end else "42.0" if w.begin else "42" for w in windows]


def test_flips_are_other_answers(model):
    """An answer of equal value is none, a missing one is."""
    windows = cut_windows(0, 20, 4, 2)
    control, flips = labels.label_flips(Reader(model, TEXT), windows, None, Oracle(), 3)
    assert control == "42.0"
    assert flips == [w.begin <= 5 < w.end for w in windows] and sum(flips) == 2


def test_flips_through_the_command(monkeypatch, capsys, folder, tmp_path):
    """A random model boxes nothing, so there is nothing to flip, and that is what is told."""
    path = write_traces(tmp_path / "t.jsonl", 1)
    options = ["--outcomes", "loss,flip,attention", "--answer-tokens", 5]
    run_command(monkeypatch, capsys, folder, path, tmp_path / "run", *options)
    (record,) = map(json.loads, (tmp_path / "run/records.jsonl").read_text().splitlines())
    assert record["control"] is None and "flip" not in record and record["loss"]
    model = Transformer.from_pretrained(folder)
    trace = model.tokenizer.ids(GOOD["trace"], add_special_tokens=False)
    prompt = model.tokenizer.encode(GOOD["prompt"])
    wanted = labels.received_attention(model, prompt + trace, 0)[len(prompt) :]
    assert record["attention"][:-1] == pytest.approx(wanted[:-1], rel=1e-3)
    assert record["attention"][-1] is wanted[-1] is None


@pytest.mark.parametrize(
    "options, words",
    [
        (["--fillers", "zero"], "unknown filler 'zero'; known: drop, pad, eos, random"),
        (["--outcomes", "loss,fun"], "unknown outcome 'fun'; known: loss, flip, attention"),
        (["--window", "0"], "window must be at least 1, got 0"),
        (["--stride", "0"], "stride must be at least 1, got 0"),
        (["--delay", "-1"], "delay must be 0 or more, got -1"),
        (["--fillers", "pad"], "the model has no pad token; choose another filler"),
    ],
)
def test_bad_options(monkeypatch, capsys, folder, tmp_path, options, words):
    path = write_traces(tmp_path / "t.jsonl", 1)
    with pytest.raises(SystemExit) as exit:
        run_command(monkeypatch, capsys, folder, path, tmp_path / "run", *options)
    assert exit.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

"""Occlusion labels against a dense model by transformers, window by window."""

import json
import math
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
        (alone,) = reader.loss_increases([window], reader.occlude([window], filler, start=0))
        assert increase == pytest.approx(alone, abs=1e-10)


def test_attention_is_that_of_a_dense_model(model, peer, monkeypatch):
    """The whole matrix, though it is read in chunks."""
    monkeypatch.setattr(labels, "CHUNK", 16)
    with torch.no_grad():
        weights = peer(torch.tensor([TEXT]), output_attentions=True).attentions
    wanted = torch.stack(weights)[:, 0].mean((0, 1))  # [N, N]
    found = labels.attention_matrix(model, TEXT)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_effects_are_those_of_a_dense_model(model, peer, monkeypatch):
    """Its gradients for a bias on the scores of every layer and head, over what is left without."""
    n, n_heads = len(TEXT), peer.config.num_attention_heads
    biases = []

    def add_bias(module, args, kwargs):
        biases.append(torch.zeros(1, n_heads, n, n, dtype=torch.float64, requires_grad=True))
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
        return args, kwargs | {"attention_mask": mask + biases[-1]}

    hooks = [
        layer.register_forward_pre_hook(add_bias, with_kwargs=True) for layer in peer.model.layers
    ]
    found = peer(torch.tensor([TEXT]), labels=torch.tensor([TEXT]), output_attentions=True)
    (found.loss * (n - 1)).backward()
    for hook in hooks:
        hook.remove()
    of_heads = torch.stack(
        [
            bias.grad[0] / (1 - weights[0].detach()).clamp(min=0.01)
            for bias, weights in zip(biases, found.attentions, strict=True)
        ]
    )  # [L, H, N, N]
    wanted = of_heads.sum((0, 1))
    actual = labels.effect_matrix(model, TEXT)
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(actual, wanted**2, rtol=1e-3, atol=1e-7)

    monkeypatch.setattr(labels, "FEWEST", 2)
    actual = labels.head_effects(model, TEXT, (0, 5))
    n_layers, n_kv_heads = peer.config.num_hidden_layers, peer.config.num_key_value_heads
    assert actual.shape == (2, n, n_layers, n_kv_heads)
    shared = of_heads.view(n_layers, n_kv_heads, -1, n, n).sum(2) ** 2
    for found, delay in zip(actual, (0, 5), strict=True):
        for key in (0, 7, n - 3 - delay):
            mean = shared[..., key + delay + 1 :, key].mean(-1)
            torch.testing.assert_close(found[key].double(), mean, rtol=1e-3, atol=1e-9)
        assert found[n - 2 - delay :].isnan().all()


def test_an_effect_is_the_change_of_the_loss(tmp_path):
    """With one layer and head, by its slope where a key counts a tenth less, and a tenth more."""
    shape = dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    folder = tiny.make_checkpoint(tmp_path, **shape)
    model = Transformer.from_pretrained(folder, dtype=torch.float64)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    ids, n = torch.tensor([TEXT[:12]]), 12
    found = labels.effect_matrix(model, TEXT[:12])
    causal = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(
        torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf
    )
    for query, key in ((5, 2), (9, 9), (10, 0)):
        losses = []
        for share in (0.9, 1.1):  # of its odds against all other keys
            mask = causal.clone()
            mask[..., query, key] = math.log(share)
            with torch.no_grad():
                out = peer(ids, attention_mask=mask, output_attentions=True)
            likelihoods = out.logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
            losses.append(-likelihoods.sum().item())
            weight = out.attentions[0][0, 0, query, key].item()
        slope = (losses[1] - losses[0]) / math.log(1.1 / 0.9)
        assert found[query, key].item() == pytest.approx((slope / (1 - weight)) ** 2, rel=0.02)


def test_the_mean_over_later_tokens_by_hand(monkeypatch):
    """Of a column without its first rows; two rows are too few here."""
    monkeypatch.setattr(labels, "FEWEST", 3)
    matrix = torch.arange(36).view(6, 6).float()
    few = math.nan
    found = labels.mean_beyond(torch.stack([matrix, 2 * matrix]), 0).tolist()
    assert found[0] == pytest.approx([18, 22, 26, few, few, few], nan_ok=True)
    assert found[1] == pytest.approx([36, 44, 52, few, few, few], nan_ok=True)
    found = labels.mean_beyond(matrix, 2).tolist()
    assert found == pytest.approx([24, few, few, few, few, few], nan_ok=True)


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
    assert "2 of 2 traces, 0 minutes left" in run.err
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
    monkeypatch.setattr(labels, "FEWEST", 1)
    options = ["--outcomes", "loss,flip,attention,effect", "--answer-tokens", 5]
    run_command(monkeypatch, capsys, folder, path, tmp_path / "run", *options)
    (record,) = map(json.loads, (tmp_path / "run/records.jsonl").read_text().splitlines())
    assert record["control"] is None and "flip" not in record and record["loss"]
    model = Transformer.from_pretrained(folder)
    trace = model.tokenizer.ids(GOOD["trace"], add_special_tokens=False)
    prompt = model.tokenizer.encode(GOOD["prompt"])
    for outcome in ("attention", "effect"):
        matrix = getattr(labels, f"{outcome}_matrix")(model, prompt + trace)
        wanted = labels.mean_beyond(matrix, 0)[len(prompt) :].tolist()
        assert record[outcome][:-1] == pytest.approx(wanted[:-1], rel=1e-3)
        assert record[outcome][-1] is None and math.isnan(wanted[-1])


def test_delays_through_the_command(monkeypatch, capsys, folder, tmp_path):
    """A record for each; other fillers than a drop know none."""
    path = write_traces(tmp_path / "t.jsonl", 1)
    options = ["--delays", "0,4", "--fillers", "drop,eos"]
    run_command(monkeypatch, capsys, folder, path, tmp_path / "run", *options)
    found = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    kinds = [(record["filler"], record["delay"]) for record in found]
    assert kinds == [("drop", 0), ("drop", 4), ("eos", 0), ("eos", 4)]
    soon, late, filled, same = (record["loss"] for record in found)
    assert filled == same and soon != late
    # The last window is gone 4 tokens before the answer; so are all tokens' windows.
    assert late.count(None) == soon.count(None) + 4


@pytest.mark.parametrize(
    "options, words",
    [
        (["--fillers", "zero"], "unknown filler 'zero'; known: drop, pad, eos, random"),
        (["--outcomes", "loss,fun"], "unknown outcome 'fun'; known: loss, flip, attention, effect"),
        (["--window", "0"], "window must be at least 1, got 0"),
        (["--stride", "0"], "stride must be at least 1, got 0"),
        (["--delays", "0,-1"], "delays must be 0 or more, got '0,-1'"),
        (["--fillers", "pad"], "the model has no pad token; choose another filler"),
    ],
)
def test_bad_options(monkeypatch, capsys, folder, tmp_path, options, words):
    path = write_traces(tmp_path / "t.jsonl", 1)
    with pytest.raises(SystemExit) as exit:
        run_command(monkeypatch, capsys, folder, path, tmp_path / "run", *options)
    assert exit.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

"""Teacher-forced replay: against a dense model by transformers, and by what must be zero."""

import dataclasses
import json
import math
import random
import re
import shutil
import sys

import pytest
import tiny
import torch
import transformers

import fidelity
import records
from epikv import POLICIES
from fidelity import compare, longest, replay, summarise
from generate import Engine, generate
from model import Transformer
from replay import Setting, Trace

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def model(folder):
    return Transformer.from_pretrained(folder, dtype=torch.float64)


class WithoutSinks(Setting):
    def config(self, *arguments, **options):
        return dataclasses.replace(super().config(*arguments, **options), sinks=0)


def traces_of(*prompts, n_tokens=40, seed=0):
    """A trace for each length of a prompt, of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(256, (n,), generator=generator).tolist()

    return [Trace(f"trace {i}", draw(n), draw(n_tokens)) for i, n in enumerate(prompts)]


def test_measures_by_hand():
    """Of two tokens: halves against a quarter and the rest, and a sure thing against halves."""
    full = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]], dtype=torch.float64).log() + 3  # any constant
    other = torch.tensor([[[0.75, 0.25], [0.2, 0.8]]], dtype=torch.float64).log()
    loss_gap, kl, agreement = compare(full, other, torch.tensor([[1, 0]]))[:, 0].tolist()
    assert loss_gap == pytest.approx([math.log(2), math.log(4.5)])
    assert kl == pytest.approx(
        [0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2), 0.9 * math.log(4.5) - 0.1 * math.log(8)]
    )
    assert agreement[1] == 0


def configs_of(traces, settings, **given):
    return {setting: setting.config(longest(traces), **given) for setting in settings}


def test_the_full_cache_has_no_gap(model):
    """Exactly: it is compared with itself."""
    traces = traces_of(3, 30)
    (values,) = replay(model, traces, configs_of(traces, [Setting("full")]), "none").values()
    assert values.shape == (4, 2, 40)
    assert values[0].eq(0).all() and values[1].eq(0).all() and values[2:].eq(1).all()


@pytest.mark.parametrize("recent", [None, 8])
def test_a_budget_for_everything_has_no_gap(model, recent):
    """Exactly zero for every policy; but ThinKV forgets at the end of a thought, room or no room.

    The smaller recency window makes all of them take single tokens.
    """
    traces = traces_of(3, 30)
    forgetful = ("thinkv", "full")
    names = [name for name in POLICIES if name not in forgetful]
    if recent is not None:  # too short for two blocks
        names = [name for name in names if not POLICIES[name].blocks]
    settings = [Setting(name, 200, recent) for name in names]
    configs = configs_of(traces, settings, calibration=tiny.calibration(4))
    for setting, values in replay(model, traces, configs, "none").items():
        assert values[:2].eq(0).all() and values[2:].eq(1).all(), setting


@pytest.mark.parametrize("positions", ["true", "cache-length"])
@pytest.mark.parametrize("compile_mode", ["none", "blocks"])
def test_the_gap_of_streaming_is_that_of_a_sliding_window(model, folder, compile_mode, positions):
    """A dense model with a band for a mask sees in every layer what the cache holds.

    With its positions stopped at the budget as well, if asked for.
    """
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    traces, budget = traces_of(1, 1, n_tokens=60), 12
    tokens = torch.tensor([trace.prompt + trace.tokens for trace in traces])  # [2, 61]
    at = torch.arange(tokens.shape[1])
    causal = at <= at[:, None]
    # The first token is the prompt and stays; of the others the last ones.
    band = causal & ((at == 0) | (at > at[:, None] - (budget - 1)))

    def log_probabilities(mask, position):
        additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        with torch.no_grad():
            additive = additive.expand(2, 1, -1, -1)
            ids = position.expand(2, -1)
            logits = peer(tokens, attention_mask=additive, position_ids=ids).logits
        return logits.log_softmax(-1)[:, :-1]

    stopped = at.clamp(max=budget) if positions == "cache-length" else at
    full, window = log_probabilities(causal, at), log_probabilities(band, stopped)
    target = tokens[:, 1:, None]
    gap = (full.gather(2, target) - window.gather(2, target))[..., 0]
    kl = (full.exp() * (full - window)).sum(-1)
    setting = WithoutSinks("streaming", budget, 2)
    values = replay(model, traces, configs_of(traces, [setting]), compile_mode, positions)[setting]
    # RoPE's cosines are float32 here, whatever the model's type.
    torch.testing.assert_close(values[0], gap, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values[1], kl, rtol=1e-4, atol=1e-5)
    assert torch.equal(values[2], (full.argmax(-1) == window.argmax(-1)).double())
    assert kl[:, : budget - 1].abs().max() < 1e-12 and kl[:, budget:].max() > 0.1


@pytest.mark.parametrize("policy", ["lag-kv", "epikv-seg", "r-kv"])
def test_blocks_end_where_they_do_in_generation(model, monkeypatch, policy):
    """After each token that makes the length of some row a multiple of the lag."""
    ends = []
    monkeypatch.setattr(Engine, "end_block", lambda self: ends.append(self.cache.length.tolist()))
    traces = traces_of(3, 6, n_tokens=40)
    replay(model, traces, configs_of(traces, [Setting(policy, 32)]), "none")  # lag 4
    assert ends == [[n + 3, n + 6] for n in range(1, 41) if (n + 3) % 4 == 0 or (n + 6) % 4 == 0]


def test_means_by_distance():
    """A prompt of 3 and 6 tokens around a budget of 5: the first two before it is full."""
    values = torch.arange(6.0).expand(4, 1, 6)
    (record,) = summarise(values, [Trace("a", [1] * 3, [2] * 6)], budget=5)
    assert record["trace"] == "a"
    assert record["all"] == dict.fromkeys(fidelity.MEASURES, 2.5)
    assert record["before"]["kl"] == 0.5 and record["to 127"]["kl"] == 3.5
    assert "beyond" not in record


def test_mean_and_standard_error():
    """Of 1, 2, 3, 6: mean 3, sample variance 14/3, over four traces."""
    assert fidelity.mean_and_error([1, 2, 3, 6]) == pytest.approx((3, math.sqrt(14 / 3 / 4)))
    assert fidelity.mean_and_error([0.5]) == (0.5, 0)


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


GOOD = {"id": "a", "prompt": "Why?", "trace": "Because of this and that."}


def test_traces_are_cut_to_one_length(model):
    """Those that are shorter are left out; the trace carries no second BOS."""
    long, short = GOOD | {"id": "b"}, GOOD | {"id": "c", "trace": "No."}
    traces = [fidelity.tokenize_trace(record, model.tokenizer) for record in (GOOD, short, long)]
    traces = fidelity.cut(traces, 10, None)
    assert [trace.id for trace in traces] == ["a", "b"]
    assert model.tokenizer.decode(traces[0].tokens) == "Because of"
    assert traces[0].prompt[0] == tiny.BOS and model.tokenizer.decode(traces[0].prompt) == "Why?"
    assert tiny.BOS not in traces[0].tokens
    assert len(fidelity.cut(traces, 10, 1)) == 1
    with pytest.raises(ValueError, match="no trace has 11 tokens, the longest 10; lower --tokens"):
        fidelity.cut(traces, 11, None)


def run_command(monkeypatch, capsys, folder, output, *options):
    command = ["fidelity.py", "--checkpoint", str(folder), "--no-compile", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*command, *map(str, options)])
    fidelity.main()
    return capsys.readouterr()


def records_of(output):
    files = output.glob("records*.jsonl")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(lines)


@pytest.fixture
def traces_file(tmp_path):
    """Two texts, one of them twice."""
    texts = ("Because of this and that.", "Because of this and that.", "For no reason at all, say.")
    records = (GOOD | {"id": str(i), "trace": text} for i, text in enumerate(texts))
    return write_lines(tmp_path / "traces.jsonl", *records)


def options_of(traces_file, *more):
    options = ["--traces", traces_file, "--tokens", 20, "--batch-size", 2]
    return [*options, "--policies", "streaming,full,h2o", "--budgets", "16,12", *more]


def test_the_command(monkeypatch, capsys, folder, tmp_path, traces_file):
    """A row for each setting by budget, a record for each trace; run again it draws the table."""
    options = options_of(traces_file)
    first = run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    names = ["full", "h2o, 12", "streaming, 12", "h2o, 16", "streaming, 16"]
    table = first.out.split("\n\n")[1]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [f"| {n}" for n in names]
    assert "15 of 15 replays, 0 minutes left" in first.err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "settings.json",
        "records.jsonl",
        "table.md",
        "loss_gap.png",
        "kl.png",
        "agreement.png",
    }
    by_name = {}
    for line in records_of(tmp_path / "run"):
        record = json.loads(line)
        by_name.setdefault((record["policy"], record["budget"]), {})[record["trace"]] = record
    assert len(by_name) == 5
    for (policy, _), found in by_name.items():
        assert sorted(found) == ["0", "1", "2"]
        assert found["0"]["all"] == found["1"]["all"]  # the same text
        assert (found["0"]["all"]["kl"] > 0) == (policy != "full")
    again = run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    assert again.out == first.out and again.err == ""


def test_a_broken_run_goes_on(monkeypatch, capsys, folder, tmp_path, traces_file):
    """With every record of a whole run, wherever it was cut; and more settings may be added."""
    options = options_of(traces_file)
    whole = run_command(monkeypatch, capsys, folder, tmp_path / "whole", *options).out
    records = (tmp_path / "whole/records.jsonl").read_bytes()
    few = options_of(traces_file, "--policies", "h2o", "--budgets", 12)
    run_command(monkeypatch, capsys, folder, tmp_path / "cut", *few)
    assert len(records_of(tmp_path / "cut")) == 3
    for length in random.Random(0).sample(range(len(records)), 4):
        (tmp_path / "cut/records.jsonl").write_bytes(records[:length])
        table = run_command(monkeypatch, capsys, folder, tmp_path / "cut", *options).out
        assert table == whole
        assert records_of(tmp_path / "cut") == records_of(tmp_path / "whole")


def test_processes_share_the_work(monkeypatch, capsys, folder, tmp_path, traces_file):
    """The first waits for what the second does meanwhile, and reports all."""
    options = options_of(traces_file)
    alone = run_command(monkeypatch, capsys, folder, tmp_path / "alone", *options).out
    monkeypatch.setenv("WORLD_SIZE", "2")

    def second_process(seconds):
        monkeypatch.setenv("RANK", "1")
        fidelity.main()

    monkeypatch.setattr(records.time, "sleep", second_process)
    shared = run_command(monkeypatch, capsys, folder, tmp_path / "shared", *options)
    assert shared.out == alone
    assert "waiting for the other processes" in shared.err
    counts = [
        len((tmp_path / "shared" / name).read_text(encoding="utf-8").splitlines())
        for name in ("records.jsonl", "records.1.jsonl")
    ]
    assert counts == [9, 6]


def test_the_model_writes_the_traces(monkeypatch, capsys, folder, tmp_path):
    """With a full cache, once for a folder; what they say is what it would generate."""
    model_folder = tmp_path / "chat"
    shutil.copytree(folder, model_folder)
    tiny.make_tokenizer(model_folder, chat_template="{{ messages[0].content }}\n")
    problems = [{"id": str(i), "problem": text} for i, text in enumerate(("Why?", "How so?"))]
    options = ["--problems", write_lines(tmp_path / "problems.jsonl", *problems)]
    options += ["--tokens", 30, "--policies", "streaming", "--budgets", 16, "--seed", 3]
    first = run_command(monkeypatch, capsys, model_folder, tmp_path / "run", *options)
    model = Transformer.from_pretrained(model_folder)
    result = generate(
        model, ["Why?", "How so?"], policy="full", max_new_tokens=30, seed=3, compile_mode="none"
    )
    lines = (tmp_path / "run/traces.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line) for line in lines]
    assert [trace["tokens"] for trace in written] == [output.tokens for output in result.outputs]
    assert [trace["id"] for trace in written] == ["0", "1"]
    assert len(records_of(tmp_path / "run")) == 2
    again = run_command(monkeypatch, capsys, model_folder, tmp_path / "run", *options)
    assert again.out == first.out and again.err == ""
    few = run_command(monkeypatch, capsys, model_folder, tmp_path / "few", *options, "--limit", 1)
    assert few.err.startswith("0: 30 tokens written\n1 of 1 replays")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--policies", "lru"], "unknown policy 'lru'"),
        (["--budgets", "few"], "budgets must be numbers"),
        (["--budgets", "4"], "budget 4 is smaller"),
        (["--recent", "x"], "recent must be numbers"),
        (["--policies", "epikv-fit"], "policy 'epikv-fit' needs a calibration"),
        (["--calibration", "/nowhere.json"], "No such file or directory: '/nowhere.json'"),
        (["--tokens", "0"], "tokens must be at least 1"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--batch-size", "0"], "batch-size must be at least 1"),
        ([], "no field 'trace'"),
    ],
)
def test_bad_input_is_told_before_the_model_is_loaded(
    monkeypatch, capsys, tmp_path, options, words
):
    """The checkpoint is not there, and the file of traces is a bad one."""
    traces = write_lines(tmp_path / "traces.jsonl", {"id": "a", "prompt": "b"})
    command = ["fidelity.py", "--checkpoint", "/nowhere", "--traces", str(traces), *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit:
        fidelity.main()
    assert exit.value.code == 2 and words in capsys.readouterr().err


def test_too_short_traces_leave_no_trace(monkeypatch, capsys, folder, tmp_path, traces_file):
    """So that fewer tokens may go into the same folder."""
    options = options_of(traces_file)
    with pytest.raises(SystemExit):
        run_command(monkeypatch, capsys, folder, tmp_path / "run", *options, "--tokens", 99)
    assert "no trace has 99 tokens, the longest 26; lower --tokens" in capsys.readouterr().err
    assert "| full |" in run_command(monkeypatch, capsys, folder, tmp_path / "run", *options).out


def test_the_ablation_through_the_command(monkeypatch, capsys, folder, tmp_path, traces_file):
    """Positions that stop change predictions from the budget on and not before."""
    options = [*options_of(traces_file), "--policies", "streaming"]
    run_command(monkeypatch, capsys, folder, tmp_path / "true", *options)
    options += ["--positions", "cache-length"]
    run_command(monkeypatch, capsys, folder, tmp_path / "stopped", *options)
    true, stopped = (
        {(r["budget"], r["trace"]): r for r in map(json.loads, records_of(tmp_path / name))}
        for name in ("true", "stopped")
    )
    for key, record in true.items():
        assert record["before"] == stopped[key]["before"]
        assert record["to 127"]["kl"] != stopped[key]["to 127"]["kl"]


def test_a_calibration_through_the_command(monkeypatch, capsys, folder, tmp_path, traces_file):
    """It moves the policies that read it and no other, and belongs to the settings of a folder."""
    first, second = (
        tiny.write_calibration(tmp_path / f"{seed}.json", tiny.calibration(4, seed))
        for seed in (0, 2)
    )
    policies = ["--policies", "streaming,epikv,epikv-fit", "--recent", 2]
    options = [*options_of(traces_file), *policies]
    for name, path in (("first", first), ("second", second)):
        run_command(monkeypatch, capsys, folder, tmp_path / name, *options, "--calibration", path)
    found, other = (
        {
            (record["policy"], record["budget"], record["trace"]): record["all"]
            for record in map(json.loads, records_of(tmp_path / name))
        }
        for name in ("first", "second")
    )
    assert len(found) == len(other) == 3 * 2 * 3
    for (policy, *_), same in ((key, found[key] == other[key]) for key in found):
        assert same == (policy == "streaming"), policy
    written = tiny.read_json(tmp_path / "first/settings.json")["calibration"]
    assert re.fullmatch("[0-9a-f]{16}", written)
    with pytest.raises(SystemExit):
        run_command(
            monkeypatch, capsys, folder, tmp_path / "first", *options, "--calibration", second
        )
    of_second = tiny.read_json(tmp_path / "second/settings.json")["calibration"]
    message = capsys.readouterr().err
    assert f"first holds a run with calibration {written!r}, not {of_second!r}; name" in message
    with pytest.raises(SystemExit):
        run_command(monkeypatch, capsys, folder, tmp_path / "first", *options_of(traces_file))
    assert (
        f"calibration {written!r}, not None; name another output folder" in capsys.readouterr().err
    )


def test_a_calibration_of_another_model_is_refused(
    monkeypatch, capsys, folder, tmp_path, traces_file
):
    path = tiny.write_calibration(tmp_path / "calibration.json", tiny.calibration(3))
    options = options_of(traces_file, "--policies", "epikv", "--calibration", path)
    with pytest.raises(SystemExit) as exit:
        run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert message.endswith("error: calibrated was a model of 3 blocks; this has 4\n")


def test_other_settings_are_refused(monkeypatch, capsys, folder, tmp_path, traces_file):
    """Other texts of the same name are other settings."""
    options = options_of(traces_file)
    run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    with pytest.raises(SystemExit):
        run_command(monkeypatch, capsys, folder, tmp_path / "run", *options, "--tokens", 19)
    assert "run holds a run with tokens 20, not 19" in capsys.readouterr().err
    other = tiny.make_checkpoint(tmp_path / "elsewhere" / folder.name, num_hidden_layers=4, seed=1)
    with pytest.raises(SystemExit):
        run_command(monkeypatch, capsys, other, tmp_path / "run", *options)
    assert "run holds a run with weights " in capsys.readouterr().err
    write_lines(traces_file, GOOD)
    with pytest.raises(SystemExit):
        run_command(monkeypatch, capsys, folder, tmp_path / "run", *options)
    assert "run holds a run with texts 'traces.jsonl, sha256 " in capsys.readouterr().err

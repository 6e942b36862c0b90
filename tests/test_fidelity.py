"""Teacher-forced replay: against a dense model by transformers, and by what must be zero."""

import json
import math
import sys

import pytest
import tiny
import torch
import transformers

import fidelity
from baselines import BASELINES
from epikv import POLICIES, EvictionConfig
from fidelity import Trace, compare, replay, summarise
from model import Transformer

ATTENTION_FREE = [*POLICIES]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, policy in BASELINES.items():
        monkeypatch.setitem(POLICIES, name, policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def model(folder):
    return Transformer.from_pretrained(folder, dtype=torch.float64)


def traces_of(*prompts, n_tokens=40, seed=0):
    """A trace for each length of a prompt, of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(256, (n,), generator=generator).tolist()

    return [Trace(f"trace {i}", draw(n), draw(n_tokens)) for i, n in enumerate(prompts)]


def test_measures_by_hand():
    """Of two tokens: halves against a quarter and the rest, and a sure thing against halves."""
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log() + 3  # any constant
    other = torch.tensor([[0.75, 0.25], [0.2, 0.8]], dtype=torch.float64).log()
    loss_gap, kl, agreement = compare(full, other, torch.tensor([1, 0])).tolist()
    assert loss_gap == pytest.approx([math.log(2), math.log(4.5)])
    assert kl == pytest.approx(
        [0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2), 0.9 * math.log(4.5) - 0.1 * math.log(8)]
    )
    assert agreement[1] == 0


def test_the_full_cache_has_no_gap(model):
    """Exactly: it is compared with itself."""
    traces = traces_of(3, 30)
    values = replay(model, traces, {"full": EvictionConfig(1024, "full")}, "none")["full"]
    assert values.shape == (3, 2, 40)
    assert values[0].eq(0).all() and values[1].eq(0).all() and values[2].eq(1).all()


def test_a_budget_for_everything_has_no_gap(model):
    """Exactly zero for every policy; one that reads weights has attention of another rounding."""
    traces = traces_of(3, 30)
    settings = {name: EvictionConfig(200, name) for name in POLICIES if name != "thinkv"}
    for name, values in replay(model, traces, settings, "none").items():
        exact = name in ATTENTION_FREE
        assert values[:2].abs().max() <= (0 if exact else 1e-9), name
        assert values[2].eq(1).all(), name


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
    config = EvictionConfig(budget, "streaming", sinks=0, recent=2)
    found = replay(model, traces, {"streaming": config}, compile_mode, positions)
    values = found["streaming"]
    # RoPE's cosines are float32 here, whatever the model's type.
    torch.testing.assert_close(values[0], gap, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values[1], kl, rtol=1e-4, atol=1e-5)
    assert torch.equal(values[2], (full.argmax(-1) == window.argmax(-1)).double())
    assert kl[:, : budget - 1].abs().max() < 1e-12 and kl[:, budget:].max() > 0.1


@pytest.mark.parametrize("policy", ["lag-kv", "epikv-seg", "r-kv"])
def test_blocks_end_where_they_do_in_generation(model, monkeypatch, policy):
    """After each token that makes the length of some row a multiple of the lag."""
    ends = []
    monkeypatch.setattr(
        fidelity.Engine, "end_block", lambda self: ends.append(self.cache.length.tolist())
    )
    replay(model, traces_of(3, 6, n_tokens=14), {"it": EvictionConfig(32, policy, lag=4)}, "none")
    assert ends == [[n + 3, n + 6] for n in range(1, 15) if (n + 3) % 4 == 0 or (n + 6) % 4 == 0]


def test_means_by_distance():
    """A prompt of 3 and 6 tokens around a budget of 5: the first two before it is full."""
    values = torch.arange(6.0).expand(3, 1, 6)
    (record,) = summarise(values, [Trace("a", [1] * 3, [2] * 6)], budget=5)
    assert record["trace"] == "a"
    assert record["all"] == dict.fromkeys(fidelity.MEASURES, 2.5)
    assert record["before"]["kl"] == 0.5 and record["to 127"]["kl"] == 3.5
    assert "beyond" not in record


def test_mean_and_standard_error():
    """Of 1, 2, 3, 6: mean 3, sample variance 14/3, over four traces."""
    assert fidelity.mean_and_error([1, 2, 3, 6]) == pytest.approx((3, math.sqrt(14 / 3 / 4)))
    assert fidelity.mean_and_error([0.5]) == (0.5, 0)


def write_traces(path, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = {"id": "a", "prompt": "Why?", "trace": "Because of this and that."}


def test_traces_are_cut_to_one_length(tmp_path, model):
    """Those that are shorter are left out; the trace carries no second BOS."""
    long, short = GOOD | {"id": "b"}, GOOD | {"id": "c", "trace": "No."}
    path = write_traces(tmp_path / "t.jsonl", GOOD, "", short, long)
    traces = fidelity.read_traces(path, model.tokenizer, 10, None)
    assert [trace.id for trace in traces] == ["a", "b"]
    assert traces[0].tokens == list(b"Because of") or len(traces[0].tokens) == 10
    assert tiny.BOS not in traces[0].tokens and traces[0].prompt[0] == tiny.BOS
    assert len(fidelity.read_traces(path, model.tokenizer, 10, 1)) == 1


@pytest.mark.parametrize(
    "record, words",
    [
        ("{", "line 2: "),
        ("[1]", "line 2: "),
        ({"id": "b", "prompt": "x"}, "line 2: no field 'trace'"),
        (GOOD, "line 2: id 'a' comes twice"),
        ({"id": "b", "prompt": 5, "trace": "x"}, "line 2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path, model, record, words):
    path = write_traces(tmp_path / "t.jsonl", GOOD, record)
    with pytest.raises(ValueError, match=words) as error:
        fidelity.read_traces(path, model.tokenizer, 5, None)
    assert "\n" not in str(error.value)


def test_the_command(tmp_path, folder, monkeypatch, capsys):
    """A row for each policy and budget, and a record for each trace, in two batches."""
    path = write_traces(tmp_path / "t.jsonl", *({**GOOD, "id": str(i)} for i in range(3)))
    command = f"fidelity.py --checkpoint {folder} --traces {path} --tokens 20 --batch-size 2"
    command += f" --policies streaming,h2o --budgets 12,16 --no-compile --output {tmp_path}/o.json"
    monkeypatch.setattr(sys, "argv", command.split())
    fidelity.main()
    out = capsys.readouterr().out
    names = [f"{policy}, {budget}" for budget in (12, 16) for policy in ("streaming", "h2o")]
    assert [line.split(" | ")[0] for line in out.splitlines()[4:]] == [f"| {n}" for n in names]
    results = json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))
    assert [*results] == names
    for records in results.values():
        assert [record["trace"] for record in records] == ["0", "1", "2"]
        assert records[0] == records[1] | {"trace": "0"}  # the same text
        assert records[0]["all"]["kl"] > 0


@pytest.mark.parametrize(
    "options, words",
    [
        (["--policies", "lru"], "unknown policy 'lru'"),
        (["--budgets", "few"], "budgets must be numbers"),
        (["--budgets", "4"], "budget 4 is smaller"),
        (["--tokens", "0"], "tokens must be at least 1"),
        (["--batch-size", "0"], "batch-size must be at least 1"),
    ],
)
def test_bad_options_are_told_before_the_model_is_loaded(monkeypatch, capsys, options, words):
    """Though neither the checkpoint nor the traces are there."""
    command = ["fidelity.py", "--checkpoint", "/nowhere", "--traces", "/nowhere.jsonl", *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit:
        fidelity.main()
    assert exit.value.code == 2 and words in capsys.readouterr().err
